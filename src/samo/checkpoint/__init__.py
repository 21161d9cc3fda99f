"""Checkpoints: what `samo.save` writes and `samo.load` reads, and what needs no torch."""

from samo.checkpoint.folder import copy, remove, verify
from samo.checkpoint.manifest import Manifest, read_manifest

__all__ = ["Manifest", "copy", "read_manifest", "remove", "verify"]

"""A checkpoint to be loaded: its files are checked, its tensors not read yet."""

from pathlib import Path
from typing import Any, Final

from samo.checkpoint import json_values
from samo.checkpoint.folder import check_file
from samo.checkpoint.manifest import Manifest, damaged, read_manifest
from samo.checkpoint.tensors import SavedTensors
from samo.distributed.ranks import Ranks
from samo.errors import CheckpointError, MaskError
from samo.mask.mask import Mask
from samo.mask.masks import Masks


class Checkpoint:
    """Manifest, masks and tensors of a checkpoint."""

    def __init__(self, path: Path, ranks: Ranks) -> None:
        self.path: Final = path
        self.manifest: Final = read_manifest(path)
        for i, (name, entry) in enumerate(self.manifest.files.items()):
            # One rank compares the bytes of a file, so that no file is read by all of them.
            is_mine = i % len(ranks.ranks) == ranks.place
            file = self.manifest.data / name
            check_file(file, entry, size_only=not is_mine, on_chunk=ranks.note_progress)
        self.masks: Final = read_masks(self.manifest)
        self.weights: Final = SavedTensors(self.manifest, "weights")
        self.optimizer: Final = SavedTensors(self.manifest, "optimizer")
        self._extra: Final = SavedTensors(self.manifest, "extra")
        self.check_names(self._extra, self.manifest.content["extra"], "extra")

    def check_names(self, tensors: SavedTensors, json: Any, what: str) -> None:
        """Refuse JSON that does not name each of these tensors once."""
        if json_values.tensor_names(json) != sorted(tensors.specs):
            raise damaged(self.path, f"the tensors of its {what} are not those its manifest names")

    def read_extra(self) -> dict[str, Any]:
        """Return what was given to `samo.save` as extra."""
        found: dict[str, Any] = json_values.decode(
            self.manifest.content["extra"], lambda name: self._extra.read(name).clone()
        )
        return found

    def misfit(self, what: str) -> CheckpointError:
        """Return the error for a checkpoint of something else."""
        return CheckpointError(f"'{self.path}' does not fit: {what}")


def read_masks(manifest: Manifest) -> dict[str, Mask]:
    """Return the masks of a checkpoint."""
    masks: dict[str, Mask] = {}
    for file in manifest.files_of("masks"):
        try:
            masks.update(Masks.load(file))
        except MaskError as error:
            raise damaged(file, str(error)) from error
    return masks

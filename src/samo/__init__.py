"""samo trains pruned neural networks with a fraction of the memory.

Example:
    >>> import torch, samo
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
    >>> masks = samo.prune(model, sparsity=0.9)
    >>> model = samo.compress_(model, masks)
    >>> opt = samo.AdamW(samo.parameters(model), lr=1e-3)
    >>> model(torch.randn(4, 64)).square().mean().backward()
    >>> opt.step()
    >>> opt.zero_grad()

Names are loaded on first use, so that ``import samo`` costs nothing and the parts that only count
bytes never load torch.
"""

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from samo.candidates import prunable as prunable
    from samo.checkpoints.loading import load as load
    from samo.checkpoints.saving import save as save
    from samo.compression import compress_ as compress_
    from samo.dynamic.gradual import GradualPruning as GradualPruning
    from samo.dynamic.sparse import DynamicSparse as DynamicSparse
    from samo.early_bird.bird import EarlyBird as EarlyBird
    from samo.errors import (
        CheckpointError as CheckpointError,
        CompressionError as CompressionError,
        ConfigError as ConfigError,
        DataError as DataError,
        MaskError as MaskError,
        PeerError as PeerError,
        RunError as RunError,
        SamoError as SamoError,
        TicketError as TicketError,
    )
    from samo.leaves import (
        named_parameters as named_parameters,
        param_groups as param_groups,
        parameters as parameters,
    )
    from samo.mask import Mask as Mask
    from samo.masks import Masks as Masks
    from samo.memory.ledger import Ledger as Ledger, ledger as ledger
    from samo.optim import AdamW as AdamW
    from samo.parallel.clipping import clip_grad_norm_ as clip_grad_norm_
    from samo.parallel.mesh import mesh as mesh
    from samo.parallel.replicas import (
        Replicas as Replicas,
        no_sync as no_sync,
        replicate as replicate,
        traffic as traffic,
    )
    from samo.parallel.traffic import Traffic as Traffic, TrafficOf as TrafficOf
    from samo.pipeline.api import Pipeline as Pipeline
    from samo.pruning.choosing import prune as prune
    from samo.remapping import remap_ as remap_
    from samo.scaling import LossScaler as LossScaler

__version__: Final = "0.1.0"

_MODULES: Final = {
    "PeerError": "samo.errors",
    "Pipeline": "samo.pipeline.api",
    "Replicas": "samo.parallel.replicas",
    "Traffic": "samo.parallel.traffic",
    "TrafficOf": "samo.parallel.traffic",
    "clip_grad_norm_": "samo.parallel.clipping",
    "mesh": "samo.parallel.mesh",
    "no_sync": "samo.parallel.replicas",
    "replicate": "samo.parallel.replicas",
    "traffic": "samo.parallel.replicas",
    "RunError": "samo.errors",
    "DataError": "samo.errors",
    "ConfigError": "samo.errors",
    "CheckpointError": "samo.errors",
    "AdamW": "samo.optim",
    "CompressionError": "samo.errors",
    "EarlyBird": "samo.early_bird.bird",
    "DynamicSparse": "samo.dynamic.sparse",
    "GradualPruning": "samo.dynamic.gradual",
    "Ledger": "samo.memory.ledger",
    "LossScaler": "samo.scaling",
    "Mask": "samo.mask",
    "MaskError": "samo.errors",
    "Masks": "samo.masks",
    "SamoError": "samo.errors",
    "TicketError": "samo.errors",
    "compress_": "samo.compression",
    "ledger": "samo.memory.ledger",
    "load": "samo.checkpoints.loading",
    "named_parameters": "samo.leaves",
    "param_groups": "samo.leaves",
    "parameters": "samo.leaves",
    "prunable": "samo.candidates",
    "prune": "samo.pruning.choosing",
    "remap_": "samo.remapping",
    "save": "samo.checkpoints.saving",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'samo' has no attribute '{name}'")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

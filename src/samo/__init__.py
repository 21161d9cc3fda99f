"""samo trains pruned neural networks with a fraction of the memory.

Example:
    >>> import torch, samo
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    >>> masks = samo.prune(model, sparsity=0.9)
    >>> model = samo.compress_(model, masks)
    >>> opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    >>> model(torch.randn(4, 64)).square().mean().backward()
    >>> opt.step()
    >>> opt.zero_grad()

Names are loaded on first use, so that ``import samo`` costs nothing and the parts that only count
bytes never load torch.
"""

import importlib
from typing import TYPE_CHECKING, Final

from samo.integrations import import_hook

if TYPE_CHECKING:
    from samo.checkpoint.load import load as load
    from samo.checkpoint.save import async_save as async_save, save as save
    from samo.core.adamw import AdamW as AdamW
    from samo.core.compress import (
        compress_ as compress_,
        decompress_ as decompress_,
        dense_state_dict as dense_state_dict,
        masks as masks,
    )
    from samo.core.param_groups import param_groups as param_groups
    from samo.core.remap import remap_ as remap_
    from samo.distributed.mesh import mesh as mesh
    from samo.errors import (
        CheckpointError as CheckpointError,
        CompressionError as CompressionError,
        ConfigError as ConfigError,
        DataError as DataError,
        MaskError as MaskError,
        PeerError as PeerError,
        RunError as RunError,
        SamoError as SamoError,
    )
    from samo.integrations.chunk_loss import chunk_loss_ as chunk_loss_
    from samo.integrations.export import export as export
    from samo.integrations.model_folders import load_masks as load_masks
    from samo.mask.mask import Mask as Mask
    from samo.mask.masks import Masks as Masks
    from samo.mask.prunable import prunable as prunable
    from samo.memory.ledger import Ledger as Ledger, ledger as ledger
    from samo.pipeline.pipeline import Pipeline as Pipeline
    from samo.planner.answer import plan as plan
    from samo.pruning.early_bird import EarlyBird as EarlyBird
    from samo.pruning.mask_schedules import (
        DynamicSparse as DynamicSparse,
        GradualPruning as GradualPruning,
    )
    from samo.pruning.prune import prune as prune

__version__: Final = "0.2.0"

_NAMES: Final = {
    "samo.checkpoint.load": "load",
    "samo.checkpoint.save": "async_save save",
    "samo.core.adamw": "AdamW",
    "samo.core.compress": "compress_ decompress_ dense_state_dict masks",
    "samo.core.param_groups": "param_groups",
    "samo.core.remap": "remap_",
    "samo.distributed.mesh": "mesh",
    "samo.integrations.chunk_loss": "chunk_loss_",
    "samo.integrations.export": "export",
    "samo.integrations.model_folders": "load_masks",
    "samo.mask.mask": "Mask",
    "samo.mask.masks": "Masks",
    "samo.mask.prunable": "prunable",
    "samo.memory.ledger": "Ledger ledger",
    "samo.pipeline.pipeline": "Pipeline",
    "samo.planner.answer": "plan",
    "samo.pruning.early_bird": "EarlyBird",
    "samo.pruning.prune": "prune",
    "samo.pruning.mask_schedules": "DynamicSparse GradualPruning",
    "samo.errors": "CheckpointError CompressionError ConfigError DataError MaskError "
    "PeerError RunError SamoError",
}
_MODULES: Final = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'samo' has no attribute '{name}'")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


import_hook.install()

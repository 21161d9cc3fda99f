"""Models on grids of ranks, for checkpoints that go from any layout into any other."""

import hashlib
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

import samo
from samo.checkpoint import read_manifest
from samo.checkpoint.tensors import SavedTensors
from tests.pipeline.cases import next_token_loss, tokens

VOCABULARY = 32


class Block(nn.Module):
    """Matrices, a norm and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 40)
        self.down = nn.Linear(40, 16)
        self.register_buffer("place", torch.rand(3))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD + self.down(torch.tanh(self.up(self.norm(x_BTD))))


def whole(*, is_tied: bool, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    embed, head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY, bias=False)
    if is_tied:
        head.weight = embed.weight
    return nn.Sequential(embed, Block(), Block(), head)


class Case(NamedTuple):
    """What is trained."""

    dtype: torch.dtype = torch.float32
    optimizer: Literal["exact", "lean", "sgd"] = "exact"
    is_tied: bool = False

    @property
    def name(self) -> str:
        return f"{self.dtype}-{self.optimizer}{'-tied' * self.is_tied}"


class Layout(NamedTuple):
    """How it lies on ranks."""

    pipe: int
    data: int
    stages_per_rank: int = 1


class Run:
    """A model in training, in one process (no layout) or on this rank's place of a grid."""

    def __init__(
        self, case: Case, layout: Layout | None, masks: samo.Masks | None = None, seed: int = 0
    ) -> None:
        model = whole(is_tied=case.is_tied, seed=seed)
        masks = masks or samo.prune(whole(is_tied=case.is_tied), 0.5)
        mesh = None if layout is None else samo.mesh(layout.pipe, layout.data)
        per_rank = 1 if layout is None else layout.stages_per_rank
        self.pipeline = samo.Pipeline(
            model, next_token_loss, mesh, 4, timeout_s=20, stages_per_rank=per_rank
        )
        self.module = self.pipeline.module
        samo.compress_(
            self.module,
            self.pipeline.masks(masks),
            dtype=case.dtype,
            value_dtype=torch.bfloat16 if case.optimizer == "lean" else None,
            kernels="reference",
        )
        # By their density, so that stages have other groups than one process.
        groups = samo.param_groups(self.module, lr=0.01, weight_decay=0.1, density_power=-0.5)
        self.opt: torch.optim.Optimizer
        if case.optimizer == "sgd":
            for group in groups:
                group["lr"] = torch.tensor(group["lr"])  # settings that all stages write
            self.opt = torch.optim.SGD(groups, momentum=0.9)
        else:
            self.opt = samo.AdamW(groups, state=case.optimizer)

    def train(self, steps: int) -> None:
        """Train on the same rows on every replica: a mean of equal numbers over 2 or 4 is exact."""
        for step in range(steps):
            x, y = tokens(seed=step)
            self.pipeline.step(x, target=y)
            self.opt.step()
            self.module.zero_grad()

    @torch.no_grad()
    def randomise(self) -> None:
        """Set values and state to what depends on name and entry alone, not on the layout.

        So that ranks of any layout, and one process, hold the same, without training for it.
        """
        aliases = {name: group[0] for group in self.pipeline.tied for name in group}
        for name, param in self.module.named_parameters():
            name = aliases.get(name, name)
            param.copy_(draw(f"{name} values", param.numel()).view(param.shape))
            for key, value in self.opt.state.get(param, {}).items():
                drawn = draw(f"{name} {key}", value.numel()).abs() * 50
                value.copy_(torch.full((), 11.0) if key == "step" else drawn.view(value.shape))
        for name, buffer in self.module.named_buffers():
            buffer.copy_(draw(name, buffer.numel()).view(buffer.shape))


def draw(what: str, size: int) -> Tensor:
    seed = int.from_bytes(hashlib.sha256(what.encode()).digest()[:4], "little")
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def contents(path: Path) -> dict[str, Any]:
    """Return all that a checkpoint says, however it is cut into files, groups and rows."""
    manifest = read_manifest(path)
    keys = ("is_compressed", "dtype", "num_params", "kept", "tied", "extra")
    found: dict[str, Any] = {key: getattr(manifest, key) for key in keys}
    if (entry := manifest.optimizer) is not None:
        settings = {name: group["settings"] for group in entry["groups"] for name in group["names"]}
        found["optimizer"] = (entry["class"], settings, entry["state"], entry["more"])
    for kind in ("weights", "optimizer", "extra"):
        saved = SavedTensors(manifest, kind)
        for name, spec in saved.specs.items():
            found[f"{kind} {name}"] = (spec[:2], saved.read(name).flatten().tolist())
    found["masks"] = samo.load_masks(path).fingerprint() if manifest.is_compressed else None
    return found

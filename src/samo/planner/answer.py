"""`samo.plan`: will it fit, with what, how fast; and what the saving buys."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from samo.errors import ConfigError, nearest
from samo.models.shapes import SHAPES
from samo.planner.choose import ranked
from samo.planner.command import command
from samo.planner.configs import from_config, read_config
from samo.planner.folders import read_sparsities
from samo.planner.hardware import HARDWARE, Cluster, Hardware, Link, find_hardware
from samo.planner.memory import Job, Scheme, peak
from samo.planner.network import Kind, Network, named, sparsities
from samo.planner.public import PUBLIC, no_hub
from samo.planner.search import Option, layouts, room, search
from samo.utils.formatting import size

if TYPE_CHECKING:
    from torch import nn

    from samo.mask.masks import Masks

__all__ = ["Plan", "plan"]

ASSUMED: Final = "assumed"
_ENDS: Final[frozenset[Kind]] = frozenset({"embedding", "head"})
RIVALS: Final[tuple[Scheme, ...]] = ("paper", "8-bit", "dense", "autocast")
_MOST_GPUS: Final = 4096
_SEQUENCES: Final = 8  # of a step, for each GPU
_SPARSITY: Final = 0.9  # unless one is given or read


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What `plan` has found. `print` shows a table; ``best`` is None if nothing fits.

    Example:
        >>> import samo
        >>> found = samo.plan("gpt3-13b", sparsity=0.9, gpu="h200", batch=8, context=1024)
        >>> found.best.layout.weights, round(found.best.time.total, 1)
        ('resident', 0.9)
    """

    job: Job
    cluster: Cluster
    options: list[Option]  # samo's, one of each kind, best first
    rivals: dict[Scheme, Option]  # the best of each other scheme
    fewest: dict[Scheme, int | None]  # GPUs of this kind on which a scheme fits at all
    advice: list[str]  # what would fit, if nothing does
    source: str | None  # what the command calls the target, if it was a name or a path
    pruned_by: str  # where the sparsity is from: a file, "assumed", or "" if it was given

    @property
    def best(self) -> Option | None:
        """The fastest layout that fits; of those within 2 %, with room to spare, exact."""
        return self.options[0] if self.options[0].fits else None

    @property
    def command(self) -> str:
        """What to type or write to train with the best layout; empty if nothing fits."""
        if self.best is None:
            return ""
        is_pruned = self.pruned_by not in ("", ASSUMED)
        lines = command(self.job, self.best.layout, self.cluster, self.source, is_pruned=is_pruned)
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan for JSON: bytes and seconds."""
        best = self.best
        return {
            "network": {"name": self.job.network.name, "parameters": self.job.network.num_params},
            "sparsity": dict(self.job.sparsity),
            "sparsity_from": self.pruned_by or "given",
            "batch": self.job.batch,
            "context": self.job.context,
            "frozen": sorted(self.job.frozen),
            "hardware": asdict(self.cluster.hardware),
            "num_gpus": self.cluster.num_gpus,
            "fits": best is not None,
            "options": [_record(option) for option in self.options],
            "rivals": {scheme: _record(option) for scheme, option in self.rivals.items()},
            "fewest_gpus": self.fewest,
            "advice": self.advice,
            "command": self.command,
        }

    def __str__(self) -> str:
        from samo.planner.render import text

        return text(self)


def plan(
    target: "str | Path | Network | nn.Module",
    masks: "Masks | None" = None,
    *,
    sparsity: float | None = None,
    rules: Mapping[str, float] | None = None,
    gpu: str | Path | Hardware = "h100",
    gpus: int = 1,
    gpus_per_node: int | None = None,
    node_gbit: float | None = None,
    batch: int | None = None,
    context: int | None = None,
    freeze_embeddings: bool = False,
) -> Plan:
    """Predict memory and time of training, and choose a layout. Loads no torch for a name or path.

    Example:
        >>> import samo
        >>> found = samo.plan("gpt3-2.7b", sparsity=0.9, gpu="rtx4090")
        >>> found.best is not None, found.rivals["dense"].fits
        (True, False)

    Args:
        target: A named shape such as "gpt3-13b" or "llama-3-8b", a Hugging Face folder or
            config.json, or a module: samo's GPT or a causal language model of Hugging Face, on the
            meta device too.
        masks: Of a module; otherwise ``sparsity`` says how much is pruned.
        sparsity: Of what `samo.prune` prunes: matrices of attention, MLPs and experts. By default
            that of the folder's masks, or 0.9.
        rules: Sparsities by kind, if they differ: attention, mlp, experts, router, embedding, head.
        gpu: A name in `samo.planner.hardware.HARDWARE`, "24GB" for any card of so much memory,
            "here", or a .toml or .json file.
        gpus: How many of them.
        gpus_per_node: By default that of the hardware.
        node_gbit: Bandwidth between nodes, in Gbit/s for each node.
        batch: Sequences of a step, over all ranks; by default 8 for each GPU.
        context: Tokens of a sequence; by default the model's, at most 2,048.
        freeze_embeddings: Whether embeddings and head stay as they are.

    Raises:
        ConfigError: A setting is out of range, or a name or file is not known.
    """
    hardware = gpu if isinstance(gpu, Hardware) else find_hardware(gpu)
    if gpus_per_node is not None:
        hardware = replace(hardware, gpus_per_node=gpus_per_node)
    if node_gbit is not None:
        if not node_gbit > 0:
            raise ConfigError(f"node_gbit must be over 0, got {node_gbit}")
        inter = Link(bandwidth=node_gbit * 1e9 / 8, latency_s=hardware.inter.latency_s)
        hardware = replace(hardware, inter=inter)
    for name, value in (("gpus", gpus), ("batch", batch), ("context", context)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ConfigError(f"{name} must be a whole number, 1 or more, got {value!r}")
    try:
        chosen = sparsities(_SPARSITY if sparsity is None else sparsity, rules)
    except ValueError as error:
        raise ConfigError(f"{error}; 0.9 prunes 90 %") from None
    network = _network(target)
    pruned_by = "" if sparsity is not None else ASSUMED
    if masks is not None:
        from samo.planner.modules import sparsities_of  # loads torch, as the masks did

        chosen, pruned_by = sparsities_of(masks, network), ""
    elif sparsity is None and not rules and isinstance(target, str | Path):
        is_path = target not in SHAPES and Path(target).exists()
        if is_path and (read := read_sparsities(Path(target), network)) is not None:
            chosen, pruned_by = read
    cluster = Cluster(hardware=hardware, num_gpus=gpus)
    job = Job(
        network=network,
        sparsity=tuple(chosen.items()),
        batch=batch or _SEQUENCES * gpus,
        context=context or min(network.context, 2048),
        dtype=hardware.dtype,
        frozen=_ENDS if freeze_embeddings else frozenset(),
    )
    if job.context > network.context and network.command:
        raise ConfigError(
            f"context {job.context} is longer than that of '{network.name}', {network.context}"
        )
    found = search(job, cluster)
    if not found:
        raise ConfigError(
            f"a batch of {job.batch} sequences is too small for {gpus} GPUs: each replica needs "
            f"one, and {len(network.layers)} layers allow as many stages; raise --batch"
        )
    options = _best_of_each(found, room(cluster), by_mesh=gpus > 1)
    return Plan(
        job=job,
        cluster=cluster,
        options=options,
        rivals={scheme: search(job, cluster, scheme)[0] for scheme in RIVALS},
        fewest={scheme: _fewest(job, hardware, scheme) for scheme in ("samo", *RIVALS)},
        advice=[] if options[0].fits else list(_advice(job, cluster)),
        source=_source(target, network),
        pruned_by=pruned_by,
    )


def _source(target: "str | Path | Network | nn.Module", network: Network) -> str | None:
    if isinstance(target, Network):
        return network.name
    if not isinstance(target, str | Path):
        return None
    path = Path(target)
    if not path.exists():  # a public model, which is to be downloaded
        return "MODEL_DIR"
    return str(path.parent if path.suffix == ".json" else path)


def _network(target: "str | Path | Network | nn.Module") -> Network:
    if isinstance(target, Network):
        return target
    if not isinstance(target, str | Path):
        from samo.planner.modules import from_module

        return from_module(target)
    if target in SHAPES:
        return named(target)
    path = Path(target)
    if path.exists() or path.suffix == ".json":
        return read_config(path)
    name = str(target).lower()
    if name in SHAPES:
        return named(name)
    if name in PUBLIC:
        return from_config(PUBLIC[name], name)
    if "/" in str(target):
        raise no_hub(str(target))
    names = (*SHAPES, *PUBLIC)
    raise ConfigError(
        f"no shape and no folder '{target}'{nearest(name, names)}; name a Hugging Face "
        f"folder, its config.json, or one of {', '.join(names)}"
    )


def _best_of_each(found: list[Option], space: float, *, by_mesh: bool) -> list[Option]:
    """Return the best option of each mesh, or of each way to keep weights and state."""
    groups: dict[Any, list[Option]] = {}
    for option in found:
        own = option.layout
        kind = "budget" if isinstance(own.weights, int) else own.weights
        key: Any = (kind, own.state, own.checkpointing)
        groups.setdefault((own.pipe, own.data, own.shard) if by_mesh else key, []).append(option)
    return ranked([ranked(group, space)[0] for group in groups.values()], space)


def _smallest(job: Job, cluster: Cluster, scheme: Scheme) -> float:
    """Return the least memory that any layout of a scheme needs."""
    least = float("inf")
    for layout in layouts(job, cluster, scheme):
        # One pass does not accumulate gradients; one sequence has the fewest activations.
        is_small = layout.micro_batch == 1 or layout.micro_batches(job) == 1
        if is_small and layout.checkpointing:
            least = min(least, peak(job, layout).needed_bytes)
    return least


def frozen_bytes(job: Job, cluster: Cluster) -> float | None:
    """Return the memory with frozen embeddings and head, if that makes it fit."""
    if job.frozen or any(value for kind, value in job.sparsity if kind in _ENDS):
        return None
    least = _smallest(replace(job, frozen=_ENDS), cluster, "samo")
    return least if least <= room(cluster) else None


def _fewest(job: Job, hardware: Hardware, scheme: Scheme) -> int | None:
    """Return the smallest power of two of GPUs on which a scheme fits."""
    count = 1
    while count <= _MOST_GPUS:
        cluster = Cluster(hardware=hardware, num_gpus=count)
        large = replace(job, batch=max(job.batch, count))
        if _smallest(large, cluster, scheme) <= room(cluster):
            return count
        count *= 2
    return None


def _advice(job: Job, cluster: Cluster) -> Iterator[str]:
    """Yield what would fit."""
    hardware, count = cluster.hardware, cluster.num_gpus
    if (frozen := frozen_bytes(job, cluster)) is not None:
        yield f"{size(frozen)} with frozen embeddings: --freeze-embeddings"
    is_cpu = job.dtype == "float32"  # whose ranks share one memory
    if not is_cpu and (enough := _fewest(job, hardware, "samo")) is not None:
        yield f"{enough} x {hardware.name}: --gpus {enough}"
    for name, other in sorted(HARDWARE.items(), key=lambda item: item[1].memory_bytes):
        larger = Cluster(hardware=other, num_gpus=count)
        is_larger = other.memory_bytes > hardware.memory_bytes
        if is_larger and _smallest(job, larger, "samo") <= room(larger):
            yield f"{count} x {name}: --gpu {name}"
            break
    for sparsity in (0.8, 0.9, 0.95, 0.98):
        if any(0 < value < sparsity for _, value in job.sparsity):
            pruned = tuple((kind, sparsity if value else 0.0) for kind, value in job.sparsity)
            if _smallest(replace(job, sparsity=pruned), cluster, "samo") <= room(cluster):
                yield f"pruning more: --sparsity {sparsity}"
                break
    context = job.context // 2
    while context >= 256:
        if _smallest(replace(job, context=context), cluster, "samo") <= room(cluster):
            yield f"shorter sequences: --context {context}"
            break
        context //= 2


def _record(option: Option) -> dict[str, Any]:
    return {
        "layout": asdict(option.layout),
        "fits": option.fits,
        "state_bytes": option.memory.state_bytes,
        "peak_bytes": option.memory.peak_bytes,
        "needed_bytes": option.memory.needed_bytes,
        "state": option.memory.state,
        "at_peak": option.memory.at_peak,
        "step_s": option.time.total,
        "tokens_per_s": option.tokens / option.time.total,
        "time": asdict(option.time),
    }

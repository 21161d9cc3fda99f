"""`samo.plan`: will it fit, with what, how fast; and what the saving buys."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from samo.errors import ConfigError, nearest
from samo.memory.predict import Scheme
from samo.models.shapes import SHAPES
from samo.planner.advice import SEQUENCES, fewest_gpus, what_would_fit
from samo.planner.configs import from_config, from_module, read_config
from samo.planner.hardware import Cluster, Hardware, Link, find_hardware
from samo.planner.memory import Job
from samo.planner.network import ENDS, Network, named
from samo.planner.public_models import PUBLIC
from samo.planner.search import Option, ranked, search
from samo.planner.sparsity import pruned_as_read, pruned_by_masks
from samo.planner.suggested_command import command

if TYPE_CHECKING:
    from torch import nn

    from samo.mask.masks import Masks

RIVALS: Final[tuple[Scheme, ...]] = ("paper", "8-bit", "dense", "autocast")
_ASSUMED: Final = "assumed"
_SPARSITY: Final = 0.9  # of a GPT that is trained from scratch, unless one is given or read
_LM_SPARSITY: Final = 0.7  # of a pretrained language model, which loses too much above


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
    teacher: str | None = None  # what the command calls the teacher
    teacher_bytes: int = 0  # of each GPU

    @property
    def best(self) -> Option | None:
        """The fastest layout that fits; of those within 2 %, with room to spare, exact."""
        return self.options[0] if self.options[0].fits else None

    @property
    def is_pruned(self) -> bool:
        """Whether the folder has its masks, so that nothing is left to prune."""
        return not self.is_assumed and self.pruned_by != ""

    @property
    def is_assumed(self) -> bool:
        """Whether the sparsity is a guess."""
        return self.pruned_by == _ASSUMED

    @property
    def host_bytes(self) -> tuple[float, float] | None:
        """Memory of the host that a rank of samo finetune takes: for a dense and a small folder."""
        if self.source is None or self.job.network.command:
            return None
        state = self.options[0].memory.state
        small = state["values"] + state["bitmap"]
        return 2 * self.job.network.num_params + small, small

    @property
    def command(self) -> str:
        """What to type or write to train with the best layout; empty if nothing fits."""
        return "" if self.best is None else command(self, self.best.layout)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan for JSON: bytes and seconds."""
        return {
            "network": {"name": self.job.network.name, "parameters": self.job.network.num_params},
            "sparsity": self.job.network.sparsity,
            "sparsity_from": self.pruned_by or "given",
            "batch": self.job.batch,
            "context": self.job.context,
            "frozen": self.job.network.frozen,
            "teacher_bytes": self.teacher_bytes,
            "host_bytes": self.host_bytes,
            "hardware": asdict(self.cluster.hardware),
            "num_gpus": self.cluster.num_gpus,
            "fits": self.best is not None,
            "options": [self._record(option) for option in self.options],
            "rivals": {scheme: self._record(option) for scheme, option in self.rivals.items()},
            "fewest_gpus": self.fewest,
            "advice": self.advice,
            "command": self.command,
        }

    def _record(self, option: Option) -> dict[str, Any]:
        return {
            "layout": asdict(option.layout),
            "fits": option.fits,
            "state_bytes": option.memory.state_bytes,
            "peak_bytes": option.memory.peak_bytes,
            "needed_bytes": option.memory.needed_bytes,
            "state": option.memory.state,
            "at_peak": option.memory.at_peak,
            "step_s": option.time.total,
            "tokens_per_s": self.job.tokens / option.time.total,
            "time": asdict(option.time),
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
    teacher: str | Path | None = None,
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
            that of the folder's masks, or 0.7 for a language model and 0.9 for a GPT of samo train.
        rules: Sparsities by kind, if they differ: attention, mlp, experts, router, embedding, head.
        gpu: A name in `samo.planner.hardware.HARDWARE`, "24GB" for any card of so much memory,
            "here", or a .toml or .json file.
        gpus: How many of them.
        gpus_per_node: By default that of the hardware.
        node_gbit: Bandwidth between nodes, in Gbit/s for each node.
        batch: Sequences of a step, over all ranks; by default 8 for each GPU.
        context: Tokens of a sequence; by default the model's, at most 2,048.
        freeze_embeddings: Whether embeddings and head stay as they are.
        teacher: A model to learn from, named as the target is. Every GPU holds it in 16 bits.

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
    network, source, folder = _find(target)
    if masks is not None:
        network, pruned_by = pruned_by_masks(network, masks), ""
    elif sparsity is None and not rules and folder and (read := pruned_as_read(folder, network)):
        network, pruned_by = read
    else:
        usual = _SPARSITY if network.command else _LM_SPARSITY
        network = network.pruned(usual if sparsity is None else sparsity, rules)
        pruned_by = "" if sparsity is not None else _ASSUMED
    teacher_name, taken = None, 0
    if teacher is not None:
        if network.command:
            raise ConfigError(
                "samo train has no teacher; plan for a language model of Hugging Face"
            )
        teaching, teacher_name, _ = _find(teacher)
        taken = teaching.num_params * (4 if hardware.dtype == "float32" else 2)
        hardware = replace(hardware, reserved_bytes=hardware.reserved_bytes + taken)
    cluster = Cluster(hardware=hardware, num_gpus=gpus)
    job = Job(
        network=network.with_frozen(ENDS) if freeze_embeddings else network,
        batch=batch or SEQUENCES * gpus,
        context=context or min(network.context, 2048),
        dtype=hardware.dtype,
    )
    if freeze_embeddings and network.command:
        raise ConfigError(
            f"samo train trains the embeddings of '{network.name}'; leave out --freeze-embeddings, "
            "or name a Hugging Face folder, for samo finetune"
        )
    if job.context > network.context:
        raise ConfigError(
            f"context {job.context} is longer than that of '{network.name}', {network.context}"
        )
    found = search(job, cluster)
    if not found:
        raise ConfigError(
            f"a batch of {job.batch} sequences is too small for {gpus} GPUs: each replica needs "
            f"one, and {len(network.layers)} layers allow as many stages; raise --batch"
        )
    options = _best_of_each(found, by_mesh=gpus > 1)
    return Plan(
        job=job,
        cluster=cluster,
        options=options,
        rivals={scheme: search(job, cluster, scheme)[0] for scheme in RIVALS},
        fewest={scheme: fewest_gpus(job, cluster, scheme) for scheme in ("samo", *RIVALS)},
        advice=[] if options[0].fits else list(what_would_fit(job, cluster, taken, rules or {})),
        source=source,
        pruned_by=pruned_by,
        teacher=teacher_name,
        teacher_bytes=taken,
    )


def _find(
    target: "str | Path | Network | nn.Module",
) -> tuple[Network, str | None, Path | None]:
    """Return the network, what the command calls it, and the path of its config if it has one."""
    if isinstance(target, Network):
        return target, target.name, None
    if not isinstance(target, str | Path):
        return from_module(target), None, None
    path, name = Path(target), str(target).lower()
    if target not in SHAPES and (path.exists() or path.suffix == ".json"):
        return read_config(path), str(path.parent if path.suffix == ".json" else path), path
    if name in SHAPES:
        return named(name), name, None
    if name in PUBLIC:
        return from_config(PUBLIC[name], name), "MODEL_DIR", None  # which is to be downloaded
    if "/" in str(target):
        raise ConfigError(
            f"no folder '{target}' here, and samo plan reads no hub; download the model and name "
            f"its folder or config.json, or plan for a shape{nearest(path.name.lower(), PUBLIC)}: "
            f"{', '.join(PUBLIC)}"
        )
    names = (*SHAPES, *PUBLIC)
    raise ConfigError(
        f"'{target}' is neither a known shape nor a folder{nearest(name, names)}; name a "
        f"Hugging Face folder, its config.json, or one of {', '.join(names)}"
    )


def _best_of_each(found: list[Option], *, by_mesh: bool) -> list[Option]:
    """Return the best option of each mesh, or of each way to keep weights and state."""
    groups: dict[Any, list[Option]] = {}
    for option in found:
        own = option.layout
        kind = "budget" if isinstance(own.weights, int) else own.weights
        key: Any = (kind, own.state, own.checkpointing)
        groups.setdefault((own.mesh, own.shard) if by_mesh else key, []).append(option)
    return ranked([ranked(group)[0] for group in groups.values()])

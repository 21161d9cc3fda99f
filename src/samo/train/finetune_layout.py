"""How ``samo finetune`` keeps weights and optimizer state: what fits the device, by `samo.plan`."""

from dataclasses import replace
from typing import Any

from torch import nn

from samo.errors import ConfigError
from samo.mask.masks import Masks
from samo.models.chunked_loss import MAX_LOGITS
from samo.planner.choose import choose
from samo.planner.local import this_cluster
from samo.planner.memory import Job, Layout
from samo.planner.modules import from_module, sparsities_of
from samo.planner.network import Kind
from samo.train.finetune_config import ResolvedFinetune

__all__ = []


def choose_layout(
    config: ResolvedFinetune, model: nn.Module, masks: Masks, teacher: nn.Module | None, ranks: int
) -> tuple[Any, Any, str]:
    """Return how to keep weights and state where that is "auto", and why; "" if nothing is.

    Raises:
        ConfigError: Nothing that the settings allow fits.
    """
    given: dict[str, Any] = {"weights": config.run.weights, "state": config.optim.state}
    if "auto" not in given.values():
        return given["weights"], given["state"], ""
    kinds: dict[str, Any] = {"weights": ("resident", "streamed"), "state": ("exact", "lean")}
    if config.run.dtype != "bfloat16" or config.run.fp32_gradients:
        kinds["state"] = ("exact",)
    options = {name: kinds[name] if given[name] == "auto" else (given[name],) for name in given}
    try:
        network = replace(from_module(model), max_logits=MAX_LOGITS)
    except ConfigError:  # a family that samo plan does not know
        kept, exactness = options["weights"][0], options["state"][0]
        why = f"samo plan does not know {type(model).__name__}, so nothing is predicted"
        return kept, exactness, f"{kept}, {exactness}: {why}"
    sparsity = sparsities_of(masks, network)
    ends: tuple[Kind, ...] = ("embedding", "head")
    is_frozen = config.model.freeze_embeddings
    batch = config.run.batch_size
    job = Job(
        network=network,
        sparsity=tuple(sparsity.items()),
        batch=batch * config.run.accumulate,
        context=config.model.context,
        dtype=config.run.dtype,
        frozen=frozenset(kind for kind in ends if is_frozen and not sparsity[kind]),
    )
    cluster = this_cluster(config.run.device, ranks)
    if teacher is not None:
        taken = sum(param.nbytes for param in teacher.parameters())
        left = max(cluster.hardware.memory_bytes - taken, 1.0)
        cluster = replace(cluster, hardware=replace(cluster.hardware, memory_bytes=left))
    layout = Layout(
        data=ranks,
        shard=config.mesh.shard == "weights" and ranks > 1,
        micro_batch=-(-batch // ranks),
        checkpointing=config.model.checkpointing,
    )
    among = [
        replace(layout, weights=kept, state=exactness)
        for kept in options["weights"]
        for exactness in options["state"]
    ]
    choice = choose(job, cluster, among=among, budgets=given["weights"] == "auto")
    return choice.layout.weights, choice.layout.state, choice.reason

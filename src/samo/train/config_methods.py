"""The settings that belong to a method of pruning: what "auto" stands for, and what contradicts what.

magnitude, random   masks are drawn once, after the dense phase
early-bird          the same, but as soon as they have settled; the dense phase is the limit
gradual             masks keep everything at first and lose weights step by step
set, rigl           masks are as sparse all the time, and move

Numbers in, numbers out. Imports no torch.
"""

from typing import TYPE_CHECKING, Any, Final, Literal

from samo.errors import ConfigError

if TYPE_CHECKING:
    from samo.train.config import PruneConfig

__all__ = []

Method = Literal["magnitude", "random", "early-bird", "gradual", "set", "rigl"]
Distance = Literal["kept", "hamming"]

CHANGING: Final = ("gradual", "set", "rigl")
"""Methods whose masks change after they were drawn; on compressed state alone."""
MOVING: Final = ("set", "rigl")
"""Methods whose masks stay as sparse as they are."""

NONE: Final[dict[str, Any]] = {
    "mask_every": 0,
    "mask_stop": 0,
    "queue": 5,
    "threshold": 0.1,
    "distance": "kept",
    "history": False,
    "drop": 0.3,
}
"""What a setting of a method is where the method is another."""

_OWNERS: Final[dict[str, tuple[str, ...]]] = {
    "mask_every": ("early-bird", *CHANGING),
    "mask_stop": CHANGING,
    "queue": ("early-bird",),
    "threshold": ("early-bird",),
    "distance": ("early-bird",),
    "history": ("early-bird",),
    "drop": MOVING,
}
_HISTORY_WEIGHTS: Final = 30_000_000
"""Weights up to which the masks of all observations are held if nothing is said: 200 MB or so."""
_LOOKS: Final = 200
"""Observations of early-bird in a run, if it were dense to the end,"""
_SHORTEST: Final = 5
"""and fewest steps between two of them, if there is room: masks a step apart are always close."""
_CHANGES: Final = 40
"""Changes of masks in a run,"""
_LONGEST: Final = 100
"""and most steps between two of them."""


def resolve_method(
    prune: "PruneConfig",
    *,
    steps: int,
    warmup_steps: int,
    is_dense: bool,
    has_start: bool,
    num_weights: int,
) -> dict[str, Any]:
    """Return the settings of a method that were "auto", by name.

    Example:
        >>> from samo.train.config import PruneConfig
        >>> from samo.train.config_methods import resolve_method
        >>> about = {"steps": 1000, "warmup_steps": 50, "is_dense": False, "has_start": False}
        >>> resolve_method(PruneConfig(method="rigl"), **about, num_weights=10**6)
        {'dense_steps': 0, 'mask_every': 25, 'mask_stop': 750, 'history': False}

    Args:
        prune: The settings.
        steps: Steps of the run.
        warmup_steps: Steps in which its learning rate rises.
        is_dense: Whether nothing is pruned.
        has_start: Whether the run starts from trained weights, or from masks.
        num_weights: Weights in the matrices of the model, about.
    """
    method = "none" if is_dense else prune.method
    dense = prune.dense_steps
    if isinstance(dense, str):
        dense = 0 if is_dense or method in MOVING or has_start else steps // 5
        if method == "early-bird":
            dense = steps // 2
    every, stop, history = 0, 0, False
    if method == "early-bird":
        room = (dense - warmup_steps) // max(prune.queue, 1)
        every = max(1, min(max(steps // _LOOKS, _SHORTEST), room))
        history = num_weights <= _HISTORY_WEIGHTS
    elif method in CHANGING:
        every = max(1, min(steps // _CHANGES, _LONGEST))
        stop = dense + max(1, 3 * (steps - dense) // 4)
    return {
        "dense_steps": dense,
        "mask_every": every if isinstance(prune.mask_every, str) else prune.mask_every,
        "mask_stop": stop if isinstance(prune.mask_stop, str) else prune.mask_stop,
        "history": history if isinstance(prune.history, str) else prune.history,
    }


def first_look(every: int, warmup_steps: int) -> int:
    """Return the step of early-bird's first look: masks that hardly move yet have not settled.

    Example:
        >>> from samo.train.config_methods import first_look
        >>> first_look(every=20, warmup_steps=50), first_look(every=20, warmup_steps=0)
        (60, 20)
    """
    return max(1, -(-warmup_steps // every)) * every


def check_method(
    prune: "PruneConfig", *, mode: str, steps: int, warmup_steps: int, state: str
) -> None:
    """Refuse settings of a method that cannot be meant.

    Raises:
        ConfigError: One is out of range, belongs to another method, or contradicts another.
    """
    method = prune.method
    for name, owners in _OWNERS.items():
        if method not in owners and getattr(prune, name) != NONE[name]:
            raise ConfigError(
                f"{name} is a setting of method {_listed(owners)}, and with method {method} it would have "
                "no effect; leave one of them out"
            )
    if mode == "dense" or method in ("magnitude", "random"):
        return
    every, dense = prune.mask_every, prune.dense_steps
    assert not isinstance(every, str)
    assert not isinstance(dense, str)
    if not 1 <= every < 2**31:
        raise ConfigError(f"mask_every must be 1 or more, and less than 2^31, got {every}")
    if method == "early-bird":
        _check_early_bird(prune, every, dense, warmup_steps)
    else:
        _check_changing(prune, dense, steps=steps, state=state)


def _check_early_bird(prune: "PruneConfig", every: int, dense: int, warmup_steps: int) -> None:
    if not 2 <= prune.queue < 2**31:
        raise ConfigError(f"queue must be 2 or more, and less than 2^31, got {prune.queue}")
    if not 0 <= prune.threshold < 1:
        raise ConfigError(
            f"threshold must be at least 0 and less than 1, got {prune.threshold}; 0.1 means that nine of "
            "ten kept weights agree"
        )
    full = first_look(every, warmup_steps) + (prune.queue - 1) * every
    if full > dense:
        raise ConfigError(
            f"method early-bird compares {prune.queue} masks, {every:,} steps apart and after the warm-up "
            f"of {warmup_steps:,} steps, so none can settle before step {full:,}, and the dense phase ends "
            f"at step {dense:,}; raise --dense-steps or --steps, or lower --mask-every, --queue or "
            "--warmup-steps"
        )


def _check_changing(prune: "PruneConfig", dense: int, *, steps: int, state: str) -> None:
    method, stop, every = prune.method, prune.mask_stop, prune.mask_every
    assert not isinstance(stop, str)
    assert not isinstance(every, str)
    if not dense < stop < 2**63:
        raise ConfigError(
            f"mask_stop {stop:,} is not after the dense phase, which ends at step {dense:,}; masks change "
            "from there on until mask_stop"
        )
    if prune.pattern is not None:
        raise ConfigError(
            f"method {method} would not keep to pattern {prune.pattern} when it changes masks; leave one "
            "of them out"
        )
    if method in MOVING:
        if stop - dense <= every:
            raise ConfigError(
                f"method {method} moves masks every {every:,} steps after the dense phase, which "
                f"ends at step {dense:,}, and no more from mask_stop {stop:,} on, so they never would; "
                "lower mask_every, or take more steps"
            )
        if not 0 < prune.drop <= 1:
            raise ConfigError(
                f"drop must be more than 0 and at most 1, got {prune.drop}; 0.3 replaces 30 % of the kept "
                "weights at first"
            )
        if state != "exact":
            raise ConfigError(
                f"method {method} counts the updates of each weight, which state {state} has no place "
                "for; leave one of them out"
            )
        return
    if stop > steps:
        raise ConfigError(
            f"method gradual reaches its sparsity at mask_stop {stop:,}, and the run ends at step "
            f"{steps:,}; lower mask_stop, or take more steps"
        )
    unused = [name for name in ("scope", "rules") if getattr(prune, name) not in ("tensor", {})]
    if unused:
        raise ConfigError(
            f"method gradual prunes every matrix to the same sparsity, and {_listed(unused)} would have "
            "no effect; leave one of them out"
        )


def _listed(names: "list[str] | tuple[str, ...]") -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"

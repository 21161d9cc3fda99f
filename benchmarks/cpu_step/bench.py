"""One training step of a pruned GPT on a CPU: samo beside dense training and its peers.

All contenders train the same 90 % pruned GPT in fp32 on the same tokens and keep their weights
masked. They take turns, one step each, so that they share whatever the machine does meanwhile.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune

import samo
from benchmarks.measure import (
    Row,
    arguments,
    held_bytes,
    in_turns,
    keep_freed_memory,
    show,
    spread,
    time_ms,
    write_rows,
)
from samo.models.gpt import GPT, GPTConfig

LR = 3e-4
SPARSITY = 0.9


class Contender:
    """A way to train the pruned model."""

    model: nn.Module
    optimizer: Any

    def gradients(self, tokens: Tensor) -> None:
        """Run forward and backward."""
        self.optimizer.zero_grad()
        self.model(tokens, tokens).backward()

    def update(self) -> None:
        """Step the optimizer and keep the mask."""
        self.optimizer.step()

    def state_bytes(self) -> int:
        """Measure the bytes held between steps, gradients included."""
        return held_bytes(self.model, self.optimizer)


class Dense(Contender):
    """A dense model with a torch-like optimizer, multiplied by its masks after every step."""

    def __init__(self, model: GPT, masks: samo.Masks, make: Callable[..., Any]) -> None:
        masks.apply_(model)
        self.model = model
        self.optimizer = make(model.parameters(), lr=LR)
        parameters = masks.parameters_of(model)
        self.pruned = [parameters[name].data for name in masks]
        # As numbers, not booleans: the multiplication is twice as fast, and so a fairer rival.
        self.masks = [mask.to_bool().float() for mask in masks.values()]

    def update(self) -> None:
        self.optimizer.step()
        torch._foreach_mul_(self.pruned, self.masks)

    def state_bytes(self) -> int:
        return held_bytes(self.model, self.optimizer, self.masks)


class TorchPrune(Contender):
    """A model under ``torch.nn.utils.prune``, whose masks multiply in every forward pass."""

    def __init__(self, model: GPT, masks: samo.Masks) -> None:
        self.model = model
        for name, mask in masks.items():
            path, _, attribute = name.rpartition(".")
            module = model.get_submodule(path)
            torch_prune.custom_from_mask(module, attribute, mask.to_bool().float())
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def state_bytes(self) -> int:
        products = [
            module.weight
            for module in self.model.modules()
            if hasattr(module, "weight_mask") and isinstance(module.weight, Tensor)
        ]
        return held_bytes(self.model, self.optimizer, products)


class Samo(Contender):
    """samo, resident weights, exact state."""

    def __init__(self, model: GPT, masks: samo.Masks) -> None:
        self.model = samo.compress_(model, masks)
        self.optimizer = samo.AdamW(model.parameters(), lr=LR)

    def state_bytes(self) -> int:
        account = samo.ledger(self.model, self.optimizer)
        return account.measured_bytes + account.other_bytes


def contenders(model: GPT, masks: samo.Masks, *, with_peers: bool) -> dict[str, Contender]:
    """Build dense training and samo, and the peers that are installed, each on its own model."""
    fused = functools.partial(torch.optim.AdamW, fused=True)
    made: dict[str, Contender] = {
        "dense AdamW(fused) + mask": Dense(copy.deepcopy(model), masks, fused),
        "samo": Samo(copy.deepcopy(model), masks),
    }
    if not with_peers:
        return made
    made["torch.nn.utils.prune"] = TorchPrune(copy.deepcopy(model), masks)
    try:
        from torchao.optim import AdamW8bit as TorchaoAdamW

        made["torchao AdamW8bit + mask"] = Dense(copy.deepcopy(model), masks, TorchaoAdamW)
    except ImportError:
        print("torchao is not installed; left out")
    try:
        from bitsandbytes.optim import AdamW8bit as BitsandbytesAdamW

        made["bitsandbytes AdamW8bit + mask"] = Dense(
            copy.deepcopy(model), masks, BitsandbytesAdamW
        )
    except ImportError:
        print("bitsandbytes is not installed; left out")
    return made


def run(
    model: GPT, masks: samo.Masks, tokens: Tensor, *, rounds: int, with_peers: bool
) -> list[Row]:
    """Time whole steps and updates of every contender."""
    rivals = contenders(model, masks, with_peers=with_peers)
    updates: dict[str, list[float]] = {name: [] for name in rivals}

    def step(name: str) -> None:
        rivals[name].gradients(tokens)
        updates[name].append(time_ms(rivals[name].update))

    times = in_turns({name: functools.partial(step, name) for name in rivals}, rounds=rounds)
    baseline = "dense AdamW(fused) + mask"
    num_params = sum(param.numel() for param in model.parameters())
    rows = []
    for name in rivals:
        whole, update = spread(times[name]), spread(updates[name][-rounds:])
        size = rivals[name].state_bytes()
        rows.append(
            {
                "contender": name,
                "step_ms": whole["median"],
                "step_p20_ms": whole["p20"],
                "step_p80_ms": whole["p80"],
                # Ratios within a round: neighbours in time see the same machine.
                **_ratios("step_ratio", times[name], times[baseline]),
                "update_ms": update["median"],
                "update_p20_ms": update["p20"],
                "update_p80_ms": update["p80"],
                **_ratios("update_ratio", updates[name][-rounds:], updates[baseline][-rounds:]),
                "state_mb": round(size / 1e6, 2),
                "bytes_per_param": round(size / num_params, 3),
                "num_params": num_params,
                "tokens": tokens.numel(),
                "rounds": rounds,
                "sparsity": SPARSITY,
            }
        )
    return rows


def _ratios(name: str, times: list[float], baseline: list[float]) -> Row:
    found = spread([a / b for a, b in zip(times, baseline)])
    return {name: found["median"], f"{name}_p20": found["p20"], f"{name}_p80": found["p80"]}


def main() -> None:
    """Run the benchmark and print its table."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="steps of each contender")
    parser.add_argument("--no-peers", action="store_true", help="dense training and samo only")
    parser.add_argument("--default-malloc", action="store_true", help="leave glibc's malloc alone")
    options = parser.parse_args()
    if not options.toy and not options.default_malloc:
        keep_freed_memory()
    torch.manual_seed(0)
    shape = {"num_layers": 6, "width": 768, "num_heads": 12, "context": 256}
    if options.toy:
        shape = {"num_layers": 1, "width": 32, "num_heads": 2, "context": 16}
    model = GPT(GPTConfig(**shape))
    tokens = torch.randint(0, 256, (4, shape["context"]))
    masks = samo.prune(model, SPARSITY)
    rows = run(model, masks, tokens, rounds=options.rounds, with_peers=not options.no_peers)
    show(
        rows,
        [
            "contender",
            "step_ms",
            "step_ratio",
            "step_ratio_p20",
            "step_ratio_p80",
            "update_ms",
            "update_ratio",
            "bytes_per_param",
        ],
    )
    write_rows(options.out, rows)


if __name__ == "__main__":
    main()

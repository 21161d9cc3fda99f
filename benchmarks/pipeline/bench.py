"""Message-driven pipeline against those of fixed order: 4 stages whose passes are sleeps.

Sleeps take the place of computation, so that four ranks fit on two cores and nothing but waiting is
measured. All contenders sleep the same seeded times for the same passes and take turns step by
step. Fixed and free order are compared at equal limits: with as many micro-batches in flight as
there are stages, and with one more. How many a stage holds is counted in its layer, not taken from
the settings.
"""

import datetime
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.measure import Row, arguments, in_turns, is_installed, spread, write_rows
from benchmarks.pipeline.contenders import BASELINE, Contender, build
from benchmarks.pipeline.passes import FORWARD_MS, SleepyLayer
from benchmarks.ranks import run as run_ranks

STAGES: Final = 4
WARM_UP: Final = 2
"""Steps that are not timed: links are made, torch finds shapes."""


@dataclass(frozen=True)
class Case:
    """How passes vary.

    Attributes:
        deviation: Standard deviation of the logarithm of a pass's time.
        micro_batches: Micro-batches of a step.
        is_one_more: Whether contenders with one micro-batch more in flight take part.
        forward_ms: Mean time of a forward pass; a backward pass takes twice as long.
    """

    deviation: float
    micro_batches: int = 16
    is_one_more: bool = True
    forward_ms: float = FORWARD_MS


CASES: Final = {
    "even": Case(0.0),
    "jittering": Case(0.5),
    "often late": Case(1.2),
    "often late, 32 micro-batches": Case(1.2, micro_batches=32, is_one_more=False),
    "even, 1 ms": Case(0.0, forward_ms=1.0),
}


def work(
    rank: int,
    num_ranks: int,
    cases: Mapping[str, Case],
    rounds: int,
    scale: float,
    has_deepspeed: bool,
) -> list[Row]:
    """Time all contenders on one rank."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=5))
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("pipe",))
    found = []
    for name, case in cases.items():

        def layers(case: Case = case) -> list[SleepyLayer]:
            return [
                SleepyLayer(
                    stage, case.deviation, case.micro_batches, scale * case.forward_ms / FORWARD_MS
                )
                for stage in range(num_ranks)
            ]

        contenders = build(
            layers,
            mesh,
            case.micro_batches,
            is_one_more=case.is_one_more,
            has_deepspeed=has_deepspeed,
        )
        times, held = compare(contenders, case.micro_batches, rounds)
        found += [
            {"case": name, "contender": who, "times": times[who], "held": held[who]}
            for who in times
        ]
        for contender in contenders:
            contender.close()
    return found


def compare(
    contenders: list[Contender], micro_batches: int, rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[int]]]:
    """Return milliseconds of each contender's steps, and the most micro-batches each stage held."""
    torch.manual_seed(0)
    x, y = torch.randn(2, micro_batches, 16_384)
    losses: dict[str, torch.Tensor] = {}

    def turn(contender: Contender) -> Callable[[], None]:
        layer, steps = contender.layer, iter(range(rounds + WARM_UP))

        def step() -> None:
            number = next(steps)
            if number == WARM_UP:
                layer.most_held = 0
            layer.start(number)
            losses[contender.name] = contender.step(x, y)
            dist.barrier()
            passes = {"forward": micro_batches, "backward": micro_batches}
            assert number < WARM_UP or layer.counts == passes, (contender.name, layer.counts)

        return step

    times = in_turns(
        {contender.name: turn(contender) for contender in contenders},
        rounds=rounds,
        warm_up=WARM_UP,
        prepare=dist.barrier,
    )
    held: dict[str, Any] = {}
    for contender in contenders:
        ours, theirs = losses[contender.name].reshape(()), losses[BASELINE]
        text = f"the loss of {contender.name} is {ours}, that of {BASELINE} {theirs}"
        torch.testing.assert_close(ours, theirs, msg=text)
        held[contender.name] = [None] * dist.get_world_size()
        dist.all_gather_object(held[contender.name], contender.layer.most_held)
    return times, held


def run(cases: Mapping[str, Case], *, rounds: int, scale: float) -> list[Row]:
    """Start the ranks and return a row for each contender and case."""
    found = run_ranks(
        STAGES,
        work,
        cases,
        rounds,
        scale,
        is_installed("deepspeed"),
        preload=["torch.distributed.pipelining", "benchmarks.pipeline.contenders"],
    )
    rows = []
    for one in found:
        case, times = one["case"], one["times"]
        (baseline,) = (
            other["times"]
            for other in found
            if other["case"] == case and other["contender"] == BASELINE
        )
        ratios = spread([a / b for a, b in zip(times, baseline)])
        whole = spread(times)
        rows.append(
            {
                "stages": case,
                "contender": one["contender"],
                "held": " ".join(str(number) for number in one["held"]),
                "step_ms": whole["median"],
                "step_p20_ms": whole["p20"],
                "step_p80_ms": whole["p80"],
                "ratio": whole["median"] / spread(baseline)["median"],
                "paired_ratio": ratios["median"],
                "paired_ratio_p20": ratios["p20"],
                "paired_ratio_p80": ratios["p80"],
                "num_stages": STAGES,
                "micro_batches": cases[case].micro_batches,
                "forward_ms": cases[case].forward_ms * scale,
                "spread": cases[case].deviation,
                "rounds": rounds,
            }
        )
    return rows


def table(rows: list[Row]) -> str:
    """Return rows as the table of README.md; bold is what is faster than 1F1B in 4 rounds of 5."""
    lines = [
        "| stages | contender | held | step, ms (p20-p80) | against 1F1B (p20-p80) |",
        "| --- | --- | --- | --- | --- |",
    ]
    previous = None
    for row in rows:
        case = row["stages"]
        if row["spread"]:
            case += f" (log-normal, sigma {row['spread']})"
        against = "1.00"
        if row["contender"] != BASELINE:
            against = f"{row['paired_ratio']:.2f}"
            against = f"**{against}**" if round(row["paired_ratio_p80"], 2) < 1 else against
            against += " ({paired_ratio_p20:.2f}-{paired_ratio_p80:.2f})".format(**row)
        cells = [
            "" if case == previous else case,
            row["contender"],
            row["held"],
            "{step_ms:,.0f} ({step_p20_ms:,.0f}-{step_p80_ms:,.0f})".format(**row),
            against,
        ]
        lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
        previous = case
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark and print its table."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="steps of each contender")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    options = parser.parse_args()
    rows = run(
        {name: CASES[name] for name in options.cases},
        rounds=options.rounds,
        scale=0.05 if options.toy else 1.0,
    )
    print(table(rows))
    write_rows(options.out, rows)


if __name__ == "__main__":
    main()

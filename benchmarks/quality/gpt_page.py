"""The page of a result: the table, what it says in words, and the figures, all made from rows."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.drawing import write_figure
from benchmarks.measure import Row
from benchmarks.quality import rates, spreads
from benchmarks.quality.figures import Curve, Figure, curves_figure, dots_figure
from samo.bench.rows import Table, markdown
from samo.utils import atomic_io
from samo.utils.formatting import NOTHING, count, duration, size

_HEAD: Final = (
    "contender",
    "learning rate",
    "parameters, kept",
    "state at the end",
    "at its peak",
    "steps with more state",
    "their time",
    "time of the run",
    "validation loss",
    "against dense",
)


def write(folder: Path, rows: Sequence[Row], order: Sequence[str]) -> None:
    """Write the page of some rows; ``order`` has the names of the contenders, from the top."""
    found = spreads.by_contender(rates.best_rows(rows), order)
    tried = spreads.by_contender(rows, order)
    settings = rows[0]["settings"]
    tokens = settings["steps"] * settings["batch"] * settings["context"]
    seeds = sorted({row["seed"] for row in rows})
    dense = found.get("dense", [])
    power = settings["density_power"]
    lrs = sorted({row["lr"] for row in rows})
    figures = {
        "loss": ("Validation loss of every run", _dots(found)),
        "curves": ("Validation loss over the text read", _curves(found)),
    }
    trials = ""
    if len(lrs) > 1:
        figures["rates"] = ("Validation loss over the learning rate", _rates(tried))
        trials = f"Losses at other rates, seed {seeds[0]}:\n\n{markdown(_trials(tried)).rstrip()}"
    for name, (_, figure) in figures.items():
        write_figure(figure, folder, name)
    sizes = ("num_layers", "width", "num_heads", "context", "batch", "steps")
    flags = " ".join(f"--{name.replace('_', '-')} {settings[name]}" for name in sizes)
    notes = [
        _where(rows),
        f"Text: {count(settings['train_bytes'])} bytes of {settings['text_source']}, and "
        f"{count(settings['valid_bytes'])} bytes of other files held back (digest {settings['text']}).",
        f"Each run: {count(settings['steps'])} steps of {settings['batch']} x {settings['context']} "
        f"bytes, {count(tokens)} in all. A byte is seen {tokens / settings['train_bytes']:.2f} times "
        "on average, and none more than 4 times. Same bytes, order and first weights (but for the small GPT) "
        f"for all contenders of a seed; seeds {', '.join(map(str, seeds))}.",
        f"{_rule_of_rates(rows)} Pruned tensors learn at that rate times "
        f"their kept fraction to the power of {power:g}.",
        "Loss in nats for each byte: mean +- standard deviation over seeds. Against dense: the same of "
        'the differences seed by seed; positive is worse. "Worse" and "better" below: the 95 % interval of '
        "the mean difference (Student's t) leaves out 0.",
        "State is weights, masks, gradients and moments, measured. Dense: fp32 with torch's AdamW, 16 "
        "bytes for each parameter. Pruned: bfloat16 with samo.AdamW, exact. The small dense GPT is the "
        "narrowest of equal depth whose state is not smaller than that of the 90 % pruned one.",
    ]
    parts = [
        "# What pruning costs a GPT",
        f"    python -m benchmarks.quality.gpt --out DIR {flags} --density-power {power:g} "
        f"--lrs {' '.join(f'{lr:g}' for lr in lrs)}",
        _listed(notes),
        markdown(Table(_HEAD, [_line(several, dense) for several in found.values()])).rstrip(),
        _listed([*_findings(found), *_edges(tried), *_tickets(found)]),
        *(f"![{description}]({name}.png)" for name, (description, _) in figures.items()),
        trials,
        "Every run, with its curve: rows.jsonl. The page is made from it: `--page-only`.",
    ]
    page = "\n\n".join(filter(None, parts))
    atomic_io.write_bytes(folder / "README.md", page.encode() + b"\n")


def _listed(sentences: Sequence[str]) -> str:
    return "\n".join(f"- {sentence}" for sentence in sentences)


def _where(rows: Sequence[Row]) -> str:
    dates = sorted({row["date"] for row in rows})
    devices = ", ".join(dict.fromkeys(row["device_name"] for row in rows))
    found = rows[-1]["versions"]
    versions = ", ".join(f"{name} {found[name]}" for name in ("samo", "torch", "python"))
    commits = ", ".join(dict.fromkeys(row["commit"] or "unknown" for row in rows))
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    at_once = ", ".join(map(str, sorted({row["parallel"] for row in rows})))
    return (
        f"Measured {when} on {devices}; {versions}; commit {commits}. Runs at a time: {at_once} (times "
        "are those of runs that shared the device)."
    )


def _line(rows: Sequence[Row], dense: Sequence[Row]) -> tuple[str, ...]:
    first = rows[0]
    kept = first["num_params"] - first["pruned_params"]
    numbers = count(first["num_params"]) + (
        "" if not first["pruned_params"] else f", {count(kept)}"
    )
    difference = spreads.against(rows, dense, "valid_loss")
    large = spreads.of([row["large_steps"] for row in rows]).mean
    return (
        first["title"],
        f"{first['lr']:g}",
        numbers,
        size(first["final_state_bytes"]),
        size(max(row["peak_state_bytes"] for row in rows)),
        count(large) if large else NOTHING,
        duration(spreads.of([row["large_s"] for row in rows]).mean) if large else NOTHING,
        duration(spreads.of([row["train_s"] for row in rows]).mean),
        spreads.of([row["valid_loss"] for row in rows]).text(),
        NOTHING if difference is None or rows is dense else difference.text("+.3f"),
    )


def _rule_of_rates(rows: Sequence[Row]) -> str:
    lrs = {row["lr"] for row in rows}
    if len(lrs) == 1:
        return f"All have the same learning rate, {min(lrs):g}."
    return (
        "Each contender has the learning rate at which its first seed ends best: rates are tried from the "
        "lowest on, until the loss is worse. All trials are below."
    )


def _trials(tried: dict[str, list[Row]]) -> Table:
    lrs = sorted({row["lr"] for rows in tried.values() for row in rows})
    lines = []
    for rows in tried.values():
        losses = {row["lr"]: row["valid_loss"] for row in _first_seed(rows)}
        cells = [f"{losses[lr]:.3f}" if lr in losses else NOTHING for lr in lrs]
        lines.append((rows[0]["title"], *cells))
    return Table(("contender", *(f"rate {lr:g}" for lr in lrs)), lines)


def _first_seed(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the first seed, by their rates."""
    first = min(row["seed"] for row in rows)
    return sorted((row for row in rows if row["seed"] == first), key=lambda row: row["lr"])


def _findings(found: dict[str, list[Row]]) -> list[str]:
    """Say in words where pruning loses and where it wins, as far as the seeds tell."""
    sentences = []
    small, dense = found.get("small-dense"), found.get("dense")
    for name, rows in found.items():
        if not rows[0]["pruned_params"]:
            continue
        parts = []
        for base, label in ((dense, "the dense GPT"), (small, "the small dense GPT")):
            difference = spreads.against(rows, base, "valid_loss") if base else None
            if base and difference:
                share = rows[0]["final_state_bytes"] / base[0]["final_state_bytes"]
                parts.append(
                    f"{_compared(difference)} {label} ({difference.text('+.3f')}) with {share:.2f} times "
                    "its state"
                )
        if parts:
            sentences.append(f"{found[name][0]['title']}: {'; '.join(parts)}.")
    if small and dense and (difference := spreads.against(small, dense, "valid_loss")):
        params = count(small[0]["num_params"])
        sentences.append(
            f"{small[0]['title']}, {params} parameters at width {small[0]['width']}: "
            f"{_compared(difference)} the dense GPT ({difference.text('+.3f')})."
        )
    return sentences


def _edges(tried: dict[str, list[Row]]) -> list[str]:
    """Name those whose best rate is the lowest or the highest that was tried."""
    edges: dict[str, list[str]] = {"lowest": [], "highest": []}
    for rows in tried.values():
        lrs = sorted({row["lr"] for row in rows})
        for edge, lr in (("lowest", lrs[0]), ("highest", lrs[-1])):
            if len(lrs) > 1 and rates.best(rows) == lr:
                edges[edge].append(rows[0]["title"])
    return [
        f"Best at the {edge} rate that was tried, so that a {'lower' if edge == 'lowest' else 'higher'} one "
        f"may be better: {', '.join(titles)}."
        for edge, titles in edges.items()
        if titles
    ]


def _compared(difference: spreads.Spread) -> str:
    if not difference.is_clear:
        return (
            "not clearly other than"
            if difference.number > 1
            else "one seed, not to be compared with"
        )
    return "worse than" if difference.mean > 0 else "better than"


def _tickets(found: dict[str, list[Row]]) -> list[str]:
    return [
        f"{row['title']}, seed {row['seed']}: ticket {row['ticket']} (step {count(row['large_steps'])})."
        for rows in found.values()
        for row in rows
        if row["ticket"]
    ]


def _dots(found: dict[str, list[Row]]) -> Figure:
    contenders = [
        (rows[0]["title"], [row["valid_loss"] for row in rows]) for rows in found.values()
    ]
    return dots_figure(contenders, title="Validation loss in the end, nats a byte", form=".3f")


def _curves(found: dict[str, list[Row]]) -> Figure:
    curves = []
    for rows in found.values():
        curve_of_seed = [row["curve"] for row in rows]
        x = [tokens for tokens, _ in curve_of_seed[0]]
        values = [[loss for _, loss in points] for points in zip(*curve_of_seed)]
        means = [spreads.of(several).mean for several in values]
        millions = [tokens / 1e6 for tokens in x]
        curves.append(
            Curve(rows[0]["title"], millions, means, [*map(min, values)], [*map(max, values)])
        )
    # All end low and close together; what comes before a quarter of the run would flatten that.
    quarter = len(curves[0].mean) // 4
    high = max(curve.mean[min(quarter, len(curve.mean) - 1)] for curve in curves)
    low = min(min(curve.low) for curve in curves)
    return curves_figure(
        curves,
        title="Validation loss, nats a byte",
        axis="bytes read, millions",
        low=low - 0.05 * (high - low),
        high=high + 0.02 * (high - low) + 1e-3,
    )


def _rates(tried: dict[str, list[Row]]) -> Figure:
    curves = []
    for rows in tried.values():
        trials = [row for row in _first_seed(rows) if math.isfinite(row["valid_loss"])]
        losses = [row["valid_loss"] for row in trials]
        curves.append(
            Curve(rows[0]["title"], [row["lr"] for row in trials], losses, losses, losses)
        )
    low = min(min(curve.mean) for curve in curves)
    # What came apart at a rate too high would flatten everything else.
    high = min(max(max(curve.mean) for curve in curves), 3 * low)
    return curves_figure(
        curves,
        title="Validation loss in the end, nats a byte",
        axis="learning rate",
        low=low - 0.05 * (high - low),
        high=high + 0.05 * (high - low) + 1e-3,
        is_log=True,
    )

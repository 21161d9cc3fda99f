"""The tables of README.md, from the published numbers and the model's."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np

from benchmarks.paper.clusters import SCHEMES, answers
from benchmarks.paper.published import read
from benchmarks.paper.summit import (
    FORMS,
    LIMIT,
    MODELS,
    Fit,
    calibrate,
    left_out_errors,
    select,
)  # fmt: skip

_OWN: Final = ("resident", "streamed", "streamed, lean")


def compare(fit: Fit, only: str = "") -> list[dict[str, Any]]:
    """Return the 16 rows: published and modelled seconds, dense and AxoNN+SAMO, errors in per cent."""
    rows: list[dict[str, Any]] = []
    for dense, pruned in zip(read("dense"), read("pruned"), strict=True):
        model, gpus = str(dense["model"]), int(dense["gpus"])
        if only in ("", model):
            ours, theirs = fit.seconds(model, "dense", gpus), fit.seconds(model, "paper", gpus)
            rows.append(
                {
                    "model": model,
                    "gpus": gpus,
                    "dense": dense["axonn"],
                    "dense_model": ours,
                    "dense_error": 100 * (ours / dense["axonn"] - 1),
                    "samo": pruned["samo"],
                    "samo_model": theirs,
                    "samo_error": 100 * (theirs / pruned["samo"] - 1),
                    "reduction": pruned["reduction"],
                    "reduction_model": 100 * (1 - theirs / ours),
                }
            )
    return rows


def _summary(fit: Fit, only: str = "") -> list[str]:
    """Return mean and largest absolute error of dense rows, of SAMO's, and of the reduction."""
    rows = compare(fit, only)
    errors = [
        [row["dense_error"], row["samo_error"], row["reduction_model"] - row["reduction"]]
        for row in rows
    ]
    found = np.abs(errors)
    return [f"{x:.1f}" for pair in zip(found.mean(axis=0), found.max(axis=0)) for x in pair]


_SUMMARY: Final = (
    "dense, mean %", "dense, largest %", "SAMO, mean %", "SAMO, largest %", "reduction, mean points", "largest",
)  # fmt: skip


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def costs() -> str:
    """Return what the four costs come to."""
    found = calibrate().costs
    meaning = (
        ("matmul", f"{1 / found[0]:.0%} of 125 Tflop/s"),
        ("memory", f"{1 / found[1]:.0%} of 900 GB/s"),
        ("messages", f"{1 / found[2]:.1f} GB/s a stage; printed: 50 inside a node, 12.5 between nodes"),
        ("collective", f"{1 / found[3]:.1f} GB/s a GPU, {6 / found[3]:.0f} a node of six; printed: 12.5"),
    )  # fmt: skip
    return markdown(("cost", "calibrated on the 16 dense rows"), meaning)


def rows() -> str:
    """Return the 16 rows, published and predicted."""
    fit = calibrate()
    header = (
        "model", "GPUs", "stages", "AxoNN", "model", "error %", "AxoNN+SAMO", "predicted", "error %", "saved %", "predicted", "points",
    )  # fmt: skip
    lines = [
        f"{row['model']}|{row['gpus']}|{fit.pipe(row['model'], 'dense')}, {fit.pipe(row['model'], 'paper')}"
        f"|{row['dense']:.2f}|{row['dense_model']:.2f}|{row['dense_error']:+.1f}"
        f"|{row['samo']:.2f}|{row['samo_model']:.2f}|{row['samo_error']:+.1f}"
        f"|{row['reduction']:.0f}|{row['reduction_model']:.0f}|{row['reduction_model'] - row['reduction']:+.0f}"
        for row in compare(fit)
    ]
    return markdown(header, [line.split("|") for line in lines])


def summary() -> str:
    """Return the errors of all rows, and of each model when the fit has not seen it."""
    lines = [["all, calibrated on all", *_summary(calibrate())]]
    lines += [[f"{model}, left out", *_summary(calibrate(model), model)] for model in MODELS]
    return markdown(("rows", *_SUMMARY), lines)


def limits() -> str:
    """Return the errors by memory limit."""
    lines = []
    for limit in (9, 10, 11, 12, 13, 14, 15, 16):
        fit = calibrate(limit=1e9 * limit)
        stages = [
            " ".join(str(fit.pipe(model, scheme)) for model in MODELS)
            for scheme in ("dense", "paper")
        ]
        name = f"**{limit}**" if limit * 1e9 == LIMIT else str(limit)
        lines.append([name, *stages, *_summary(fit)])
    return markdown(("limit, GB", "stages, dense", "stages, SAMO", *_SUMMARY), lines)


def forms() -> str:
    """Return the errors of all forms, by the error that chooses one."""
    lines = []
    for form in FORMS:
        fit, left_out = calibrate(form=form), 100 * np.abs(left_out_errors(form))
        options: list[str] = [form.extra or "-"]
        options += ["yes" if option else "no" for option in (form.fill, form.shared)]
        dense = 100 * np.abs(fit.dense_errors())
        samo = np.abs([row["samo_error"] for row in compare(fit)])
        errors = [
            f"{x:.1f}" for found in (left_out, dense, samo) for x in (found.mean(), found.max())
        ]
        if form == select():
            errors = [f"**{text}**" for text in errors]
        lines.append([*options[1:], options[0], *errors])
    lines.sort(key=lambda line: float(line[3].strip("*")))
    header = (
        "fill", "node shares", "fifth cost", "left out, mean %", "largest %", "dense, mean %", "largest %", "SAMO, mean %", "largest %",
    )  # fmt: skip
    return markdown(header, lines)


def own() -> str:
    """Return stages and seconds of samo's schemes on the paper's machine."""
    fit, lines = calibrate(), []
    for model in MODELS:
        gpus = max(int(row["gpus"]) for row in read("dense") if row["model"] == model)
        cells = [
            f"{fit.pipe(model, scheme)}: {fit.seconds(model, scheme, gpus):.2f} s"
            for scheme in ("dense", "paper", *_OWN)
        ]
        lines.append([model, gpus, *cells])
    return markdown(("model", "GPUs", "dense", "AxoNN+SAMO", *(f"samo, {n}" for n in _OWN)), lines)


def fewest() -> str:
    """Return the fewest GPUs that hold a model."""
    found = {
        (r["gpu"], r["model"], r["scheme"]): r["gpus"]
        for r in answers()
        if "fewest" in r["question"]
    }
    lines = [
        [gpu, model, *(found.get((gpu, model, scheme), "over 256") for scheme in SCHEMES)]
        for gpu in ("rtx4090", "h100", "h200")
        for model in ("13B", "66B", "175B")
    ]
    return markdown(("GPU", "model", *SCHEMES), lines)


def _times(question: str, keep: Callable[[dict[str, Any]], bool]) -> list[list[str]]:
    """Return the seconds of each scheme, with layout and share of computing."""
    found: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in filter(keep, answers()):
        if row["question"] == question:
            key = (row["model"], f"{row['gbit']:,}", f"{row['gpus']:,}")
            share = row["compute"] / row["seconds"]
            text = f"**{row['seconds']:.3g}** ({share:.0%}) {row['layout'].split(',')[0]}"
            found.setdefault(key, {})[row["scheme"]] = text
    return [[*key, *(cells.get(scheme, "-") for scheme in SCHEMES)] for key, cells in found.items()]


def clusters() -> str:
    """Return seconds of a step on H100s, strong scaling and networks."""
    lines = _times("strong", lambda row: row["gpus"] in (64, 512, 4096))
    lines += _times("network", lambda row: row["gbit"] in (10, 100, 400, 1600))
    return markdown(("model", "Gbit/s a node", "GPUs", *SCHEMES), lines)


def consumer() -> str:
    """Return seconds of a step on consumer cards."""
    lines = _times("consumer", lambda row: row["gpus"] in (1, 4, 16, 64, 256))
    lines.sort(key=lambda line: (int(line[1]), int(line[2])))
    return markdown(("model", "Gbit/s", "GPUs", *SCHEMES), lines)


TABLES: dict[str, Callable[[], str]] = {
    "costs": costs,
    "rows": rows,
    "summary": summary,
    "limits": limits,
    "forms": forms,
    "own": own,
    "fewest": fewest,
    "clusters": clusters,
    "consumer": consumer,
}
"""What README.md holds between its markers, by name."""

"""The sections of the page, from top to bottom: HTML around the figures, every text escaped."""

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Final

from samo.memory.predict import KINDS
from samo.report import findings, grid, mask_pictures
from samo.report.figures import loss_figure, memory_figure, throughput_figure
from samo.report.findings import QUANTITIES, Entry
from samo.report.mask_pictures import MaskView, Picture, sparsity_figure
from samo.report.parts import colour_of, escaped, figure, listed, role, run_key, section
from samo.report.theme import KIND_NAMES
from samo.utils import formatting

__all__ = []

_MOST_MASKS: Final = 3
"""Different sets of masks that are shown."""
_SAMPLE_LETTERS: Final = 2000


def warnings(shown: Sequence[Entry]) -> Iterable[str]:
    """Say what is wrong with a run, if anything is."""
    for entry in shown:
        run = entry.run
        lost = findings.lost_losses(run)
        notes = [
            f"{lost:,} of {len(run.steps):,} logged losses are not numbers" if lost else "",
            f"{run.broken_lines:,} lines of metrics.jsonl could not be read"
            if run.broken_lines > 1
            else "its last line was cut off"
            if run.broken_lines
            else "",
            "it failed" if run.end == "failed" else "",
            "no step was logged" if not len(run.steps) else "",
        ]
        if text := "; ".join(filter(None, notes)):
            yield f'<p class="warning"><b>{escaped(entry.label)}</b>: {escaped(text)}.</p>'


def card(entry: Entry) -> str:
    """Show the numbers that matter most."""
    run, last = entry.run, entry.run.last_eval
    about = [run.mode if run.mode != entry.label else "", run.dtype, findings.status(run)]
    about.insert(2, grid.ranks(run))
    if run.prune is not None:
        about.insert(1, f"{formatting.percent(run.prune.sparsity)} sparse")
    loss = findings.last_loss(run)
    held = run.state.measured_bytes if run.state else None
    per_param, saved = findings.bytes_per_param(run), findings.saved(run)
    ms = findings.step_ms(run)
    dense = run.state.dense_bytes if run.state else None
    numbers = [
        (
            (
                "validation loss",
                formatting.loss(last.loss),
                f"perplexity {formatting.three_digits(last.perplexity)}",
            )
            if last
            else ("training loss", formatting.loss(loss), "not evaluated")
        ),
        (
            "model state",
            formatting.size(held),
            "no ledger in this run"
            if held is None
            else ", ".join(
                filter(None, [f"{formatting.three_digits(per_param)} B/param", grid.largest(run)])
            ),
        ),
        (
            "saved against dense",
            formatting.percent(saved),
            "" if dense is None else f"of {formatting.size(dense)}",
        ),
        (
            "tokens/s",
            formatting.count(findings.tokens_per_s(run)),
            f"{formatting.three_digits(ms)} ms a step" if math.isfinite(ms) else "",
        ),
    ]
    cells = "".join(
        f'<div><dt>{name}</dt><dd class="big">{escaped(big)}</dd><dd class="small">{escaped(small)}</dd></div>'
        for name, big, small in numbers
    )
    return (
        f'<article class="card" style="{colour_of(entry)}"><p class="who"><b>{escaped(entry.label)}</b>'
        f"<span>{escaped(', '.join(filter(None, about)))}</span></p>"
        f'<dl class="numbers">{cells}</dl></article>'
    )


def loss(shown: Sequence[Entry]) -> Iterable[str]:
    """Show the losses."""
    key = [*run_key(shown), '<li><i class="round"></i>validation</li>']
    caption = (
        "Faint: every logged training loss. Line: its running mean over a fiftieth of them, 5 at least, never "
        "across the step of pruning. Losses of the first steps may lie above the figure."
    )
    yield from section(
        "Loss",
        findings.loss_finding(shown),
        figure("loss", findings.loss_finding(shown), lambda size: loss_figure(shown, size)),
        key=key,
        caption=caption,
    )


def memory(shown: Sequence[Entry]) -> Iterable[str]:
    """Show the model state, if a run has an account of it."""
    bars = findings.bars(shown)
    if not bars:
        return
    key = [
        f'<li><i style="--colour:var(--{kind})"></i>{KIND_NAMES[kind]}</li>'
        for kind in KINDS
        if any(bar.kinds.get(kind) for bar in bars)
    ]
    if any(not bar.kinds for bar in bars):
        key.append('<li><i style="--colour:var(--whole)"></i>all kinds together</li>')
    yield from section(
        "Memory",
        findings.memory_finding(shown),
        figure("memory", findings.memory_finding(shown), lambda size: memory_figure(bars, size)),
        key=key,
        caption="Model state without activations. Solid: measured on the tensors held. Pale: by "
        "formula; the paper's is for 16-bit weights, and its mask is an index of 4 bytes a kept weight.",
    )


def throughput(shown: Sequence[Entry]) -> Iterable[str]:
    """Show the speed, if a run has logged it."""
    if not any(math.isfinite(findings.tokens_per_s(entry.run)) for entry in shown):
        return
    finding = findings.throughput_finding(shown)
    yield from section(
        "Throughput",
        finding,
        figure("throughput", finding, lambda size: throughput_figure(shown, size)),
        key=run_key(shown) if len(shown) > 1 else [],
        caption="Numbers are medians of the last phase of a run.",
    )


def masks(shown: Sequence[Entry], views: Sequence[MaskView | str]) -> Iterable[str]:
    """Show each different set of masks once."""
    different: dict[str, MaskView] = {}
    owners: dict[str, list[str]] = {}
    for entry, view in zip(shown, views):
        if isinstance(view, MaskView) and view.tensors:
            different.setdefault(view.fingerprint, view)
            owners.setdefault(view.fingerprint, []).append(entry.label)
    for number, (key, view) in enumerate(list(different.items())[:_MOST_MASKS]):
        whose = f"Masks of {listed(owners[key])}"
        finding = mask_pictures.finding(view.tensors)
        draw = partial(sparsity_figure, view.tensors)
        caption = ""
        if len(view.tensors) > mask_pictures.MOST_BARS:
            caption = "A row for each kind of tensor, a column for each layer."
        yield from section(
            f"{whose}: sparsity of each layer",
            finding,
            figure(f"sparsity{number}", finding, draw),
            caption=caption,
        )
        yield from section(
            f"{whose}: where the kept weights are",
            "",
            f'<div class="masks">{"".join(map(_mask_picture, view.pictures))}</div>',
            caption="Left: density of blocks, the fullest block in full colour. Right: single weights, "
            "kept ones in colour.",
        )
    reasons: dict[str, list[str]] = {}
    for entry, view in zip(shown, views):
        if isinstance(view, str) and view:
            reasons.setdefault(view, []).append(entry.label)
    left_out = [f"{listed(names)}: {reason}" for reason, names in reasons.items()]
    if len(different) > _MOST_MASKS:
        rest = [name for key in list(different)[_MOST_MASKS:] for name in owners[key]]
        left_out.append(f"not drawn, for brevity: the masks of {listed(rest)}")
    if left_out:
        items = "".join(f"<li>{escaped(line)}</li>" for line in left_out)
        yield f'<section><p class="eyebrow">Masks not shown</p><ul class="notes">{items}</ul></section>'


def _mask_picture(picture: Picture) -> str:
    high, wide = picture.block
    # Very long or very flat tensors are drawn less so, or nothing could be seen of them.
    ratio = min(2.0, max(0.6, picture.columns / picture.rows))
    name = escaped(picture.name)
    rows, columns = picture.zoom
    return (
        f"<figure><h3>{name}</h3>"
        '<div class="pair">'
        f'<div><img src="{picture.map_url}" alt="density map of {name}" style="aspect-ratio:{ratio:.3f}">'
        f"<figcaption>{picture.rows:,} x {picture.columns:,} weights; blocks of {high} x {wide} keep "
        f"{formatting.percent(picture.lowest)} to {formatting.percent(picture.highest)}</figcaption></div>"
        f'<div><img src="{picture.zoom_url}" alt="first bits of the mask of {name}" '
        f'style="aspect-ratio:{min(3.0, max(1 / 3, columns / rows)):.3f}">'
        f"<figcaption>rows 0-{rows - 1}, columns 0-{columns - 1}</figcaption></div></div></figure>"
    )


def comparison(shown: Sequence[Entry]) -> Iterable[str]:
    """Put the numbers of all runs side by side."""
    body = [_row("mode", [escaped(entry.run.mode or formatting.NOTHING) for entry in shown])]
    if any(entry.run.is_on_many_ranks for entry in shown):
        body.append(_row("ranks", [escaped(grid.ranks(entry.run) or "1") for entry in shown]))
    for quantity in QUANTITIES:
        values = [quantity.value(entry.run) for entry in shown]
        known = [value for value in values if value is not None and math.isfinite(value)]
        if not known:
            continue
        texts = [quantity.write(value) for value in values]
        cells = [escaped(text) for text in texts]
        if quantity.best is not None and len(known) > 1 and len(set(texts)) > 1:
            best = quantity.write(quantity.best(known))
            cells = [f"<b>{cell}</b>" if text == best else cell for cell, text in zip(cells, texts)]
        first = quantity.is_of_first_rank and any(entry.run.is_on_many_ranks for entry in shown)
        body.append(_row(f"{quantity.name}{', first rank' if first else ''}", cells))
    body.append(_row("ended", [escaped(findings.status(entry.run)) for entry in shown]))
    table = _table(shown, "".join(body))
    finding = "The runs side by side" if len(shown) > 1 else "The run in numbers"
    caption = "Bold: the best of a row." if "<b>" in table else ""
    yield from section("Comparison", finding, table, caption=caption)


def _table(shown: Sequence[Entry], body: str) -> str:
    head = "".join(f'<th style="{colour_of(entry)}">{escaped(entry.label)}</th>' for entry in shown)
    return (
        f'<div class="scroll"><table><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _row(name: str, cells: Iterable[str]) -> str:
    return f"<tr><th>{name}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def samples(shown: Sequence[Entry]) -> Iterable[str]:
    """Show the last text that each model wrote."""
    written = [(entry, entry.run.samples[-1]) for entry in shown if entry.run.samples]
    if not written:
        return
    parts = []
    for entry, sample in written:
        text = formatting.plain(sample.text)
        if len(text) > _SAMPLE_LETTERS:
            text = text[:_SAMPLE_LETTERS] + " ..."
        parts.append(
            f'<h3 style="color:var({role(entry)})">{escaped(entry.label)}, step '
            f"{formatting.count(sample.step)}</h3><pre>{html.escape(text)}</pre>"
        )
    finding = "What the model writes" if len(written) == 1 else "What the models write"
    yield from section("Sample", finding, "".join(parts))


def settings(shown: Sequence[Entry]) -> Iterable[str]:
    """Show what differs between the runs, and fold the rest away."""
    configs = [_flat(entry.run.config) for entry in shown]
    parts = []
    keys = dict.fromkeys(key for config in configs for key in config)
    differ = [key for key in keys if len({config.get(key) for config in configs}) > 1]
    if differ:
        body = "".join(
            _row(escaped(key), [escaped(config.get(key, formatting.NOTHING)) for config in configs])
            for key in differ
        )
        parts.append(f"<h3>Settings that differ</h3>{_table(shown, body)}<br>")
    for entry in shown:
        run = entry.run
        sections = [
            (
                "",
                {"command": run.command, "started": run.started, "folder": run.path.resolve().name},
            ),
            ("", run.config),
            ("model", run.model),
            ("data", run.data),
            ("hardware", run.hardware),
            ("ranks", run.ranks),
            ("versions", run.versions),
        ]
        rows = "".join(
            _row(escaped(f"{title}.{key}" if title else key), [escaped(value)])
            for title, values in sections
            for key, value in _flat(values).items()
        )
        parts.append(
            f"<details><summary>{escaped(entry.label)}</summary>"
            f'<div class="scroll"><table class="settings"><tbody>{rows}</tbody></table></div></details>'
        )
    yield from section("Settings and hardware", "", "".join(parts))


def method(shown: Sequence[Entry]) -> Iterable[str]:
    """Say how the numbers came about."""
    notes = [
        "Memory is model state: dense weights, masks, values, gradients and moments, counted by the "
        "ledger on the tensors that are held. Activations are not counted. MB and GB are 10^6 and "
        "10^9 bytes.",
        "Dense training is arithmetic: 20 bytes a parameter for 16-bit weights with Adam (weights and "
        "gradients in 16 and in 32 bit, two fp32 moments), 16 bytes for float32.",
        "The bar of the SAMO paper is its formula, 2 + 24f bytes for each pruned parameter at density f, "
        "and 20 for each unpruned one. It is for 16-bit weights, whatever the type of the weights here.",
        "Validation loss is the mean cross-entropy in nats per token on text that was not trained on; "
        "perplexity is its exponential. Losses compare only between runs with the same tokenizer and text.",
        "The training loss of a table is the mean over the last fiftieth of the logged steps; tokens/s and "
        "step times are medians over the last phase, without its first logged step.",
    ]
    if any(entry.run.is_on_many_ranks for entry in shown):
        notes.append(
            "On many ranks model state is that of one replica, all its stages together; tokens/s are those "
            "of all ranks, and memory in use is the first rank's."
        )
    if len({str(entry.run.data.get("fingerprint")) for entry in shown}) > 1:
        notes.append("These runs were not all trained on the same data.")
    if len({str(entry.run.hardware.get("device_name")) for entry in shown}) > 1:
        notes.append("These runs did not all use the same hardware: their speeds do not compare.")
    items = "".join(f"<li>{escaped(note)}</li>" for note in notes)
    yield from section("How it was measured", "", f'<ul class="notes">{items}</ul>')


def origin(shown: Sequence[Entry]) -> str:
    """Name hardware, versions and dates of the runs."""
    parts = []
    for name in dict.fromkeys(str(entry.run.hardware.get("device_name", "")) for entry in shown):
        parts.append(name)
    for package in ("samo", "torch", "python"):
        versions = dict.fromkeys(str(entry.run.versions.get(package, "")) for entry in shown)
        parts += [f"{package} {version}" for version in versions if version]
    parts += dict.fromkeys(entry.run.started[:10] for entry in shown)
    return ", ".join(filter(None, parts))


def _flat(values: Mapping[str, object], prefix: str = "") -> dict[str, str]:
    """Return nested settings as ``optim.lr`` and their values as text."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            flat |= _flat(value, f"{name}.")
        elif value != "":
            flat[name] = f"{value:,}" if type(value) is int and abs(value) >= 10_000 else str(value)
    return flat

"""The report itself: what the page says, that it is one file, and that odd runs do not break it."""

import html.parser
import io
import json
import math
import re
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.image import imread

import samo
from samo.mask.mask import Mask
from samo.mask.masks import Masks
from samo.report import findings, mask_pictures
from samo.report.figures import NARROW, WIDE
from samo.report.mask_pictures import (
    Tensor,
    density_map,
    grid,
    picture,
    read_masks,
    sparsity_figure,
)
from samo.report.page import write_report
from samo.report.runs import read_run
from samo.report.theme import DARK, LIGHT, drawing, to_svg
from tests.train.runs import NUM_PARAMS, fake_masks, write_metrics, write_run

SAMPLE = "def f(x):\n    return x < 3 & '\u00e9'  # <script>alert(1)</script>"


class Page(html.parser.HTMLParser):
    """What a page holds: its text, its tags with their attributes, and whether they nest."""

    VOID = ("meta", "link", "img", "br")

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.pieces: list[str] = []
        self.feed(source)
        assert not self.open, f"not closed: {self.open}"
        self.text = " ".join(" ".join(self.pieces).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.pieces.append(data)

    def values(self, name: str) -> list[str]:
        return [value for _, attrs in self.tags if (value := attrs.get(name)) is not None]


def report(*runs: Path) -> str:
    out = runs[0].parent / "report.html"
    assert write_report(list(runs), out) == out
    return out.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A samo run, another with the same masks and a shorter dense one, and their report."""
    base = tmp_path_factory.mktemp("runs")
    masks = fake_masks()
    write_run(base / "samo", name="compressed", masks=masks, sample=SAMPLE)
    write_run(base / "again", name="again", masks=masks, seed=1)
    write_run(base / "dense", name="dense", mode="dense", steps=200, end="interrupted")
    write_report([base / name for name in ("samo", "again", "dense")], base / "three.html")
    return base


@pytest.fixture(scope="module")
def source(folder: Path) -> str:
    return (folder / "three.html").read_text(encoding="utf-8")


def test_the_page_has_its_sections_in_order(source: str) -> None:
    text = Page(source).text
    wanted = [
        "compressed, again and dense",
        "3 runs of a model with 868,352 parameters, 200 to 300 steps.",
        "validation loss",
        "nats per token",
        "compressed holds",
        "medians of the last phase",
        "Sparsity runs from",
        "Masks of compressed and again: where the kept weights are",
        "The runs side by side",
        "What the model writes",
        "Settings and hardware",
        "How it was measured",
    ]
    places = [text.find(words) for words in wanted]
    assert -1 not in places
    assert places == sorted(places)


def test_the_numbers_of_the_cards_are_those_of_the_run(folder: Path, source: str) -> None:
    run = read_run(folder / "samo")
    assert run.last_eval is not None
    assert run.state is not None
    assert run.state.measured_bytes is not None
    card = source[source.index("<article") : source.index("</article>")]
    numbers = re.findall(r'<dd class="\w+">([^<]*)</dd>', card)
    held, dense = run.state.measured_bytes, 16 * NUM_PARAMS
    assert numbers[:6] == [
        f"{run.last_eval.loss:.3f}",
        f"perplexity {run.last_eval.perplexity:.2f}",
        f"{held / 1e6:.2f} MB",
        f"{held / NUM_PARAMS:.2f} B/param",
        f"{100 * (1 - held / dense):.1f} %",
        "of 13.9 MB",
    ]
    assert abs(int(numbers[6].replace(",", "")) - 16_800) < 100


def test_the_page_is_one_file(source: str) -> None:
    page = Page(source)
    assert not {tag for tag, _ in page.tags} & {"script", "iframe", "object", "image"}
    links = page.values("src") + page.values("href")
    assert links
    assert all(link.startswith(("data:", "#")) for link in links)
    assert not re.search(r"url\((?!#)|@import|https?:|@font-face", source)


def test_what_the_figures_refer_to_is_there_once(source: str) -> None:
    page = Page(source)
    ids = Counter(page.values("id"))
    assert ids
    assert max(ids.values()) == 1
    wanted = {link[1:] for link in page.values("href") if link.startswith("#")}
    wanted |= set(re.findall(r"url\(#([^)]*)\)", source))
    assert wanted
    assert wanted <= set(ids)


def test_figures_come_wide_and_narrow_and_say_what_they_show(source: str) -> None:
    page = Page(source)
    kinds = Counter(c for c in page.values("class") if c.startswith("figure"))
    assert kinds == {"figure wide": 4, "figure narrow": 4}
    labels = [attrs["aria-label"] for tag, attrs in page.tags if tag == "svg"]
    assert len(labels) == 8
    assert all(labels)


def test_figures_take_their_colours_from_the_style_sheet(source: str) -> None:
    body = source[source.index("<body>") :]
    assert not [colour for colour in LIGHT.values() if colour in body]
    assert LIGHT.keys() == DARK.keys()
    assert len(set(LIGHT.values())) == len(LIGHT)  # or one role would be taken for another
    used = set(re.findall(r"var\(--(\w+)\)", source)) - {"font", "mono", "colour"}
    assert used <= set(LIGHT)
    # Black is what matplotlib takes when nobody says a colour, and cannot be seen on a dark page.
    assert "#000000" not in body


def test_the_sample_is_shown_letter_by_letter(source: str) -> None:
    assert "x &lt; 3 &amp; &#x27;\u00e9&#x27;  # &lt;script&gt;" in source
    assert "<script" not in source


def test_the_prediction_and_the_measured_bar_are_both_there(source: str) -> None:
    for label in (
        "dense training",
        "SAMO paper (formula)",
        "compressed, predicted",
        "compressed, measured",
    ):
        assert source.count(f">{label}</text>") == 2, label  # wide and narrow


def test_settings_that_differ_are_named(source: str) -> None:
    part = source[source.index("Settings that differ") : source.index("<details>")]
    assert re.findall(r"<tr><th>([^<]+)</th>", part) == ["run.mode", "run.steps", "run.seed"]


def test_the_best_of_a_row_is_bold(source: str) -> None:
    row = source[source.index("<th>tokens/s</th>") :]
    cells = re.findall(r"<td>(.*?)</td>", row[: row.index("</tr>")])
    rates = [int(re.sub(r"\D", "", cell)) for cell in cells]
    assert [cell.startswith("<b>") for cell in cells] == [rate == max(rates) for rate in rates]


def test_the_picture_is_drawn_at_twice_its_size(folder: Path) -> None:
    pixels = imread(folder / "three.png")
    assert pixels.shape[:2] == (1350, 2400)
    assert pixels[..., :3].std() > 0.05  # something is on it


def test_equal_runs_give_equal_files(folder: Path, source: str) -> None:
    write_report([folder / name for name in ("samo", "again", "dense")], folder / "again.html")
    assert (folder / "again.html").read_text(encoding="utf-8") == source
    assert (folder / "again.png").read_bytes() == (folder / "three.png").read_bytes()


def test_settings_of_matplotlib_neither_matter_nor_change(folder: Path, source: str) -> None:
    with matplotlib.rc_context({"font.size": 30, "lines.linewidth": 9, "axes.grid": True}):
        before = settings()
        write_report([folder / name for name in ("samo", "again", "dense")], folder / "rc.html")
        assert settings() == before
    assert (folder / "rc.html").read_text(encoding="utf-8") == source


def settings() -> dict[str, Any]:
    # Without the backend, which matplotlib chooses when somebody asks for it, be it this test.
    return {name: value for name, value in matplotlib.rcParams.copy().items() if name != "backend"}


def test_nothing_is_left_beside_the_report(folder: Path) -> None:
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_no_network_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the report opened a socket")

    monkeypatch.setattr(socket, "socket", refuse)
    report(write_run(tmp_path / "run", steps=5))


# Odd runs


EVIL = '<img src=x onerror=alert(1)>"\'&$x_1$ #0072b2 id="y"\x00\n\u6f22\u5b57'


def test_names_are_escaped_everywhere(tmp_path: Path) -> None:
    changes = {"command": EVIL, "hardware": {EVIL: EVIL}, "versions": {"samo": EVIL}}
    masks = Masks({EVIL: Mask.from_bool(torch.rand(64, 64) > 0.5)})
    run = write_run(
        tmp_path / "run", name=EVIL, sample=EVIL, steps=120, changes=changes, masks=masks
    )
    page = Page(report(run))
    assert not [tag for tag, attrs in page.tags if "onerror" in attrs]
    assert not [v for v in page.values("src") if not v.startswith("data:")]
    assert page.text.count('<img src=x onerror=alert(1)>"\'&$x_1$ #0072b2 id="y"') > 5


def test_a_name_is_not_taken_for_mathematics(tmp_path: Path) -> None:
    source = report(write_run(tmp_path / "run", name=r"$\frac$", steps=60))
    assert re.search(r">\$\\frac\$  \d\.\d{3}</text>", source)


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / name, steps=2)) for name in ("a", "b")]
    labels = [entry.label for entry in findings.entries([*runs, runs[0]])]
    assert labels == ["notes (a)", "notes (b)", "notes (a) #3"]


def test_a_dense_run_has_no_memory_and_no_masks(tmp_path: Path) -> None:
    text = Page(report(write_run(tmp_path / "run", mode="dense", steps=20))).text
    assert "no ledger in this run" in text
    assert "Mask" not in text
    assert "samo, measured" not in text


def test_a_run_without_evaluations_shows_its_training_loss(tmp_path: Path) -> None:
    text = Page(report(write_run(tmp_path / "run", steps=20, eval_every=0))).text
    assert "not evaluated" in text
    assert "The training loss is" in text


def test_a_run_without_a_step_is_reported(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", end=None)
    (folder / "metrics.jsonl").unlink()
    text = Page(report(folder)).text
    assert "no step was logged" in text
    assert "still running, or killed" in text


def test_one_step_is_enough_for_a_figure(tmp_path: Path) -> None:
    assert "nats per token" in report(write_run(tmp_path / "run", steps=1, eval_every=0))


def test_losses_that_are_no_numbers_are_counted_and_not_drawn(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    lines: list[dict[str, Any]] = [
        {"event": "step", "step": i, "phase": "dense", "loss": None if i > 5 else 2.0}
        for i in range(1, 11)
    ]
    write_metrics(folder, lines)
    source = report(folder)
    assert "5 of 10 logged losses are not numbers" in source
    assert "nan" not in Page(source).text.lower().split()


def test_a_run_that_is_nan_from_the_start_is_reported(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    write_metrics(folder, [{"event": "step", "step": i, "loss": None} for i in range(1, 4)])
    assert "3 of 3 logged losses are not numbers" in report(folder)


def test_a_failed_run_and_broken_lines_are_said(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=5, end="failed")
    with open(folder / "metrics.jsonl", "a") as lines:
        lines.write("{\n{\n")
    assert "2 lines of metrics.jsonl could not be read; it failed." in report(folder)


def test_a_line_that_was_cut_off_is_said(tmp_path: Path) -> None:
    file = write_run(tmp_path / "run", steps=5, end=None) / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-9])
    assert "its last line was cut off." in report(file.parent)


@pytest.mark.slow
def test_ten_runs_share_a_page(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / f"{i}", name=f"run {i}", seed=i, steps=50 + 20 * i, prune_at=40)
        for i in range(10)
    ]
    source = report(*runs)
    page = Page(source)
    assert "10 runs" in page.text
    assert source.count('class="dashed"') == 2 * 4  # the last four, below loss and throughput
    assert page.values("class").count("card") == 10
    assert page.text.count("SAMO paper (formula)") == 2  # equal for all: drawn once


def test_a_long_run_is_thinned_out(tmp_path: Path) -> None:
    source = report(write_run(tmp_path / "run", steps=6000, prune_at=1500, eval_every=50))
    assert len(source) < 400_000
    longest = max(len(re.findall("[ML] ", d)) for d in Page(source).values("d"))
    assert 500 < longest <= 2000


def test_runs_on_other_hardware_and_data_are_said_not_to_compare(tmp_path: Path) -> None:
    changes = {"hardware": {"device_name": "other"}, "data": {"fingerprint": "other"}}
    a = write_run(tmp_path / "a", steps=3)
    b = write_run(tmp_path / "b", steps=3, changes=changes)
    text = Page(report(a, b)).text
    assert "not all use the same hardware" in text
    assert "not all trained on the same data" in text


# Where it cannot be written


def test_a_report_needs_runs_and_an_html_name(tmp_path: Path) -> None:
    with pytest.raises(samo.ConfigError, match="no run to report on"):
        write_report([], tmp_path / "report.html")
    with pytest.raises(
        samo.ConfigError, match=r"got '.*report\.png'; give a name that ends in \.html"
    ):
        write_report([tmp_path], tmp_path / "report.png")


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=2)
    with pytest.raises(samo.RunError, match=r"there is no folder '.*nowhere'; create it first"):
        write_report([run], tmp_path / "nowhere" / "report.html")
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(samo.RunError, match="it is a folder; give the name of a file"):
        write_report([run], tmp_path / "folder.html")
    with pytest.raises(
        samo.RunError, match=r"cannot write .*File name too long; give a place that"
    ):
        write_report([run], tmp_path / f"{'x' * 252}.html")


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(samo.RunError, match="is not a run folder"):
        write_report([tmp_path], tmp_path / "report.html")


# Memory


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_parts_of_the_baselines_add_up(tmp_path: Path, dtype: str) -> None:
    run = read_run(write_run(tmp_path, dtype=dtype))
    assert run.state is not None
    assert sum(findings.dense_kinds(run).values()) == run.state.dense_bytes
    assert sum(findings.paper_kinds(run).values()) == run.state.paper_bytes


def test_the_papers_parts_are_those_of_its_table(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path))
    assert run.prune is not None
    kept, unpruned = run.prune.kept, NUM_PARAMS - run.prune.numel
    kinds = findings.paper_kinds(run)
    assert kinds["dense"] == 2 * NUM_PARAMS
    assert kinds["bitmap"] == 4 * kept
    assert kinds["moments"] == 8 * (kept + unpruned)


def test_a_baseline_whose_parts_are_not_known_is_one_bar(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    state = {"event": "state", "step": 1, "num_params": 10, "dense_bytes": 123, "paper_bytes": 77}
    write_metrics(folder, [state, {"event": "step", "step": 1, "loss": 2.0}])
    bars = findings.bars(findings.entries([read_run(folder)]))
    assert [(bar.total_bytes, bar.kinds) for bar in bars] == [(123, {}), (77, {})]
    assert "all kinds together" in report(folder)


def test_a_prediction_that_does_not_add_up_is_not_split(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    state = {"event": "state", "step": 1, "measured_bytes": 9, "measured": {"dense": 5}}
    write_metrics(folder, [state])
    (bar,) = findings.bars(findings.entries([read_run(folder)]))
    assert (bar.total_bytes, bar.kinds, bar.is_measured) == (9, {}, True)


def test_a_run_before_its_pruning_is_not_called_samo(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    state = {"event": "state", "step": 1, "measured_bytes": 9_000, "dense_bytes": 9_000}
    write_metrics(folder, [state])
    shown = findings.entries([read_run(folder)])
    assert findings.memory_finding(shown) == "notes holds 9.00 kB, dense training 9.00 kB"
    assert findings.bars(shown)[-1].label == "notes, measured"


def test_many_runs_show_a_prediction_only_where_it_differs(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / f"{i}", name=f"r{i}", steps=101)) for i in range(4)]
    labels = [bar.label for bar in findings.bars(findings.entries(runs))]
    assert labels[:2] == ["dense training", "SAMO paper (formula)"]
    assert labels[2:] == [f"r{i}, measured" for i in range(4)]
    assert len(findings.bars(findings.entries(runs[:3]))) == 2 + 6


def test_baselines_that_differ_name_their_run(tmp_path: Path) -> None:
    runs = [
        read_run(write_run(tmp_path / f"{p}", name=f"r{p}", steps=101, sparsity=p))
        for p in (0.8, 0.9)
    ]
    labels = [bar.label for bar in findings.bars(findings.entries(runs))]
    assert labels[:3] == [
        "dense training",
        "SAMO paper (formula), r0.8",
        "SAMO paper (formula), r0.9",
    ]


# Masks


def test_the_density_map_counts_every_weight() -> None:
    for shape in [(128, 384), (5, 7), (1, 1000), (700, 33), (3, 40, 50)]:
        keep = torch.rand(shape) < 0.3
        rows, columns = keep.numel() // shape[-1], shape[-1]
        density, (high, wide) = density_map(Mask.from_bool(keep), rows, columns)
        flat = keep.view(rows, columns)
        for i in range(density.shape[0]):
            for j in range(density.shape[1]):
                block = flat[i * high : (i + 1) * high, j * wide : (j + 1) * wide]
                assert density[i, j] == pytest.approx(block.double().mean().item(), rel=1e-12)
        assert max(density.shape) <= 64


def test_the_zoom_shows_the_first_bits() -> None:
    keep = torch.rand(100, 70) < 0.3
    shown = picture("w", Mask.from_bool(keep))
    pixels = decoded(shown.zoom_url)
    assert shown.zoom == (64, 64)
    assert np.array_equal(pixels[..., 3] > 0.5, keep[:64, :64].numpy())


def test_the_fullest_block_has_the_full_colour() -> None:
    keep = torch.zeros(64, 64, dtype=torch.bool)
    keep[:8, :8] = True
    keep[8:16, :4] = True
    shown = picture("w", Mask.from_bool(keep))
    opacity = decoded(shown.map_url)[..., 3]
    assert (shown.lowest, shown.highest, shown.block) == (0.0, 1.0, (8, 8))
    assert opacity[0, 0] == 1.0
    assert opacity[1, 0] == pytest.approx(0.5, abs=1 / 255)
    assert opacity[2:].max() == opacity[:, 1:].max() == 0.0


def decoded(url: str) -> np.ndarray[Any, Any]:
    import base64

    return np.asarray(imread(io.BytesIO(base64.b64decode(url.partition(",")[2]))))


def test_a_mask_that_keeps_nothing_or_one_weight_can_be_drawn() -> None:
    assert picture("w", Mask.from_bool(torch.zeros(9, 9, dtype=torch.bool))).highest == 0.0
    assert picture("w", Mask.from_bool(torch.ones(1, dtype=torch.bool))).zoom == (1, 1)
    assert picture("w", Mask.from_bool(torch.ones((), dtype=torch.bool))).rows == 1


def test_pictures_are_of_different_kinds_in_the_order_of_the_model(tmp_path: Path) -> None:
    view = read_masks(write_run(tmp_path, masks=fake_masks(num_layers=11)))
    assert not isinstance(view, str)
    assert [tensor.name for tensor in view.tensors][-1].startswith("blocks.10.")
    names = [shown.name for shown in view.pictures]
    assert len({name.split(".", 2)[2] for name in names}) == 4
    layers = [int(name.split(".")[1]) for name in names]
    assert layers == sorted(layers)
    assert (layers[0], layers[-1]) == (0, 10)


def test_masks_that_cannot_be_read_are_said(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", masks=fake_masks(num_layers=1))
    (run / "masks.safetensors").write_bytes(b"no masks")
    text = Page(report(run)).text
    assert "Masks not shown notes: " in text
    assert "is not a mask file" in text


def test_a_pruned_run_without_masks_says_so(tmp_path: Path) -> None:
    assert "notes: there is no masks.safetensors" in Page(report(write_run(tmp_path / "run"))).text


@pytest.mark.slow
def test_different_masks_are_shown_up_to_three(tmp_path: Path) -> None:
    runs = [
        write_run(
            tmp_path / f"{i}", name=f"r{i}", steps=101, masks=fake_masks(num_layers=1, seed=i)
        )
        for i in range(4)
    ]
    text = Page(report(*runs)).text
    assert text.count("where the kept weights are") == 3
    assert "not drawn, for brevity: the masks of r3" in text


def tensors(*names: str) -> list[Tensor]:
    return [Tensor(name=name, kept=10 + i, numel=100) for i, name in enumerate(names)]


def test_many_tensors_become_a_heat_map() -> None:
    few = tensors(*(f"blocks.{i}.{kind}.weight" for i in range(12) for kind in ("up", "down")))
    many = [*few, *tensors("head.weight")]
    with drawing():
        bars, heat = (to_svg(sparsity_figure(t, WIDE), "", "x") for t in (few, many))
    assert "blocks.11.down.weight" in bars
    assert "blocks" not in heat
    for text in (">up<", ">down<", ">head<", ">layer<", ">11<"):
        assert text in heat


def test_numbers_of_experts_are_taken_together_when_there_are_many() -> None:
    names = [f"blocks.{i}.experts.{j}.up.weight" for i in range(3) for j in range(30)]
    kinds, layers, cells = grid(tensors(*names))
    assert (kinds, layers) == (["experts.*.up"], ["0", "1", "2"])
    assert cells["experts.*.up", "0"].numel == 3000
    assert cells["experts.*.up", "0"].kept == sum(range(10, 40))


def test_a_layer_that_is_the_whole_name_keeps_a_kind() -> None:
    kinds, layers, _ = grid(tensors("0.weight", "2.weight", "weight"))
    assert (kinds, layers) == (["0", "2", "weight"], ["0", "2", ""])


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=lambda size: size.name)
def test_a_hundred_layers_fit_into_a_heat_map(size: Any) -> None:
    names = [f"h.{i}.{k}" for i in range(100) for k in ("attn.c_attn", "attn.c_proj", "mlp.c_fc")]
    with drawing():
        figure = sparsity_figure(tensors(*names), size)
        svg = to_svg(figure, "", "x")
    assert len(re.findall(r"<path[^>]*var\(--accent\)", svg)) == 300
    assert len(figure.axes[0].get_xticks()) < 30


def test_findings_about_sparsity_name_the_extremes() -> None:
    assert (
        mask_pictures.finding(tensors("a", "b", "c")) == "Sparsity runs from 88 % in c to 90 % in a"
    )
    assert mask_pictures.finding(tensors("a")) == "One tensor is 90 % sparse"
    same = [Tensor(name=name, kept=1, numel=4) for name in "ab"]
    assert mask_pictures.finding(same) == "All 2 pruned tensors are 75 % sparse"


# Findings


def test_the_finding_about_the_loss_says_what_was_before_pruning(tmp_path: Path) -> None:
    shown = findings.entries([read_run(write_run(tmp_path))])
    run = shown[0].run
    before = next(e.loss for e in run.evals if e.step == 100)
    assert run.last_eval is not None
    assert findings.loss_finding(shown) == (
        f"At 90 % sparsity the validation loss reaches {run.last_eval.loss:.3f}; "
        f"it was {before:.3f} before pruning"
    )


def test_throughput_is_the_median_of_the_last_phase_without_its_first_line(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    rates = [("dense", 900.0), ("samo", 1.0), ("samo", 50.0), ("samo", 60.0), ("samo", 80.0)]
    write_metrics(
        folder,
        [
            {"event": "step", "step": i, "phase": phase, "tokens_per_s": rate}
            for i, (phase, rate) in enumerate(rates, 1)
        ],
    )
    assert findings.tokens_per_s(read_run(folder)) == 60.0


def test_the_last_training_loss_is_a_mean_over_the_end(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    lines = [{"event": "step", "step": i, "loss": float(i > 98)} for i in range(1, 101)]
    write_metrics(folder, lines)
    assert findings.last_loss(read_run(folder)) == 1.0
    write_metrics(folder, [{"event": "step", "step": 1, "loss": None}])
    assert math.isnan(findings.last_loss(read_run(folder)))


# Many ranks ---------------------------------------------------------------------------------------


def on_ranks(folder: Path, *rank_bytes: int, **ranks: int) -> Path:
    """A run on several ranks, whose account says what each of them holds."""
    run = write_run(folder, changes={"ranks": ranks})
    file = run / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        if line["event"] == "state":
            line["rank_bytes"] = list(rank_bytes)
    write_metrics(run, lines)
    return run


def test_ranks_are_named_and_state_is_of_all_stages(tmp_path: Path) -> None:
    run = read_run(
        on_ranks(tmp_path / "run", 3_000_000, 3_000_000, 2_816_112, 2_816_112, pipe=2, data=2)
    )
    assert "on 4 ranks: 2 stages x 2 replicas, pruned to" in findings.summary(
        findings.entries([run])
    )
    assert findings.memory_finding(findings.entries([run])).startswith(
        "samo holds 5.82 MB in 2 stages together, dense training 13.9 MB"
    )
    assert findings.held(run) == (
        "5.82 MB in 2 stages together, 58.1 % less than dense training, largest rank 3.00 MB"
    )
    source = write_report([tmp_path / "run"], tmp_path / "report.html").read_text()
    shown = Page(source).text
    assert "samo, 90 % sparse, float32, 4 ranks: 2 stages x 2 replicas, finished" in shown
    assert "6.70 B/param, largest rank 3.00 MB" in shown
    assert "memory in use, first rank" in shown
    assert "model state is that of one replica" in shown


def test_replicas_hold_the_state_each(tmp_path: Path) -> None:
    run = read_run(on_ranks(tmp_path / "run", 5_816_112, 5_816_112, pipe=1, data=2))
    assert findings.held(run) == "5.82 MB on each rank, 58.1 % less than dense training"
    assert "2 ranks: 2 replicas" in findings.summary(findings.entries([run]))


def test_bytes_of_one_stage_are_divided_by_its_own_parameters(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", changes={"model": {"num_params": 10 * 868_352}})
    assert findings.bytes_per_param(read_run(run)) == pytest.approx(5_816_112 / 868_352)

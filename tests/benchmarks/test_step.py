"""samo bench step with further contenders, and the page of streamed and compiled weights."""

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from benchmarks import contenders, figures, step
from benchmarks.measure import held_bytes
from benchmarks.streamed import bench as streamed, page
from benchmarks.streamed.frontier import draw
from benchmarks.streamed.lines import LINES
from torch import Tensor, nn

import samo
from samo.bench.contenders import CONTENDERS, SETTINGS
from samo.bench.step import check, contenders as chosen, new_model
from samo.models.shapes import GPTConfig

CPU = torch.device("cpu")
SMALL = GPTConfig(num_layers=1, width=64, num_heads=2, context=16, vocab_size=128)
TOKENS = torch.arange(32).view(2, 16)


@pytest.fixture(autouse=True)
def all_contenders(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Add the further contenders for one test; other projects are not installed."""
    for name in ("flashoptim", "torchao.optim", "bitsandbytes.optim"):
        monkeypatch.setitem(sys.modules, name, None)
    with mock.patch.dict(CONTENDERS, contenders.CONTENDERS):
        yield


def built(name: str) -> Any:
    return CONTENDERS[name](new_model(SMALL, CPU), samo.prune(new_model(SMALL, CPU), 0.9))


# Contenders


def test_contenders_that_are_not_installed_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    only = ["--only", "masked,samo,autocast,torchao", "flashoptim"]
    assert step.main(["--quick", "--device", "cpu", "--out", str(out), *only]) == 0
    shown = capsys.readouterr().out
    rows = {row["name"]: row for row in page.read_rows(out / "rows.jsonl")}
    assert list(rows) == ["masked", "samo", "autocast", "flashoptim", "torchao"]
    for name in ("torchao", "flashoptim"):
        assert f"not measured: {name}: not installed (" in shown
        assert f"- {name}: not installed (" in (out / "README.md").read_text()
    assert rows["autocast"]["figures"]["state_bytes_per_param"] == pytest.approx(16, abs=0.02)
    with mock.patch.object(sys, "argv", ["figures", str(out)]):
        figures.main()
    assert (out / "step.png").read_bytes().startswith(b"\x89PNG")
    assert ">autocast<" in (out / "step.svg").read_text()


def test_a_figure_of_kernels_has_a_panel_for_each_density() -> None:
    rows = [
        {
            "name": name,
            "parameters": {"numel": 2**power, "density": density},
            "figures": {"times_floor": 1.5},
        }
        for name in ("copy", "compress", "expand", "update, exact")
        for power in (12, 13)
        for density in (0.1, 0.2)
    ]
    png, svg = figures.kernels_figure(rows)
    assert png.startswith(b"\x89PNG")
    for text in (">10 % kept<", ">20 % kept<", ">2^13<", ">update, exact<"):
        assert text in svg


@pytest.mark.parametrize("name", ["torchao", "bitsandbytes"])
def test_an_8_bit_optimizer_trains_the_masked_weights(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def make(params: Any, **settings: Any) -> torch.optim.Optimizer:
        given.update(settings)
        return torch.optim.SGD(params, lr=1.0)

    monkeypatch.setitem(sys.modules, f"{name}.optim", SimpleNamespace(AdamW8bit=make))
    contender = built(name)
    contender.gradients(TOKENS, TOKENS)
    contender.update()
    contender.keep_masks()
    assert given.items() >= SETTINGS.items()
    for key, mask in contender.masks.items():
        assert not contender.model.get_parameter(key)[~mask.to_bool()].any()


def test_flashoptim_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashoptim", SimpleNamespace())
    with pytest.raises(contenders.UnavailableError, match="FlashOptim needs an NVIDIA GPU"):
        built("flashoptim")


@pytest.mark.parametrize("lean", ["", "-lean"])
def test_a_budget_is_a_fraction_of_the_bytes_of_dense_weights(
    lean: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = built("lean" if lean else "samo").account()
    dense = account.pruned.predicted["dense"] + account.unpruned.predicted["dense"]
    given: list[object] = []
    monkeypatch.setattr(contenders, "Samo", lambda *_, weights, state: given.append(weights))
    built(f"budget-50%{lean}")
    assert given == [dense // 2]


def test_held_bytes_counts_each_storage_once_wherever_it_lies() -> None:
    class Wrapped(Tensor):
        scales: Tensor

        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return ["scales"], None

    layer = nn.Linear(10, 10, bias=False)
    outer = torch.zeros(100).as_subclass(Wrapped)
    outer.scales = torch.zeros(6)
    opt = torch.optim.SGD(layer.parameters())
    opt.state[layer.weight] = {
        "a": torch.zeros(5),
        "same": layer.weight.detach(),
        "n": 3,
        "object": SimpleNamespace(_data=torch.zeros(7), name="x"),
        "list": [torch.zeros(2), (torch.zeros(1),), outer],
    }
    assert held_bytes(layer, opt, [None, torch.zeros(3)]) == 4 * (100 + 5 + 7 + 3 + 6 + 3)


# Streamed and compiled weights


def row_of(name: str, ms: float, gb: float, line: str = "frontier") -> dict[str, Any]:
    figures = {
        "over_masked": ms / 317,
        "in_a_row_ms": ms,
        "peak_bytes": gb * 1e9,
        "peak_over_masked": gb / 56.7,
        "state_bytes_per_param": 3.5,
        "warm_up_s": 1.5,
        "compilations": 2,
    }
    return {
        "line": line,
        "name": name,
        "parameters": {"shape": "gpt3-2.7b", "batch_size": 8, "context": 1024, "sparsity": 0.9},
        **{"median": ms, "p20": ms, "p80": ms, "figures": figures, "failure": None},
        **{"device_name": "a GPU", "versions": {"torch": "2.11"}, "date": "today", "commit": "c"},
    }


def test_every_line_can_be_measured_and_its_goals_are_for_its_contenders() -> None:
    for line in LINES.values():
        check(line.config)
        assert set(line.goals) <= set(chosen(line.config))
        assert "masked" in chosen(line.config) or not line.goals


def test_lines_are_measured_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[list[str]] = []

    def run(command: list[str], **_: Any) -> None:
        seen.append(command[command.index("benchmarks.step") + 1 :])
        step.main(seen[-1])

    out = tmp_path / "rows.jsonl"
    stopped = subprocess.TimeoutExpired
    monkeypatch.setattr(streamed, "subprocess", SimpleNamespace(run=run, TimeoutExpired=stopped))
    arguments = ["--toy", "--only", "masked", "--repeats", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["bench", "eager", "13b", *arguments])
    streamed.main()
    assert [command[command.index("--shape") + 1] for command in seen] == ["gpt3-2.7b", "gpt3-13b"]
    assert [(row["line"], row["name"]) for row in page.read_rows(out)] == [
        ("eager", "masked"),
        ("13b", "masked"),
    ]
    assert "| 13B, 8 x 1,024, eager | masked | " in capsys.readouterr().out


def test_what_was_measured_stays_when_the_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = itertools.count(0.0, 1.0)

    def run(command: list[str], *, timeout: float) -> None:
        assert timeout == 1.0  # of 2 s one is gone
        folder = Path(command[command.index("--out") + 1])
        folder.mkdir()
        (folder / "rows.jsonl").write_text(json.dumps(row_of("masked", 317, 56.7)) + "\n")
        raise subprocess.TimeoutExpired(command, timeout)

    out = tmp_path / "rows.jsonl"
    stopped = subprocess.TimeoutExpired
    monkeypatch.setattr(streamed, "subprocess", SimpleNamespace(run=run, TimeoutExpired=stopped))
    monkeypatch.setattr(streamed, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    arguments = ["eager", "13b", "--seconds", "2", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    streamed.main()
    assert [row["name"] for row in page.read_rows(out)] == ["masked"]
    assert "no time for 13b" in capsys.readouterr().out


def test_later_rows_stand_in_place_of_earlier_ones(tmp_path: Path) -> None:
    first = [row_of("streamed", 300, 8, "eager"), row_of("masked", 317, 56.7, "eager")]
    second = [row_of("samo", 20, 1, "graphs-125m"), row_of("streamed", 400, 8, "eager")]
    rows = page.merge([second[:1], first, second[1:]])
    found = [(row["line"], row["name"], row["median"]) for row in rows]
    assert found == [
        ("eager", "streamed", 400),
        ("eager", "masked", 317),
        ("graphs-125m", "samo", 20),
    ]
    page.write(tmp_path, rows)
    text = (tmp_path / "README.md").read_text()
    assert "| streamed | 400 | 400-400 | 1.262 (0.96) | 400 | 8.00 | 0.141 (0.18) |" in text
    assert "python -m benchmarks.step --repeats 9 --shape gpt3-2.7b" in text
    assert "frontier.png" not in text  # none of its rows


@pytest.mark.parametrize("flat", [False, True], ids=["as it is", "all alike"])
def test_the_frontier_names_every_contender_and_no_names_touch(flat: bool) -> None:
    measured = {
        **{"masked": (317, 56.7), "autocast": (345, 52.0), "samo": (292, 15.0)},
        **{"lean": (294, 11.0), "streamed": (305, 8.3), "streamed-lean": (308, 5.6)},
        **{"budget-25%": (302, 10.0), "budget-50%": (299, 11.6), "budget-75%": (296, 13.3)},
        **{"budget-25%-lean": (304, 7.0), "budget-50%-lean": (300, 8.4)},
        **{"budget-75%-lean": (297, 9.7), "flashoptim": (310, 20.8)},
        **{"flashoptim-release": (306, 17.6)},
    }
    rows = [
        row_of(name, 300 if flat else ms, 5 + gb / 10 if flat else gb)
        for name, (ms, gb) in measured.items()
    ]
    figure = draw(rows)
    assert figure is not None
    (axes,) = figure.axes
    renderer = figure.canvas.get_renderer()
    boxes = {text: text.get_window_extent(renderer) for text in axes.texts}
    assert len(boxes) == len(measured)
    for one, other in itertools.combinations(boxes, 2):
        names = (one.get_text(), other.get_text())
        assert not boxes[one].overlaps(boxes[other]), names
    dots = [axes.transData.transform(line.get_xydata()) for line in axes.lines]
    for x, y in itertools.chain(*dots):
        assert not any(box.contains(x, y) for box in boxes.values())

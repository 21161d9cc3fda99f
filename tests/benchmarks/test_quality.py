"""The benchmark of quality runs at tiny sizes, keeps its rows, and compares what can be compared."""

import gzip
import json
import struct
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.quality import gpt, images, rates, runs, spreads, vgg
from benchmarks.quality.gpt_run import (
    DENSE_BYTES,
    QUICK,
    WEIGHT_DECAY,
    Run,
    Settings,
    matching_shape,
)
from benchmarks.quality.text import Text, even, find_text, order, windows
from benchmarks.quality.tickets import ChannelTickets
from hypothesis import given, settings, strategies as st
from torch import nn

import samo
from samo.errors import DataError, RunError
from samo.models.gpt import GPT, GPTConfig

CPU = torch.device("cpu")
PNG = b"\x89PNG"


def call(main: Any, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", *map(str, arguments)])
    main()


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(b"".join(b"%d squared is %d.\n" % (n, n * n) for n in range(4000)))
    return path


# GPTs


@pytest.mark.long
def test_gpts_run_once_and_leave_rows_page_and_figures(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    where = ("--quick", "--out", out, "--text", text_file, "--device", "cpu")
    common = (*where, "--steps", 24, "--lrs", 1e-3)
    call(gpt.main, monkeypatch, *common, "--seeds", 0)
    rows = {row["contender"]: row for row in rows_of(out)}
    assert list(rows) == [name for name, contender in gpt.CONTENDERS.items() if contender.is_usual]

    dense = rows["dense"]
    assert dense["peak_state_bytes"] == dense["final_state_bytes"] == 16 * dense["num_params"]
    pruned = rows["magnitude-90"]["final_state_bytes"]
    assert (
        pruned
        == rows["random-90"]["final_state_bytes"]
        == rows["early-bird-90"]["final_state_bytes"]
    )
    assert pruned == rows["gradual-90"]["final_state_bytes"] < rows["rigl-90"]["final_state_bytes"]
    assert pruned <= rows["small-dense"]["final_state_bytes"] < dense["final_state_bytes"]
    assert rows["early-bird-90"]["peak_state_bytes"] == dense["peak_state_bytes"]
    assert 0 < rows["early-bird-90"]["large_steps"] <= 6  # a quarter of 24
    assert rows["early-bird-90"]["ticket"].startswith(("settled", "drawn on demand"))
    assert rows["gradual-90"]["large_steps"] == 14  # six tenths
    assert not any(rows[name]["large_steps"] for name in ("rigl-90", "random-90", "dense"))
    assert {row["tokens"] for row in rows.values()} == {24 * 4 * 32}
    for row in rows.values():
        assert row["curve"][-1] == [row["tokens"], row["valid_loss"]]
        assert row["valid_loss"] < row["curve"][0][1]  # it learns

    before = (out / "rows.jsonl").read_bytes()
    call(gpt.main, monkeypatch, *common, "--seeds", 0)  # nothing is left to do
    assert (out / "rows.jsonl").read_bytes() == before
    page = (out / "README.md").read_text()
    assert page.count("\n| ") == 2 + len(rows)
    assert f"{dense['valid_loss']:.3f} | - |" in page
    for name in ("loss", "curves"):
        assert (out / f"{name}.png").read_bytes().startswith(PNG)
        assert "</svg>" in (out / f"{name}.svg").read_text()

    (out / "README.md").unlink()
    call(gpt.main, monkeypatch, "--out", out, "--page-only")
    assert (out / "README.md").read_text() == page

    # With a second rate there is a table of rates, and a figure; the rate that came apart is not
    # taken.
    second = [json.dumps(row | {"lr": 3e-3, "valid_loss": float("nan")}) for row in rows.values()]
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "rows.jsonl").write_text(before.decode() + "\n".join(second) + "\n")
    call(gpt.main, monkeypatch, "--out", tmp_path / "two", "--page-only")
    page = (tmp_path / "two" / "README.md").read_text()
    assert page.count("\n| ") == 2 * (2 + len(rows))
    assert "| contender | rate 0.001 | rate 0.003 |" in page
    assert "Best at the lowest rate that was tried" in page
    assert f"| dense | {dense['valid_loss']:.3f} | nan |" in page
    assert (tmp_path / "two" / "rates.png").read_bytes().startswith(PNG)

    with pytest.raises(SystemExit, match=r"rows of other settings.*batch 4 and now 5"):
        call(gpt.main, monkeypatch, *common, "--batch", 5)


@pytest.mark.long
def test_runs_in_processes_of_their_own_give_the_same(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = "--quick --steps 4 --seeds 0 1 --only random-90 --lrs 0.01 --parallel 2 --device cpu"
    call(gpt.main, monkeypatch, *sizes.split(), "--text", text_file, "--out", tmp_path)
    found = {row["seed"]: row["valid_loss"] for row in rows_of(tmp_path)}
    settings = Settings(**(QUICK | {"steps": 4}))
    for seed in (0, 1):
        here = gpt.train(runs.Job("random-90", seed, 0.01), settings, [text_file], "cpu")
        assert found[seed] == pytest.approx(here["valid_loss"], rel=1e-4)  # threads may differ
    assert found[0] != found[1]


def test_an_estimate_runs_nothing(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    arguments = ("--quick", "--text", text_file, "--out", tmp_path / "out", "--steps", 5)
    call(gpt.main, monkeypatch, *arguments, "--estimate", "--device", "cpu")
    printed = capsys.readouterr().out
    assert "tokens a second" in printed
    assert "32 to 48 runs of 5 steps" in printed  # 8 contenders: 2 to 4 rates, and 2 more seeds
    assert not (tmp_path / "out").exists()


def decayed_parameters(run: Run) -> int:
    groups = [group for group in run.opt.param_groups if group["weight_decay"]]
    for group in groups:  # a faster rate decays as much
        assert group.get("lr_scale", 1.0) * group["weight_decay"] == pytest.approx(WEIGHT_DECAY)
    return sum(len(group["params"]) for group in groups)


def small_run() -> Run:
    text = Text(bytes(range(256)) * 40, bytes(range(256)) * 4, "bytes")
    sizes = Settings(**(QUICK | {"steps": 3}))
    return Run(sizes, sizes.shape, text, CPU, seed=0, lr=1e-3)


def test_moments_steps_and_weight_decay_continue_after_pruning() -> None:
    run = small_run()
    decayed = [decayed_parameters(run)]
    for step in run.steps():
        if step == 2:
            break
    run.compress(samo.prune(run.model, 0.9))
    for _ in run.steps():
        pass
    assert run.step == 3
    decayed.append(decayed_parameters(run))
    assert decayed[0] == decayed[1] > 0
    assert {int(state["step"]) for state in run.opt.state.values()} == {3}
    assert [step for step, _, _ in run.states] == [1, 3]


@pytest.mark.parametrize(("layers", "width"), [(2, 64), (3, 96)])
def test_the_small_gpt_has_the_state_of_the_pruned_one(layers: int, width: int) -> None:
    shape = GPTConfig(num_layers=layers, width=width, num_heads=width // 32, context=64)
    model = GPT(shape)
    bf16 = torch.bfloat16
    samo.compress_(model, samo.prune(model, 0.9), dtype=bf16, grad_dtype=bf16)
    held = samo.ledger(model, samo.AdamW(model.parameters())).predicted_bytes
    narrow = matching_shape(shape)
    assert narrow.num_layers == layers
    narrower = GPTConfig(num_layers=layers, width=narrow.width - 8, num_heads=1, context=64)
    sizes = [DENSE_BYTES * sum(p.numel() for p in GPT(c).parameters()) for c in (narrower, narrow)]
    assert sizes[0] < held <= sizes[1]


# Text


@given(
    num_bytes=st.integers(40, 400),
    context=st.integers(1, 20),
    steps=st.integers(1, 12),
    batch=st.integers(1, 6),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=30, deadline=None)
def test_no_byte_is_read_more_than_four_times(
    num_bytes: int, context: int, steps: int, batch: int, seed: int
) -> None:
    sizes = {"steps": steps, "batch": batch, "context": context, "seed": seed}
    per_pass = (num_bytes - context) // context
    if steps * batch > 4 * per_pass:
        with pytest.raises(DataError, match="more than 4 times; take fewer --steps"):
            order(num_bytes, **sizes)
        return
    starts_SB = order(num_bytes, **sizes)
    assert starts_SB.shape == (steps, batch)
    places = torch.arange(num_bytes)
    read, told = (
        windows(places.to(torch.int64), starts_SB.flatten(), context)[part].flatten()
        for part in (0, 1)
    )
    assert torch.equal(told, read + 1)  # the next byte is what is learnt
    passes = -(-steps * batch // per_pass)
    assert torch.bincount(read).max() <= passes <= 4
    assert torch.equal(starts_SB, order(num_bytes, **sizes))


def test_text_is_held_back_in_whole_files_or_in_part(tmp_path: Path) -> None:
    assert even(101, count=5, context=10).tolist() == [0, 20, 40, 60, 80]
    assert even(101, count=100, context=10).tolist() == list(range(0, 100, 10))
    for number in range(41):
        (tmp_path / f"{number:02}.py").write_bytes(b"%02d" % number * 10)
    (tmp_path / "40 again.txt").write_bytes(b"40" * 10)
    (tmp_path / "picture.png").write_bytes(b"none")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "other.py").write_bytes(b"theirs")
    text = find_text([tmp_path], least=0)
    assert text.valid == b"00" * 10 + b"20" * 10 + b"40" * 10
    assert len(text.train) == 38 * 20
    few = find_text([tmp_path / "01.py", tmp_path / "02.py"], least=0)
    assert few.train == b"01" * 9 + b"0" + b"02" * 9 + b"0"
    assert few.valid == b"12"
    assert few.digest != text.digest
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(DataError, match="has 5 bytes of text in 1 files, and 10,000,000 are"):
        find_text([tmp_path / "a.txt"])
    with pytest.raises(DataError, match=r"there is no text '.*b\.txt'"):
        find_text([tmp_path / "b.txt"])


# Images


def write_images(folder: Path, count: int = 40) -> Path:
    """Write images whose class is the place of a bright bar: something that can be learnt."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    for name in ("train", "t10k"):
        labels = torch.arange(count) % 10
        pictures = torch.randint(0, 60, (count, 28, 28), generator=generator)
        for picture, label in zip(pictures, labels.tolist()):
            picture[:, 2 * label : 2 * label + 4] += 180
        head = struct.pack(">4i", 0x803, count, 28, 28)
        data = head + bytes(pictures.flatten().tolist())
        (folder / f"{name}-images-idx3-ubyte.gz").write_bytes(gzip.compress(data))
        head = struct.pack(">2i", 0x801, count)
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(head + bytes(labels.tolist()))
    return folder


def test_images_are_read_from_packed_and_plain_files(tmp_path: Path) -> None:
    found = images.read_images(write_images(tmp_path), CPU)
    assert found.train.shape == (40, 36, 36)
    assert found.test_labels.tolist() == [n % 10 for n in range(40)]
    inner = found.train[:, 4:32, 4:32]
    assert abs(inner.mean()) < 1e-5
    assert abs(inner.std() - 1) < 1e-5
    assert torch.equal(images.centred(found.train)[:, 0, 2:30, 2:30], inner)


def test_files_of_another_format_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is neither '.*train-images-idx3-ubyte' nor"):
        images.read_images(tmp_path, CPU)
    write_images(tmp_path)
    labels = tmp_path / "t10k-labels-idx1-ubyte"
    labels.write_bytes(labels.read_bytes()[:-1])
    with pytest.raises(
        DataError, match=r"not an idx file of labels: .*0x00000801 .*sizes \[40\].*47"
    ):
        images.read_images(tmp_path, CPU)


def test_windows_are_cut_at_all_places_and_mirrored() -> None:
    places = torch.arange(36 * 36).view(1, 36, 36).expand(400, -1, -1)
    cut = images.augmented(places, torch.Generator().manual_seed(0))
    assert cut.shape == (400, 1, 32, 32)
    first = cut[:, 0, 0, :]
    is_mirrored = first[:, 0] > first[:, 1]
    assert 150 < is_mirrored.sum() < 250
    corners = torch.where(is_mirrored, first[:, -1], first[:, 0])
    assert set(corners.tolist()) == {36 * row + column for row in range(5) for column in range(5)}
    assert (cut[:, 0, 1:] - cut[:, 0, :-1] == 36).all()


# VGGs


@pytest.mark.slow
def test_vggs_run_and_tell_what_tickets_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, out = write_images(tmp_path / "data"), tmp_path / "out"
    where = ("--data", data, "--out", out)
    call(vgg.main, monkeypatch, "--quick", *where, "--seeds", 0, "--device", "cpu")
    rows = {row["contender"]: row for row in rows_of(out)}
    assert list(rows) == list(vgg.CONTENDERS)
    page = (out / "README.md").read_text()
    drawn = [row for row in rows.values() if row["drawn_epoch"] is not None]
    assert drawn, "none of the tickets settled"
    for row in drawn:
        share = row["pruned_channels"] / row["num_channels"]
        assert abs(share - int(row["contender"][-2:]) / 100) < 0.02
        assert row["state_bytes"] < rows["unpruned"]["state_bytes"]
        assert 4 <= row["drawn_epoch"] < row["settings"]["epochs"] == len(row["curve"])
        assert f"ticket {row['ticket']}" in page
    for row in rows.values():
        if row["failure"]:
            assert row["accuracy"] is None
            assert row["failure"] in page
    for name in ("accuracy", "curves"):
        assert (out / f"{name}.png").read_bytes().startswith(PNG)
    (out / "README.md").unlink()
    call(vgg.main, monkeypatch, "--out", out, "--page-only")
    assert (out / "README.md").read_text() == page
    with pytest.raises(SystemExit, match="2"):  # images must be given
        call(vgg.main, monkeypatch, "--quick", "--out", tmp_path)
    with pytest.raises(SystemExit, match="error: there is neither"):
        call(vgg.main, monkeypatch, "--quick", "--out", tmp_path, "--data", tmp_path)


def test_the_penalty_reaches_kept_scales_alone(tmp_path: Path) -> None:
    found = images.read_images(write_images(tmp_path), CPU)
    sizes = vgg.Settings(width=4, epochs=1, batch=16, images=40)
    signs, added = [], []
    for is_pruned in (False, True):
        run = vgg.Run(sizes, found, 0, CPU, has_l1=True)
        with torch.no_grad():
            for name in run.norms:
                scale = run.model.get_parameter(f"{name}.weight")
                scale.copy_(torch.linspace(-1.0, 2.0, len(scale)))
        if is_pruned:
            run.compress(ChannelTickets(run.model, 0.5).draw_now())
        (1e-3 * run.model(images.centred(found.train[:8])).square().mean()).backward()
        parameters = dict(run.model.named_parameters())
        before = {name: parameters[f"{name}.weight"].grad.clone() for name in run.norms}
        run._add_l1_()
        for name in run.norms:
            values = parameters[f"{name}.weight"]
            signs.append(values.detach().sign())
            added.append(values.grad - before[name])
    for sign, change in zip(signs, added):
        assert sign.numel() > 0
        assert torch.allclose(change, 1e-4 * sign, atol=1e-8)  # rounded as the gradient is


def test_training_from_a_ticket_is_masked_dense_training(tmp_path: Path) -> None:
    found = images.read_images(write_images(tmp_path), CPU)
    sizes = vgg.Settings(width=4, epochs=4, batch=8, images=40, lr=0.05)
    ours, dense = (vgg.Run(sizes, found, 0, CPU, has_l1=True) for _ in range(2))
    with torch.no_grad():
        for run in (ours, dense):
            for name in run.norms:
                scale = run.model.get_parameter(f"{name}.weight")
                scale.copy_(torch.linspace(0.3, 0.7, len(scale)))
    ticket = ChannelTickets(ours.model, 0.3).draw_now()
    masks = {name: mask.to_bool() for name, mask in ticket.items()}
    first = {name: p.detach().clone() for name, p in ours.model.named_parameters()}
    ours.compress(ticket)
    for name, kept in masks.items():
        parameter = dense.model.get_parameter(name)
        parameter.data *= kept
        parameter.register_hook(kept.mul)  # the penalty of a pruned scale is sign(0) = 0
    for run in (ours, dense):
        run.train_epoch()
    trained = samo.dense_state_dict(ours.model)
    for name, parameter in dense.model.named_parameters():
        assert torch.allclose(trained[name], parameter, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(parameter, first[name], rtol=1e-4, atol=1e-5)
    assert ours.curve == dense.curve


def test_a_ticket_that_takes_a_whole_layer_is_not_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_images(tmp_path)
    real = vgg.vgg

    def unfair(width: int) -> nn.Sequential:
        model = real(width)
        norms = [module for module in model if isinstance(module, nn.BatchNorm2d)]
        for norm in norms:
            norm.weight.data = torch.linspace(0.5, 1.0, len(norm.weight))
        nn.init.constant_(norms[-1].weight, 1e-3)
        return model

    monkeypatch.setattr(vgg, "vgg", unfair)
    sizes = {"width": 4, "epochs": 6, "batch": 16, "images": 16, "lr": 1e-6}
    row = vgg.train(runs.Job("ticket-50", 0), vgg.Settings(**sizes), data, "cpu")
    assert "no ticket in 6 epochs: '26' would lose all of its 32 channels" in row["failure"]
    assert row["accuracy"] is None
    assert len(row["curve"]) == 6  # it was looked for to the end
    row = vgg.train(runs.Job("ticket-50", 0), vgg.Settings(**sizes, spared=1), data, "cpu")
    assert row["failure"] is None
    assert row["drawn_epoch"] == 4  # the fifth look


# Runs and spreads


def fake_row(job: runs.Job, failing: str = "") -> runs.Row:
    if job[0] == failing:
        raise ValueError(f"{failing} cannot\nbe run")
    return {"contender": job[0], "seed": job[1], "loss": 1.0 + job[1]}


def test_what_was_done_stays_when_a_run_fails(tmp_path: Path) -> None:
    jobs = [runs.Job(name, 0) for name in "abc"]

    def plan(_: object) -> list[runs.Job]:
        return jobs

    said: list[str] = []
    with runs.kept_rows(tmp_path, Settings()) as kept:
        with pytest.raises(RunError, match=r"1 runs failed: b \(seed 0\): b cannot$"):
            runs.finish(kept, plan, partial(fake_row, failing="b"), device=CPU, say=said.append)
        with (
            pytest.raises(RunError, match="another process writes to"),
            runs.kept_rows(tmp_path, Settings()),
        ):
            pass
    assert [row["contender"] for row in rows_of(tmp_path)] == ["a", "c"]
    with runs.kept_rows(tmp_path, Settings()) as kept:
        assert kept.missing(jobs) == [runs.Job("b", 0)]
        runs.finish(kept, plan, fake_row, device=CPU, minutes=-1, say=said.append)
    assert said[-1] == "1 runs are left for the next call: b (seed 0)"
    with runs.kept_rows(tmp_path, Settings()) as kept:
        runs.finish(kept, plan, fake_row, device=CPU, say=said.append)
    assert [row["contender"] for row in rows_of(tmp_path)] == ["a", "c", "b"]


def test_other_seeds_wait_for_the_best_rate_of_the_first() -> None:
    losses = {0.1: 3.0, 0.3: 2.0, 1.0: 2.5, 3.0: 1.0}
    plan = partial(rates.plan, names=["a", "b"], seeds=[5, 6], lrs=[1.0, 0.1, 3.0, 0.3])
    rows: list[dict[str, Any]] = []
    begun = []
    while jobs := [job for job in plan(rows) if job not in begun]:
        begun.append(jobs[0])
        name, seed, lr = jobs[0]
        assert lr is not None
        loss = losses[lr] if name == "a" else -lr  # b: the more the better
        rows.append({"contender": name, "seed": seed, "lr": lr, "valid_loss": loss})
    assert [job.lr for job in begun if job[:2] == ("a", 5)] == [0.1, 0.3, 1.0]  # 1.0 is worse
    assert [job.lr for job in begun if job[:2] == ("a", 6)] == [0.3]
    assert [job.lr for job in begun if job[:2] == ("b", 5)] == [0.1, 0.3, 1.0, 3.0]
    assert [job.lr for job in begun if job[:2] == ("b", 6)] == [3.0]
    best = rates.best_rows(rows)
    assert {(row["contender"], row["seed"], row["lr"]) for row in best} == {
        *(("a", seed, 0.3) for seed in (5, 6)),
        *(("b", seed, 3.0) for seed in (5, 6)),
    }


def test_a_run_that_came_apart_is_no_better_rate() -> None:
    rows = [
        {"contender": "a", "seed": 0, "lr": lr, "valid_loss": loss}
        for lr, loss in ((0.1, 2.0), (0.3, float("nan")))
    ]
    found = rates.plan(rows, names=["a"], seeds=[0, 1], lrs=[0.1, 0.3, 1.0])
    assert found == [runs.Job("a", 0, 0.1), runs.Job("a", 1, 0.1)]
    assert rates.best(rows) == 0.1


def test_differences_are_taken_seed_by_seed() -> None:
    base = [{"seed": seed, "loss": float(seed)} for seed in range(3)]
    rows = [{"seed": seed, "loss": seed + 0.1 + 0.001 * (seed % 2)} for seed in range(3)]
    found = spreads.against(rows, base, "loss")
    assert found is not None
    assert found.text("+.3f") == "+0.100 +- 0.001"
    assert found.is_clear
    assert not spreads.of([row["loss"] for row in base]).is_clear  # 1 +- 1
    assert spreads.against(rows, [{"seed": 7, "loss": 0.0}], "loss") is None
    assert spreads.of([2.0]).text() == "2.000"
    assert not spreads.of([2.0]).is_clear

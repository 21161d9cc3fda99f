"""The command line: what is typed, what is shown, how it ends."""

import json
import logging
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import samo
from samo.cli.commands import Demo, Finetune, Inspect, Train
from samo.cli.main import main, parse
from samo.planner.hardware import HARDWARE
from samo.train.config import AUTO

FLAGS = (
    "--steps 6 --batch-size 2 --num-layers 1 --width 32 --num-heads 2 --context 32 --log-every 1 "
    "--eval-every 3 --eval-batches 1 --sample-tokens 4"
)
TRAIN = f"train notes.txt {FLAGS}"


@pytest.fixture
def here(here: Path) -> Path:
    """A folder of one's own with a text in it."""
    (here / "notes.txt").write_text("It was the best of times, it was the worst of times. " * 60)
    return here


def test_help_is_fast() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "samo", "train", "--help"]
    subprocess.run(command, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Of the processor, not of the clock: the machine may be busy with other things.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.5


def test_no_arguments_show_the_commands(type_in: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert type_in("--version").out == f"samo {samo.__version__}\n"
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "samo --version" in shown
    for command in ("demo", "train", "prune", "inspect", "report", "bench"):
        assert f" {command} " in shown


@pytest.mark.parametrize(
    ("command", "usual", "rare"),
    [("train", "--sparsity", "--mask-every"), ("finetune", "--teacher", "--temperature")],
)
def test_help_of_a_run_is_short_and_the_rest_is_in_help_all(
    command: str, usual: str, rare: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = {}
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            main([command, flag])
        shown = capsys.readouterr()
        assert not re.search(r"default: (None)?\)|None\|", shown.out)
        assert usual in shown.out
        assert (rare in shown.out) == (flag == "--help-all")
        assert shown.err == ""
        lengths[flag] = shown.out.count("\n")
    assert lengths["--help"] <= 100 < lengths["--help-all"]


def test_help_of_plan_names_all_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    shown = re.sub(r"[\s│]+", "", capsys.readouterr().out)
    assert ",".join(HARDWARE) in shown


def test_flags_win_over_the_file_and_the_file_over_defaults(here: Path) -> None:
    (here / "run.toml").write_text(
        "[data]\ntrain = 'notes.txt'\n[run]\nsteps = 7\nseed = 3\n[prune]\nsparsity = 0.5"
    )
    command = parse(["train", "--config", "run.toml", "--seed", "4"])
    assert isinstance(command, Train)
    assert command.data.train == (Path("notes.txt"),)
    assert (command.run.steps, command.run.seed, command.prune.sparsity) == (7, 4, 0.5)
    assert command.optim.clip == 1.0
    (here / "run.toml").write_text("[model]\nmodel = 'llama'\n[run]\nepochs = 3\n")
    command = parse(["finetune", "--config", "run.toml", "--data", "notes.jsonl"])
    assert isinstance(command, Finetune)
    assert (command.model.model, command.run.epochs) == (Path("llama"), 3.0)
    assert command.data.data == (Path("notes.jsonl"),)


def test_flags_become_settings() -> None:
    flags = "--width 64 --sparsity auto --lr 1e-3 --data 2 --weights 4GB --rules x.* 0.5"
    command = parse(["train", "a.txt", "b.txt", *flags.split(), "--betas", "0.8", "0.9"])
    assert isinstance(command, Train)
    assert command.data.train == (Path("a.txt"), Path("b.txt"))
    assert (command.model.width, command.prune.sparsity, command.optim.lr) == (64, AUTO, 0.001)
    assert type(command.model.width) is int
    assert (command.mesh.data, command.run.weights) == (2, "4GB")
    assert (command.prune.rules, command.optim.betas) == ({"x.*": 0.5}, (0.8, 0.9))
    for words, found in ((["--compile"], True), (["--no-compile"], False), ([], False)):
        command = parse(["train", "a.txt", *words])
        assert isinstance(command, Train)
        assert command.run.compile is found
    assert parse(["demo", "--out", "x"]) == Demo(out=Path("x"))
    assert parse(["inspect"]) == Inspect(path=None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "notes.txt", "--sparcity", "0.5"], "--sparsity"),
        (["train", "notes.txt", "--frobnicate"], "run samo train --help"),
        (["train", "notes.txt", "--sparsity", "abc"], "takes a number or auto, got"),
        (["train", "notes.txt", "--steps", "abc"], "it takes a whole number, got 'abc'"),
        (["train", "notes.txt", "--mode", "sparse"], "samo"),
        (["prune"], "required"),
    ],
)
def test_a_wrong_flag_is_usage_and_names_the_nearest(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "code", "message"),
    [
        ("train", 2, "no text to train on; name a file: samo train notes.txt"),
        ("trian notes.txt", 2, "no command 'trian' (did you mean 'train'?); choose among"),
        ("chat hugging", 2, "no command 'chat'; use: samo generate hugging --chat"),
        ("finetune hugging notes.txt", 2, "name data with --data: samo finetune hugging --data n"),
        ("finetune notes.txt --data notes.txt", 1, "notes.txt' is a file, and a model is a folder"),
        ("prune Some/Model", 1, "local folders only; download the model with: hf download Some/"),
        ("finetune Some/Model --data notes.txt", 1, "hf download Some/Model --local-dir Model"),
        ("prune hugging --sparsity 0", 2, "--sparsity 0 prunes nothing; use one such as 0.5"),
        ("finetune hugging --data notes.txt --epochs 0", 2, "--epochs must be more than 0, got 0"),
        ("launch train notes.txt -n 2", 2, "-n goes before the word train: samo launch -n"),
        ("train notes.txt --init hugging", 2, "a Hugging Face model; train that with samo finet"),
        ("train notes.txt --device cuda", 2, "--device cuda needs a GPU"),
        ("train notes.txt --config none.toml", 2, "cannot read the config 'none.toml'"),
        ("train --resume nothing", 1, "'nothing' is not a run folder: it does not exist"),
        ("train --resume r --config c", 2, "leave out --config"),
        ("train --resume r --out c", 2, "leave out --out"),
        ("train note.txt", 1, "did you mean 'notes.txt'?"),
        ("train chat.jsonl", 2, "reads plain text; fine-tune a model on them: samo finetune MODEL"),
        ("train notes.txt --valid chat.parquet", 2, "MODEL_DIR --data chat.parquet; or write the"),
        ("train short.txt", 1, "--context"),
        ("train notes.txt --tokenizer none", 1, "none"),
        ("train notes.txt --out notes.txt", 1, "notes.txt"),
        (f"train notes.txt --out {'x' * 300}", 1, "File name too long"),
        ("train notes.txt --shape gpt3-175b --context 32 --device cpu", 2, "its dense phase"),
        ("demo --out notes.txt", 1, "cannot write to 'notes.txt'"),
        ("report", 2, "no run to report on"),
        ("report nothing", 1, "nothing"),
        ("inspect nothing", 1, "'nothing' does not exist"),
        ("inspect .", 1, "has no run.json, manifest.json or config.json; pass a mask file"),
        ("inspect notes.txt", 1, "is not a mask file, or it is damaged; pass a mask file, a che"),
        ("generate runs/zzz", 1, "'runs/zzz' does not exist; name a checkpoint, a run folder, or"),
        ("inspect --verify", 2, "--verify needs a checkpoint"),
        ("inspect hugging", 1, "'hugging/config.json' cannot be read: "),
        ("inspect hugging --verify", 2, "--verify needs a checkpoint or a run folder; leave"),
        ("prune nothing", 1, "'nothing' does not exist"),
        ("prune full", 1, "holds none of manifest.json, run.json, config.json"),
    ],
)
def test_bad_input_ends_with_a_message_and_makes_nothing(
    here: Path, typed: str, code: int, message: str, type_in: Any
) -> None:
    (here / "short.txt").write_text("short")
    for name in ("full", "hugging"):
        (here / name).mkdir()
    (here / "hugging" / "config.json").touch()
    (here / "full" / "thesis.tex").touch()
    before = sorted(here.rglob("*"))
    shown = type_in(typed, code)
    assert shown.err.startswith("samo: ")
    assert message in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""  # no folder is announced that will not be there
    assert sorted(path for path in here.rglob("*") if "runs" not in path.parts) == before
    assert not list(here.glob("runs/*/run.json"))


def test_ctrl_c_while_the_report_is_made_says_that_the_run_is_complete(
    here: Path, type_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("samo.report.page.write_report", interrupted)
    shown = type_in(TRAIN, 130).out
    assert "the run is complete; samo report runs/notes makes its report" in shown
    assert "is complete; extend it" in type_in("train --resume runs/notes").out


def test_train_resume_report_inspect_and_prune(here: Path, type_in: Any) -> None:
    shown = type_in(TRAIN).out
    for part in ("step 6/6  samo    loss", "pruned 90 %", "validation loss", "tokens/s", "left"):
        assert part in shown
    assert "run folder: runs/notes" in shown
    assert "runs/notes/report.html" in shown
    assert Path("runs/notes/report.html").read_text().startswith("<!doctype html>")

    shutil.copytree("runs/notes", "runs/notes-2")
    resume = "train --resume runs/notes-2"
    shown = type_in(f"{resume} --steps 8").out
    assert "step 6/8  resumed" in shown
    assert "state" in next(line for line in shown.splitlines() if "step 7/8" in line)
    assert "--width was 32, not 64" in type_in(f"{resume} --width 64", 2).err
    shown = type_in(f"{resume} --steps 1", 2).err
    assert "--steps 1 ends in the run's dense phase of 1 step, which it keeps" in shown
    assert type_in(resume).out == "'runs/notes-2' is complete; extend it with --steps\n"
    shutil.rmtree("runs/notes-2/checkpoints")
    again = "the run has no checkpoint yet: it starts again at its first step\n"
    assert type_in(resume).out.startswith(again)

    both = "report runs/notes runs/notes-2"
    assert type_in(f"{both} --out both.html").out.split() == ["both.html"]
    assert type_in(both).out.split() == ["runs/report.html"]
    assert "8 of 8" in type_in("inspect runs/notes-2").out
    assert json.loads(type_in("inspect runs/notes --json").out)["step"] == 6
    assert type_in("inspect runs/notes --verify").out.count("checksums correct") == 2
    shown = type_in("inspect runs/notes/checkpoints/last --verify").out
    assert "checksums         correct" in shown
    assert "blocks.*.mlp.* " in shown

    shown = type_in("prune runs/notes --sparsity 0.5 --out half.safetensors", 2).err
    assert "or raise --sparsity above 0.900" in shown
    assert "95 %" in type_in("prune runs/notes --sparsity 0.95 --out few.safetensors").out
    assert samo.Masks.load("few.safetensors").sparsity == pytest.approx(0.95, abs=1e-3)
    found = json.loads(type_in("inspect few.safetensors --json").out)
    assert len(found["tensors"]) == 4
    assert found["fingerprint"] in type_in("inspect few.safetensors").out  # on one line
    assert "12,288" in type_in("prune runs/notes --method zeros --out zeros.safetensors").out
    assert samo.Masks.load("zeros.safetensors") == samo.load_masks("runs/notes/checkpoints/last")
    samo.save("checkpoint", torch.nn.Linear(4, 4))
    shown = type_in("prune checkpoint", 1).err
    assert "was not saved by samo train, so its model is not known" in shown
    assert "cannot prune 'runs/notes'" in type_in("prune runs/notes --skip nothing", 2).err


def test_the_machine_and_its_kernels_are_shown(type_in: Any) -> None:
    found = json.loads(type_in("inspect --json").out)
    assert found["torch"] == torch.__version__
    assert found["cpu"]["kernels"] in ("cpu", "reference")


def test_the_demo_tells_the_whole_story(
    here: Path, monkeypatch: pytest.MonkeyPatch, type_in: Any
) -> None:
    monkeypatch.setattr("samo.cli.demo.STEPS", 4)
    monkeypatch.setattr("samo.cli.demo.DENSE_STEPS", 2)
    shown = type_in("demo").out
    for part in ("run 1 of 2", "run 2 of 2", "saved", 'The model continues "', "report.html"):
        assert part in shown
    for mode in ("samo", "dense"):
        assert Path("runs/demo", mode, "checkpoints/last/manifest.json").exists()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: 9"),
        MemoryError(),
    ],
)
def test_running_out_of_memory_ends_with_advice(
    here: Path, monkeypatch: pytest.MonkeyPatch, type_in: Any, error: Exception
) -> None:
    monkeypatch.setattr("samo.cli.train.train", mock.Mock(side_effect=error))
    found = type_in("train notes.txt", 1).err
    assert found.startswith("samo: out of memory: ")
    assert "lower --batch-size" in found


def test_a_path_a_sample_and_a_report_are_shown_safely(
    here: Path, monkeypatch: pytest.MonkeyPatch, type_in: Any, capsys: Any
) -> None:
    full = mock.Mock(side_effect=samo.RunError("no room for it"))
    monkeypatch.setattr("samo.report.page.write_report", full)
    monkeypatch.setattr("samo.data.tokenizers.ByteTokenizer.decode", lambda self, ids: "a\x1b[2Jb")
    shown = type_in(f"{TRAIN} --out notes[/b][v2]").out
    assert "notes[/b][v2]/checkpoints" in shown.replace("\n", "")  # not markup
    assert "none: no room for it" in shown
    assert "a?[2Jb" in shown  # no control characters
    assert "samo:" not in type_in("inspect notes[/b][v2]").err
    logging.getLogger("another.library").warning("not ours")
    assert "samo:" not in capsys.readouterr().err


@pytest.mark.slow
def test_an_interrupted_run_saves_and_says_how_to_resume(here: Path) -> None:
    long = TRAIN.replace("--steps 6", "--steps 20000")
    process = subprocess.Popen(
        [sys.executable, "-m", "samo", *long.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "ascii"},
    )
    metrics = here / "runs" / "notes" / "metrics.jsonl"
    while not (metrics.exists() and '"step": 4,' in metrics.read_text()):
        time.sleep(0.01)
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    shown, complaints = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert "\x1b" not in shown  # a log file gets plain lines
    assert any(line.startswith("step ") for line in shown.splitlines())
    assert "samo train --resume runs/notes" in shown
    assert complaints == ""
    saved = samo.checkpoint.read_manifest(here / "runs" / "notes" / "checkpoints" / "last")
    last_line = json.loads(metrics.read_text().splitlines()[-1])
    assert last_line == {
        "event": "end",
        "step": saved.extra["progress"]["step"],
        "reason": "interrupted",
    }


def test_a_pipe_that_closes_early_is_no_crash(here: Path) -> None:
    (here / "run.json").write_text('{"format": "samo-run", "version": 1}')
    script = f"{sys.executable} -m samo inspect . | true; exit ${{PIPESTATUS[0]}}"
    shown = subprocess.run(["bash", "-c", script], capture_output=True, check=True)
    assert shown.stderr == b""


def test_a_closed_pipe_ends_the_output_and_not_the_run(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in samo train notes.txt | head -1."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(TRAIN.split()) == 0
    assert Path("runs/notes/checkpoints/last/manifest.json").exists()


def test_a_run_of_a_mesh_resumes_on_another(run: Path) -> None:
    record = json.loads((run / "run.json").read_text())
    record["config"]["mesh"] |= {"pipe": 2, "data": 2, "micro_batches": 4}
    (run / "run.json").write_text(json.dumps(record))
    command = parse(["train", "--resume", str(run)])
    assert isinstance(command, Train)
    assert (command.mesh.pipe, command.mesh.data, command.mesh.micro_batches) == (2, AUTO, 4)
    command = parse(["train", "--resume", str(run), "--data", "3"])
    assert isinstance(command, Train)
    assert command.mesh.data == 3


def test_errors_on_many_ranks_are_short_and_name_the_rank(
    here: Path, monkeypatch: pytest.MonkeyPatch, type_in: Any
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank, lines in (("0", 1), ("1", 0)):  # the first rank alone complains of settings
        monkeypatch.setenv("RANK", rank)
        shown = type_in(f"{TRAIN} --pipe 2", 2).err
        assert shown.count("pipe=2 does not make up 3 ranks") == lines
    error = RuntimeError("Connection closed by peer\nin some file")
    monkeypatch.setattr("samo.cli.train._train", mock.Mock(side_effect=error))
    shown = type_in(TRAIN, 1).err
    assert shown.startswith("samo: rank 1: stopped by RuntimeError: Connection closed by peer; l")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(RuntimeError, match="Connection closed"):  # a bug: with its traceback
        type_in(TRAIN)

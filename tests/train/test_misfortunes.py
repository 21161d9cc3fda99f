"""What can befall a run from outside: broken listeners, vanished files, odd places, wrong numbers."""

import logging
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import samo
from samo.cli import main
from samo.data.tokens import Tokens
from samo.errors import CheckpointError, ConfigError, DataError, RunError
from samo.train.config import PruneConfig
from samo.train.events import Event
from samo.train.interrupt import Interrupt
from samo.train.loop import resume, train
from samo.train.metrics import Board, MetricsFile
from tests.cli.test_cli import SMALL, here
from tests.train.test_learner import batch, learner
from tests.train.test_loop import Watcher, lines, samo_config, small, text

__all__ = ["here", "text"]


class Broken:
    """A display whose terminal has gone."""

    told = 0

    def on(self, event: Event) -> None:
        self.told += 1
        raise OSError(5, "Input/output error")


def test_a_display_that_cannot_write_is_left_out_and_the_run_goes_on(
    tmp_path: Path, text: Path, caplog: pytest.LogCaptureFixture
) -> None:
    display = Broken()
    assert train(small(text), tmp_path / "run", listeners=[display]).step == 8
    assert display.told == 1
    assert "broken is left out: [Errno 5] Input/output error" in caplog.text


def test_a_board_that_cannot_write_is_left_out_and_the_run_goes_on(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Board, "on", full)
    monkeypatch.setattr(Board, "close", full)
    assert train(small(text), tmp_path / "run").step == 8
    assert "board is left out: [Errno 28] No space left on device" in caplog.text
    assert lines(tmp_path / "run", "end")[-1]["reason"] == "done"


def test_a_run_that_goes_back_to_its_best_keeps_whole_lines(tmp_path: Path, text: Path) -> None:
    """Back at the best, then killed before its first save: the next resume starts from there too."""
    run = tmp_path / "run"
    train(small(text, steps=20, eval_every=5, save_every=50), run)
    best = samo.checkpoint.read_manifest(run / "checkpoints" / "best").extra["progress"]["step"]
    longer = replace(samo_config(run), run=replace(samo_config(run).run, steps=40))

    class CrashError(Exception):
        pass

    def crash() -> None:
        raise CrashError

    with pytest.raises(CrashError):
        resume(run / "checkpoints" / "best", config=longer, listeners=[Watcher(best + 2, crash)])
    resume(run, config=longer)
    steps = [line["step"] for line in lines(run, "step")]  # which reads every line as JSON
    assert steps == list(range(1, 41))


def test_metrics_are_never_cut_within_a_line(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(b'{"event": "a"}\n{"event": "b"}\n')
    MetricsFile(path, size=20, on_error="stop").close()
    assert path.read_bytes() == b'{"event": "a"}\n'


def test_metrics_in_an_impossible_place_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"cannot write metrics to '.*': Is a directory"):
        MetricsFile(tmp_path, size=0, on_error="stop")


def test_what_cannot_be_pruned_is_told_before_the_dense_phase(tmp_path: Path, text: Path) -> None:
    config = replace(small(text), prune=PruneConfig(dense_steps=5, skip=("no-such-layer",)))
    with pytest.raises(ConfigError, match=r"cannot prune: .*no-such-layer"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_short_text_to_validate_on_is_told_at_the_start(tmp_path: Path, text: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("x")
    config = small(text)
    with pytest.raises(DataError, match=r"the text to validate on \('short.txt'\)"):
        train(replace(config, data=replace(config.data, valid=(short,))), tmp_path / "run")
    with pytest.raises(DataError, match=r"the text to train on \('short.txt'\)"):
        train(
            replace(config, data=replace(config.data, train=(short,), valid=(text,))),
            tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_does_not_need_what_it_started_from(tmp_path: Path, text: Path) -> None:
    train(small(text), tmp_path / "first")
    source = tmp_path / "first" / "checkpoints" / "last"
    config = small(text)
    config = replace(
        config, model=replace(config.model, init=source), prune=PruneConfig(masks=source)
    )
    stop = Watcher(4, lambda: signal.raise_signal(signal.SIGTERM))
    train(config, tmp_path / "second", listeners=[stop])
    source.rename(tmp_path / "gone")
    assert resume(tmp_path / "second").step == 8


def test_fewer_steps_than_were_taken_are_refused(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    train(small(text), run)
    config = samo_config(run)
    with pytest.raises(
        ConfigError, match="the run has taken 8 steps already, more than the 5 asked"
    ):
        resume(run, config=replace(config, run=replace(config.run, steps=5)))


def test_a_finished_run_that_is_resumed_loses_no_line(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    train(small(text), run)
    before = lines(run)
    resume(run)
    assert lines(run)[: len(before)] == before


def test_other_batches_to_validate_on_start_the_search_for_the_best_anew(
    tmp_path: Path, text: Path
) -> None:
    run = tmp_path / "run"
    train(small(text), run)
    config = samo_config(run)
    changed = replace(config, run=replace(config.run, steps=12, eval_batches=1))
    resume(run, config=changed)
    best = samo.checkpoint.read_manifest(run / "checkpoints" / "best").extra["progress"]
    assert best["step"] > 8


@pytest.mark.parametrize(
    ("field", "value"),
    [("step", "abc"), ("position", -1), ("best_loss", "x"), ("phase", "foo"), ("step", 10**400)],
)
def test_a_checkpoint_with_impossible_progress_is_refused(
    tmp_path: Path, text: Path, field: str, value: Any
) -> None:
    run = tmp_path / "run"
    train(small(text, mode="dense"), run)
    last = run / "checkpoints" / "last"
    extra = samo.checkpoint.read_manifest(last).extra
    model = learner().model
    samo.save(last, model, extra={**extra, "progress": {**extra["progress"], field: value}})
    with pytest.raises(CheckpointError, match=f"is damaged: its {field} is"):
        resume(run)


def test_progress_that_a_newer_samo_has_added_is_left_out(tmp_path: Path, text: Path) -> None:
    from samo.train.snapshot import Progress, _progress

    found = _progress(tmp_path, {"step": 3, "mood": "good"})
    assert found == Progress(step=3)


def test_the_loss_scale_goes_on_over_the_prune() -> None:
    one = learner(torch.float16)
    assert isinstance(one.scaler, torch.amp.GradScaler)
    one.backward([batch(2)])
    one.step(1e-3)
    one.scaler.update(512.0)
    one.prune(samo.prune(one.model, 0.5))
    assert one.scaler.get_scale() == 512.0
    assert one.scaler.state_dict()["_growth_tracker"] == 1


def test_a_lost_connection_saves_and_ends() -> None:
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGHUP)
        assert interrupt.signal == signal.SIGHUP


def test_an_interrupted_sample_is_left_out(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def impatient(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("samo.train.run.generate", impatient)
    result = train(small(text), tmp_path / "run")
    assert (result.step, result.sample) == (8, None)
    assert lines(tmp_path / "run", "end")[-1]["reason"] == "done"


def test_every_token_of_a_usual_text_is_in_its_fingerprint() -> None:
    tokens = np.zeros(3_000_000, dtype=np.uint8)
    before = Tokens([tokens], 256).fingerprint()
    changed = tokens.copy()
    changed[1_234_567] = 1
    assert Tokens([changed], 256).fingerprint() != before


def test_an_empty_manifest_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").touch()
    samo.save(tmp_path, torch.nn.Linear(2, 2))
    assert samo.checkpoint.verify(tmp_path).num_params == 6


def test_brackets_in_a_path_are_no_markup(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "notes.txt", *SMALL, "--out", "notes[/b][v2]"]) == 0
    assert "notes[/b][v2]/checkpoints" in capsys.readouterr().out.replace("\n", "")
    assert main(["inspect", "notes[/b][v2]"]) == 0


def test_a_sample_is_shown_without_control_characters(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("samo.data.tokenizers.ByteTokenizer.decode", lambda self, ids: "a\x1b[2Jb")
    assert main(["train", "notes.txt", *SMALL]) == 0
    assert "a?[2Jb" in capsys.readouterr().out


@pytest.mark.long
def test_a_terminal_without_unicode_shows_what_it_can(here: Path) -> None:
    (here / "notes.txt").write_text("Grüße aus Köln und Übersee. " * 200)
    ended = subprocess.run(
        [sys.executable, "-m", "samo", "train", "notes.txt", *SMALL],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


def test_a_report_that_cannot_be_written_hides_nothing(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: object) -> None:
        raise RunError("no room for it")

    monkeypatch.setattr("samo.report.page.write_report", full)
    assert main(["train", "notes.txt", *SMALL]) == 0
    shown = capsys.readouterr().out
    assert "none: no room for it" in shown
    assert "the model writes" in shown


def test_a_name_that_no_file_system_takes_is_an_error(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "notes.txt", *SMALL, "--out", "x" * 300]) == 1
    assert "File name too long" in capsys.readouterr().err


def test_a_model_that_the_host_cannot_hold_ends_with_advice(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9")

    monkeypatch.setattr("samo.cli.train.train", full)
    assert main(["train", "notes.txt"]) == 1
    assert "out of memory: DefaultCPUAllocator" in capsys.readouterr().err


def test_other_errors_of_torch_are_not_called_memory(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr("samo.cli.train.train", fail)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        main(["train", "notes.txt"])


@pytest.mark.parametrize("content", ["a = " + "[" * 5000, '[data]\ntrain = ["~no-such-user/x"]'])
def test_a_config_that_python_stumbles_over_is_refused(
    here: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "run.toml").write_text(content)
    assert main(["train", "--config", "run.toml"]) == 2
    assert "run.toml" in capsys.readouterr().err


def test_samo_logs_under_its_own_name_only(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--version"])
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    capsys.readouterr()
    logging.getLogger("another.library").warning("not ours")
    assert "samo:" not in capsys.readouterr().err

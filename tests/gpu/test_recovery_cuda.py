"""The benchmark of recovery on a GPU."""

from pathlib import Path

import pytest
from benchmarks.recovery import bench

from tests.benchmarks.calling import rows_of
from tests.data.trained_tokenizer import save_trained_tokenizer
from tests.integrations.tiny_lms import tiny_lm

pytestmark = pytest.mark.gpu


def test_passes_recorded_as_cuda_graphs_train_like_eager_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("to be, or not to be: that is the question. " * 200)
    tiny_lm(vocab_size=300).save_pretrained("tiny")
    save_trained_tokenizer(Path("tiny"))
    given = ["tiny", "--train", "text.txt", "--valid", "text.txt", "--toy", "--lr", "1e-2"]
    given += ["--methods", "wanda", "--sparsities", "0.5"]
    recorded = rows_of(bench.main, tmp_path / "recorded.jsonl", *given)
    eager = rows_of(bench.main, tmp_path / "eager.jsonl", *given, "--eager")
    assert len(recorded) >= 5
    for ours, theirs in zip(recorded, eager, strict=True):
        # Sums on a GPU have no fixed order.
        assert ours["ppl"] == pytest.approx(theirs["ppl"], rel=1e-2)
        if "loss" in ours:
            assert ours["ppl"] < 0.9 * recorded[0]["ppl"]

"""The benchmark of recovery runs at toy size and draws what it measured."""

import json
import sys
from pathlib import Path

import pytest
from benchmarks.recovery import bench, figure
from transformers import LlamaConfig, LlamaForCausalLM

from tests.data.trained_tokenizer import save_trained_tokenizer


@pytest.mark.slow
def test_it_measures_every_contender_and_draws_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "to be, or not to be: that is the question. " * 200
    Path("text.txt").write_text(text)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=300))
    model.save_pretrained("tiny")
    save_trained_tokenizer(Path("tiny"))
    given = ["tiny", "--train", "text.txt", "--valid", "text.txt", "--toy", "--out", "rows.jsonl"]
    given += ["--methods", "magnitude", "wanda", "--sparsities", "0.5", "0.8"]
    given += ["--contenders", "unpruned", "samo", "distilled"]
    monkeypatch.setattr(sys, "argv", ["bench", *given])
    bench.main()
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    assert [row["contender"] for row in rows[:2]] == ["as it came", "unpruned"]
    assert len(rows) == 2 + 2 * 2 * 3
    assert all(row["ppl"] > 1 for row in rows)
    monkeypatch.setattr(sys, "argv", ["figure", "rows.jsonl"])
    figure.main()
    assert "wanda, distilled" in Path("rows.svg").read_text()

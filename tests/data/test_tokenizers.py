"""Tokenizers: bytes, and folders of Hugging Face's kind, whole and damaged."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer, models, processors

from samo.data.tokenizers import open_tokenizer
from samo.errors import DataError
from tests.data.trained_tokenizer import TEXT, VOCAB_SIZE, save_trained_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_trained_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@settings(max_examples=20)
@given(st.text())
def test_bytes_decode_to_what_was_encoded(text: str) -> None:
    tokenizer = open_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == tokenizer.decode(ids.astype(np.int64)) == text
    decoded = tokenizer.decode(np.array([97, 0xC3, 98, 256, 300, 99]))
    assert decoded == "a\ufffdb\ufffd\ufffdc", "what is not text is replaced"


def test_a_folder_tokenizer_merges_and_decodes(folder: Path) -> None:
    tokenizer = open_tokenizer(str(folder))
    ids = tokenizer.encode(TEXT)
    assert (tokenizer.name, tokenizer.vocab_size) == (str(folder), VOCAB_SIZE)
    assert 0 < len(ids) < len(TEXT.encode())
    assert (ids.ndim, ids.dtype.kind, int(ids.max()) < VOCAB_SIZE) == (1, "u", True)
    assert tokenizer.decode(ids) == TEXT


def test_a_fingerprint_depends_on_the_contents_and_not_the_place(
    folder: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    before = open_tokenizer(str(copy)).fingerprint
    assert before == open_tokenizer(str(folder)).fingerprint
    content = json.loads((copy / "tokenizer.json").read_text(encoding="utf-8"))
    last = max(content["model"]["vocab"], key=content["model"]["vocab"].get)
    content["model"]["vocab"][last] = 1000  # a vocabulary with a gap
    (copy / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    changed = open_tokenizer(str(copy))
    assert changed.fingerprint != before
    assert changed.vocab_size == 1001


def test_stored_truncation_padding_and_special_tokens_are_not_applied(
    folder: Path, tmp_path: Path
) -> None:
    stored = Tokenizer.from_file(str(folder / "tokenizer.json"))
    stored.add_special_tokens(["<start>"])
    start = stored.token_to_id("<start>")
    stored.post_processor = processors.TemplateProcessing(
        single="<start> $A", special_tokens=[("<start>", start)]
    )
    stored.enable_truncation(5)
    stored.enable_padding(length=500)
    stored.save(str(tmp_path / "tokenizer.json"))
    plain, tokenizer = open_tokenizer(str(folder)), open_tokenizer(str(tmp_path))
    assert len(stored.encode(TEXT).ids) != len(plain.encode(TEXT))
    assert np.array_equal(tokenizer.encode(TEXT), plain.encode(TEXT))
    assert tokenizer.vocab_size == VOCAB_SIZE + 1
    assert tokenizer.decode(np.array([start])) == "<start>"


def test_a_missing_tokenizer_is_refused_with_the_nearest_name(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "gpt2-tokenizer")
    (tmp_path / "empty").mkdir()
    for name, message in {
        str(tmp_path / "gpt2-tokenzer"): r"no folder '.*' \(did you mean '.*gpt2-tokenizer'\?\)",
        "byte": r"no folder 'byte' \(did you mean 'bytes'\?\); pass --tokenizer bytes, or a folder",
        "no/such": "no folder 'no/such'; pass",
        str(tmp_path / "empty"): "folder '.*empty' has no tokenizer.json",
        str(folder / "tokenizer.json"): "no folder",
    }.items():
        with pytest.raises(DataError, match=message):
            open_tokenizer(name)


def test_a_damaged_tokenizer_and_a_missing_package_are_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tokenizer.json"
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    content["model"]["continuing_subword_prefix"] = "longer than a token"  # a panic of Rust
    for damaged in ('{"model":', json.dumps(content)):
        file.write_text(damaged, encoding="utf-8")
        with pytest.raises(DataError, match=r"'.*tokenizer.json' cannot be read: "):
            open_tokenizer(str(tmp_path))
    Tokenizer(models.WordLevel({"a": 0}, unk_token="[UNK]")).save(str(file))
    with pytest.raises(DataError, match=r"'.*tokenizer.json' cannot encode the text: .*UNK"):
        open_tokenizer(str(tmp_path)).encode("b")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match="needs the package tokenizers: pip install tokenizers"):
        open_tokenizer(str(folder))

"""Tokenizers: bytes, and folders of Hugging Face's kind, whole and damaged."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from samo.data.tokenizers import ByteTokenizer, open_tokenizer
from samo.errors import DataError
from tests.data.trained_tokenizer import TEXT, VOCAB_SIZE, save_trained_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_trained_tokenizer(tmp_path_factory.mktemp("tokenizer"))


# Bytes


@settings(max_examples=50)
@given(st.text())
def test_bytes_decode_to_what_was_encoded(text: str) -> None:
    tokenizer = open_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == tokenizer.decode(ids.astype(np.int64)) == text


def test_bytes_that_are_no_text_are_replaced() -> None:
    decoded = ByteTokenizer().decode(np.array([97, 0xC3, 98, 256, 300, 99]))
    assert decoded == "a\ufffdb\ufffd\ufffdc"


# Folders


def test_a_folder_tokenizer_merges_and_gives_back_the_text(folder: Path) -> None:
    tokenizer = open_tokenizer(str(folder))
    ids = tokenizer.encode(TEXT)
    assert tokenizer.name == open_tokenizer(folder).name == str(folder)
    assert tokenizer.vocab_size == VOCAB_SIZE
    assert 0 < len(ids) < len(TEXT.encode())
    assert ids.ndim == 1
    assert ids.dtype.kind == "u"
    assert ids.max() < VOCAB_SIZE
    assert tokenizer.decode(ids) == TEXT


def test_vocabulary_and_merges_alone_give_the_same_tokens(folder: Path, tmp_path: Path) -> None:
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(folder / name, tmp_path)
    whole, parts = open_tokenizer(folder), open_tokenizer(tmp_path)
    assert np.array_equal(whole.encode(TEXT), parts.encode(TEXT))
    assert parts.decode(parts.encode(TEXT)) == TEXT
    assert parts.vocab_size == whole.vocab_size


def test_a_fingerprint_follows_the_contents_and_not_the_place(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    before = open_tokenizer(copy).fingerprint
    assert before == open_tokenizer(folder).fingerprint
    content = json.loads((copy / "tokenizer.json").read_text(encoding="utf-8"))
    content["model"]["merges"].pop()
    (copy / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    assert open_tokenizer(copy).fingerprint != before


def test_stored_truncation_padding_and_special_tokens_are_not_applied(
    folder: Path, tmp_path: Path
) -> None:
    from tokenizers import Tokenizer, processors

    stored = Tokenizer.from_file(str(folder / "tokenizer.json"))
    stored.add_special_tokens(["<start>"])
    start = stored.token_to_id("<start>")
    stored.post_processor = processors.TemplateProcessing(
        single="<start> $A", special_tokens=[("<start>", start)]
    )
    stored.enable_truncation(5)
    stored.enable_padding(length=500)
    stored.save(str(tmp_path / "tokenizer.json"))
    assert len(stored.encode(TEXT).ids) != len(open_tokenizer(folder).encode(TEXT))
    tokenizer = open_tokenizer(tmp_path)
    assert np.array_equal(tokenizer.encode(TEXT), open_tokenizer(folder).encode(TEXT))
    assert tokenizer.vocab_size == VOCAB_SIZE + 1
    assert tokenizer.decode(np.array([start])) == "<start>"


def test_a_vocabulary_with_gaps_counts_to_its_largest_number(folder: Path, tmp_path: Path) -> None:
    vocab = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    last = max(vocab, key=lambda token: vocab[token])
    vocab[last] = 1000
    (tmp_path / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    shutil.copy(folder / "merges.txt", tmp_path)
    assert open_tokenizer(tmp_path).vocab_size == 1001


# What is refused


def test_what_is_not_a_folder_is_refused_with_the_nearest_name(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "gpt2-tokenizer").mkdir()
    missing = "is not a local folder, and nothing is downloaded"
    for name, message in {
        str(tmp_path / "gpt2-tokenzer"): rf"{missing} \(did you mean '.*gpt2-tokenizer'\?\); give",
        "byte": rf"{missing} \(did you mean 'bytes'\?\); give the word 'bytes' or a folder with",
        "no/such": f"{missing}; give the word",
        str(folder / "tokenizer.json"): "is a file.*; give the word",
    }.items():
        with pytest.raises(DataError, match=f"tokenizer '{name}' {message}"):
            open_tokenizer(name)


def test_a_folder_without_a_tokenizer_says_what_was_looked_for(tmp_path: Path) -> None:
    looked = r"has no tokenizer: looked for tokenizer.json, then for vocab.json and merges.txt, "
    with pytest.raises(DataError, match=looked + "and found nothing; save one there with"):
        open_tokenizer(tmp_path)
    (tmp_path / "vocab.json").touch()
    with pytest.raises(DataError, match=looked + r"and found vocab.json; save one there with"):
        open_tokenizer(tmp_path)
    for number in range(20):
        (tmp_path / f"a{number:02}").touch()
    with pytest.raises(
        DataError, match=r"and found a00, a01, .*, a07, \.\.\.; save one there with"
    ):
        open_tokenizer(tmp_path)


def test_a_damaged_tokenizer_and_a_missing_package_are_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model":', encoding="utf-8")
    message = r"the tokenizer in '.*' cannot be read: .*; take another copy of tokenizer.json"
    with pytest.raises(DataError, match=message):
        open_tokenizer(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match="is not installed; pip install tokenizers"):
        open_tokenizer(folder)

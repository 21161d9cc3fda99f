"""Examples: opened, cut, split, packed into rows; each once an epoch, and resumed exactly."""

import json
import logging
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from samo.data import examples as examples_module
from samo.data.batches import IGNORE, Batch, Batches, validation_batches
from samo.data.examples import END, Examples, open_examples
from samo.data.packing import pack
from samo.data.sources import open_data
from samo.data.tokens import Tokens
from samo.errors import DataError
from samo.integrations.model_tokenizer import ModelTokenizer
from tests.data.model_tokenizer import BOS, END_OF_TURN, VOCAB_SIZE, save_model_tokenizer
from tests.data.test_batches import counted
from tests.pruning.language_models import language_model

Sequence = tuple[tuple[int, int], ...]
"""Inputs and targets of an example."""

# An example is how many of its tokens are read, and how many are learned.
shapes = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=40)


def examples_of(shapes: list[tuple[int, int]], *, is_packed: bool = True) -> Examples:
    """Return examples with tokens that count up, in two files."""
    segments: list[list[int]] = [[], []]
    spans = []
    number = 1
    for index, (read, learned) in enumerate(shapes):
        owner = int(index >= len(shapes) // 2)
        start = len(segments[owner])
        tokens = range(number, number + read + learned)
        segments[owner] += [~token for token in tokens[:read]] + [*tokens[read:], END]
        spans.append((owner, start, start + len(tokens), learned))
        number += len(tokens)
    arrays = [np.array(segment, dtype=np.int32) for segment in segments]
    return Examples(arrays, np.array(spans), number, is_packed)


def expected_of(shapes: list[tuple[int, int]]) -> list[Sequence]:
    found, number = [], 1
    for read, learned in shapes:
        tokens = range(number, number + read + learned)
        targets = [IGNORE] * (read - 1) + [*tokens[read:]]
        found.append(tuple(zip(tokens, targets)))
        number += len(tokens)
    return found


def sequences(batch: Batch) -> list[list[Sequence]]:
    """Return the examples of each row, told apart by their positions, without the padding."""
    found = []
    positions_BT = batch.positions_BT
    if positions_BT is None:
        positions_BT = torch.arange(batch.inputs_BT.shape[1]).expand_as(batch.inputs_BT)
    for tokens, targets, positions in zip(
        batch.inputs_BT.tolist(), batch.targets_BT.tolist(), positions_BT.tolist()
    ):
        row: list[list[tuple[int, int]]] = []
        for token, target, position in zip(tokens, targets, positions):
            if token == 0:
                assert target == IGNORE
                continue
            if position == 0:
                row.append([])
            assert position == len(row[-1])
            row[-1].append((token, target))
        found.append([tuple(example) for example in row])
    return found


def flat(batches: Iterator[Batch] | list[Batch]) -> list[Sequence]:
    return [example for batch in batches for row in sequences(batch) for example in row]


@settings(max_examples=40)
@given(shapes, st.integers(17, 40), st.integers(0, 2**32), st.integers(0, 1000), st.booleans())
def test_an_epoch_has_every_example_once_with_all_its_targets(
    shapes: list[tuple[int, int]], context: int, seed: int, epoch: int, is_packed: bool
) -> None:
    examples = examples_of(shapes, is_packed=is_packed)
    batches = Batches(examples, context=context, batch_size=1, seed=seed)
    batches.position = epoch * batches.num_windows
    found = list(islice(batches, batches.num_windows))
    assert sorted(flat(found)) == expected_of(shapes)
    assert sum(batch.num_tokens for batch in found) == sum(learned for _, learned in shapes)
    assert all(batch.num_tokens == (batch.targets_BT != IGNORE).sum() for batch in found)
    assert all(batch.num_read == (batch.inputs_BT != 0).sum() for batch in found)
    if not is_packed:
        assert batches.num_windows == len(examples)
        assert all(batch.positions_BT is None for batch in found)
    valid = validation_batches(examples, context=context, batch_size=3, max_batches=1000)
    assert sorted(flat(valid)) == expected_of(shapes)


texts = st.lists(st.integers(2, 80), min_size=1, max_size=4).filter(lambda sizes: sum(sizes) > 20)
kinds = st.one_of(
    st.builds(examples_of, shapes, is_packed=st.booleans()),
    texts.map(lambda sizes: counted(*sizes)),
)


def joined(batches: list[Batch]) -> list[Tensor]:
    """Return the tensors of batches one after the other."""
    found = [(b.inputs_BT, b.targets_BT, b.positions_BT) for b in batches]
    return [torch.cat(parts) for parts in zip(*found) if parts[0] is not None]


@settings(max_examples=60)
@given(kinds, st.integers(1, 9), st.integers(1, 5), st.integers(0, 2**32), st.integers(0, 10**12))
def test_batches_of_any_size_part_and_position_have_the_same_windows(
    data: Tokens | Examples, size: int, parts: int, seed: int, position: int
) -> None:
    single = Batches(data, context=20, batch_size=1, seed=seed)
    shares = [
        Batches(data, context=20, batch_size=size, seed=seed, part=(i, parts)) for i in range(parts)
    ]
    for each in (single, *shares):
        each.position = position
    for number in range(1, 4):
        resumed = Batches(data, context=20, batch_size=size, seed=seed)
        resumed.position = shares[0].position
        whole, ones = next(resumed), list(islice(single, size))
        found = [next(share) for share in shares]
        for batches in (ones, found):
            assert all(map(torch.equal, joined(batches), joined([whole])))
        lengths = [len(part.inputs_BT) for part in found]
        assert lengths == sorted(lengths, reverse=True)
        assert max(lengths) - min(lengths) <= 1
        counts = {(part.num_tokens, part.num_read) for part in (whole, *found)}
        assert counts == {(sum(b.num_tokens for b in ones), sum(b.num_read for b in ones))}
        assert {each.position for each in (single, *shares)} == {position + number * size}
    assert single.epoch == single.position / single.num_windows
    valid: Any = {"context": 20, "batch_size": size, "max_batches": 3}
    divided = [list(validation_batches(data, **valid, part=(i, parts))) for i in range(parts)]
    for whole, *found in zip(validation_batches(data, **valid), *divided, strict=True):
        assert all(map(torch.equal, joined(found), joined([whole])))


def test_an_order_is_stable() -> None:
    """Checkpoints hold a position, so an order must not change from one version to the next."""
    examples = examples_of([(1 + n % 4, 1 + n % 5) for n in range(40)])
    batch = next(Batches(examples, context=16, batch_size=6, seed=3))
    assert batch.inputs_BT[:, 0].tolist() == [3, 21, 184, 174, 212, 123]
    assert batch.num_tokens == int((batch.targets_BT != IGNORE).sum())


@settings(max_examples=50)
@given(st.lists(st.integers(1, 20), max_size=200), st.integers(20, 30), st.integers(0, 99))
def test_rows_hold_each_example_once_and_are_not_overfull(
    sizes: list[int], room: int, seed: int
) -> None:
    order, starts = pack(np.array(sizes, dtype=np.int64), room, seed)
    assert sorted(order.tolist()) == list(range(len(sizes)))
    assert (starts[0], starts[-1]) == (0, len(sizes))
    for start, stop in pairwise(starts):
        assert 0 < sum(sizes[index] for index in order[start:stop]) <= room
    full = -(-sum(sizes) // room)
    assert len(starts) - 1 <= 2 * full, "no two rows are both half empty"


def test_packing_wastes_little() -> None:
    sizes = np.random.default_rng(0).integers(1, 1000, 5000)
    _, starts = pack(sizes, 1024, 0)
    assert sizes.sum() / (len(starts) - 1) / 1024 > 0.99


def test_a_seed_chooses_which_examples_share_a_row() -> None:
    rows = {tuple(pack(np.full(20, 4), 8, seed)[0]) for seed in range(10)}
    assert len(rows) == 10


# Splits and fingerprints


@settings(max_examples=30)
@given(st.integers(2, 60), st.floats(0.001, 0.9))
def test_a_split_takes_whole_examples_from_everywhere(count: int, fraction: float) -> None:
    examples = examples_of([(1, 2)] * count)
    train, valid = examples.split(fraction)
    assert len(valid) == max(round(count * fraction), 1)
    spans = [tuple(span) for part in (train, valid) for span in part.spans_N4.tolist()]
    assert sorted(spans) == sorted(map(tuple, examples.spans_N4.tolist()))
    assert train.num_tokens + valid.num_tokens == examples.num_tokens
    assert len({each.fingerprint() for each in (examples, train, valid)}) == 3


def test_a_prompt_is_what_comes_before_the_first_answer() -> None:
    array = np.array([~5, 7, 1, END, ~5, ~6, ~7, 8, ~9, 3, END], dtype=np.int32)
    both = Examples([array], np.array([[0, 0, 3, 2], [0, 4, 10, 2]]), vocab_size=10)
    prompt = both.prompt()
    assert prompt is not None
    assert prompt.tolist() == [5, 6, 7]
    assert Examples([array], both.spans_N4[:1], vocab_size=10).prompt() is None  # a document


def test_a_single_example_cannot_be_split() -> None:
    with pytest.raises(DataError, match="with 1 example the data is too small to hold back 1 for"):
        examples_of([(1, 2)]).split(0.1)


def test_fingerprint_sees_tokens_and_what_is_learned() -> None:
    one = examples_of([(2, 3), (4, 5)])
    found = {one.fingerprint(), examples_of([(2, 3), (4, 5)]).fingerprint()}
    assert len(found) == 1
    found.add(examples_of([(3, 2), (4, 5)]).fingerprint())
    one.segments[0][0] = ~9
    found.add(one.fingerprint())
    assert len(found) == 3


# Opening


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    return ModelTokenizer(save_model_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def write_rows(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def test_files_are_encoded_once_and_again_if_the_cache_is_damaged(
    tmp_path: Path, tokenizer: ModelTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    paths = [
        write_rows(tmp_path / "a.jsonl", {"text": "be"}, {"prompt": "or", "completion": " not"}),
        write_rows(tmp_path / "b.jsonl", {"text": "question"}),
    ]
    cache = tmp_path / "cache"

    def opened() -> Examples:
        return open_examples(paths, tokenizer=tokenizer, context=16, cache=cache)

    first = opened()
    fingerprint = first.fingerprint()
    encode = tokenizer.encode
    assert first.segments[0].tolist() == [
        *(~BOS, *encode("be"), END_OF_TURN, END),
        *(~BOS, *(~encode("or").astype(np.int32)), *encode(" not"), END_OF_TURN, END),
    ]
    assert first.segments[1].tolist() == [~BOS, *encode("question"), END_OF_TURN, END]
    assert first.vocab_size == VOCAB_SIZE
    assert isinstance(first.segments[0].base, np.memmap)
    assert not caplog.records
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "encode_examples", None, raising=False)
        assert opened().fingerprint() == fingerprint
    damaged = sorted(cache.glob("a.jsonl-*.tokens"))[0]
    content = bytearray(damaged.read_bytes())
    content[3] ^= 1
    damaged.write_bytes(content)
    assert opened().fingerprint() == fingerprint
    assert "is damaged, and is encoded again" in caplog.text


@settings(max_examples=30)
@given(st.lists(st.integers(1, 60), min_size=2, max_size=9), st.integers(1, 20))
def test_a_long_document_becomes_parts_without_a_loss(sizes: list[int], context: int) -> None:
    sizes = [size + 1 for size in sizes]
    numbers = iter(range(sum(sizes)))
    documents = [[next(numbers) for _ in range(size)] for size in sizes]
    array = np.array([token for document in documents for token in (*document, END)], np.int32)
    spans_N4, num_cut = examples_module._spans(array, 0, context)
    assert num_cut == 0
    examples = Examples([array], spans_N4, sum(sizes), is_packed=False)
    batch = next(Batches(examples, context=context, batch_size=len(examples), seed=0))
    targets = batch.targets_BT[batch.targets_BT != IGNORE].tolist()
    assert sorted(targets) == [token for document in documents for token in document[1:]]
    assert batch.num_tokens == len(targets)
    train, valid = examples.split(0.4)
    owners = [
        {next(n for n, document in enumerate(documents) if array[start] in document)}
        for part in (train, valid)
        for start in part.spans_N4[:, 1]
    ]
    held = [set().union(*owners[: len(train)]), set().union(*owners[len(train) :])]
    assert not held[0] & held[1], "a document is not torn apart"
    assert held[0] | held[1] == set(range(len(sizes)))


def test_long_completions_are_cut_and_those_without_targets_left_out_with_a_count(
    tmp_path: Path, tokenizer: ModelTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    long = {"prompt": "be", "completion": " be" * 30}
    unlearned = {"prompt": "question " * 9, "completion": "or"}
    path = write_rows(tmp_path / "a.jsonl", long, {"text": "be"}, unlearned, {"text": "be " * 30})
    options: dict[str, Any] = {"tokenizer": tokenizer, "context": 8, "cache": tmp_path / "cache"}
    examples = open_examples([path], **options)
    size = len(tokenizer.encode("be " * 30)) + 1
    parts = [min(8, size - start) for start in range(0, size, 8)]
    assert examples.spans_N4[:, 3].tolist() == [7, 2, *parts]
    assert "2 of 4 examples are longer than --context 8, and are cut" in caplog.text
    assert "1 of 4 examples in '" in caplog.text
    found = "left out, the first of them example 3: 1 with no token to learn among the first 8 (--"
    assert found in caplog.text
    assert "none at all" not in caplog.text
    write_rows(path, unlearned, unlearned)
    message = "none of the 2 examples in '.*a.jsonl' has a token to learn; a conversation"
    with pytest.raises(DataError, match=message):
        open_examples([path], **options)


def test_a_token_that_the_model_does_not_know_is_refused(
    tmp_path: Path, tokenizer: ModelTokenizer
) -> None:
    path = write_rows(tmp_path / "a.jsonl", {"text": "be"})
    options: dict[str, Any] = {"tokenizer": tokenizer, "context": 8, "cache": tmp_path / "cache"}
    assert open_examples([path], **options, vocab_size=303).vocab_size == 303
    message = r"makes token 302 of '.*a.jsonl', but the model has only 302 tokens, up to 301; use"
    for _ in range(2):  # encoded, and from the cache
        with pytest.raises(DataError, match=message):
            open_examples([path], **options, vocab_size=302)
    # Also one that is only read.
    path = write_rows(tmp_path / "b.jsonl", {"prompt": "<|im_end|>", "completion": "b"})
    with pytest.raises(DataError, match=message.replace("a.jsonl", "b.jsonl")):
        open_examples([path], **options, vocab_size=302)


def test_data_is_text_or_examples_but_not_both(tmp_path: Path, tokenizer: ModelTokenizer) -> None:
    text = tmp_path / "a.txt"
    text.write_text("To be, or not to be " * 100)
    rows = write_rows(tmp_path / "a.jsonl", *[{"text": "be"}] * 20)
    options: dict[str, Any] = {
        "valid_fraction": 0.1, "tokenizer": tokenizer, "context": 8, "cache": tmp_path / "cache",
        "vocab_size": VOCAB_SIZE,
    }  # fmt: skip
    for train, valid in (open_data([text], [], **options), open_data([text], [text], **options)):
        assert isinstance(train, Tokens)
        assert isinstance(valid, Tokens)
    train, valid = open_data([rows], [], **options)
    assert isinstance(train, Examples)
    assert isinstance(valid, Examples)
    assert (len(train), len(valid), train.is_packed) == (18, 2, True)
    train, valid = open_data([rows], [rows], **options, is_packed=False)
    assert [len(part) for part in (train, valid) if isinstance(part, Examples)] == [20, 20]
    assert not train.is_packed
    with pytest.raises(DataError, match=r"'.*a.txt' is text and '.*a.jsonl' has examples; name"):
        open_data([rows], [text], **options)


# A packed row in a model


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_packed_examples_do_not_see_each_other(attention: str) -> None:
    model = language_model("llama", attn_implementation=attention).eval()
    shapes = [(3, 5), (1, 2), (4, 4), (2, 9), (1, 1)]
    batch = next(Batches(examples_of(shapes), context=30, batch_size=1, seed=0))
    assert len(sequences(batch)[0]) == 5, "all in one row"
    with torch.no_grad():
        packed = model(batch.inputs_BT, position_ids=batch.positions_BT, use_cache=False).logits
        apart = model(batch.inputs_BT, use_cache=False).logits
        start = 0
        for example in sequences(batch)[0]:
            tokens = torch.tensor([[token for token, _ in example]])
            alone = model(tokens, use_cache=False).logits
            stop = start + len(example)
            # The same sums of another shape: a few units of the last place of fp32.
            torch.testing.assert_close(packed[:, start:stop], alone, atol=2e-6, rtol=1e-5)
            if start:
                assert not torch.allclose(apart[:, start:stop], alone, atol=1e-3)
            start = stop


@pytest.fixture(autouse=True)
def warnings_only(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)

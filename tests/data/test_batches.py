"""Batches: every token once in an epoch, another order and other borders in the next, exact resume."""

from collections import Counter
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings, strategies as st

from samo.data import batches as module
from samo.data.batches import IGNORE, Batch, Batches, validation_batches
from samo.data.tokens import Tokens
from samo.errors import DataError

Window = tuple[int, ...]

segment_sizes = st.lists(st.integers(1, 120), min_size=1, max_size=5)
contexts = st.integers(1, 20)
seeds = st.integers(0, 2**32)


def counted(*sizes: int) -> Tokens:
    """Return segments whose tokens count up from 1 through all of them, so that each is unique."""
    ends = np.cumsum(sizes) + 1
    segments = [np.arange(end - size, end) for end, size in zip(ends, sizes)]
    return Tokens(segments, vocab_size=int(ends[-1]))


def windows(batch: Batch) -> list[Window]:
    """Return the inputs of each row, after a look at its targets and its padding."""
    found = []
    for inputs, targets in zip(batch.inputs_BT.tolist(), batch.targets_BT.tolist()):
        size = sum(target != IGNORE for target in targets)
        assert size >= 1
        assert inputs[size:] == [0] * (len(inputs) - size)
        assert targets[size:] == [IGNORE] * (len(inputs) - size)
        assert inputs[1:size] == targets[: size - 1]
        assert targets[size - 1] == inputs[size - 1] + 1
        found.append(tuple(inputs[:size]))
    return found


def epoch(tokens: Tokens, context: int, seed: int, number: int) -> list[Window]:
    one = Batches(tokens, context=context, batch_size=1, seed=seed)
    one.position = number * one.num_windows
    return [window for batch in islice(one, one.num_windows) for window in windows(batch)]


def inputs_of(tokens: Tokens) -> list[int]:
    """Return the tokens that have one after them in their segment."""
    return [int(token) for segment in tokens.segments for token in segment[:-1]]


# One epoch


@given(segment_sizes, contexts, seeds, st.integers(0, 1000))
def test_an_epoch_has_every_token_once_and_no_window_crosses_a_segment(
    sizes: list[int], context: int, seed: int, number: int
) -> None:
    tokens = counted(*sizes)
    assume(sum(size for size in sizes if size > 1) > context)
    found = epoch(tokens, context, seed, number)
    assert sorted(token for window in found for token in window) == inputs_of(tokens)
    owners = {int(token): n for n, segment in enumerate(tokens.segments) for token in segment}
    for window in found:
        assert len({owners[token] for token in (*window, window[-1] + 1)}) == 1
        assert len(window) <= context


@given(segment_sizes, contexts, seeds)
def test_only_the_first_and_last_window_of_a_segment_are_short(
    sizes: list[int], context: int, seed: int
) -> None:
    tokens = counted(*sizes)
    assume(sum(size for size in sizes if size > 1) > context)
    firsts = {int(segment[0]) for segment in tokens.segments}
    lasts = {int(segment[-1]) - 1 for segment in tokens.segments}
    for window in epoch(tokens, context, seed, 0):
        assert len(window) == context or window[0] in firsts or window[-1] in lasts


def test_a_segment_of_one_token_has_no_window() -> None:
    tokens = counted(1, 9, 1)
    assert sorted(token for window in epoch(tokens, 4, 0, 0) for token in window) == list(
        range(2, 10)
    )


# From epoch to epoch


@pytest.mark.parametrize("size", range(81, 98))  # every remainder of a division by the context
def test_each_epoch_has_another_order_and_other_borders(size: int) -> None:
    tokens = counted(size)
    epochs = [epoch(tokens, 16, 0, number) for number in range(60)]
    heads = Counter(min(map(len, filter(lambda window: 1 in window, found))) for found in epochs)
    assert len(heads) >= 5, "the first window has many lengths"
    assert heads.most_common(1)[0][1] < 30, "and no favourite among them"
    assert len(set(map(tuple, epochs))) > 50, "orders of 6 windows repeat by chance"
    places = Counter(next(n for n, w in enumerate(found) if 40 in w) for found in epochs)
    assert len(places) >= 5, "and a token has many places"


def test_over_the_epochs_a_token_is_at_nearly_every_place_of_a_window() -> None:
    tokens = counted(201)
    places: Counter[int] = Counter()
    for number in range(60):
        places.update(w.index(100) for w in epoch(tokens, 8, 0, number) if 100 in w)
    assert len(places) == 7, "every shift but 0, which would leave the added window empty"
    assert max(places.values()) < 20


def test_segments_are_shifted_apart_from_each_other() -> None:
    tokens = counted(90, 90)
    pairs = set()
    for number in range(30):
        found = epoch(tokens, 16, 0, number)
        pairs.add(tuple(len(next(w for w in found if first in w)) for first in (1, 91)))
    assert len(pairs) > 10


def test_short_segments_get_no_window_more_than_they_need() -> None:
    for size in range(2, 49):
        batches = Batches(counted(size, 100), context=16, batch_size=1, seed=0)
        alone = Batches(counted(100), context=16, batch_size=1, seed=0)
        assert batches.num_windows - alone.num_windows == -(-(size - 1) // 16)


def test_seeds_give_different_orders() -> None:
    tokens = counted(300)
    assert len({tuple(epoch(tokens, 16, seed, 0)) for seed in range(10)}) == 10


def test_epochs_of_one_seed_are_not_those_of_the_next() -> None:
    tokens = counted(300)
    assert epoch(tokens, 16, 0, 1) != epoch(tokens, 16, 1, 0)


# Batches


@settings(max_examples=50)
@given(segment_sizes, contexts, st.integers(1, 40), seeds)
def test_batches_of_any_size_draw_the_same_windows(
    sizes: list[int], context: int, batch_size: int, seed: int
) -> None:
    tokens = counted(*sizes)
    assume(sum(size for size in sizes if size > 1) > context)
    one = Batches(tokens, context=context, batch_size=1, seed=seed)
    many = Batches(tokens, context=context, batch_size=batch_size, seed=seed)
    found = [window for batch in islice(many, 3) for window in windows(batch)]
    assert found == [w for batch in islice(one, 3 * batch_size) for w in windows(batch)]
    assert many.position == one.position == 3 * batch_size


def test_a_batch_may_span_several_epochs() -> None:
    tokens = counted(20)
    batches = Batches(tokens, context=16, batch_size=7, seed=3)
    assert batches.num_windows == 2
    found = windows(next(batches))
    assert found == [w for number in range(4) for w in epoch(tokens, 16, 3, number)][:7]


@given(st.integers(0, 10**12))
def test_a_position_that_is_set_goes_on_exactly(position: int) -> None:
    tokens = counted(333, 20)
    one, other = (Batches(tokens, context=16, batch_size=5, seed=1) for _ in range(2))
    one.position = position
    next(one)
    other.position = one.position
    assert one.position == position + 5
    for batch, again in islice(zip(one, other), 3):
        assert torch.equal(batch.inputs_BT, again.inputs_BT)
        assert torch.equal(batch.targets_BT, again.targets_BT)


def test_epochs_are_counted_in_windows() -> None:
    batches = Batches(counted(1000), context=16, batch_size=21, seed=0)
    assert batches.num_windows == 63
    assert batches.epoch == 0
    next(batches)
    assert batches.epoch == 21 / 63
    batches.position = 630
    assert batches.epoch == 10


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, ">u2", np.int64])
def test_batches_are_int64_of_any_tokens(dtype: str) -> None:
    tokens = Tokens([np.arange(100).astype(dtype)], vocab_size=100)
    batch = next(Batches(tokens, context=8, batch_size=4, seed=0))
    assert [part.dtype for part in batch[:2]] == [torch.int64, torch.int64]
    assert [part.shape for part in batch[:2]] == [(4, 8), (4, 8)]
    assert all(part.is_contiguous() for part in batch[:2])


def test_real_targets_are_counted() -> None:
    tokens = counted(12)
    found = list(validation_batches(tokens, context=8, batch_size=4, max_batches=9))
    assert [batch.num_tokens for batch in found] == [11]


def test_a_batch_reads_no_more_than_its_windows() -> None:
    class Watched(np.ndarray):
        num_read = 0

        def __getitem__(self, key: Any) -> Any:
            Watched.num_read += key.stop - key.start
            return super().__getitem__(key)

    batches = Batches(counted(100_000), context=16, batch_size=5, seed=0)
    segments = batches._windows._segments
    segments[:] = [segment.view(Watched) for segment in segments]
    next(batches)
    assert Watched.num_read == 5 * 16 * 2


# Validation


@given(segment_sizes, contexts, st.integers(1, 7))
def test_validation_without_a_limit_has_every_token_once(
    sizes: list[int], context: int, batch_size: int
) -> None:
    tokens = counted(*sizes)
    assume(sum(size for size in sizes if size > 1) > context)
    found = list(
        validation_batches(tokens, context=context, batch_size=batch_size, max_batches=1000)
    )
    assert [token for batch in found for w in windows(batch) for token in w] == inputs_of(tokens)
    assert all(len(batch.inputs_BT) == batch_size for batch in found[:-1])
    assert 1 <= len(found[-1].inputs_BT) <= batch_size


def test_limited_validation_is_spread_evenly_and_the_same_every_time() -> None:
    tokens = counted(5000, 5000)
    one, other = (
        list(validation_batches(tokens, context=10, batch_size=4, max_batches=5)) for _ in range(2)
    )
    starts = [int(inputs[0]) for batch in one for inputs in batch.inputs_BT]
    assert len(one) == 5
    assert len(starts) == 20
    assert starts[0] == 1
    assert set(np.diff(starts)) == {500}
    for batch, again in zip(one, other):
        assert torch.equal(batch.inputs_BT, again.inputs_BT)


# What is refused


def test_fewer_tokens_than_a_sequence_are_refused() -> None:
    message = (
        r"64 tokens are fewer than one sequence needs, 65 \(a context of 64, and the token after it\); "
        r"give more text or a smaller --context"
    )
    for tokens in (counted(64), counted(30, 34), counted(64, 1, 1)):
        with pytest.raises(DataError, match=message):
            Batches(tokens, context=64, batch_size=1, seed=0)
        with pytest.raises(DataError, match=message):
            validation_batches(tokens, context=64, batch_size=1, max_batches=1)
    assert Batches(counted(30, 35), context=64, batch_size=1, seed=0).num_windows == 2
    with pytest.raises(DataError, match="0 tokens are fewer than one sequence needs, 3 "):
        Batches(counted(1, 1, 1, 1), context=2, batch_size=1, seed=0)


@pytest.mark.parametrize("name", ["context", "batch_size", "max_batches"])
def test_a_size_less_than_one_is_refused(name: str) -> None:
    sizes = {"context": 4, "batch_size": 2, "max_batches": 1, name: 0}
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        validation_batches(counted(100), **sizes)
    if name != "max_batches":
        del sizes["max_batches"]
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            Batches(counted(100), **sizes, seed=0)


def test_a_negative_position_is_refused() -> None:
    batches = Batches(counted(100), context=4, batch_size=2, seed=0)
    with pytest.raises(ValueError, match="a position is a number of windows, 0 or more, got -1"):
        batches.position = -1
    assert batches.position == 0


def test_ignored_targets_are_those_that_torch_ignores() -> None:
    assert torch.nn.CrossEntropyLoss().ignore_index == module.IGNORE


@given(
    num_tokens=st.integers(40, 200),
    batch_size=st.integers(1, 9),
    parts=st.integers(1, 5),
    seed=st.integers(0, 9),
)
def test_parts_put_together_are_the_batch(
    num_tokens: int, batch_size: int, parts: int, seed: int
) -> None:
    tokens = Tokens([np.arange(num_tokens)], vocab_size=num_tokens)
    sizes = {"context": 7, "batch_size": batch_size}
    whole = Batches(tokens, **sizes, seed=seed)
    shares = [Batches(tokens, **sizes, seed=seed, part=(i, parts)) for i in range(parts)]
    for _ in range(3):
        expected, found = next(whole), [next(share) for share in shares]
        lengths = [len(part.inputs_BT) for part in found]
        assert max(lengths) - min(lengths) <= 1
        assert lengths == sorted(lengths, reverse=True)
        assert torch.equal(torch.cat([part.inputs_BT for part in found]), expected.inputs_BT)
        assert torch.equal(torch.cat([part.targets_BT for part in found]), expected.targets_BT)
        assert {part.num_tokens for part in found} == {int((expected.targets_BT != IGNORE).sum())}
        assert {share.position for share in shares} == {whole.position}
    valid = {"max_batches": 3, **sizes}
    divided = [list(validation_batches(tokens, **valid, part=(i, parts))) for i in range(parts)]
    for expected, *found in zip(validation_batches(tokens, **valid), *divided, strict=True):
        assert torch.equal(torch.cat([part.inputs_BT for part in found]), expected.inputs_BT)

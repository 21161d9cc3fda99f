"""Batches: every token once an epoch, a new order and new borders in the next, exact resume."""

from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings, strategies as st

from samo.data.batches import IGNORE, Batch, Batches, validation_batches
from samo.data.tokens import Tokens
from samo.errors import DataError

Window = tuple[int, ...]

segment_sizes = st.lists(st.integers(1, 80), min_size=1, max_size=4)
contexts = st.integers(1, 20)
seeds = st.integers(0, 2**32)


def counted(*sizes: int) -> Tokens:
    """Return segments whose tokens count up from 1 across all of them, so that each is unique."""
    ends = np.cumsum(sizes) + 1
    segments = [np.arange(end - size, end) for end, size in zip(ends, sizes)]
    return Tokens(segments, vocab_size=int(ends[-1]))


def windows(batch: Batch) -> list[Window]:
    """Return the inputs of each row, after a check of its targets and padding."""
    found = []
    assert batch.inputs_BT.dtype == batch.targets_BT.dtype == torch.int64
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
    one = Batches(tokens, context=context, batch_size=7, seed=seed)
    one.position = number * one.num_windows
    batches = islice(one, -(-one.num_windows // 7))
    return [window for batch in batches for window in windows(batch)][: one.num_windows]


def inputs_of(tokens: Tokens) -> list[int]:
    """Return the tokens that have a next one in their segment."""
    return [int(token) for segment in tokens.segments for token in segment[:-1]]


@settings(max_examples=30)
@given(segment_sizes, contexts, seeds, st.integers(0, 1000))
def test_an_epoch_has_every_token_once_in_windows_within_segments(
    sizes: list[int], context: int, seed: int, number: int
) -> None:
    tokens = counted(*sizes)
    assume(sum(size for size in sizes if size > 1) > context)
    found = epoch(tokens, context, seed, number)
    assert sorted(token for window in found for token in window) == inputs_of(tokens)
    owners = {int(token): n for n, segment in enumerate(tokens.segments) for token in segment}
    firsts = {int(segment[0]) for segment in tokens.segments}
    lasts = {int(segment[-1]) - 1 for segment in tokens.segments}
    for window in found:
        assert len({owners[token] for token in (*window, window[-1] + 1)}) == 1
        is_short = len(window) < context
        assert len(window) <= context
        assert not is_short or window[0] in firsts or window[-1] in lasts


def test_each_epoch_has_a_new_order_and_new_borders() -> None:
    tokens = counted(90, 90)
    epochs = [epoch(tokens, 16, 0, number) for number in range(60)]
    assert epoch(tokens, 16, 1, 0) != epochs[0], "another seed"
    assert len(set(map(tuple, epochs))) == 60
    heads = [
        tuple(len(next(w for w in found if first in w)) for first in (1, 91)) for found in epochs
    ]
    assert len(set(heads)) > 20, "segments shift, and apart from each other"
    places = Counter(next(n for n, w in enumerate(found) if 40 in w) for found in epochs)
    assert len(places) >= 8, "and a token has many places in the order"
    assert max(places.values()) < 20


def test_an_order_is_stable() -> None:
    """Checkpoints hold a position, so an order must not change from one version to the next."""
    batches = Batches(counted(60), context=4, batch_size=8, seed=3)
    assert next(batches).inputs_BT[:, 0].tolist() == [44, 32, 36, 4, 48, 8, 56, 40]


@settings(max_examples=30)
@given(segment_sizes, contexts, st.integers(1, 7))
def test_validation_without_a_limit_has_every_token_once(
    sizes: list[int], context: int, batch_size: int
) -> None:
    tokens = counted(*sizes)
    assume(sum(size for size in sizes if size > 1) > context)
    limits = {"context": context, "batch_size": batch_size, "max_batches": 1000}
    found = list(validation_batches(tokens, **limits))
    assert [token for batch in found for w in windows(batch) for token in w] == inputs_of(tokens)
    assert sum(batch.num_tokens for batch in found) == len(inputs_of(tokens))
    assert all(len(batch.inputs_BT) == batch_size for batch in found[:-1])
    assert 1 <= len(found[-1].inputs_BT) <= batch_size


def test_limited_validation_is_spread_evenly_and_the_same_every_time() -> None:
    one, other = (
        list(validation_batches(counted(5000, 5000), context=10, batch_size=4, max_batches=5))
        for _ in range(2)
    )
    starts = [int(inputs[0]) for batch in one for inputs in batch.inputs_BT]
    assert (len(one), len(starts), starts[0]) == (5, 20, 1)
    assert set(np.diff(starts)) == {500}
    assert all(torch.equal(a.inputs_BT, b.inputs_BT) for a, b in zip(one, other))


def test_columns_after_the_last_target_are_trimmed() -> None:
    inputs_BT = torch.arange(10).view(2, 5)
    targets_BT = torch.tensor([[1, IGNORE, IGNORE, IGNORE, IGNORE], [IGNORE, 3, 4, IGNORE, IGNORE]])
    for positions_BT in (None, inputs_BT + 7):
        found = Batch(inputs_BT, targets_BT, 3, 10, positions_BT).trimmed()
        assert torch.equal(found.inputs_BT, inputs_BT[:, :3])
        assert torch.equal(found.targets_BT, targets_BT[:, :3])
        assert (found.num_tokens, found.num_read) == (3, 10)
        if positions_BT is not None:
            assert found.positions_BT is not None
            assert torch.equal(found.positions_BT, positions_BT[:, :3])


def test_fewer_tokens_than_a_sequence_are_refused() -> None:
    message = "64 tokens are too few for a sequence of 64 and the token after it; use more text"
    with pytest.raises(DataError, match=r"^1 tokens are too few"):
        Batches(counted(1), context=64, batch_size=1, seed=0)
    for tokens in (counted(64), counted(30, 34), counted(64, 1, 1)):
        with pytest.raises(DataError, match=message):
            Batches(tokens, context=64, batch_size=1, seed=0)
        with pytest.raises(DataError, match=message):
            validation_batches(tokens, context=64, batch_size=1, max_batches=1)
    assert Batches(counted(30, 35), context=64, batch_size=1, seed=0).num_windows == 2

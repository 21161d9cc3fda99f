"""Mask files: damage is refused, and a failed save leaves the old file."""

import os
import random
import re
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import save_file

from samo import Mask, MaskError, Masks

METADATA = {"format": "samo-masks", "version": "1", "shapes": '{"w": [8, 8]}'}


def random_mask(shape: tuple[int, ...], seed: int = 0) -> Mask:
    return Mask.from_bool(torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5)


def some_masks() -> Masks:
    return Masks({f"{i}.weight": random_mask((5, 7 + i), i) for i in range(9)})


names = st.text(st.characters(codec="utf-8"), min_size=1).filter("__metadata__".__ne__)
shapes = st.lists(st.integers(0, 20), max_size=3).map(tuple)


@settings(max_examples=15)
@given(st.dictionaries(names, shapes, max_size=4), st.integers(0, 99))
def test_a_file_gives_back_what_was_saved(named: dict[str, tuple[int, ...]], seed: int) -> None:
    masks = Masks({n: random_mask(shape, seed + i) for i, (n, shape) in enumerate(named.items())})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "masks.safetensors"
        masks.save(path)
        loaded = Masks.load(str(path))
        assert [path.name] == os.listdir(folder)
    assert loaded == masks
    assert loaded.fingerprint() == masks.fingerprint()


def test_equal_masks_are_equal_bytes_in_whatever_order_they_come(tmp_path: Path) -> None:
    masks = some_masks()
    masks.save(tmp_path / "masks")
    Masks({name: masks[name] for name in sorted(masks, reverse=True)}).save(tmp_path / "other")
    assert (tmp_path / "masks").read_bytes() == (tmp_path / "other").read_bytes()


def test_a_file_may_be_a_link_and_hold_one_mask_twice(tmp_path: Path) -> None:
    mask = random_mask((3, 4))
    (tmp_path / "link").symlink_to("masks")
    Masks({"a": mask, "b": mask}).save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert Masks.load(tmp_path / "masks") == Masks({"a": mask, "b": mask})


def test_any_flipped_bit_and_any_other_length_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "masks"
    Masks({"w": random_mask((61,)), "v": random_mask((3, 50))}).save(path)
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    chance = random.Random(0)
    places = [*chance.sample(range(64), 20), *chance.sample(range(64, 8 * header), 20)]
    damaged = [data + b"\0"]
    for bit in [*places, *range(8 * header, 8 * len(data))]:
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        damaged.append(bytes(flipped))
    for length in [0, 1, 7, 8, len(data) - 1, *chance.sample(range(len(data)), 20)]:
        damaged.append(data[:length])
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(MaskError, match=re.escape(str(path))):
            Masks.load(path)


def test_what_is_not_a_mask_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(MaskError, match=r"mask file '.*file' does not exist; write one with"):
        Masks.load(path)
    with pytest.raises(MaskError, match=r"is a folder; read its masks with samo\.load_masks\("):
        Masks.load(tmp_path)
    path.write_text("not a mask file, but long enough to hold a header\n" * 5)
    with pytest.raises(MaskError, match=r"is not a mask file"):
        Masks.load(path)
    save_file({"weight": torch.ones(4)}, path, {"format": "pt"})
    with pytest.raises(MaskError, match=r"its format is 'pt', not 'samo-masks'; .*from_zeros"):
        Masks.load(path)
    save_file({}, path, METADATA | {"version": "2"})
    with pytest.raises(MaskError, match=r"has version '2', this samo reads version '1'; update"):
        Masks.load(path)


@pytest.mark.parametrize(
    "change",
    [
        *({"shapes": text} for text in ("[]", "{}", "not json", "[" * 100_000, None)),
        *({"shapes": f'{{"w": {shape}}}'} for shape in ("[8]", '"8, 8"', '[8, 8], "v": [0]')),
        {"shapes": '{"v": [8, 8]}'},
        {"fingerprint": "00"},
        {"fingerprint": None},
        {},  # but for a tensor too many
    ],
    ids=lambda change: str(change)[:40],
)
def test_a_file_whose_parts_do_not_agree_is_refused(
    change: dict[str, str | None], tmp_path: Path
) -> None:
    mask, path = random_mask((8, 8)), tmp_path / "masks"
    good = METADATA | {"fingerprint": Masks({"w": mask}).fingerprint()}
    save_file({"w": mask.words}, path, good)
    assert Masks.load(path) == Masks({"w": mask})
    words = {"w": mask.words} if change else {"w": mask.words, "v": torch.zeros(2)}
    save_file(words, path, {k: v for k, v in {**good, **change}.items() if v is not None})
    with pytest.raises(MaskError, match=r"mask file '.*' is damaged: its "):
        Masks.load(path)


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "masks"
    some_masks().save(path)
    data = path.read_bytes()
    with mock.patch.object(os, "fsync", side_effect=EOFError), pytest.raises(EOFError):
        Masks({}).save(path)
    assert os.listdir(tmp_path) == [path.name]
    assert path.read_bytes() == data


def test_a_file_needs_a_folder_and_a_free_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no folder '.*missing'"):
        some_masks().save(tmp_path / "missing" / "masks")
    (tmp_path / "masks").mkdir()
    with pytest.raises(OSError, match="masks"):
        some_masks().save(tmp_path / "masks")
    assert os.listdir(tmp_path) == ["masks"]

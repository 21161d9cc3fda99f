"""Compressed folders from strangers: what does not fit is refused before it takes memory."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import samo
from samo.core.modules import BITMAP, to_bytes
from samo.errors import CheckpointError, MaskError
from samo.integrations.folder_files import edit_config
from samo.integrations.hf_quantizer import SamoConfig
from samo.integrations.model_folders import open_compressed, open_masks, open_model
from tests.integrations.cases import exported, load, pruned

NAME: Final = "model.layers.0.mlp.up_proj.weight"
BITS: Final = NAME + BITMAP
Edit = Callable[[Any], Tensor | None]


@pytest.fixture
def compressed(tmp_path: Path) -> Path:
    return exported(tmp_path, "compressed")


@pytest.fixture
def bitmask(tmp_path: Path) -> Path:
    return exported(tmp_path, "bitmask", intermediate_size=60)  # rows that end within a byte


def change(folder: Path, name: str, edit: Edit) -> None:
    """Change a tensor of a folder's file; None stands for one that is not there."""
    state = load_file(folder / "model.safetensors")
    changed = edit(state.pop(name, None))
    if changed is not None:
        state[name] = changed
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def flipped(place: int) -> Edit:
    def edit(bitmap: Any) -> Tensor:
        bitmap[place] ^= 128
        return torch.as_tensor(bitmap)

    return edit


HOSTILE: Final[dict[str, tuple[str, Edit, str]]] = {
    "values cut": (NAME, lambda v: v[:-1], r"shape \(204,\) in the file, \(205,\) in the model"),
    "values dense": (NAME, lambda _: torch.zeros(64, 32), r"has shape \(64, 32\)"),
    "values of integers": (NAME, lambda v: v.long(), "is I64 in the file"),
    "no values": (NAME, lambda _: None, "is not complete: 'model.layers.0.mlp.up_proj.weight' is"),
    "a flipped bit": (BITS, flipped(0), "its bits do not match their fingerprint"),
    "another fingerprint": (BITS, flipped(-1), "its bits do not match their fingerprint"),
    "a short bitmap": (BITS, lambda b: b[:40], "a mask of 2,048 weights needs 64 int32 words"),
    "an empty bitmap": (BITS, lambda b: b[:0], "does not fit the model"),
    "a bitmap of floats": (BITS, lambda b: b.float(), r"is F32 \(288,\), not a list of bytes"),
    "no bitmap": (BITS, lambda _: None, r"has shape \(205,\) in the file, \(64, 32\)"),
    "a bitmap of nothing": (
        "x.weight" + BITMAP,
        lambda _: torch.zeros(288, dtype=torch.uint8),
        r"'x.weight_bitmap' is of no weight",
    ),
    "an embedding too large": (
        "model.embed_tokens.weight",
        lambda _: torch.zeros(65, 32),
        r"embed_tokens.weight' has shape \(65, 32\) in the file, \(64, 32\) in the model",
    ),
    "a tensor too many": (
        "model.layers.7.x",
        lambda _: torch.zeros(1),
        "the model has no 'model.layers.7.x'",
    ),
}


def assert_refused(folder: Path, message: str) -> None:
    for act in (load, open_model, open_compressed):
        with pytest.raises((CheckpointError, MaskError), match=message):
            act(folder)


@pytest.mark.parametrize("case", HOSTILE)
def test_what_a_kernel_indexes_by_is_checked(case: str, compressed: Path) -> None:
    *edit, message = HOSTILE[case]
    change(compressed, *edit)
    assert_refused(compressed, message)


def test_a_compressed_folder_has_bitmaps(compressed: Path) -> None:
    state = load_file(compressed / "model.safetensors")
    for name in [name for name in state if name.endswith(BITMAP)]:
        change(compressed, name, lambda _: None)
    assert_refused(compressed, "has no bitmaps, so it is not compressed; remove")


def test_a_tied_weight_has_one_mask(tmp_path: Path) -> None:
    model, masks = pruned("Llama", tie_word_embeddings=True)
    shape = model.get_input_embeddings().weight.shape
    both = [samo.Mask.from_bool(torch.arange(shape.numel()).view(shape) % n == 0) for n in (2, 3)]
    masks = samo.Masks({**masks, "model.embed_tokens.weight": both[0]})
    folder = samo.export(model, tmp_path / "llama", format="compressed", masks=masks)
    change(folder, "lm_head.weight_bitmap", lambda _: to_bytes(both[1]))
    assert_refused(folder, r"is not that of 'model.embed_tokens.weight', which is the same")


def test_bits_past_the_end_of_a_mask_are_refused(tmp_path: Path) -> None:
    # Masks of 1,056 weights, not a multiple of 64.
    folder = exported(tmp_path, "compressed", intermediate_size=33)
    change(folder, BITS, flipped(-33))
    with pytest.raises(MaskError, match="has bits set past its last weight"):
        load(folder)


def test_masks_of_another_model_are_refused(compressed: Path) -> None:
    model, _ = pruned("Llama", intermediate_size=128)
    with pytest.raises(MaskError, match="does not fit the model"):
        open_masks(compressed, model)
    state = load_file(compressed / "model.safetensors")
    again = load(compressed)
    with pytest.raises(MaskError, match=f"the bitmap of '{NAME}' is not that of its mask"):
        again.model.layers[0].mlp.up_proj.weight_bitmap = state[BITS].flip(0)


SIZES: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "layers": ({"num_hidden_layers": 10**9}, "1,000,000,000 layers, and its files have 35 tensors"),
    "one more layer": ({"num_hidden_layers": 3}, "is not complete"),
    "width": ({"intermediate_size": 10**9}, "does not fit|is not complete"),
    "vocabulary": ({"vocab_size": 10**12}, "does not fit|is not complete"),
    "more than memory has": ({"vocab_size": 2**62}, "cannot be read|is not complete"),
    "labels": ({"num_labels": 10**9}, "num_labels is 1000000000"),
}


@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("format", ["dense", "compressed", "bitmask"])
def test_sizes_are_compared_with_the_files(case: str, format: Any, tmp_path: Path) -> None:
    folder = exported(tmp_path, format)
    sizes, message = SIZES[case]
    edit_config(folder, **sizes)
    message = message.replace("35 tensors", r"\d+ tensors")
    with pytest.raises((CheckpointError, MaskError), match=message):
        open_model(folder)


def test_tables_that_no_file_holds_have_a_limit(tmp_path: Path) -> None:
    from transformers import GPTJConfig, GPTJForCausalLM

    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "rotary_dim": 4, "vocab_size": 32}
    GPTJForCausalLM(GPTJConfig(**sizes, n_positions=8)).save_pretrained(tmp_path)
    edit_config(tmp_path, n_positions=10**10)
    with pytest.raises(CheckpointError, match="asks for tables of 40,000,000,000 entries, such as"):
        open_model(tmp_path)


@pytest.mark.parametrize("format", ["dense", "compressed"])
def test_a_config_does_not_choose_how_the_model_is_called(format: Any, tmp_path: Path) -> None:
    """Its kernels would be code of the hub."""
    folder = exported(tmp_path, format)
    names = ("attn_implementation", "_attn_implementation", "experts_implementation")
    edit_config(folder, **dict.fromkeys(names, "someone/kernel"), return_dict=False)
    model: Any = open_model(folder)
    assert model.config._attn_implementation == "sdpa"
    assert model(input_ids=torch.zeros(1, 2, dtype=torch.int64)).logits.shape[:2] == (1, 2)


def test_links_among_chat_templates_are_not_followed(compressed: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (compressed / "additional_chat_templates").mkdir()
    (compressed / "additional_chat_templates" / "a.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"a\.jinja' is a link"):
        open_model(compressed)


@pytest.mark.parametrize("rate", [-0.5, 1.5, math.nan, None])
def test_a_dropout_that_is_no_probability_is_refused(rate: float | None, tmp_path: Path) -> None:
    folder = exported(tmp_path, "dense")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_dropout": rate}))
    with pytest.raises(CheckpointError, match="attention_dropout must be between 0 and 1, got "):
        open_model(folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "samo", "version": 2}, "compressed in version 2, this samo reads ver"),
        ({"quant_method": "samo", "version": True}, "compressed in version True"),
        ({"quant_method": "samo", "weights": "both"}, "weights must be 'resident', 'streamed'"),
        ({"quant_method": "samo", "weights": -1}, "weights must be .* got -1"),
        (
            {"quant_method": "samo", "masks": "x"},
            "masks and prepare of a quantization_config cannot come",
        ),
        ({"quant_method": "samo", "code": "x"}, "a quantization_config of samo has no setting 'c"),
    ],
)
def test_a_hostile_quantization_config_is_refused(
    settings: dict[str, Any], message: str, compressed: Path
) -> None:
    edit_config(compressed, quantization_config=settings)
    with pytest.raises(ValueError, match=message):
        load(compressed)
    if settings.get("weights") is None:  # which open_compressed sets
        with pytest.raises(CheckpointError, match=message):
            open_compressed(compressed)


@pytest.mark.parametrize("settings", [3, "samo", [], {}, {"quant_method": ["samo"]}])
def test_a_quantization_config_names_its_method(settings: Any, compressed: Path) -> None:
    edit_config(compressed, quantization_config=settings)
    for act in (open_model, open_compressed, lambda folder: open_masks(folder, None)):  # type: ignore[arg-type]
        with pytest.raises(CheckpointError, match="quantization_config does not name a quant_meth"):
            act(compressed)


def test_a_config_of_samo_is_for_compressed_folders(tmp_path: Path) -> None:
    folder = exported(tmp_path, "dense")
    with pytest.raises(ValueError, match="samo does require the model to be pre-quantized"):
        load(folder, quantization_config=SamoConfig())


def header(name: str, dtype: str, shape: list[int], offsets: list[int], size: int = 8) -> bytes:
    entry = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    other = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    text = json.dumps({name: entry, "other": other}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(size)


@pytest.mark.parametrize(
    "data",
    [
        header("a", "F32", [2**40], [4, 8]),
        header("a", "F32", [1], [0, 4]),
        header("a", "F32", [1], [4, 2**62]),
        header("a", "F32", [2**62, 2**62], [4, 8]),
        header("a", "F32", [-1], [4, 8]),
        header("a", "F32", [0, 2**63 + 1], [4, 4], size=4),
        header("a", "X7", [1], [4, 8]),
        b"\xff" * 64,
        b"",
    ],
    ids=[
        "size",
        "overlap",
        "offset",
        "overflow",
        "negative",
        "beside a zero",
        "dtype",
        "noise",
        "empty",
    ],
)
def test_a_hostile_header_is_refused(data: bytes, compressed: Path) -> None:
    (compressed / "model.safetensors").write_bytes(data)
    for act in (open_model, open_compressed):
        with pytest.raises(CheckpointError, match=r"model.safetensors' cannot be read: "):
            act(compressed)


BITMASKS: Final[dict[str, tuple[str, Edit, str]]] = {
    "no values": ("compressed", lambda _: None, "has a .bitmask and no .compressed"),
    "no shape": ("shape", lambda _: None, "has a .bitmask and no .shape"),
    "values cut": (
        "compressed",
        lambda values: values[1:],
        r"has values of F32 \(\d+,\), and its bitmask keeps \d+",
    ),
    "values of integers": ("compressed", lambda values: values.long(), "has values of I64"),
    "a huge shape": (
        "shape",
        lambda _: torch.tensor([2**40, 2**40]),
        r"has a .bitmask of U8 \(32, 8\) for a shape of \[1099511627776, ",
    ),
    "a negative shape": ("shape", lambda _: torch.tensor([32, -1]), "for a shape of"),
    "a shape of floats": ("shape", lambda _: torch.tensor([32.0, 60.0]), "has a .shape of F32"),
    "a scalar": ("bitmask", lambda bits: bits[0, 0], "has a .shape of I64"),
    "a shorter row": (
        "shape",
        lambda _: torch.tensor([32, 57]),
        "has bits set past the end of a row|its bitmask keeps",
    ),
    "a bit past the end of a row": (
        "bitmask",
        lambda bits: bits | torch.tensor([0] * 7 + [128], dtype=torch.uint8),
        "has bits set past the end of a row",
    ),
}


@pytest.mark.parametrize("case", BITMASKS)
def test_a_bitmask_folder_is_checked(case: str, bitmask: Path) -> None:
    part, edit, message = BITMASKS[case]
    change(bitmask, f"model.layers.0.mlp.down_proj.{part}", edit)  # rows of 60
    with pytest.raises(CheckpointError, match=message):
        open_model(bitmask)


def test_other_layouts_of_compressed_tensors_are_refused(bitmask: Path) -> None:
    cases: tuple[dict[str, Any], ...] = (
        {"config_groups": {"group_0": {}}},
        {"sparsity_config": {"format": "sparse-24-bitmask"}},
        {"sparsity_config": 3},
    )
    for settings in cases:
        method = {"quant_method": "compressed-tensors", **settings}
        edit_config(bitmask, quantization_config=method)
        with pytest.raises(
            CheckpointError, match=r"is quantized by compressed-tensors .*samo reads"
        ):
            open_model(bitmask)

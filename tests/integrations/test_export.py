"""Models written as Hugging Face folders, and read back."""

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import SafetensorError

import samo
from samo.errors import CheckpointError
from samo.integrations.model_folders import tokenizer_folder
from samo.utils import atomic_io
from tests.integrations.cases import load, names, pruned


def test_masks_make_zeros_without_changing_the_model(tmp_path: Path) -> None:
    model, _ = pruned("Llama", sparsity=0.5)
    before = {name: param.clone() for name, param in model.named_parameters()}
    masks = samo.prune(model, 0.9)
    again = load(samo.export(model, tmp_path / "out", masks=masks, dtype=torch.bfloat16))
    assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())
    assert model.config.dtype in (None, torch.float32)
    masks.apply_(model)
    for name, param in again.named_parameters():
        assert torch.equal(param, model.get_parameter(name).to(torch.bfloat16))


def test_tokenizer_files_are_copied_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja", "modeling_mine.py"):
        (source / name).write_text("{}")
    model, masks = pruned("GPT2")
    out = samo.export(model, tmp_path / "out", source=source, masks=masks)
    assert tokenizer_folder(out) == out
    assert (out / "chat_template.jinja").read_text() == "{}"
    assert "modeling_mine.py" not in names(out)
    (source / "vocab.json").symlink_to("/etc/passwd")
    with pytest.raises(CheckpointError, match=r"vocab.json' is a link, a pipe or a device"):
        samo.export(model, tmp_path / "other", source=source)
    assert names(tmp_path) == {"source", "out"}  # no half of a folder is left


def test_a_generation_config_is_handed_on_as_it_is(tmp_path: Path) -> None:
    model, masks = pruned("GPT2")
    model.generation_config.update(max_length=77, temperature=0.3, do_sample=False)
    own = model.generation_config
    again = load(samo.export(model, tmp_path / "out", masks=masks))
    assert model.generation_config is own
    found = again.generation_config
    assert (found.max_length, found.temperature, found.do_sample) == (77, 0.3, False)


def test_the_model_card_states_the_sparsity(tmp_path: Path) -> None:
    model, masks = pruned("Llama")
    out = samo.export(model, tmp_path / "my-llama", masks=masks)
    text = (out / "README.md").read_text()
    assert "# my-llama" in text
    assert f"Written by samo {samo.__version__}" in text
    assert "| mlp.up_proj.weight | 410 | 4,096 | 90 % |" in text
    assert "| 1 | 921 | 9,216 | 90 % |" in text


@pytest.mark.parametrize("format", ["dense", "compressed", "bitmask"])
def test_others_may_read_the_weights_as_they_may_read_the_config(
    tmp_path: Path, format: Any
) -> None:
    model, masks = pruned("Llama")
    before = os.umask(0o027)
    try:
        out = samo.export(model, tmp_path / "my-llama", format=format, masks=masks)
    finally:
        os.umask(before)
    assert {oct(path.stat().st_mode & 0o777) for path in out.iterdir()} == {"0o640"}


def test_a_folder_is_never_overwritten(tmp_path: Path) -> None:
    model, masks = pruned("GPT2")
    (tmp_path / "there").mkdir()
    with pytest.raises(CheckpointError, match="there' exists; choose another folder, or remove it"):
        samo.export(model, tmp_path / "there", masks=masks)
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(CheckpointError, match=r"cannot write '.*file/out': .*File exists; free"):
        samo.export(model, blocked / "out", masks=masks)


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    (model, masks), full = pruned("Llama"), SafetensorError("I/O error: No space left on device")
    with (
        mock.patch.object(type(model), "save_pretrained", side_effect=full),
        pytest.raises(CheckpointError, match=r"cannot write '.*out': I/O error: No space left"),
    ):
        samo.export(model, tmp_path / "out", masks=masks)
    assert not any(tmp_path.iterdir())


def test_drafts_of_killed_processes_are_removed_and_others_are_not(tmp_path: Path) -> None:
    model, masks = pruned("Llama")
    left, live, other = (tmp_path / name for name in (".out.00000001", ".out.00000002", ".outer"))
    for folder in (left, live, other):
        folder.mkdir()
        (folder / "model.safetensors").touch()
    with atomic_io.locked(live):
        samo.export(model, tmp_path / "out", masks=masks)
    assert names(tmp_path) == {".out.00000002", ".outer", "out"}


def test_a_folder_that_appears_meanwhile_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, masks = pruned("Llama")
    out = tmp_path / "out"

    def slow_card(*_: object) -> str:
        out.mkdir()
        return "a card"

    monkeypatch.setattr("samo.integrations.export.model_card", slow_card)
    with pytest.raises(CheckpointError, match="out' exists; choose another folder, or remove it"):
        samo.export(model, out, masks=masks)
    assert names(tmp_path) == {"out"}
    assert not names(out)


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    model, masks = pruned("GPT2")
    with pytest.raises(ValueError, match=r"format must be one of dense.* got 'gguf'"):
        samo.export(model, tmp_path / "out", format="gguf")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="model must be one of transformers, got Linear"):
        samo.export(torch.nn.Linear(2, 2), tmp_path / "out")
    samo.compress_(model, masks)
    with pytest.raises(ValueError, match="masks are for dense models; a compressed model has its"):
        samo.export(model, tmp_path / "out", masks=masks)
    assert not os.listdir(tmp_path)

"""Load Hugging Face folders through transformers, after their files are checked.

transformers fills what a file lacks with random weights and only logs it, and makes room for
whatever sizes config.json names. A folder may come from a stranger, so both are looked at first.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from samo.core.compress import decompress_
from samo.errors import CheckpointError, SamoError, first_words
from samo.integrations import folder_files, sparse_bitmask
from samo.integrations.folder_files import CONFIG, GENERATION, METHOD, QUANTIZATION
from samo.integrations.progress_bars import hidden_bars
from samo.mask.masks import Masks

__all__ = []

_SAFE: Final = {"local_files_only": True, "trust_remote_code": False}


def method_of(folder: Path) -> str | None:
    """Return the ``quant_method`` of a folder whose weights are not stored densely, else None."""
    found = folder_files.read_json(folder / CONFIG).get(QUANTIZATION)
    if found is None:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("quant_method"), str):
        raise CheckpointError(
            f"'{folder / CONFIG}' is damaged: its {QUANTIZATION} does not name a quant_method"
        )
    return str(found["quant_method"])


def open_dense(folder: Path, dtype: torch.dtype | None) -> nn.Module:
    """Load the model of a folder, dense."""
    method = method_of(folder)
    if method == METHOD:
        return decompress_(open_compressed(folder, dtype, weights="streamed"), dtype=dtype)
    specs = folder_files.read_specs(folder_files.weight_files(folder))
    if method == sparse_bitmask.METHOD:
        sparse_bitmask.check_config(folder, folder_files.read_json(folder / CONFIG))
        return from_state(folder, sparse_bitmask.read(specs), dtype)
    if method is not None:
        raise CheckpointError(
            f"'{folder}' is quantized ({method!r}), and samo prunes and trains weights that are "
            "not; use the original model"
        )
    with _reading(folder):
        transformers = _transformers(folder)
        config = _config(folder)
        _check_size(folder, config, sum(_numel(spec.shape) for spec in specs.values()), len(specs))
        options = {} if dtype is None else {"dtype": dtype}
        return _loaded(
            folder,
            transformers.AutoModelForCausalLM.from_pretrained(
                folder, **_SAFE, use_safetensors=True, output_loading_info=True, **options
            ),
        )


def open_compressed(folder: Path, dtype: torch.dtype | None, **options: Any) -> nn.Module:
    """Load a folder that samo compressed, as a compressed model; ``options`` as in SamoConfig."""
    specs = folder_files.read_specs(folder_files.weight_files(folder))
    with _reading(folder):
        transformers = _transformers(folder)
        config = _config(folder)
        if not isinstance(config.quantization_config, dict):
            config.quantization_config = config.quantization_config.to_dict()
        config.quantization_config |= options
        _check_size(folder, config, None, len(specs))
        dtypes = {} if dtype is None else {"dtype": dtype}
        return _loaded(
            folder,
            transformers.AutoModelForCausalLM.from_pretrained(
                folder, config=config, **_SAFE, use_safetensors=True, output_loading_info=True,
                **dtypes,
            ),
        )  # fmt: skip


def read_masks(folder: Path, model: nn.Module) -> Masks:
    """Return the masks of a folder that samo compressed, for a model of its shapes."""
    _transformers(folder)
    from samo.integrations.quantizer import read_masks

    return read_masks(model, folder_files.read_specs(folder_files.weight_files(folder)))


def from_state(
    folder: Path,
    state: Mapping[str, Tensor],
    dtype: torch.dtype | None,
    masks: Masks | None = None,
    **options: Any,
) -> nn.Module:
    """Build the model of a folder's config.json from a state dict, compressed if it has masks.

    ``options`` are those of SamoConfig.
    """
    with _reading(folder):
        transformers = _transformers(folder)
        config = _config(folder)
        vars(config).pop(QUANTIZATION, None)
        sizes = {name: masks[name].numel for name in masks} if masks else {}
        numel = sum(sizes.get(name, value.numel()) for name, value in state.items())
        model_class = _check_size(folder, config, numel, len(state))
        if masks is not None:
            config.quantization_config = {"quant_method": METHOD, "masks": masks, **options}
        if dtype is None:
            floats = [value.dtype for value in state.values() if value.is_floating_point()]
            dtype = max(floats, key=lambda found: found.itemsize)
        model = _loaded(
            folder,
            model_class.from_pretrained(
                None, config=config, state_dict=dict(state), dtype=dtype, output_loading_info=True
            ),
        )
        if (folder / GENERATION).is_file():
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
        return model


def empty_model(folder: Path, num_tensors: int) -> Any:
    """Return the model of a folder's config.json, of so many tensors, on the meta device."""
    with _reading(folder):
        config = _config(folder)
        vars(config).pop(QUANTIZATION, None)
        return _without_memory(folder, config, num_tensors)


def text_config(folder: Path) -> Any:
    """Return the config of a folder's language model, by transformers' own names."""
    with _reading(folder):
        return _config(folder).get_text_config()


def _check_size(folder: Path, config: Any, numel: int | None, num_tensors: int) -> Any:
    """Refuse a config of a larger model than the files hold; return the model's class."""
    model = _without_memory(folder, config, num_tensors)
    needed = sum(param.numel() for param in model.parameters())
    if numel is not None and needed > numel:
        raise CheckpointError(
            f"'{folder}' is not complete: its config.json is of a model of {needed:,} parameters, "
            f"and its files have {numel:,}"
        )
    return type(model)


def _without_memory(folder: Path, config: Any, num_tensors: int) -> Any:
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if layers > num_tensors:
        raise CheckpointError(
            f"'{folder}' is not complete: its config.json has {layers:,} layers, and its files "
            f"have {num_tensors:,} tensors"
        )
    transformers = _transformers(folder)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def _loaded(folder: Path, found: tuple[Any, dict[str, Any]]) -> Any:
    """Return a model, if no weight of it is missing. Of tensors too many, transformers warns."""
    model, info = found
    missing = info["missing_keys"]
    if missing:
        raise CheckpointError(
            f"'{folder}' does not fit its config.json: it lacks {len(missing)} tensors, such as "
            f"'{min(missing)}'"
        )
    return model


def _config(folder: Path) -> Any:
    return _transformers(folder).AutoConfig.from_pretrained(folder, **_SAFE)


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _transformers(folder: Path) -> Any:
    try:
        import transformers
    except ImportError:
        raise CheckpointError(
            f"'{folder}' is a Hugging Face model, which needs a package that is not installed: pip "
            "install transformers"
        ) from None
    return transformers


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Turn any error of transformers into one that names the folder."""
    try:
        with hidden_bars():
            yield
    except SamoError:
        raise
    except Exception as error:  # OSError, ValueError, KeyError, RuntimeError, ...
        raise CheckpointError(
            f"'{folder}' cannot be read as a Hugging Face model: {first_words(error)}"
        ) from error

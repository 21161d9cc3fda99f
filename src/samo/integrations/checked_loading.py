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
from samo.mask.masks import Masks

_MAX_LABELS: Final = 2**20
_MAX_BUFFERS: Final = 2**28
"""Most entries of buffers that no file has, such as tables of positions."""
_SAFE: Final = {"local_files_only": True, "trust_remote_code": False}


def quantization_of(folder: Path) -> dict[str, Any]:
    """Return how a folder stores its weights, with a ``quant_method``; {} if densely."""
    found = folder_files.read_json(folder / CONFIG).get(QUANTIZATION)
    if found is None:
        return {}
    if not isinstance(found, dict) or not isinstance(found.get("quant_method"), str):
        raise CheckpointError(
            f"'{folder / CONFIG}' is damaged: its {QUANTIZATION} does not name a quant_method"
        )
    return found


def is_compressed(folder: Path) -> bool:
    """Return whether samo compressed a folder."""
    return quantization_of(folder).get("quant_method") == METHOD


def open_dense(folder: Path, dtype: torch.dtype | None) -> nn.Module:
    """Load the model of a folder, dense."""
    settings = quantization_of(folder)
    method = settings.get("quant_method")
    if method == METHOD:
        return decompress_(open_compressed(folder, dtype, weights="streamed"), dtype=dtype)
    specs = folder_files.read_specs(folder_files.weight_files(folder))
    if method == sparse_bitmask.METHOD:
        sparse_bitmask.check_settings(folder, settings)
        return from_state(folder, sparse_bitmask.read(specs), dtype)
    if method is not None:
        raise CheckpointError(
            f"'{folder}' is quantized ({method!r}), and samo prunes and trains weights that are "
            "not; use the original model"
        )
    numel = sum(torch.Size(spec.shape).numel() for spec in specs.values())
    return _load(folder, dtype, len(specs), numel)


def open_compressed(folder: Path, dtype: torch.dtype | None, **options: Any) -> nn.Module:
    """Load a folder that samo compressed, as a compressed model; ``options`` as in SamoConfig."""
    specs = folder_files.read_specs(folder_files.weight_files(folder))
    return _load(folder, dtype, len(specs), quantization=quantization_of(folder) | options)


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
    sizes = {name: mask.numel for name, mask in (masks or {}).items()}
    numel = sum(sizes.get(name, value.numel()) for name, value in state.items())
    if dtype is None:
        floats = [value.dtype for value in state.values() if value.is_floating_point()]
        if not floats:
            raise CheckpointError(f"'{folder}' has no floating-point weights; use another copy")
        dtype = max(floats, key=lambda found: found.itemsize)
    settings = {"quant_method": METHOD, "masks": masks, **options}
    quantization = None if masks is None else settings
    return _load(folder, dtype, len(state), numel, quantization=quantization, state=dict(state))


def empty_model(folder: Path, num_tensors: int) -> Any:
    """Return the model of a folder's config.json, of so many tensors, on the meta device."""
    with _loading(folder) as transformers:
        return _without_memory(transformers, folder, _config(transformers, folder), num_tensors)


def text_config(folder: Path) -> Any:
    """Return the config of a folder's language model, by transformers' own names."""
    with _loading(folder) as transformers:
        return _config(transformers, folder).get_text_config()


def _load(
    folder: Path,
    dtype: torch.dtype | None,
    num_tensors: int,
    numel: int | None = None,
    *,
    quantization: dict[str, Any] | None = None,
    state: dict[str, Tensor] | None = None,
) -> nn.Module:
    """Let transformers build the model of a folder, from its files or from a state dict.

    Refuses a config of a larger model than the ``numel`` weights, and weights that do not fill it.
    """
    with _loading(folder) as transformers:
        config = _config(transformers, folder)
        if quantization is not None:
            config.quantization_config = quantization
        empty = _without_memory(transformers, folder, config, num_tensors)
        needed = sum(param.numel() for param in empty.parameters())
        if (extra := sum(buffer.numel() for buffer in empty.buffers())) > _MAX_BUFFERS:
            raise CheckpointError(
                f"'{folder}' cannot be read: its config.json asks for tables of {extra:,} entries, "
                f"such as of positions, and samo makes up to {_MAX_BUFFERS:,}; correct it"
            )
        if numel is not None and needed > numel:
            raise CheckpointError(
                f"'{folder}' is not complete: its config.json is of a model of {needed:,} "
                f"parameters, and its files have {numel:,}"
            )
        source = {"state_dict": state} if state is not None else {**_SAFE, "use_safetensors": True}
        model, info = type(empty).from_pretrained(
            folder if state is None else None,
            config=config,
            dtype=dtype or "auto",
            output_loading_info=True,
            **source,
        )
        if missing := info["missing_keys"]:  # of tensors too many, transformers warns
            raise CheckpointError(
                f"'{folder}' does not fit its config.json: it lacks {len(missing)} tensors, such "
                f"as '{min(missing)}'"
            )
        if state is not None and (folder / GENERATION).is_file():
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
        loaded: nn.Module = model
        return loaded


def _config(transformers: Any, folder: Path) -> Any:
    """Return the config of a folder, without how it stores its weights."""
    labels = folder_files.read_json(folder / CONFIG).get("num_labels") or 0
    if not isinstance(labels, int) or labels > _MAX_LABELS:  # transformers would name each of them
        raise CheckpointError(
            f"'{folder / CONFIG}' is damaged: num_labels is {str(labels)[:40]}; a language model "
            "needs none, remove it"
        )
    config = transformers.AutoConfig.from_pretrained(folder, **_SAFE)
    vars(config).pop(QUANTIZATION, None)
    # transformers saves neither, and would load the hub's kernels that they name: code.
    config._attn_implementation = config._experts_implementation = None
    config.return_dict = True  # which samo, like all training code, reads
    for name, value in vars(config.get_text_config()).items():
        # Attention would take it until the first step, and torch's error be about something else.
        is_rate = "drop" in name and isinstance(value, int | float)
        is_missing = "drop" in name and value is None and name != "classifier_dropout"
        if is_missing or (is_rate and not 0 <= value <= 1):
            raise CheckpointError(
                f"'{folder / CONFIG}' is damaged: {name} must be between 0 and 1, got {value!r}"
            )
    return config


def _without_memory(transformers: Any, folder: Path, config: Any, num_tensors: int) -> Any:
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if layers > num_tensors:
        raise CheckpointError(
            f"'{folder}' is not complete: its config.json has {layers:,} layers, and its files "
            f"have {num_tensors:,} tensors"
        )
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)


@contextmanager
def _loading(folder: Path) -> Iterator[Any]:
    """Yield transformers; turn any error of it into one that names the folder."""
    try:
        import transformers
    except ImportError:
        raise CheckpointError(
            f"'{folder}' is a Hugging Face model, which needs a package that is not installed: pip "
            "install transformers"
        ) from None
    try:
        with hidden_bars():
            yield transformers
    except SamoError:
        raise
    except Exception as error:  # OSError, ValueError, KeyError, RuntimeError, ...
        raise CheckpointError(
            f"'{folder}' cannot be read as a Hugging Face model: {first_words(error)}"
        ) from error


@contextmanager
def hidden_bars() -> Iterator[None]:
    """Hide the progress bars of transformers, which would show between the lines of samo."""
    from transformers.utils import logging

    was_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            logging.enable_progress_bar()

"""Compressed folders in transformers: `from_pretrained` reads them, `save_pretrained` writes them.

transformers calls whatever stores weights in its own way a quantizer. This one compresses a model
without memory, by the bitmaps of the files, before transformers fills it: no dense model is ever
there, unless weights are resident. A loaded model is like one that `samo.compress_` made, and
nothing of the quantizer is left on it.

Importing this module registers it; samo.integrations.import_hook does so after transformers.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from samo.core.compress import compress_, keep_resident
from samo.core.modules import BITMAP, MIXINS, named_weights
from samo.errors import CheckpointError
from samo.integrations import folder_files
from samo.integrations.folder_files import METHOD, VERSION, Spec, check_specs, read_masks
from samo.mask.masks import Masks


class SamoConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """How to load a compressed folder: the ``quantization_config`` of its config.json.

    Example:
        >>> from samo.integrations.hf_quantizer import SamoConfig
        >>> SamoConfig(weights="streamed").to_dict()  # config.json does not say how to load
        {'quant_method': 'samo', 'version': 1}

    Args:
        weights: As in `samo.compress_`: ``"resident"``, ``"streamed"``, or a budget in bytes.
        grad_dtype: As in `samo.compress_`.
        value_dtype: As in `samo.compress_`.
        version: Of the layout of the folder.
        masks: The masks, if weights come from a state dict and not from files.
        prepare: Is called with the model before it takes memory, to freeze parameters.
    """

    def __init__(
        self,
        weights: str | int = "resident",
        grad_dtype: torch.dtype | None = None,
        value_dtype: torch.dtype | None = None,
        version: int = VERSION,
        masks: Masks | None = None,
        prepare: Callable[[nn.Module], None] | None = None,
        **others: Any,
    ) -> None:
        self.quant_method = METHOD
        self.weights = weights
        self.grad_dtype = grad_dtype
        self.value_dtype = value_dtype
        self.version = version
        self.masks = masks
        self.prepare = prepare
        unknown = others.keys() - {"quant_method"}
        if unknown:
            raise ValueError(
                f"a quantization_config of samo has no setting {min(unknown)!r}; it has weights, "
                "grad_dtype, value_dtype and version"
            )
        if type(version) is not int or version != VERSION:
            raise ValueError(
                f"the folder is compressed in version {version!r}, this samo reads version "
                f"{VERSION}; update samo"
            )
        is_budget = type(weights) is int and weights >= 0
        if not is_budget and weights not in ("resident", "streamed"):
            raise ValueError(
                "weights must be 'resident', 'streamed', or the number of bytes that resident "
                f"dense weights may take, got {weights!r}"
            )
        if not (isinstance(masks, Masks | None) and (prepare is None or callable(prepare))):
            raise ValueError("masks and prepare of a quantization_config cannot come from a file")

    def to_dict(self) -> dict[str, Any]:
        """Return what config.json holds: how to load is for the loader to say."""
        return {"quant_method": METHOD, "version": self.version}

    def get_loading_attributes(self) -> dict[str, Any]:
        """Return what ``from_pretrained(quantization_config=...)`` may change."""
        names = ("weights", "grad_dtype", "value_dtype", "prepare")
        return {name: getattr(self, name) for name in names}


class SamoQuantizer(HfQuantizer):  # type: ignore[misc]
    """Compresses a model without memory for transformers to fill."""

    requires_calibration = True  # refuses a SamoConfig for a folder that is not compressed
    is_trainable = True
    is_qat_trainable = True

    def is_serializable(self) -> bool:
        """Say that the model can be saved."""
        return True

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Refuse places without memory: values are compared with their bitmaps as they arrive."""
        places = device_map.values() if isinstance(device_map, dict) else ()  # "auto" names none
        for place in map(str, places):
            if place in ("meta", "disk"):
                raise ValueError(
                    f"a compressed model cannot be loaded to {place!r}, got device_map="
                    f"{device_map}; use 'cpu' or a GPU, with SamoConfig(weights='streamed') for "
                    "the least memory"
                )

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        config = self.quantization_config
        saved, name = model.config.architectures, type(model).__name__
        if model.base_model is model and saved and name not in saved:
            raise CheckpointError(
                f"a compressed {saved[0]} cannot be loaded without its head, as {name}; load it "
                "with AutoModelForCausalLM, and use its base_model"
            )
        with torch.device("cpu"):  # here the default is meta
            # Masks come with a state dict, and without files.
            specs = folder_files.read_specs([Path(file) for file in checkpoint_files or ()])
            _tie(model, specs)
            for param in model.parameters():
                # All are in the files. transformers looks for this mark on module.weight, and
                # initializes those that lack it.
                param._is_hf_initialized = True
            masks = read_masks(model, specs) if config.masks is None else config.masks
            if config.prepare is not None:
                config.prepare(model)
            dtypes = {"grad_dtype": config.grad_dtype, "value_dtype": config.value_dtype}
            compress_(model, masks, weights="streamed", **dtypes)
            if specs:
                check_specs(model, specs)
        # transformers sets each parameter anew, and a new one decides the dtypes of its weight.
        self._dtypes = {
            name: (weight, weight.dtype, weight.layout.grad_dtype, weight.values.dtype)
            for name, weight in named_weights(model)
        }

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Say whose values may differ in shape from ``module.weight``, which is dense."""
        return param_name in self._dtypes

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        for weight, dtype, grad_dtype, value_dtype in self._dtypes.values():
            # Some versions of transformers leave what they read in the dtype of the file.
            weight.values.data = weight.values.data.to(value_dtype)
            weight.is_resident, weight.dtype = False, dtype
            weight.layout = weight.layout._replace(grad_dtype=grad_dtype)
            weight.bind(weight.values)
        del self._dtypes
        if self.quantization_config.prepare is not None:  # new parameters are trainable
            self.quantization_config.prepare(model)
        keep_resident(model, self.quantization_config.weights)
        self.remove_quantization_config(model)
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                vars(module.config).pop("_is_quantized", None)
        return model


def _tie(model: Any, specs: dict[str, Spec]) -> None:
    """Make tied parameters one, as transformers does after loading, unless the files have both."""
    for target, source in model.all_tied_weights_keys.items():
        if not (target in specs and source in specs):
            path, _, name = target.rpartition(".")
            setattr(model.get_submodule(path), name, model.get_parameter(source))


class CompressedPreTrainedModel:
    """What a compressed model of transformers does in another way than a dense one."""

    config: Any
    _dtype_of_files: torch.dtype | None = None  # while a dense state dict is saved

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the model computes, not that of its values."""
        if self._dtype_of_files is not None:
            return self._dtype_of_files
        for _, weight in named_weights(self):  # type: ignore[arg-type]
            return weight.dtype
        return super().dtype  # type: ignore[misc]

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        *args: Any,
        state_dict: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Write a compressed folder, or a dense one of a dense ``state_dict``."""
        if state_dict is None or any(name.endswith(BITMAP) for name in state_dict):
            self.config.quantization_config = SamoConfig()
            # The original format has other shapes, such as a tensor for each expert.
            options["save_original_format"] = False
        else:
            values = [value for value in state_dict.values() if isinstance(value, Tensor)]
            self._dtype_of_files = next(v.dtype for v in values if v.is_floating_point())
        try:
            super().save_pretrained(  # type: ignore[misc]
                save_directory, *args, state_dict=state_dict, **options
            )
        finally:
            vars(self.config).pop("quantization_config", None)
            vars(self).pop("_dtype_of_files", None)


MIXINS[PreTrainedModel] = CompressedPreTrainedModel
auto.register_quantization_config(METHOD)(SamoConfig)
auto.register_quantizer(METHOD)(SamoQuantizer)
# So that from_pretrained(quantization_config=SamoConfig(weights=...)) is not ignored.
auto.LOADING_ATTRIBUTES_CONFIG_TYPES += (SamoConfig,)

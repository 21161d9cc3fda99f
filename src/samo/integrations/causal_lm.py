"""What training needs to know of a causal language model of Hugging Face, besides its forward()."""

import copy
import inspect
import shutil
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from samo.data.batches import Batch
from samo.data.tokenizers import MAX_VOCAB_SIZE
from samo.errors import CheckpointError, ConfigError, SamoError, first_words
from samo.integrations import folder_files
from samo.integrations.chunk_loss import cross_entropy_sum, deferred_logits
from samo.integrations.folder_files import CONFIG, GENERATION, QUANTIZATION
from samo.models.generate import Sampling, check_logits
from samo.utils.environment import is_out_of_memory

_CONTEXT: Final = 1024


def check_model(model: nn.Module) -> None:
    """Refuse a model that computes no loss."""
    found = inspect.signature(model.forward).parameters
    head = getattr(model, "get_output_embeddings", lambda: None)()
    takes_any = any(each.kind == each.VAR_KEYWORD for each in found.values())
    if head is None or "labels" not in found or not takes_any:
        raise ConfigError(
            f"{type(model).__name__} computes no loss from labels as causal language models of "
            "transformers do; train it in Python, as docs/hugging-face.md shows"
        )


def checkpoint_blocks(model: Any) -> None:
    """Recompute the activations of blocks in the backward pass."""
    # Its name since transformers 5.23. The older one warns.
    enable = getattr(model, "activation_checkpointing_enable", None)
    # The other kind gives no gradients to blocks after frozen embeddings.
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})


def check_packing(model: nn.Module) -> None:
    """Refuse a model in which packed examples would see each other, by a pass over a few tokens."""
    if "position_ids" not in inspect.signature(model.forward).parameters or not _keeps_apart(model):
        name = type(model).__name__
        raise ConfigError(f"packed examples would see each other in a {name}; add --no-pack")


def _keeps_apart(model: nn.Module) -> bool:
    """Return whether a sequence stays out of the one packed after it.

    Many models take ``position_ids`` and have layers that do not look at them: ALiBi, convolutions,
    states. Then the second sequence has a gradient in the first, which otherwise is exactly 0.
    """
    own: Any = model
    made: list[Tensor] = []

    def watch(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        made.append(output.detach().requires_grad_())
        return made[0].clone()  # to which a model may write

    embedding = own.get_input_embeddings()
    tokens_1T = torch.arange(8, device=embedding.weight.device)[None] % embedding.num_embeddings
    handle = embedding.register_forward_hook(watch)
    try:
        with torch.enable_grad():
            inputs = {"input_ids": tokens_1T, "position_ids": tokens_1T % 4, "use_cache": False}
            second = own.base_model(**inputs).last_hidden_state[:, 4:]
            # Not their sum, which a norm may hold constant.
            steps = torch.linspace(0, 1, second.shape[-1]).to(second)
            (grad,) = torch.autograd.grad((second * steps).sum(), made)
    finally:
        handle.remove()
    return not (grad[:, :4].isfinite() & (grad[:, :4] != 0)).any()


def check_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Refuse weights that are NaN, infinite, or too large for the dtype they will compute in."""
    most = torch.finfo(dtype).max
    for name, param in model.named_parameters():
        if not param.numel() or not param.is_floating_point():
            continue
        low, high = param.detach().aminmax()  # both are NaN if one weight is
        if not (-most <= float(low) and float(high) <= most):
            raise ConfigError(
                f"'{name}' has weights that are NaN, infinite or too large for {dtype}; repair the "
                "checkpoint, or choose another --dtype (bfloat16 has the range of float32)"
            )


def context_of(config: Any) -> int | None:
    """Return the longest sequence that a model was made for, if its config tells."""
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def inputs_of(batch: Batch) -> dict[str, Any]:
    """Return what a model reads of a batch."""
    inputs: dict[str, Any] = {"input_ids": batch.inputs_BT, "use_cache": False}
    if batch.positions_BT is not None:
        inputs["position_ids"] = batch.positions_BT
    return inputs


def loss_sum(model: nn.Module, batch: Batch, **options: Any) -> Tensor:
    """Return the sum of the losses of a batch, which is on the device of the model."""
    targets_BT = batch.targets_BT
    loss: Tensor = model(
        **inputs_of(batch),
        labels=targets_BT,
        shift_labels=targets_BT,
        num_items_in_batch=1,
        **options,
    ).loss
    return loss


def cross_entropy_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the sum of a batch's cross-entropies, whatever else the model's own loss may have."""
    return cross_entropy_sum(deferred_logits(model, **inputs_of(batch)), batch.targets_BT)


@torch.no_grad()
def check_loss(model: nn.Module) -> None:
    """Refuse a model whose loss is not a sum over tokens, by a pass over a few of them.

    Some, such as Bart, compute a mean by themselves and ignore what they are asked for.
    """
    own: Any = model
    embedding = own.get_input_embeddings()
    tokens_1T = torch.arange(8, device=embedding.weight.device)[None] % embedding.num_embeddings
    batch = Batch(tokens_1T, tokens_1T, num_tokens=8, num_read=8)
    was_training = model.training
    model.eval()
    found, expected = float(loss_sum(model, batch)), float(cross_entropy_of(model, batch))
    model.train(was_training)
    if found < expected / 2:  # experts may add to it
        raise ConfigError(
            f"{type(model).__name__} computes its loss in a way of its own: {found:.3g} for 8 "
            f"tokens, where the sum of their losses is {expected:.3g}; train it in Python, as "
            "docs/hugging-face.md shows"
        )


def resolve_context(given: int | Literal["auto"], longest: int | None) -> int:
    """Return the sequence length: what is given, if the model was made for it; auto: its own."""
    if given == "auto":
        return min(_CONTEXT, longest or _CONTEXT)
    if longest is not None and given > longest:
        raise ConfigError(
            f"--context {given:,} is longer than the {longest:,} tokens that the model was made "
            "for; lower it"
        )
    return given


def end_tokens(folder: Path) -> set[int]:
    """Return the tokens at which the model of a folder stops writing."""
    has_own = (folder / GENERATION).is_file()
    found = folder_files.read_json(folder / (GENERATION if has_own else CONFIG))
    ends = found.get("eos_token_id")
    known = (end for end in (ends if isinstance(ends, list) else [ends]) if type(end) is int)
    return {end for end in known if 0 <= end < MAX_VOCAB_SIZE}


def freeze_embeddings_(model: nn.Module) -> None:
    """Freeze embeddings, of tokens and of positions, and the head."""
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    for module in [*model.modules(), head]:
        if isinstance(module, nn.Embedding) or module is head:
            for param in module.parameters(recurse=False):
                param.requires_grad_(False)


def write_description(model: nn.Module, source: Path, out: Path) -> None:
    """Write what describes a model, without its weights: its configs and its tokenizer."""
    own: Any = model
    out.mkdir(exist_ok=True)
    own.config.save_pretrained(out)
    # The other entry says how the source stores its weights.
    changes = {"architectures": [type(model).__name__], QUANTIZATION: None}
    folder_files.edit_config(out, **changes)
    if (source / GENERATION).is_file():
        folder_files.read_json(source / GENERATION)
        shutil.copyfile(source / GENERATION, out / GENERATION)
    folder_files.copy_tokenizer(source, out)


@torch.no_grad()
def sample(model: nn.Module, prompt_T: Tensor, how: Sampling, **options: Any) -> Tensor:
    """Return a prompt, and tokens that the model generates until it ends the text.

    Settings that ``how`` does not have are those of the folder's generation_config.json.
    """
    own: Any = model
    settings = copy.deepcopy(own.generation_config)
    settings.num_beams = settings.num_return_sequences = 1
    settings.max_length, settings.max_new_tokens = None, how.max_tokens
    settings.do_sample = how.temperature > 0
    settings.temperature, settings.top_p = how.temperature, how.top_p
    if not settings.do_sample:
        settings.temperature = settings.top_p = settings.top_k = None
    if settings.pad_token_id is None:  # nothing is padded, but transformers warns without one
        ends = settings.eos_token_id
        settings.pad_token_id = next(iter(ends), None) if isinstance(ends, list) else ends
    device = next(model.parameters()).device
    prompt_1T = prompt_T[None].to(device)
    was_training = model.training
    model.eval()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(how.seed)
        try:
            tokens_1T: Tensor = own.generate(
                prompt_1T,
                attention_mask=torch.ones_like(prompt_1T),
                generation_config=settings,
                logits_processor=[_checked_logits],
                **options,
            )
        except SamoError:
            raise
        except Exception as error:  # settings of a folder can raise anything
            if is_out_of_memory(error):
                raise
            raise CheckpointError(
                f"the model cannot generate text: {first_words(error)}; see generation_config.json "
                "in its folder"
            ) from error
    model.train(was_training)
    return tokens_1T[0].cpu()


def _checked_logits(_: Tensor, logits: Tensor) -> Tensor:
    check_logits(logits)
    return logits

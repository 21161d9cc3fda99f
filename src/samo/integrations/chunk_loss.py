"""`chunk_loss_`: a causal language model of Hugging Face whose loss never holds all logits.

With labels, the head returns `Logits`: a tensor without memory, which knows the hidden states, the
head, and what the model did to its output (softcapping, scaling). The loss computes them a chunk of
tokens at a time. Any other function gets ordinary logits, so nothing else changes.

Shapes: N tokens of width D, vocabulary V.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from samo.errors import ConfigError
from samo.models.sum_in_chunks import MAX_LOGITS, sum_in_chunks

_IS_DEFERRED: Final = "_samo_defers_logits"
"""Attribute of a head that is to return `Logits`; set during a forward pass with labels."""
_PLAIN: Final = "ForCausalLMLoss"
"""Name of the loss function that is replaced: shifted cross-entropy, as nearly all models use."""


def chunk_loss_(model: nn.Module, *, max_logits: int = MAX_LOGITS) -> nn.Module:
    """Let a causal language model compute its loss a chunk of tokens at a time; return the model.

    ``model(input_ids, labels=labels).loss`` and its gradients stay what they are. But logits exist
    for one chunk at a time, and are computed again in backward: 16 x 1,024 tokens of a vocabulary
    of 128,000 would take 8 GB in fp32, and as much again for their gradients. Softcapped and scaled
    logits, tied, compressed and streamed heads, DDP, FSDP2, peft and ``Trainer`` work.
    ``outputs.logits`` computes all of them where it is used.

    Models whose loss is not the usual cross-entropy stay as they are.

    Example:
        >>> import torch, samo
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1)
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, vocab_size=512))
        >>> ids = torch.randint(0, 512, (2, 16))
        >>> plain = model(input_ids=ids, labels=ids).loss
        >>> model = samo.chunk_loss_(model, max_logits=4 * 512)
        >>> torch.allclose(model(input_ids=ids, labels=ids).loss, plain)
        True

    Args:
        model: A causal language model of transformers, compressed or not.
        max_logits: Logits that may exist at once.

    Raises:
        TypeError: The model has no head or no loss function of transformers.
    """
    # Adapters of peft wrap the model whose forward() computes the loss.
    own = getattr(model, "get_base_model", lambda: model)()
    head = getattr(own, "get_output_embeddings", lambda: None)()
    plain = getattr(own, "loss_function", None)
    if not isinstance(head, nn.Module) or plain is None:
        raise TypeError(
            f"chunk_loss_ takes a causal language model of transformers, with a head and a loss "
            f"function, got {type(model).__name__}"
        )
    if not isinstance(max_logits, int) or max_logits < 1:
        raise ValueError(f"max_logits must be a whole number, 1 or more, got {max_logits!r}")
    if getattr(plain, "__name__", "") != _PLAIN:
        return model
    own.loss_function = functools.partial(_causal_loss, plain, max_logits=max_logits)
    # Hooks, since they survive copies of the model and work with any class of a head.
    own.register_forward_pre_hook(_start, with_kwargs=True)
    own.register_forward_hook(_stop, always_call=True)
    head.register_forward_pre_hook(_skip)
    head.register_forward_hook(_defer)
    return model


def deferred_logits(model: nn.Module, **inputs: Any) -> Tensor:
    """Return the `Logits` of a model that `chunk_loss_` was called with.

    If it left the model as it is, logits are ordinary.
    """
    vars(_head(model))[_IS_DEFERRED] = True
    logits: Tensor = model(**inputs).logits
    return logits


@dataclass(frozen=True, eq=False)
class Distillation:
    """What a pass learns from a teacher: pass it to a chunked model as ``distillation=``.

    The loss of a token is ``(1 - share) * cross_entropy + share * T * T * KL(teacher, student)`` of
    the distributions at temperature T, with the gradient of both about as large at any T.
    """

    logits: Tensor
    """Of the teacher, for the same tokens: from `deferred_logits`."""
    share: float
    temperature: float


class Logits(Tensor):
    """Logits that are not computed yet: hidden states, a head, and functions of its output."""

    hidden: Tensor
    head: nn.Module
    functions: tuple[Callable[[Tensor], Tensor], ...]
    written: Tensor | None = None
    """All logits, once the model has written to them."""

    @staticmethod
    def of(
        hidden: Tensor,
        head: nn.Module,
        like: Tensor,
        functions: tuple[Callable[[Tensor], Tensor], ...] = (),
    ) -> "Logits":
        """Return the logits of hidden states, with the vocabulary, dtype and device of others."""
        shape = (*hidden.shape[:-1], like.shape[-1])
        made: Logits = Tensor._make_wrapper_subclass(
            Logits, shape, dtype=like.dtype, device=like.device
        )
        made.hidden, made.head, made.functions = hidden, head, functions
        return made

    def rows(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states."""
        logits: Tensor = self.head(hidden)
        for function in self.functions:
            logits = function(logits)
        return logits

    def whole(self) -> Tensor:
        """Return an ordinary tensor."""
        return self.rows(self.hidden) if self.written is None else self.written

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(func.__self__, "__name__", "")
        if name in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        own: Any
        own, *rest = args or (None,)
        others = (*rest, *kwargs.values())
        is_write = name in _WRITES or (name.endswith("_") and not name.endswith("__"))
        if isinstance(own, Logits) and is_write:
            own.written = own.whole()
            func(own.written, *rest, **kwargs)
            return own
        is_deferred = isinstance(own, Logits) and own.written is None and name in _ELEMENTWISE
        if is_deferred and not any(isinstance(other, Tensor) for other in others):
            functions = (*own.functions, lambda logits: func(logits, *rest, **kwargs))
            return Logits.of(own.hidden, own.head, own, functions)
        args, kwargs = tree_map_only(Logits, Logits.whole, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(Logits, Logits.whole, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Logits(shape={tuple(self.shape)}, dtype={self.dtype}, not computed yet)"


_FACTS: Final = frozenset(
    {"shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "grad_fn", "is_cuda"}
    | {"size", "dim", "numel", "__len__", "is_floating_point", "register_hook", "layout"}
)
"""What can be asked of logits that are not computed."""
_ELEMENTWISE: Final = frozenset(
    {"mul", "__mul__", "__rmul__", "div", "__truediv__", "true_divide", "tanh", "contiguous"}
)
"""What models do to logits, with numbers: it applies to a chunk as to all of them."""
_WRITES: Final = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"})


# Hooks


def _head(model: nn.Module) -> nn.Module:
    head: nn.Module = model.get_output_embeddings()  # type: ignore[operator]
    return head


def _start(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    if kwargs.get("labels") is not None and not torch.compiler.is_compiling():
        vars(_head(model))[_IS_DEFERRED] = True


def _stop(model: nn.Module, args: Any, output: Any) -> None:
    vars(_head(model)).pop(_IS_DEFERRED, None)


def _skip(head: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    """Let a head that defers its work compute no rows: its output tells vocabulary and dtype."""
    if _IS_DEFERRED not in vars(head):
        return None
    vars(head)[_IS_DEFERRED] = args[0]
    return (args[0].detach().flatten(0, -2)[:0],)


def _defer(head: nn.Module, args: Any, output: Tensor) -> Tensor | None:
    hidden = vars(head).pop(_IS_DEFERRED, None)  # the loss calls the head again
    return None if hidden is None else Logits.of(hidden, head, output)


# The loss


def _causal_loss(
    plain: Callable[..., Tensor],
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    *,
    max_logits: int,
    distillation: Distillation | None = None,
    **kwargs: Any,
) -> Tensor:
    """Compute what the loss function of transformers does, and with a teacher what that adds."""
    if isinstance(logits, Logits) and logits.written is not None:
        logits = logits.written
    if not isinstance(logits, Logits):
        if distillation is not None:
            raise ConfigError(
                "distillation needs logits that the model leaves as its head returns them; train "
                "without a teacher, or compute this loss from all logits"
            )
        items = {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index}
        return plain(logits, labels, vocab_size, **items, shift_labels=shift_labels, **kwargs)
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets_N = shift_labels.flatten().to(logits.device)
    rows = [logits.hidden.flatten(0, -2), targets_N]
    teacher = None if distillation is None else distillation.logits
    if teacher is not None:
        assert isinstance(teacher, Logits)
        rows.append(teacher.hidden.flatten(0, -2))

    def loss_sum(hidden_ND: Tensor, targets_N: Tensor, *teacher_ND: Tensor) -> Tensor:
        logits_NV = _wide(logits.rows(hidden_ND))
        loss = F.cross_entropy(logits_NV, targets_N, ignore_index=ignore_index, reduction="sum")
        if distillation is None:
            return loss
        assert isinstance(teacher, Logits)
        share, heat = distillation.share, distillation.temperature
        with torch.no_grad():
            goal_NV = F.log_softmax(_wide(teacher.rows(*teacher_ND)) / heat, -1)
        student_NV = F.log_softmax(logits_NV / heat, -1)
        gaps_NV = F.kl_div(student_NV, goal_NV, reduction="none", log_target=True)
        gap = gaps_NV.sum(-1).masked_fill(targets_N == ignore_index, 0.0).sum()
        return (1 - share) * loss + share * heat * heat * gap

    size = logits.shape[-1] * (1 if teacher is None else 2)  # a teacher's logits count too
    total = sum_in_chunks(loss_sum, *rows, vocab_size=size, max_logits=max_logits)
    if num_items_in_batch is None:
        return total / (targets_N != ignore_index).sum()
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch


def cross_entropy_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the losses of logits, `Logits` or others, for the tokens that follow."""
    losses: Any = functools.partial(F.cross_entropy, reduction="sum")
    if not isinstance(logits, Logits) or logits.written is not None:
        return losses(_wide(logits).flatten(0, -2), targets.flatten())
    return _causal_loss(
        losses,
        logits,
        targets,
        logits.shape[-1],
        num_items_in_batch=1,
        shift_labels=targets,
        max_logits=MAX_LOGITS,
    )


def _wide(logits: Tensor) -> Tensor:
    """Return logits in fp32 at least, as transformers computes losses."""
    return logits if logits.dtype == torch.float64 else logits.float()

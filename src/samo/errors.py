"""The exceptions a caller may want to tell apart.

    SamoError
     +- MaskError (ValueError)      masks that do not fit the model, or a mask file that is damaged
     +- CompressionError (RuntimeError)   a compressed model was used in a way that would corrupt it
     +- ConfigError (ValueError)    a setting, a flag or a config file
     +- DataError (ValueError)      a data file or a tokenizer
     +- CheckpointError (RuntimeError)    a checkpoint that is damaged, does not fit, or cannot be written
     +- RunError (RuntimeError)     a run folder that cannot be used
     +- PeerError (RuntimeError)    another rank died, hung or sent nonsense

Arguments out of range raise plain ``ValueError`` or ``TypeError``. Every message says what is
wrong, the values in hand, the rule and the next step.
"""

import difflib
import re
from collections.abc import Iterable

__all__ = [
    "CheckpointError",
    "CompressionError",
    "ConfigError",
    "DataError",
    "MaskError",
    "PeerError",
    "RunError",
    "SamoError",
]


class SamoError(Exception):
    """Base of the errors that samo itself defines.

    Example:
        >>> import samo
        >>> issubclass(samo.MaskError, samo.SamoError)
        True
    """


class MaskError(SamoError, ValueError):
    """Masks that do not fit a model, or a mask file that cannot be trusted.

    Example:
        >>> import samo
        >>> try:
        ...     samo.Masks.load("no-such-file.safetensors")
        ... except samo.MaskError as error:
        ...     print(error)
        mask file 'no-such-file.safetensors' does not exist; write one with Masks.save(path)
    """


class CompressionError(SamoError, RuntimeError):
    """A compressed model was used in a way that would corrupt or ignore its state.

    Example:
        >>> import torch, samo
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
        >>> model = samo.compress_(model, samo.prune(model, 0.5))
        >>> try:
        ...     model[0].weight = torch.nn.Parameter(torch.zeros(2, 2))
        ... except samo.CompressionError as error:
        ...     print(str(error)[:46])
        '0.weight' is (8, 8) and cannot be given (2, 2
    """


class ConfigError(SamoError, ValueError):
    """A setting, a flag or a config file that cannot be used.

    Example:
        >>> import samo
        >>> issubclass(samo.ConfigError, ValueError)
        True
    """


class DataError(SamoError, ValueError):
    """A data file or a tokenizer that cannot be used.

    Example:
        >>> import samo
        >>> issubclass(samo.DataError, ValueError)
        True
    """


class CheckpointError(SamoError, RuntimeError):
    """A checkpoint that is damaged, does not fit the model, or could not be written.

    Example:
        >>> import torch, samo
        >>> try:
        ...     samo.load("no-such-checkpoint", torch.nn.Linear(2, 2))
        ... except samo.CheckpointError as error:
        ...     print(str(error)[:20])
        'no-such-checkpoint'
    """


class RunError(SamoError, RuntimeError):
    """A run folder that cannot be used.

    Example:
        >>> import samo
        >>> issubclass(samo.RunError, RuntimeError)
        True
    """


class PeerError(SamoError, RuntimeError):
    """Another rank died, hung or sent something invalid; the message names it.

    Example:
        >>> import samo
        >>> error = samo.PeerError("rank 3 (stage 1) is gone", rank=3, stage=1)
        >>> error.rank, error.stage, error.is_timeout
        (3, 1, False)

    Args:
        message: Which rank did what, and what to do.
        ranks: The ranks that failed, if several are known.
        rank: The rank that failed, if known.
        stage: Its pipeline stage, if it has one.
        is_timeout: Whether it failed by not answering in time.
        is_diagnosed: Whether heartbeats were compared to find these ranks. If not, the ranks named
            may themselves wait for another one.
    """

    def __init__(
        self,
        message: str,
        ranks: tuple[int, ...] = (),
        *,
        rank: int | None = None,
        stage: int | None = None,
        is_timeout: bool = False,
        is_diagnosed: bool = False,
    ) -> None:
        super().__init__(message)
        self.ranks = ranks if rank is None else (rank,)
        self.rank = rank
        self.stage = stage
        self.is_timeout = is_timeout
        self.is_diagnosed = is_diagnosed


def first_words(error: BaseException) -> str:
    """Return the first sentence of an error of another library, without the source file it comes from.

    Example:
        >>> from samo.errors import first_words
        >>> first_words(RuntimeError("[/src/tcp/pair.cc:553] Connection closed by peer. Check the logs."))
        'Connection closed by peer'
    """
    line = str(error).strip().partition("\n")[0]
    return (
        re.sub(r"\[/[^\]]*\]\s*", "", line).partition(". ")[0].rstrip(".") or type(error).__name__
    )


def nearest(name: str, known: Iterable[str], *, likeness: float = 0.5) -> str:
    """Return ``" (did you mean 'x'?)"`` for the known name closest to ``name``, or ``""``."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=likeness)
    return f" (did you mean '{close[0]}'?)" if close else ""

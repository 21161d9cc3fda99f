"""The exceptions of samo.

Arguments out of range raise plain ``ValueError`` or ``TypeError``. A message says what is wrong,
the value, the rule and the next step.
"""

import difflib
import re
from collections.abc import Iterable


class SamoError(Exception):
    """Base of all errors that samo defines.

    Example:
        >>> import samo
        >>> try:
        ...     samo.Masks.load("no-such-file.safetensors")
        ... except samo.SamoError as error:
        ...     print(error)
        mask file 'no-such-file.safetensors' does not exist; write one with Masks.save(path)
    """


class MaskError(SamoError, ValueError):
    """Masks that do not fit a model, or a mask file that is damaged."""


class CompressionError(SamoError, RuntimeError):
    """A compressed model was used in a way that would corrupt or ignore its state."""


class ConfigError(SamoError, ValueError):
    """A setting, a flag or a config file that cannot be used."""


class DataError(SamoError, ValueError):
    """A data file or a tokenizer that cannot be used."""


class CheckpointError(SamoError, RuntimeError):
    """A checkpoint that is damaged, does not fit the model, or could not be written."""


class RunError(SamoError, RuntimeError):
    """A run folder that cannot be used."""


class PeerError(SamoError, RuntimeError):
    """Another rank died, hung or sent something invalid.

    Example:
        >>> error = PeerError("rank 3 (stage 1) is gone", rank=3, stage=1)
        >>> error.ranks, error.stage, error.is_timeout
        ((3,), 1, False)

    Args:
        message: Which rank did what, and what to do.
        ranks: The ranks that failed, if known.
        rank: The rank that failed, if it is one.
        stage: Its pipeline stage, if it has one.
        is_timeout: Whether it did not answer in time.
        is_diagnosed: Whether heartbeats show that these ranks failed. Otherwise they may themselves
            wait for another one.
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
    """Return the first sentence of another library's error, without the source file it names."""
    line = re.sub(r"\[/[^\]]*\]\s*", "", str(error).strip().partition("\n")[0])
    return line.partition(". ")[0].rstrip(".") or type(error).__name__


def nearest(name: str, known: Iterable[str], *, likeness: float = 0.5) -> str:
    """Return ``" (did you mean 'x'?)"`` for the known name closest to ``name``, or ``""``."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=likeness)
    return f" (did you mean '{close[0]}'?)" if close else ""

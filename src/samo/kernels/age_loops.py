"""The loops behind AdamW with ages on a CPU, compiled by numba; ``cpu_ages.py`` calls them.

They run over compressed vectors, in which kept entries lie side by side. bfloat16 values arrive as
uint16, as in ``loops.py``.
"""

import numpy as np
from numba import prange

from samo.kernels.loops import BLOCK_BITS, _fma, _jit, _jit_parallel, _read_grad, _widen

__all__ = []


@_jit
def _update(param, grad, exp_avg, exp_avg_sq, age, step_sizes, denominators, scalars):
    """Update vectors in place, rounding where the update without ages does."""
    decay, lerp, beta2, rest2, eps = scalars[0], scalars[1], scalars[2], scalars[3], scalars[4]
    is_small = lerp < 0.5
    one = scalars.dtype.type(1)
    oldest = step_sizes.size - 1
    for k in range(param.size):
        t = min(np.int64(age[k]) + 1, oldest)
        age[k] = np.int16(t)
        # Unsigned, so that numba need not look whether an index counts from the end.
        step, denominator = step_sizes[np.uint64(t)], denominators[np.uint64(t)]
        g = grad[k]
        m = exp_avg[k]
        m = _fma(lerp, g - m, m) if is_small else _fma(lerp - one, g - m, g)
        v = _fma(rest2 * g, g, exp_avg_sq[k] * beta2)
        exp_avg[k] = m
        exp_avg_sq[k] = v
        param[k] = param[k] * decay + m * step / (np.sqrt(v) / denominator + eps)


@_jit
def update_wide(values, rest, grad, exp_avg, exp_avg_sq, age, sizes, denominators, scalars, at, to):
    """Update the entries from ``at`` to ``to`` of float32 or float64 values, which have no rest."""
    _update(
        values[at:to],
        grad[at:to],
        exp_avg[at:to],
        exp_avg_sq[at:to],
        age[at:to],
        sizes,
        denominators,
        scalars,
    )


@_jit
def update_bf16(values, rest, grad, exp_avg, exp_avg_sq, age, sizes, denominators, scalars, at, to):
    """Update the entries from ``at`` to ``to`` of bfloat16 values with their remainders."""
    param_bits = np.empty(BLOCK_BITS, dtype=np.int32)
    grad_bits = np.empty(BLOCK_BITS, dtype=np.int32)
    param, wide_grad = param_bits.view(np.float32), grad_bits.view(np.float32)
    for start in range(at, to, BLOCK_BITS):
        stop = min(start + BLOCK_BITS, to)
        count = stop - start
        kept, rests = values[start:stop], rest[start:stop]
        for k in range(count):
            param_bits[k] = _widen(kept[k]) + rests[k]
        _read_grad(grad[start:stop], grad_bits, wide_grad)
        _update(
            param[:count],
            wide_grad[:count],
            exp_avg[start:stop],
            exp_avg_sq[start:stop],
            age[start:stop],
            sizes,
            denominators,
            scalars,
        )
        for k in range(count):
            if np.isnan(param[k]):  # its bits may all be set, and rounding would carry over
                param_bits[k] = np.int32(0x7FC00000)
            rounded = (param_bits[k] + np.int32(0x8000)) >> np.int32(16)
            rests[k] = np.int16(param_bits[k] - (rounded << np.int32(16)))
            kept[k] = np.uint16(rounded)


@_jit_parallel
def update_wide_shared(
    values, rest, grad, exp_avg, exp_avg_sq, age, sizes, denominators, scalars, parts
):
    """Give each of ``parts`` threads the same number of entries."""
    for part in prange(parts):
        at, to = values.size * part // parts, values.size * (part + 1) // parts
        update_wide(
            values, rest, grad, exp_avg, exp_avg_sq, age, sizes, denominators, scalars, at, to
        )


@_jit_parallel
def update_bf16_shared(
    values, rest, grad, exp_avg, exp_avg_sq, age, sizes, denominators, scalars, parts
):
    """Give each of ``parts`` threads the same number of entries."""
    for part in prange(parts):
        at, to = values.size * part // parts, values.size * (part + 1) // parts
        update_bf16(
            values, rest, grad, exp_avg, exp_avg_sq, age, sizes, denominators, scalars, at, to
        )

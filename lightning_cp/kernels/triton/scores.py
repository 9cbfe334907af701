"""Device code that forward and backward share; imported only if Triton is installed.

Scores are in units of log2, for ``exp2``. With ``inner`` and ``outer`` from the host:
``s = (q.k) * inner``, or with a cap ``s = outer * tanh((q.k) * inner)``; then with slopes
``s -= slope * |i - j + shift|``.

Annotations of device code are read by Triton, so no ``from __future__ import annotations`` here.
"""

import triton
import triton.language as tl


@triton.jit
def tokens(x, row, head, first, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return pointers [BLOCK, BLOCK_D] to one head of the tokens ``first ..``.

    The first one is computed in 64 bits: a tensor may have more than 2^31 entries.
    """
    start = x.at + tl.cast(row, tl.int64) * x.batch + tl.cast(head, tl.int64) * x.head
    start += tl.cast(first, tl.int64) * x.token
    return start + tl.arange(0, BLOCK)[:, None] * x.token + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def numbers(x, row, head, first, BLOCK: tl.constexpr):
    """Return pointers [BLOCK] to one number per token."""
    start = x.at + tl.cast(row, tl.int64) * x.batch + tl.cast(head, tl.int64) * x.head
    return start + tl.cast(first, tl.int64) * x.token + tl.arange(0, BLOCK) * x.token


@triton.jit
def load_block(pointers, count, BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load [BLOCK, BLOCK_D], 0 beyond the first ``count`` tokens and beyond D."""
    inside = tl.arange(0, BLOCK)[:, None] < count
    if BLOCK_D != D:
        inside = inside & (tl.arange(0, BLOCK_D)[None, :] < D)
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def load_whole_block(pointers, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load [BLOCK, BLOCK_D] of a complete block of tokens, 0 beyond D."""
    if BLOCK_D != D:
        return tl.load(pointers, mask=tl.arange(0, BLOCK_D)[None, :] < D, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def store_block(pointers, x, count, BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store the first ``count`` tokens."""
    inside = tl.arange(0, BLOCK)[:, None] < count
    if BLOCK_D != D:
        inside = inside & (tl.arange(0, BLOCK_D)[None, :] < D)
    tl.store(pointers, x, mask=inside)


@triton.jit
def add_to_block(pointers, x, count, BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Add to the first ``count`` tokens, which no other program touches."""
    before = load_block(pointers, count, BLOCK, D, BLOCK_D)
    store_block(pointers, before + x, count, BLOCK, D, BLOCK_D)


@triton.jit
def seen_range(begin, end, first, last, near, far, BLOCK: tl.constexpr):
    """Return the part of the tokens ``begin .. end`` that the block ``first .. last`` sees, in three parts.

    Token i of the block sees ``i + near .. i + far``. The middle part has whole blocks that every token
    of the block sees: no mask is needed there.
    """
    start = tl.maximum(begin, first + near)
    stop = tl.minimum(end, last + far)
    whole = start + tl.cdiv(tl.maximum(last - 1 + near - start, 0), BLOCK) * BLOCK
    whole = tl.minimum(whole, stop)
    cut = whole + tl.maximum(tl.minimum(stop, first + far + 1) - whole, 0) // BLOCK * BLOCK
    return start, whole, cut, stop


@triton.jit
def tanh(x):
    """Compute tanh to a few units in the last place, for small x too, by Eigen's float32 approximation.

    Odd over even polynomial on +-7.9, beyond which tanh is 1 in float32. ``1 - 2 / (exp(2 x) + 1)`` loses
    precision for small x, and Triton's own tanh is missing in its interpreter.
    """
    x = tl.minimum(tl.maximum(x, -7.90531110763549805), 7.90531110763549805)
    y = x * x
    odd = -2.76076847742355e-16 * y + 2.00018790482477e-13
    odd = odd * y - 8.60467152213735e-11
    odd = odd * y + 5.12229709037114e-08
    odd = odd * y + 1.48572235717979e-05
    odd = odd * y + 6.37261928875436e-04
    odd = odd * y + 4.89352455891786e-03
    even = 1.19825839466702e-06 * y + 1.18534705686654e-04
    even = even * y + 2.26843463243900e-03
    even = even * y + 4.89352518554385e-03
    return x * odd / even

"""Counter-based random numbers: functions of (seed, row, position, feature), by PyTorch's integer operations.

SplitMix64 (Steele, Lea and Flood 2014): the n-th word of a stream is ``mix(key + n * GAMMA)``. The seed gives
the key of each row, that key the key of each position, and that one the words of the features. Any rank that
holds a token computes the same words for it, on any device, whatever other tokens it holds.
"""

from __future__ import annotations

import math

import torch

GAMMA = 0x9E3779B97F4A7C15 - 2**64
_ROUNDS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1))

_AT_ONCE = {"cpu": 2**16, "cuda": 2**24}
"""Number of 64-bit words to mix at a time: what fits a core's cache, or what a GPU's memory can spare."""

_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def mix(z: torch.Tensor) -> torch.Tensor:
    """Apply SplitMix64's finaliser to int64 ``z`` in place: each input bit flips half of the output bits."""
    shifted = torch.empty_like(z)
    for shift, factor in _ROUNDS:
        torch.bitwise_right_shift(z, shift, out=shifted)
        shifted &= (1 << (64 - shift)) - 1  # a shift of signed numbers copies the sign
        z ^= shifted
        z *= factor
    return z


def token_keys(seed: torch.Tensor, rows_R: torch.Tensor, positions_L: torch.Tensor) -> torch.Tensor:
    """Return int64 [R, L]: the key of each token."""
    of_rows = mix(seed + rows_R * GAMMA)
    return mix(of_rows[:, None] + positions_L * GAMMA)


def words(keys_RL: torch.Tensor, features: int, first: int = 0) -> torch.Tensor:
    """Return int64 [R, L, F]: 64 random bits each, for the features from ``first`` on."""
    out = keys_RL.new_empty(*keys_RL.shape, features)
    counters = torch.arange(first, first + features, device=keys_RL.device) * GAMMA
    flat_TF, keys_T1 = out.flatten(0, 1), keys_RL.reshape(-1, 1)
    for some in _portions(keys_T1, features):
        mix(torch.add(keys_T1[some], counters, out=flat_TF[some]))
    return out


def bernoulli_mask(keys_RL: torch.Tensor, features: int, p: float, first: int = 0) -> torch.Tensor:
    """Return bool [R, L, F]: true with probability ``p``, to 2**-32; each word serves two features."""
    out = torch.empty(*keys_RL.shape, features, dtype=torch.bool, device=keys_RL.device)
    from_word, skipped = divmod(first, 2)
    count = (skipped + features + 1) // 2
    counters = torch.arange(from_word, from_word + count, device=keys_RL.device) * GAMMA
    flat_TF, keys_T1 = out.flatten(0, 1), keys_RL.reshape(-1, 1)
    limit = min(round(p * 2**32), 2**32 - 1) - 2**31
    for some in _portions(keys_T1, count):
        halves = mix(keys_T1[some] + counters).view(torch.int32)
        torch.lt(halves[:, skipped : skipped + features], limit, out=flat_TF[some])
    return out


def _portions(keys_T1: torch.Tensor, count: int) -> list[slice]:
    size = max(1, _AT_ONCE.get(keys_T1.device.type, 2**24) // max(1, count))
    return [slice(at, at + size) for at in range(0, keys_T1.size(0), size)]


def _top_bits(x: torch.Tensor, digits: int) -> torch.Tensor:
    """Return the highest bits as a non-negative number."""
    return (x >> (64 - digits)) & ((1 << digits) - 1)


def uniform(
    x: torch.Tensor, dtype: torch.dtype, low: float = 0.0, high: float = 1.0
) -> torch.Tensor:
    """Return numbers in [low, high), with as many binary digits as ``dtype`` has."""
    digits = _DIGITS.get(dtype, 53)
    unit = _top_bits(x, digits).double() * 2.0**-digits
    return (unit * (high - low) + low).to(dtype)


def _open_unit(x: torch.Tensor) -> torch.Tensor:
    """Return float64 in (0, 1), with 52 binary digits; both ends are excluded."""
    return (_top_bits(x, 52).double() + 0.5) * 2.0**-52


def normal(
    x: torch.Tensor, dtype: torch.dtype, mean: float = 0.0, std: float = 1.0
) -> torch.Tensor:
    return (torch.special.ndtri(_open_unit(x)) * std + mean).to(dtype)


def log_normal(
    x: torch.Tensor, dtype: torch.dtype, mean: float = 1.0, std: float = 2.0
) -> torch.Tensor:
    return normal(x, torch.float64, mean, std).exp().to(dtype)


def cauchy(
    x: torch.Tensor, dtype: torch.dtype, median: float = 0.0, sigma: float = 1.0
) -> torch.Tensor:
    return (torch.tan(math.pi * (_open_unit(x) - 0.5)) * sigma + median).to(dtype)


def exponential(x: torch.Tensor, dtype: torch.dtype, lambd: float = 1.0) -> torch.Tensor:
    return (-_open_unit(x).log() / lambd).to(dtype)


def geometric(x: torch.Tensor, dtype: torch.dtype, p: float) -> torch.Tensor:
    """Return the number of trials up to the first success."""
    return (_open_unit(x).log() / math.log1p(-p)).ceil().clamp(min=1).to(dtype)


def bernoulli(x: torch.Tensor, dtype: torch.dtype, p: float | torch.Tensor = 0.5) -> torch.Tensor:
    return (_top_bits(x, 53).double() * 2.0**-53 < p).to(dtype)


def integers(
    x: torch.Tensor, dtype: torch.dtype, low: int = 0, high: int | None = None
) -> torch.Tensor:
    """Return integers in [low, high); one bound: [0, bound); no bound: all that ``dtype`` holds exactly."""
    if high is None and low:
        low, high = 0, low
    if high is None:
        high = _highest(dtype) + 1
    return (_top_bits(x, 63) % (high - low) + low).to(dtype)


def _highest(dtype: torch.dtype) -> int:
    if dtype == torch.bool:
        return 1
    return 2 ** _DIGITS[dtype] if dtype in _DIGITS else torch.iinfo(dtype).max - 1

"""Short names for values: equal for what is equal on all ranks, and different, in practice, for all else."""

from __future__ import annotations

import zlib
from functools import lru_cache

import torch


def fingerprint(value: object) -> int:
    """A 32-bit checksum of ``repr(value)`` (or of raw bytes), equal across processes."""
    data = value if isinstance(value, bytes) else repr(value).encode()
    return zlib.crc32(data)


def checksum(x: torch.Tensor) -> int:
    """A checksum of a tensor's values that depends on their order; computed where the tensor lives.

    The values' bits, as integers, are multiplied by odd numbers that depend on their place and summed
    modulo 2**64: one differing value always changes the sum, several hardly ever cancel. For that,
    values and places are mixed first: round numbers in float64 have upper bits only, of which a
    product keeps little, and factors linear in the place would let tokens trade places in pairs.
    """
    flat = x.detach().contiguous().view(-1)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    bits = flat.view(integers[flat.element_size()]).to(torch.int64)
    small = bits.numel() <= _KEPT  # batches mostly are, and of one length
    factors = (_kept_factors if small else _factors)(bits.numel(), bits.device)
    return int((_fold(bits) * factors).sum())


def _factors(count: int, device: torch.device) -> torch.Tensor:
    place = torch.arange(1, count + 1, device=device, dtype=torch.int64)
    return _fold(_fold(place * 0x1E3779B97F4A7C15) * 0x3F58476D1CE4E5B9) | 1


_KEPT = 2**20
"""Places whose factors are kept: 8 MB."""
_kept_factors = lru_cache(maxsize=4)(_factors)


def _fold(x: torch.Tensor) -> torch.Tensor:
    """The upper half of each int64 added to the lower one, bit by bit; different stay different."""
    return x ^ ((x >> 32) & 0xFFFFFFFF)

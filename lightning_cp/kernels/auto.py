"""The order of kernels for ``kernel="auto"``: a table by GPU and tiles, which measurements can overwrite.

The table says which kernel was written for a GPU. It is not measured: ``hardware.json`` is, which
``python -m lightning_cp.bench`` writes and the variable ``LIGHTNING_CP_HARDWARE`` names.
"""

from __future__ import annotations

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_cp.errors import ConfigError
from lightning_cp.kernels.devices import (
    ComputeCapability,
    compute_capability,
    flash_implementation,
    has_package_part,
)
from lightning_cp.kernels.protocol import Request
from lightning_cp.layout.sequence import SequenceLayout

HARDWARE = "LIGHTNING_CP_HARDWARE"
"""The environment variable with the path of a ``hardware.json``."""
LONG = 1024
"""Queries of a row from which tiles are long, unless documents cut it."""
MANY_LENGTHS = 8
"""Lengths of a run's rows up to which cuDNN may come first: PyTorch makes a plan for each, and keeps it."""

_FLASH = ("flash_attn_3", "aten_cuda_flash", "flash_attn_2")
_OTHERS = ("triton", "aten_cpu_flash", "reference")
DEFAULT = (*_FLASH, "aten_cuda_cudnn", *_OTHERS)
"""The order where nothing better is known: Ampere and Ada, short tiles, packed rows."""
LONG_TILES: dict[int, tuple[str, ...]] = {
    9: ("flash_attn_3", "aten_cuda_cudnn", "aten_cuda_flash", "flash_attn_2", *_OTHERS),
    10: ("aten_cuda_cudnn", "aten_cuda_flash", "flash_attn_2", "flash_attn_3", *_OTHERS),
}
"""The order for few long tiles, by the first number of the compute capability.

PyTorch's FlashAttention is version 2, written for Ampere; cuDNN's kernels are written for each GPU. cuDNN
takes a plan for each length, so rows that documents or padding cut are left to others.
"""


class Tiles(NamedTuple):
    """The tiles of a call, as far as the order of kernels depends on them; equal on all ranks.

    Attributes:
        packed: documents or padding cut the rows, so that tiles are many, or of many lengths.
        tokens: queries of a ring rank's row, rounded down to a power of two.
        varied: the run's rows had more than ``MANY_LENGTHS`` lengths.
    """

    packed: bool
    tokens: int
    varied: bool = False


class Platform(NamedTuple):
    """The state of this process that the order depends on.

    Attributes:
        capability: of the GPU; ``None`` without one.
        flash: the implementation of PyTorch's FlashAttention that its user activated, as FA3 or FA4.
        deterministic: PyTorch uses deterministic algorithms only, which excludes cuDNN's backward.
        hardware: the path of the measurements.
    """

    capability: ComputeCapability | None = None
    flash: str | None = None
    deterministic: bool = False
    hardware: str | None = None

    @classmethod
    def of_calls_on(cls, device_type: str) -> Platform:
        """Return the state for calls on a device; asks no GPU for calls on CPU."""
        if device_type != "cuda":
            return cls()
        return cls(
            compute_capability(),
            flash_implementation(),
            torch.are_deterministic_algorithms_enabled(),
            os.environ.get(HARDWARE) or None,
        )


class Order(NamedTuple):
    """Kernels in the order of ``auto``, and the reason; the reason is empty where none is needed."""

    names: tuple[str, ...]
    reason: str = ""


class Crossover(NamedTuple):
    """The fastest measured kernel of a kind of call, from a length on."""

    dtype: str
    head_dim: int
    mask: str
    tokens: int
    kernel: str


def tiles_of(layout: SequenceLayout, *, varied: bool = False) -> Tiles:
    """Return the tiles of a layout, in a run whose lengths are ``varied`` or few."""
    packed = layout.documents is not None and not layout.documents.is_dense
    queries = layout.local_len * layout.ulysses_size
    return Tiles(packed, 1 << queries.bit_length() - 1, varied)


def auto_order(request: Request, tiles: Tiles | None, platform: Platform) -> Order:
    """Return the order of kernels for a request.

    Args:
        request: the requirements of the call.
        tiles: its tiles; ``None``: unknown.
        platform: this process.

    Raises:
        ConfigError: the measurements cannot be read.
    """
    if request.device_type != "cuda" or platform.capability is None:
        return Order(DEFAULT)
    order = _measured_order(request, tiles, platform) or _table_order(tiles, platform)
    return order._replace(reason=order.reason + _hint(platform))


def _table_order(tiles: Tiles | None, platform: Platform) -> Order:
    """Return the built-in order."""
    assert platform.capability is not None
    gpu = "compute capability {}.{}".format(*platform.capability)
    if platform.flash is not None:
        first = f"PyTorch's FlashAttention is {platform.flash}, which was activated"
        return Order(_first("aten_cuda_flash", DEFAULT), first)
    if tiles is None or tiles.packed or tiles.tokens < LONG:
        kind = "tiles of unknown length" if tiles is None else "packed rows" if tiles.packed else ""
        return Order(DEFAULT, f"the order for {gpu}, {kind or 'short tiles'}")
    if platform.deterministic:
        return Order(DEFAULT, f"the order for {gpu}, deterministic algorithms, which cuDNN lacks")
    if tiles.varied:
        many = f"rows of more than {MANY_LENGTHS} lengths, for each of which PyTorch keeps a cuDNN plan"
        return Order(DEFAULT, f"the order for {gpu}, {many}")
    return Order(
        LONG_TILES.get(platform.capability[0], DEFAULT), f"the order for {gpu}, few long tiles"
    )


def _measured_order(request: Request, tiles: Tiles | None, platform: Platform) -> Order | None:
    """Return the order with the fastest measured kernel first; ``None`` if that is not known."""
    if platform.hardware is None or tiles is None:
        return None
    device, crossovers = load_crossovers(platform.hardware)
    if device != torch.cuda.get_device_name():
        return None
    mask = _mask(request, tiles)
    dtype = str(request.dtype).removeprefix("torch.")
    kind = [c for c in crossovers if c[:3] == (dtype, request.head_dim, mask)]
    without_cudnn = platform.deterministic or tiles.varied
    usable = [c for c in kind if not (without_cudnn and c.kernel == "aten_cuda_cudnn")]
    if not usable:
        return None
    below = [c for c in usable if c.tokens <= tiles.tokens]
    found = max(below, key=lambda c: c.tokens) if below else min(usable, key=lambda c: c.tokens)
    what = f"{dtype}, head dim {request.head_dim}, {mask}, {found.tokens:,} tokens"
    return Order(_first(found.kernel, DEFAULT), f"the fastest in {platform.hardware} for {what}")


def _mask(request: Request, tiles: Tiles) -> str:
    """Return the bench's name for the mask of a call."""
    if tiles.packed:
        return "packed"
    if "band" in request.masks:
        return "window"
    return "causal" if "causal" in request.masks else "full"


def _first(name: str, names: tuple[str, ...]) -> tuple[str, ...]:
    return name, *(other for other in names if other != name)


def _hint(platform: Platform) -> str:
    """Return how to get FlashAttention-4, where it is installed for this GPU and not in use."""
    assert platform.capability is not None
    if platform.capability[0] != 10 or platform.flash is not None:
        return ""
    if not has_package_part("flash_attn", "cute"):
        return ""
    return (
        "; flash_attn.cute is installed: torch.nn.attention.activate_flash_attention_impl('FA4') makes "
        "PyTorch's FlashAttention use it, and puts aten_cuda_flash first"
    )


@lru_cache(maxsize=4)
def load_crossovers(file: str) -> tuple[str, tuple[Crossover, ...]]:
    """Read the device's name and its crossovers from a ``hardware.json``.

    Raises:
        ConfigError: no such file, or not of that form.
    """
    hint = f"Give the path of one that python -m lightning_cp.bench wrote, or unset {HARDWARE}."
    try:
        given: dict[str, Any] = json.loads(Path(file).read_text())
        rows = [{name: row[name] for name in Crossover._fields} for row in given["crossovers"]]
        found = tuple(Crossover(**row) for row in rows)
        device = str(given["device_name"])
    except OSError as error:
        raise ConfigError(f"{HARDWARE}={file} cannot be read ({error.strerror}). {hint}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{HARDWARE}={file} has no crossovers of kernels. {hint}") from error
    if unknown := sorted({one.kernel for one in found} - set(DEFAULT)):
        raise ConfigError(f"{HARDWARE}={file} names the unknown kernel {unknown[0]}. {hint}")
    return device, found

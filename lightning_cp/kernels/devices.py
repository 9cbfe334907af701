"""Devices of kernels: checks of the GPU, transfer of small tables, and a cache key for tile lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

import torch
import torch.nn.attention

from lightning_cp.layout.tiles import Tile

ComputeCapability = tuple[int, int]


def gpu_obstacle(name: str, wanted: str, fits: Callable[[ComputeCapability], bool]) -> str | None:
    """Return the reason why this machine's GPU cannot run a kernel; ``None`` if it can or there is none.

    Args:
        name: of the kernel, for the reason.
        wanted: its compute capabilities, in words.
        fits: returns True for a compute capability that it supports.
    """
    if not has_nvidia_gpu():
        return None
    got = torch.cuda.get_device_capability()
    if fits(got):
        return None
    return f"{name} needs a GPU of compute capability {wanted}, not {got[0]}.{got[1]}"


def pre_ampere_obstacle(name: str) -> str | None:
    """Return the reason if this machine's GPU is older than compute capability 8.0, else ``None``."""
    return gpu_obstacle(name, "8.0 or later", lambda got: got >= (8, 0))


def has_nvidia_gpu() -> bool:
    """Return True if PyTorch can use an NVIDIA GPU."""
    return torch.cuda.is_available() and torch.version.hip is None


def compute_capability() -> ComputeCapability | None:
    """Return the compute capability of the current GPU, or ``None`` without one."""
    return torch.cuda.get_device_capability() if has_nvidia_gpu() else None


def flash_implementation() -> str | None:
    """Return the implementation of PyTorch's FlashAttention that was activated: FA3, FA4, or ``None``."""
    return torch.nn.attention.current_flash_attention_impl()


FA4_HAS_WINDOWS = torch.__version__ >= "2.12"
"""Before, PyTorch's call of FlashAttention-4 takes a window in forward, and refuses it in backward."""


def window_obstacle() -> str | None:
    """Return the reason if PyTorch's FlashAttention has no windows, as it was activated; else ``None``."""
    if FA4_HAS_WINDOWS or flash_implementation() != "FA4":
        return None
    return f"FA4, which was activated, refuses it in backward before torch 2.12 (here: {torch.__version__})"


FA4_HEAD_DIM = 128
"""The largest head dim of FlashAttention-4 in all its releases and on all its GPUs."""


def head_dim_obstacle(head_dim: int) -> str | None:
    """Return the reason if PyTorch's FlashAttention, as it was activated, refuses a head dim."""
    if head_dim <= FA4_HEAD_DIM or flash_implementation() != "FA4":
        return None
    return f"FA4, which was activated, goes up to {FA4_HEAD_DIM}"


def has_package_part(package: str, part: str) -> bool:
    """Return True if a package is installed with a part of that name; imports neither."""
    spec = PathFinder.find_spec(package)
    places = spec.submodule_search_locations if spec is not None else None
    return any((Path(place) / part).is_dir() for place in places or ())


def to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a CPU tensor to the device; to a GPU from pinned memory, so that the host does not wait."""
    if device.type != "cuda":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


class IdentityKey:
    """Cache key of a tile list by identity: hashing thousands of tiles at each call costs more than a launch.

    A schedule returns the same tuple for every layer, so identity suffices.
    """

    def __init__(self, tiles: Sequence[Tile]) -> None:
        self.tiles = tuple(tiles)  # a tuple is not copied

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdentityKey) and other.tiles is self.tiles

    def __hash__(self) -> int:
        return id(self.tiles)

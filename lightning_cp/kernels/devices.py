"""The devices that kernels run on: which GPUs they take, and how small tables reach them."""

from __future__ import annotations

from collections.abc import Callable

import torch

ComputeCapability = tuple[int, int]


def unfit_gpu(name: str, wanted: str, fits: Callable[[ComputeCapability], bool]) -> str | None:
    """Why this machine's GPU cannot run a kernel; ``None`` if it can, or if it has no NVIDIA GPU to ask.

    Args:
        name: the kernel's, as the reason calls it.
        wanted: the compute capabilities that it takes, in words.
        fits: whether it takes one.
    """
    if not has_nvidia_gpu():
        return None
    got = torch.cuda.get_device_capability()
    if fits(got):
        return None
    return f"{name} needs a GPU of compute capability {wanted}, not {got[0]}.{got[1]}"


def before_ampere(name: str) -> str | None:
    """Why this machine's GPU is too old for a kernel that needs compute capability 8.0, or ``None``."""
    return unfit_gpu(name, "8.0 or later", lambda got: got >= (8, 0))


def has_nvidia_gpu() -> bool:
    """True if there is one that PyTorch can use."""
    return torch.cuda.is_available() and torch.version.hip is None


def to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CPU tensor on the device; copied to a GPU from pinned memory, so that the host does not wait."""
    if device.type != "cuda":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)

"""Functions of tensors with the types that PyTorch's own annotations leave out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

to_list: Callable[[torch.Tensor], list[Any]] = torch.Tensor.tolist
"""Return the values as nested lists; waits for the device."""


def optimizer_parameters(optimizer: Optimizer) -> Iterator[torch.nn.Parameter]:
    """Yield the parameters of all groups, in the order in which a state dict numbers them."""
    for group in optimizer.param_groups:
        yield from group["params"]


def to_device(x: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """Return the tensor on a device (``None``: where it is); the host does not wait for a copy to a GPU."""
    if device is None or x.device == device:
        return x
    from_host = device.type == "cuda" and x.device.type == "cpu"
    if from_host and x.layout is torch.strided and not x.is_nested:
        x = x.pin_memory()  # pageable memory would make the host wait
    return x.to(device, non_blocking=from_host)


def start_to_host(
    tensors: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], torch.cuda.Event | None]:
    """Return copies, which later changes do not reach, and the event of their completion.

    The host waits only for tensors of another GPU than the current one.
    """
    copies: dict[str, torch.Tensor] = {}
    pending = False
    for name, x in tensors.items():
        is_here = x.is_cuda and x.device.index == torch.cuda.current_device()  # as is the event
        copies[name] = x.detach().to("cpu", non_blocking=is_here, copy=True)
        pending |= is_here
    if not pending:
        return copies, None
    event = torch.cuda.Event()
    event.record()
    return copies, event


vector_norm: Callable[..., torch.Tensor] = torch.linalg.vector_norm

foreach_norm: Callable[..., tuple[torch.Tensor, ...]] = torch._foreach_norm


WIDENED = 2**18
"""Numbers on the CPU that a norm copies to a wider dtype at once. Memory for a large copy comes from the
system each time, which takes several times as long as the norm."""


def total_norm(tensors: Iterable[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """Return the p-norm of all entries as one vector: float64 [], on a GPU if some tensor is on one.

    One fused pass for each device and dtype; 0 without any entry. The host does not wait.
    """
    norms = [
        vector_norm(torch.stack(foreach_norm(each, norm_type, dtype=torch.float64)), norm_type)
        for each in _by_kind(tensors)
    ]
    if not norms:
        return torch.zeros((), dtype=torch.float64)
    return vector_norm(_on_one_device(norms), norm_type)


def has_infinite_norm(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return True, bool [], if some 2-norm is NaN or infinite: if an entry is, or if squares overflow.

    One fused pass for each device and dtype, in that dtype. The host does not wait.
    """
    flags: list[torch.Tensor] = []
    for each in _by_kind(tensors):
        dtype = torch.float32 if each[0].dtype == torch.float16 else None  # it overflows early
        flags.append(~torch.stack(foreach_norm(each, 2.0, dtype=dtype)).isfinite().all())
    return _on_one_device(flags).any() if flags else torch.zeros((), dtype=torch.bool)


def _by_kind(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return the entries by device and dtype; on the CPU in parts of at most ``WIDENED`` numbers."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for x in tensors:
        if x.numel():
            is_large = x.device.type == "cpu" and x.numel() > WIDENED and x.is_contiguous()
            parts = x.view(-1).split(WIDENED) if is_large else (x,)
            groups[x.device, x.dtype].extend(parts)
    return list(groups.values())


def _on_one_device(scalars: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return scalars as one tensor, on a GPU if some scalar is on one."""
    device = next((x.device for x in scalars if x.device.type != "cpu"), scalars[0].device)
    return torch.stack([x.to(device) for x in scalars])

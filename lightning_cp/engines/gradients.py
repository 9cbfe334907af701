"""The norm of gradients that are spread over ranks, and clipping by it.

PyTorch's own clipping stacks the norms of all parameters, which fails for DTensors of different meshes and
plain tensors. Here every rank sums its own entries per set of mesh axes that shard a parameter, and each of
these sums is added over the ranks of those axes: a replicated tensor counts once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from lightning_cp.comm.reduce import all_max, all_mean, all_sum, any_rank
from lightning_cp.errors import NonFiniteError
from lightning_cp.utils.dtensor import local_part
from lightning_cp.utils.tensors import total_norm

_Key = tuple[str, tuple[dist.ProcessGroup, ...]]


def gradient_norm(parameters: Iterable[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """The norm of all gradients as one vector: float64 [], equal on every rank, as in one process.

    Collective, with the same parameters on every rank; those without a gradient count as 0.

    Args:
        parameters: plain tensors and DTensors, on any meshes.
        norm_type: p of the p-norm; ``inf`` for the largest element.
    """
    parts: dict[_Key, list[torch.Tensor]] = defaultdict(list)
    for parameter in parameters:
        own = parts[_shared_over(parameter)]  # also without a gradient: other ranks may have one
        if parameter.grad is not None:
            own.append(local_part(parameter.grad))
    if not parts:
        return torch.zeros((), dtype=torch.float64)
    norms = [_over_ranks(total_norm(own, norm_type), key, norm_type) for key, own in parts.items()]
    device = next((x.device for x in norms if x.device.type != "cpu"), norms[0].device)
    return torch.linalg.vector_norm(torch.stack([x.to(device) for x in norms]), norm_type)


def clip_norm(
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients in place so that their norm is at most ``max_norm``; return the norm before.

    Raises:
        NonFiniteError: with ``error_if_nonfinite``, the norm is NaN or infinite; on every rank.
    """
    each = list(parameters)
    norm = gradient_norm(each, norm_type)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise NonFiniteError(
            f"the norm of the gradients is {float(norm)}, so they cannot be clipped to {max_norm}. Look for "
            "the first loss that is not finite, or pass error_if_nonfinite=False."
        )
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in each:
        if parameter.grad is not None:
            gradient = local_part(parameter.grad)
            gradient.mul_(factor.to(gradient.device, gradient.dtype))
    return norm


def clip_value(parameters: Iterable[torch.Tensor], value: float) -> None:
    """Clamp every element of the gradients to [-value, value], in place."""
    for parameter in parameters:
        if parameter.grad is not None:
            local_part(parameter.grad).clamp_(-value, value)


def _shared_over(parameter: torch.Tensor) -> _Key:
    """The device type and the groups over which ranks hold different parts of a parameter."""
    if not isinstance(parameter, DTensor):
        return "", ()
    mesh = parameter.device_mesh
    axes = [
        at for at, placed in enumerate(parameter.placements) if not isinstance(placed, Replicate)
    ]
    return mesh.device_type, tuple(mesh.get_group(at) for at in axes if mesh.size(at) > 1)


def _over_ranks(norm: torch.Tensor, key: _Key, norm_type: float) -> torch.Tensor:
    """Combine the norms of the groups' ranks on the device of their messages; return the result on the
    original device.
    """
    device_type, groups = key
    total = norm.to(device_type) if groups else norm
    for group in groups:
        if math.isinf(norm_type):
            total = all_max(total, group)
        else:
            total = all_sum(total**norm_type, group) ** (1.0 / norm_type)
    return total.to(norm.device)


# Gradients of a loss that a ``GradScaler`` has scaled.


def unscale(
    optimizer: Optimizer,
    inv_scale: torch.Tensor,
    found_inf: torch.Tensor,
    allow_fp16: bool,
    *,
    groups: Iterable[dist.ProcessGroup],
) -> dict[torch.device, torch.Tensor]:
    """``GradScaler._unscale_grads_`` for gradients of which each rank holds a part: all skip the same steps.

    PyTorch's takes either plain tensors or DTensors, and looks for infinity on the first one's mesh only.

    Args:
        optimizer: the owner of the gradients.
        inv_scale: [], the factor.
        found_inf: [], zero; on the device of the scale.
        allow_fp16: float16 gradients are expected.
        groups: all ranks that share the model are in these groups, one after the other; collective.

    Returns:
        By its device, a number that is not zero if a gradient of some rank is not finite.

    Raises:
        ValueError: gradients in float16, as PyTorch says it.
    """
    parts: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and (part := local_part(parameter.grad)).numel():
                parts[part.device, part.dtype].append(part)
    if not allow_fp16 and any(dtype == torch.float16 for _, dtype in parts):
        raise ValueError("Attempting to unscale FP16 gradients.")
    for (device, _), some in parts.items():
        of_device = torch.zeros_like(found_inf, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(some, of_device, inv_scale.to(device))
        found_inf = torch.maximum(found_inf, of_device.to(found_inf.device))
    for ranks in groups:
        found_inf = all_max(found_inf, ranks)
    return {found_inf.device: found_inf}


# Averages over ranks of gradients that no wrapper averages.


def average_present(
    parameters: Sequence[nn.Parameter], control: dist.ProcessGroup, group: dist.ProcessGroup
) -> None:
    """Average the existing gradients; gradients that are averaged already stay the same.

    A rank without a gradient counts as zeros; where no rank has one it stays ``None``.

    Args:
        parameters: in the same order on all ranks.
        control: carries, on the CPU, the flags of existing gradients.
        group: the same ranks; carries the gradients.
    """
    if not parameters:
        return
    existing = any_rank([p.grad is not None for p in parameters], control)
    for parameter, exists in zip(parameters, existing, strict=True):
        if exists:
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = all_mean(own, group)

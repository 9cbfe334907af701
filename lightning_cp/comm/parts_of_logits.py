"""Functions of logits that need a rank's own part of the vocabulary alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from lightning_cp.comm.sharded_cross_entropy import sharded_cross_entropy

Function = Callable[..., Any]

ABOUT_THE_TENSOR = {
    torch.Tensor.device.__get__,  # type: ignore[attr-defined]
    torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
    torch.Tensor.layout.__get__,  # type: ignore[attr-defined]
    torch.Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    torch.Tensor.grad_fn.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_leaf.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_cuda.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_sparse.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_meta.__get__,  # type: ignore[attr-defined]
    torch.Tensor.ndim.__get__,  # type: ignore[attr-defined]
    torch.Tensor.dim,
    torch.Tensor.register_hook,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.is_floating_point,
    torch.is_complex,
    torch.Tensor.get_device,
    torch.Tensor.element_size,
}
SHAPES = {torch.Tensor.shape.__get__, torch.Tensor.size, torch.Tensor.numel, torch.Tensor.__len__}  # type: ignore[attr-defined]
CROSS_ENTROPY = {F.cross_entropy}
_NUMBER_BY_NUMBER = {
    torch.Tensor.float,
    torch.Tensor.double,
    torch.Tensor.bfloat16,
    torch.Tensor.half,
    torch.Tensor.to,
    torch.Tensor.type_as,
    torch.Tensor.contiguous,
    torch.Tensor.clone,
    torch.Tensor.detach,
    torch.Tensor.data.__get__,  # type: ignore[attr-defined]
    torch.Tensor.tanh,
    torch.tanh,
}
_BY_A_NUMBER = {
    getattr(torch.Tensor, name)
    for name in ("__mul__", "__rmul__", "mul", "__truediv__", "div", "__add__", "add", "__sub__")
} | {torch.mul, torch.div, torch.add}
_VIEWS = {torch.Tensor.view, torch.Tensor.reshape}
_FLATTENS = {torch.Tensor.flatten, torch.flatten}


def of_shape(func: Function, local: torch.Tensor, ranks: int, args: Any, kwargs: Any) -> Any:
    """Questions about the shape, answered for the whole tensor."""
    whole = torch.Size((*local.shape[:-1], local.shape[-1] * ranks))
    if func is torch.Tensor.numel:
        return whole.numel()
    if func is torch.Tensor.__len__:
        return whole[0]
    at = args[0] if args else kwargs.get("dim")
    return whole if at is None else whole[at]


def kept(
    func: Function, local: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], ranks: int
) -> torch.Tensor | None:
    """This rank's part of the result, where it is made of its part alone; else ``None``."""
    if "out" in kwargs:
        return None
    if func in _NUMBER_BY_NUMBER:
        return func(local, *args, **kwargs)
    if func in _BY_A_NUMBER:
        numbers = all(isinstance(x, (int, float)) for x in (*args, *kwargs.values()))
        return func(local, *args, **kwargs) if numbers else None
    if func in _VIEWS and not kwargs:
        several = len(args) == 1 and isinstance(args[0], (tuple, list))
        sizes: list[Any] = list(args[0] if several else args)
        if len(sizes) > 1 and sizes[-1] == local.shape[-1] * ranks and sizes[-1] != -1:
            return func(local, *sizes[:-1], local.shape[-1])
        return None
    if func in _FLATTENS:
        first = kwargs.get("start_dim", args[0] if args else 0)
        last = kwargs.get("end_dim", args[1] if len(args) > 1 else -1)
        return func(local, first, last) if last % local.dim() < local.dim() - 1 else None
    return None


def cross_entropy_of_part(
    local: torch.Tensor, group: dist.ProcessGroup, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor | None:
    """The loss, from this rank's part; ``None`` for kinds of it that need whole rows."""
    names = ("target", "weight", "size_average", "ignore_index", "reduce", "reduction")
    given = {**dict(zip((*names, "label_smoothing"), args, strict=False)), **kwargs}
    target = given.pop("target", None)
    unusual = any(
        given.pop(name, None) is not None for name in ("weight", "size_average", "reduce")
    )
    plain = isinstance(target, torch.Tensor) and target.dtype == torch.int64 and target.dim() == 1
    if unusual or not plain or local.dim() != 2 or given.get("reduction") not in _REDUCTIONS:
        return None
    given["reduction"] = given.get("reduction") or "mean"
    kind = local.device.type
    if torch.is_autocast_enabled(kind) and local.dtype != torch.float64:
        local = local.float()  # as autocast has it
    return sharded_cross_entropy(local, target, group, **given)


_REDUCTIONS = (None, "mean", "sum", "none")

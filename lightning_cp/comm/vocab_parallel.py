"""Vocabulary-parallel logits and their cross-entropy: each rank of a group holds a part of the vocabulary.

``ShardedLogits`` look like the whole tensor (``shape``). ``cross_entropy``, elementwise functions (a change
of dtype, a cap, a scale) and reshapes of rows (``view(-1, vocabulary)``, ``flatten(0, 1)``) use each rank's
part. Any other function gets whole logits, gathered at that moment: correct, with the memory of one process.
Changes of these in place, or of a view of them, are written back to each rank's part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from lightning_cp.comm.tensor_parallel import gather_from_tp_region, scatter_to_tp_region
from lightning_cp.errors import ConfigError
from lightning_cp.utils.tracing import profile_range


def sharded_cross_entropy(
    logits_NV: torch.Tensor,
    target_N: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Return the ``torch.nn.functional.cross_entropy`` of the whole vocabulary; the same on every rank.

    Args:
        logits_NV: this rank's ``[N, V / ranks]``; ranks hold the vocabulary in order, in equal parts.
        target_N: int64 ``[N]``, of the whole vocabulary, the same on every rank.
        group: the ranks that share the vocabulary.
        ignore_index: a target that is not counted.
        reduction: ``mean`` over counted targets, ``sum``, or ``none``: ``[N]``, 0 for targets not counted.
        label_smoothing: the fraction of each target that is spread over the vocabulary.

    Raises:
        IndexError: on the CPU, a target that is neither ``ignore_index`` nor in the vocabulary. Elsewhere
            its loss is NaN, since a check would wait for the device.
    """
    vocabulary = logits_NV.shape[-1] * group.size()
    counts = target_N != ignore_index
    strange = _out_of_bounds(target_N, counts, vocabulary)
    if target_N.device.type == "cpu" and bool(strange.any()):
        raise IndexError(f"a target is out of bounds of the vocabulary of {vocabulary}.")
    losses = token_losses(logits_NV, target_N, counts, label_smoothing, group)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / counts.sum()


def token_losses(
    logits_NV: torch.Tensor,
    target_N: torch.Tensor,
    counts_N: torch.Tensor,
    smoothing: float,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Return losses ``[N]``: 0 for targets not counted, NaN where no rank has the target."""
    losses: Any = _CrossEntropy.apply(logits_NV, target_N, counts_N, smoothing, group)
    strange = _out_of_bounds(target_N, counts_N, logits_NV.shape[-1] * group.size())
    return losses.masked_fill(strange, float("nan"))


def _out_of_bounds(target_N: torch.Tensor, counts_N: torch.Tensor, vocabulary: int) -> torch.Tensor:
    return counts_N & ((target_N < 0) | (target_N >= vocabulary))


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropy of each token. Shapes over N tokens, a vocabulary of V and P ranks.

    ``loss = log sum exp(z) - z[target]`` and ``d loss / d z = softmax(z) - onehot(target)``. The largest
    logit and the sum of exponentials are reduced over the ranks; the target's logit comes from the rank that
    has it. No rank holds a whole row: three numbers per token are exchanged.

    ========  =======================================  =====================================  ==========
    pass      input                                    collective                             output
    ========  =======================================  =====================================  ==========
    forward   logits [N, V/P], target [N]              all-reduce: max [N], then sums [2-3, N]  losses [N]
    backward  d losses [N]                             none                                   [N, V/P]
    ========  =======================================  =====================================  ==========
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        counts: torch.Tensor,
        smoothing: float,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        size = logits.shape[-1]
        local = target - group.rank() * size
        here = counts & (local >= 0) & (local < size)
        local = local.where(here, 0)
        largest = logits.amax(-1)
        with profile_range("tensor-parallel cross-entropy"):
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        shifted = logits - largest[:, None]
        exponentials = shifted.exp()
        rows = [exponentials.sum(-1), shifted.gather(-1, local[:, None])[:, 0].where(here, 0)]
        if smoothing:
            rows.append(shifted.sum(-1))
        sums = torch.stack(rows)
        with profile_range("tensor-parallel cross-entropy"):
            dist.all_reduce(sums, group=group)
        losses = sums[0].log() - (1 - smoothing) * sums[1]
        if smoothing:
            losses = losses - smoothing / (size * group.size()) * sums[2]
        ctx.save_for_backward(exponentials / sums[0][:, None], local, here, counts)
        ctx.smoothing, ctx.vocabulary = smoothing, size * group.size()
        return losses.where(counts, 0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        softmax, local, here, counts = ctx.saved_tensors
        ones = here.to(softmax) * (1 - ctx.smoothing)
        gradient = softmax.scatter_add(-1, local[:, None], -ones[:, None])
        if ctx.smoothing:
            gradient = gradient - ctx.smoothing / ctx.vocabulary
        scale = gradients[0].where(counts, 0)
        return torch.where(counts[:, None], gradient * scale[:, None], 0), None, None, None, None


# Functions of logits that need only a rank's own part of the vocabulary.

Function = Callable[..., Any]

METADATA = {
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
_ELEMENTWISE = {
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
_SCALAR_ARITHMETIC = {
    getattr(torch.Tensor, name)
    for name in ("__mul__", "__rmul__", "mul", "__truediv__", "div", "__add__", "add", "__sub__")
} | {torch.mul, torch.div, torch.add}
_VIEWS = {torch.Tensor.view, torch.Tensor.reshape}
_FLATTENS = {torch.Tensor.flatten, torch.flatten}
_REDUCTIONS = (None, "mean", "sum", "none")


def global_shape(func: Function, local: torch.Tensor, ranks: int, args: Any, kwargs: Any) -> Any:
    """Return the result of a function of the shape for the whole tensor."""
    whole = torch.Size((*local.shape[:-1], local.shape[-1] * ranks))
    if func is torch.Tensor.numel:
        return whole.numel()
    if func is torch.Tensor.__len__:
        return whole[0]
    at = args[0] if args else kwargs.get("dim")
    return whole if at is None else whole[at]


def apply_to_part(
    func: Function, local: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], ranks: int
) -> torch.Tensor | None:
    """Return this rank's part of the result if its part of the logits is enough for it, else ``None``."""
    if "out" in kwargs:
        return None
    if func in _ELEMENTWISE:
        return func(local, *args, **kwargs)
    if func in _SCALAR_ARITHMETIC:
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


def cross_entropy_of_logits(
    local: torch.Tensor, group: dist.ProcessGroup, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor | None:
    """Return the loss from this rank's part; ``None`` for options that need whole rows."""
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
        local = local.float()  # as autocast does
    return sharded_cross_entropy(local, target, group, **given)


class ShardedLogits(torch.Tensor):
    """``[..., vocabulary]``, of which this rank holds ``[..., vocabulary / ranks]``."""

    group: dist.ProcessGroup
    viewed: tuple[torch.Tensor, int, int] | None
    """Whole logits of which a view exists, their version, and that of this rank's part at that time."""

    @staticmethod
    def of(local: torch.Tensor, group: dist.ProcessGroup) -> ShardedLogits:
        """Wrap this rank's part ``[..., V / ranks]`` as logits of the whole vocabulary."""
        logits = local.as_subclass(ShardedLogits)
        logits.group, logits.viewed = group, None
        return logits

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        profile_range = dict(kwargs)
        own, rest = (args[0], args[1:]) if args else (profile_range.pop("input", None), ())
        if isinstance(own, ShardedLogits):
            _write_back_views(own)
            local, group = _local_tensor(own), own.__dict__["group"]
            if func in METADATA:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if func in SHAPES:
                return global_shape(func, local, group.size(), rest, profile_range)
            if func in CROSS_ENTROPY:
                loss = cross_entropy_of_logits(local, group, rest, profile_range)
                if loss is not None:
                    return loss
            part = apply_to_part(func, local, rest, profile_range, group.size())
            if part is not None:
                return ShardedLogits.of(part, group)
        # The arguments as given: "input" is not the first one of every function.
        return _apply_to_whole(func, args, kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        """Show this rank's part only, without communication: other ranks may not print."""
        return (
            f"ShardedLogits(shape={tuple(self.shape)}, this rank's part: {_local_tensor(self)!r})"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return whole_logits(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        return whole_logits(self).__deepcopy__(memo)


def whole_logits(x: Any) -> Any:
    """Gather sharded logits, differentiably; return anything else unchanged.

    Args:
        x: any value; with ``ShardedLogits`` ``[..., V]`` all ranks of the group call it together.

    Returns:
        A plain tensor ``[..., V]``; each rank's gradient is summed over those that used it.
    """
    if not isinstance(x, ShardedLogits):
        return x
    _write_back_views(x)
    return _gather(x)


def _local_tensor(x: ShardedLogits) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(torch.Tensor)


def _apply_to_whole(func: Function, args: Any, kwargs: Any) -> Any:
    """Call ``func`` on whole logits; changes that it makes in place are written to this rank's part."""
    given: dict[int, tuple[ShardedLogits, torch.Tensor]] = {}
    args, kwargs = _replace_by_whole(args, given), _replace_by_whole(kwargs, given)
    versions = [_version(whole) for _, whole in given.values()]
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
    for (logits, whole), version in zip(given.values(), versions, strict=True):
        if _version(whole) != version:
            _write_back(whole, logits)
            result = logits if result is whole else result
        if any(getattr(x, "_base", None) is whole for x in _as_sequence(result)):
            logits.viewed = (whole, _version(whole), _version(logits))
    return result


def _replace_by_whole(values: Any, given: dict[int, tuple[ShardedLogits, torch.Tensor]]) -> Any:
    """Replace sharded logits by whole ones, and record both in ``given``."""
    if isinstance(values, (list, tuple)) and not hasattr(values, "_fields"):
        return type(values)(_replace_by_whole(value, given) for value in values)
    if isinstance(values, dict):
        return {key: _replace_by_whole(value, given) for key, value in values.items()}
    if isinstance(values, ShardedLogits):
        if id(values) not in given:
            given[id(values)] = values, _with_version_counter(whole_logits(values))
        return given[id(values)][1]
    return values


def _gather(logits: ShardedLogits) -> torch.Tensor:
    """Gather whole logits; reuse those that have views if still valid, so that changes of views add up."""
    viewed = logits.viewed
    if viewed is not None and viewed[2] == _version(logits):
        return viewed[0]
    return gather_from_tp_region(_local_tensor(logits), logits.__dict__["group"])


def _write_back_views(logits: ShardedLogits) -> None:
    """Write back changes that were made through a view of whole logits."""
    viewed = logits.viewed
    if viewed is None or viewed[1] == _version(viewed[0]):
        return
    if viewed[2] != _version(logits):
        raise ConfigError(
            "logits of a sharded vocabulary were changed in place through two views of them, one of which "
            "holds all of the vocabulary. Change the logits themselves, or make new ones."
        )
    _write_back(viewed[0], logits)


def _write_back(whole: torch.Tensor, logits: ShardedLogits) -> None:
    """Copy this rank's part of ``whole`` to ``logits``."""
    with torch._C.DisableTorchFunctionSubclass():
        logits.copy_(scatter_to_tp_region(whole, logits.__dict__["group"]))
    viewed = logits.viewed
    if viewed is not None and viewed[0] is whole:
        logits.viewed = (whole, _version(whole), _version(logits))


def _with_version_counter(whole: torch.Tensor) -> torch.Tensor:
    """Return a tensor that counts changes in place: a copy of one made in inference mode."""
    if not whole.is_inference():
        return whole
    with torch.inference_mode(False), torch.no_grad():
        return whole.clone()


def _version(x: torch.Tensor) -> int:
    """Return the number of changes in place."""
    with torch._C.DisableTorchFunctionSubclass():
        return 0 if x.is_inference() else x._version


def _as_sequence(result: Any) -> Any:
    return result if isinstance(result, (list, tuple)) else (result,)

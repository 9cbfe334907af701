"""Logits of which each tensor-parallel rank holds its own part of the vocabulary, used like whole ones.

They look like the whole tensor (``shape``), and ``cross_entropy`` takes them as they are. So does what treats
each number by itself (a change of dtype, a cap, a scale) or rows as rows (``view(-1, vocabulary)``,
``flatten(0, 1)``). Anything else is given whole logits, gathered then: right, with the memory of one process.
What changes these in place, or a view of them, is written back to each rank's own part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lightning_cp.comm.parts_of_logits import (
    ABOUT_THE_TENSOR,
    CROSS_ENTROPY,
    SHAPES,
    cross_entropy_of_part,
    kept,
    of_shape,
)
from lightning_cp.comm.tensor_parallel import gather_last, own_last
from lightning_cp.errors import ConfigError

Function = Callable[..., Any]


class ShardedLogits(torch.Tensor):
    """``[..., vocabulary]``, of which this rank holds ``[..., vocabulary / ranks]``."""

    group: dist.ProcessGroup
    lent: tuple[torch.Tensor, int, int] | None
    """Whole logits of which somebody has a view, their version, and this rank's part's then."""

    @staticmethod
    def of(local: torch.Tensor, group: dist.ProcessGroup) -> ShardedLogits:
        """This rank's part ``[..., V / ranks]``, as logits of the whole vocabulary."""
        logits = local.as_subclass(ShardedLogits)
        logits.group, logits.lent = group, None
        return logits

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        named = dict(kwargs)
        own, rest = (args[0], args[1:]) if args else (named.pop("input", None), ())
        if isinstance(own, ShardedLogits):
            _settle(own)
            local, group = _plain(own), own.__dict__["group"]
            if func in ABOUT_THE_TENSOR:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if func in SHAPES:
                return of_shape(func, local, group.size(), rest, named)
            if func in CROSS_ENTROPY:
                loss = cross_entropy_of_part(local, group, rest, named)
                if loss is not None:
                    return loss
            part = kept(func, local, rest, named, group.size())
            if part is not None:
                return ShardedLogits.of(part, group)
        # As they were given: "input" is not everywhere the first.
        return _of_whole(func, args, kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        """This rank's part: whoever prints it may be the only rank that does."""
        return f"ShardedLogits(shape={tuple(self.shape)}, this rank's part: {_plain(self)!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return whole_logits(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        return whole_logits(self).__deepcopy__(memo)


def whole_logits(x: Any) -> Any:
    """``x`` as it is, unless it is sharded logits: these are gathered; differentiable.

    Args:
        x: anything; of ``ShardedLogits`` ``[..., V]`` every rank of the group has to ask.

    Returns:
        A plain tensor ``[..., V]``; each rank's gradient is summed over those that used it.
    """
    if not isinstance(x, ShardedLogits):
        return x
    _settle(x)
    return _gathered(x)


def _plain(x: ShardedLogits) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(torch.Tensor)


def _of_whole(func: Function, args: Any, kwargs: Any) -> Any:
    """The result for whole logits; where ``func`` changes them, it changes this rank's part, too."""
    given: dict[int, tuple[ShardedLogits, torch.Tensor]] = {}
    args, kwargs = _whole(args, given), _whole(kwargs, given)
    versions = [_version(whole) for _, whole in given.values()]
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
    for (logits, whole), version in zip(given.values(), versions, strict=True):
        if _version(whole) != version:
            _write(whole, logits)
            result = logits if result is whole else result
        if any(getattr(x, "_base", None) is whole for x in _flat(result)):
            logits.lent = (whole, _version(whole), _version(logits))
    return result


def _whole(values: Any, given: dict[int, tuple[ShardedLogits, torch.Tensor]]) -> Any:
    """With whole logits instead of sharded ones, which are noted in ``given``."""
    if isinstance(values, (list, tuple)) and not hasattr(values, "_fields"):
        return type(values)(_whole(value, given) for value in values)
    if isinstance(values, dict):
        return {key: _whole(value, given) for key, value in values.items()}
    if isinstance(values, ShardedLogits):
        if id(values) not in given:
            given[id(values)] = values, _versioned(whole_logits(values))
        return given[id(values)][1]
    return values


def _gathered(logits: ShardedLogits) -> torch.Tensor:
    """Those that a view was lent of, if they are as they were: changes of several views add up."""
    lent = logits.lent
    if lent is not None and lent[2] == _version(logits):
        return lent[0]
    return gather_last(_plain(logits), logits.__dict__["group"])


def _settle(logits: ShardedLogits) -> None:
    """Write back what was changed since in a view of whole logits."""
    lent = logits.lent
    if lent is None or lent[1] == _version(lent[0]):
        return
    if lent[2] != _version(logits):
        raise ConfigError(
            "logits of a sharded vocabulary were changed in place through two views of them, one of which "
            "holds all of the vocabulary. Change the logits themselves, or make new ones."
        )
    _write(lent[0], logits)


def _write(whole: torch.Tensor, logits: ShardedLogits) -> None:
    """Have this rank's part be that of ``whole``."""
    with torch._C.DisableTorchFunctionSubclass():
        logits.copy_(own_last(whole, logits.__dict__["group"]))
    lent = logits.lent
    if lent is not None and lent[0] is whole:
        logits.lent = (whole, _version(whole), _version(logits))


def _versioned(whole: torch.Tensor) -> torch.Tensor:
    """One that tells of changes, also where nothing is differentiated."""
    if not whole.is_inference():
        return whole
    with torch.inference_mode(False), torch.no_grad():
        return whole.clone()


def _version(x: torch.Tensor) -> int:
    """The number of times it was changed in place."""
    with torch._C.DisableTorchFunctionSubclass():
        return 0 if x.is_inference() else x._version


def _flat(result: Any) -> Any:
    return result if isinstance(result, (list, tuple)) else (result,)

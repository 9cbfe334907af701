"""Memory for what is on the meta device, and values for what no checkpoint holds.

``to_empty`` leaves whatever was in memory in buffers that are not saved, such as rotary embeddings'
``inv_freq``: training goes on with them, and is silently wrong. They are made again here, by the module
that owns them, or the load is refused.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_cp.checkpoint.pretrained.names import plain
from lightning_cp.errors import CheckpointError

Initialize = Callable[[nn.Module], object]
"""Sets all values of a module's own parameters and buffers."""

Ways = dict[nn.Module, list[Initialize]]
"""What may set a module's values, in the order in which it is tried."""


def unsaved_on_meta(model: nn.Module) -> dict[str, nn.Module]:
    """Names of non-persistent buffers without values, and who owns them."""
    return {
        plain(f"{path}.{name}" if path else name): module
        for path, module in model.named_modules()
        for name, x in module._buffers.items()
        if x is not None and x.is_meta and name in module._non_persistent_buffers_set
    }


def ways_to_reset(
    model: nn.Module, owners: Collection[nn.Module], initialize: Initialize | None
) -> Ways:
    """How each owner's values are made again: ``initialize`` alone, if it is given.

    Otherwise the owner's ``reset_buffers()``, then ``_init_weights(owner)`` of the innermost model around it
    that has one (as transformers' do), then the owner's ``reset_parameters()``.

    Raises:
        CheckpointError: nothing makes them.
    """
    names = {module: plain(path) for path, module in model.named_modules()}
    above = [x for x in model.modules() if callable(getattr(x, "_init_weights", None))]
    ways: Ways = {}
    for owner in owners:
        family = [x for x in above if any(owner is inner for inner in x.modules())]
        found = [initialize, _own(owner, "reset_buffers")]
        found += [getattr(x, "_init_weights", None) for x in family[-1:]]
        found += [_own(owner, "reset_parameters")]
        ways[owner] = [way for way in found if way is not None][: 1 if initialize else None]
        if not ways[owner]:
            raise CheckpointError(
                f"{names[owner]} ({type(owner).__name__}) has buffers or parameters on the meta device that "
                "the checkpoint does not hold, and nothing says what their values are. Give the module a "
                "method reset_buffers() or reset_parameters() that sets them, pass initialize=, or build "
                "it on a real device. Nothing was loaded."
            )
    return ways


def _own(owner: nn.Module, name: str) -> Initialize | None:
    method = getattr(owner, name, None)
    return (lambda _: method()) if callable(method) else None


def make_again(ways: Ways, names: dict[nn.Module, list[str]]) -> None:
    """Set values, and see that all of the named ones were set.

    Raises:
        CheckpointError: a value that was left as it was.
    """
    for module, tried in ways.items():
        for name in names[module]:
            _poison(_local(getattr(module, name)))
        unset = names[module]
        for way in tried:
            with torch.no_grad():
                way(module)
            unset = [name for name in names[module] if _poisoned(_local(getattr(module, name)))]
            if not unset:
                break
        if unset:
            raise CheckpointError(
                f"{type(module).__name__} left its {unset[0]} without a value when it was made again. Have "
                "its reset_buffers() or reset_parameters() set it, or pass initialize=."
            )


def _local(x: torch.Tensor) -> torch.Tensor:
    held = x.to_local() if isinstance(x, DTensor) else x
    return held.detach()


def _poison(x: torch.Tensor) -> None:
    if x.is_floating_point() or x.is_complex():
        x.fill_(math.nan)
    elif x.dtype != torch.bool:
        x.fill_(torch.iinfo(x.dtype).min)


def _poisoned(x: torch.Tensor) -> bool:
    if not x.numel() or x.dtype == torch.bool:
        return False
    if x.is_floating_point() or x.is_complex():
        return bool(x.isnan().any())
    return bool((x == torch.iinfo(x.dtype).min).all())


def materialize(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """Give meta tensors memory, uninitialised, and floating-point parameters their dtype; ties are kept.

    Args:
        model: plain, or sharded by FSDP2, whose own records follow.
        device: for what is on the meta device.
        dtype: of floating-point parameters and saved buffers; ``None`` leaves theirs.
    """
    ties = _ties(model)
    saved = _saved(model)

    def give(x: torch.Tensor) -> torch.Tensor:
        wanted = (
            dtype if dtype is not None and x.is_floating_point() and id(x) in saved else x.dtype
        )
        if x.is_meta:
            return torch.empty_like(x, device=device, dtype=wanted)
        return x if x.dtype == wanted else x.to(wanted)

    with torch.no_grad():
        model._apply(give)
    for (first, name), *others in ties:
        for module, other in others:
            setattr(module, other, getattr(first, name))


def _saved(model: nn.Module) -> set[int]:
    """Parameters and persistent buffers, by id."""
    found = {id(x) for x in model.parameters()}
    for module in model.modules():
        for name, x in module._buffers.items():
            if x is not None and name not in module._non_persistent_buffers_set:
                found.add(id(x))
    return found


def _ties(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Places of one parameter, where there are several."""
    places: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for name, x in module._parameters.items():
            if x is not None:
                places[id(x)].append((module, name))
    return [found for found in places.values() if len(found) > 1]


def local_view(x: torch.Tensor) -> Any:
    """The memory of this rank's part."""
    return _local(x)

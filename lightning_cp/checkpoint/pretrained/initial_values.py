"""Initial values of tensors that no checkpoint holds.

``to_empty`` leaves old memory in buffers that are not saved, such as rotary embeddings' ``inv_freq``;
training with them is silently wrong. Here the module that owns a buffer initialises it, or the load is
refused.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import nn

from lightning_cp.checkpoint.pretrained.adapters import adapter_initializers
from lightning_cp.checkpoint.pretrained.memory import out_of_memory_error, room_for_whole
from lightning_cp.comm.reduce import broadcast_tensors
from lightning_cp.utils.dtensor import local_part
from lightning_cp.utils.patching import strip_wrappers

Initialize = Callable[[nn.Module], object]
"""A function that sets all values of a module's own parameters and buffers."""

Names = dict[nn.Module, list[str]]
"""Names of modules' own parameters and buffers."""

_TEST_SIZE = 2**20
"""Number of values tested together, as a test makes copies."""
_METHODS = ("reset_parameters", "_reset_parameters")


def meta_tensors(model: nn.Module) -> Names:
    """Tensors without values, by the modules that own them; tied ones at each of their places."""
    found: Names = {}
    for module in model.modules():
        states = (*module._parameters.items(), *module._buffers.items())
        if names := [name for name, x in states if x is not None and x.is_meta]:
            found[module] = names
    return found


def initializers_of(
    model: nn.Module, owners: Iterable[nn.Module]
) -> dict[nn.Module, list[Initialize]]:
    """Functions that set each owner's values, in the order of trial; none if nothing does.

    Its ``reset_buffers()``, then ``_init_weights(owner)`` of the innermost model around it that has one (as
    transformers' do), then its ``reset_parameters()``. Adapters of peft: only what peft itself would do.
    """
    family: dict[nn.Module, Initialize] = {}
    for outer in model.modules():  # inner ones come later
        if callable(way := getattr(outer, "_init_weights", None)):
            family.update(dict.fromkeys(outer.modules(), way))
    adapters = adapter_initializers(model)
    ways: dict[nn.Module, list[Initialize]] = {}
    for owner in owners:
        if owner in adapters:
            ways[owner] = adapters[owner]
            continue
        found = [_own(owner, "reset_buffers"), family.get(owner)]
        found += [_own(owner, name) for name in _METHODS]
        ways[owner] = [way for way in found if way is not None]
    return ways


def _own(owner: nn.Module, name: str) -> Initialize | None:
    method = getattr(owner, name, None)
    return (lambda _: method()) if callable(method) else None


def run_initializers(
    module: nn.Module, names: Collection[str], ways: Iterable[Initialize], path: str = ""
) -> list[str]:
    """Set a module's own values by the first functions that do; return the names of those left without.

    An untouched value is detected by a mark written before: NaN, or for dtypes without NaN, two different
    values. Then a function is called once for each, from the same state of PyTorch's random numbers, and
    values that differ were untouched. ``path`` is the module's, for an error.
    """
    left = list(names)
    for way in ways:
        left = _left_by(way, module, left, path)
        if not left:
            break
    return left


def _left_by(way: Initialize, module: nn.Module, names: Sequence[str], path: str) -> list[str]:
    marked = [name for name in names if not has_nan(_own_part(module, name))]
    devices = {_own_part(module, name).device for name in names}
    with torch.no_grad(), _restore_random_state(devices, keep=bool(marked)):
        _call(way, module, names, mark=0)
        first = {name: _copied(module, name, path) for name in marked}
    with torch.no_grad():
        if marked:
            _call(way, module, names, mark=1)
        left = [name for name in marked if not torch.equal(first[name], _own_part(module, name))]
        return left + [
            name for name in names if name not in first and _any_nan(_own_part(module, name))
        ]


def _call(way: Initialize, module: nn.Module, names: Sequence[str], mark: int) -> None:
    for name in names:
        x = _own_part(module, name)
        x.fill_(math.nan if has_nan(x) else mark)
    way(module)


def _copied(module: nn.Module, name: str, path: str) -> torch.Tensor:
    x = _own_part(module, name)
    with room_for_whole(f"{path}.{name}" if path else name, x, x.device):
        return x.clone()


@contextmanager
def _restore_random_state(devices: Collection[torch.device], *, keep: bool) -> Iterator[None]:
    cuda = [device for device in devices if device.type == "cuda"]
    with torch.random.fork_rng(devices=cuda) if keep else nullcontext():
        yield


def _own_part(module: nn.Module, name: str) -> torch.Tensor:
    return local_part(getattr(module, name))


def has_nan(x: torch.Tensor) -> bool:
    """True if its dtype has NaN, which can mark untouched values."""
    return x.is_floating_point() or x.is_complex()


def _any_nan(x: torch.Tensor) -> bool:
    return any(bool(computable(some).isnan().any()) for some in x.reshape(-1).split(_TEST_SIZE))


def computable(x: torch.Tensor) -> torch.Tensor:
    """The same values in a dtype that PyTorch computes with: few functions support 8-bit numbers."""
    return x.float() if x.is_floating_point() and x.dtype.itemsize == 1 else x


def copy_from_first_rank(
    tensors: Sequence[torch.Tensor], device: torch.device, group: dist.ProcessGroup
) -> None:
    """Copy the values of the group's first rank into whole tensors. Collective.

    Args:
        tensors: on any device; the same number and order on every rank.
        device: the device of messages.
        group: the ranks.
    """
    own = [x.detach() for x in tensors]
    sent = [x.to(device) for x in own]
    broadcast_tensors(sent, group)
    for x, first in zip(own, sent, strict=True):
        if first is not x:
            x.copy_(first)


# Memory for meta tensors.


def materialize(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """Allocate meta tensors, uninitialised, with the dtype for floating-point parameters; ties are preserved.

    Args:
        model: plain, or sharded by FSDP2, whose records are updated.
        device: for meta tensors.
        dtype: of floating-point parameters and saved buffers; ``None`` leaves theirs.

    Raises:
        CheckpointError: no memory for one of them, which it names.
    """
    ties, names, dtype_of = _ties(model), _names(model), dtypes(model, dtype)
    made: dict[int, torch.Tensor] = {}

    def allocate(x: torch.Tensor) -> torch.Tensor:
        wanted = dtype_of(x)
        try:
            if not x.is_meta:
                return x if x.dtype == wanted else x.to(wanted)
            if id(x) not in made:  # tied: PyTorch calls once for each place
                made[id(x)] = torch.empty_like(x, device=device, dtype=wanted)
            return made[id(x)]
        except (RuntimeError, MemoryError) as error:  # torch's out of memory is a RuntimeError
            name = names.get(id(x), ("a gradient", x))[0]
            raise out_of_memory_error(name, local_part(x), wanted, device, error) from error

    with torch.no_grad():
        model._apply(allocate)
    for (first, name), *others in ties:
        for module, other in others:
            setattr(module, other, getattr(first, name))


def dtypes(model: nn.Module, dtype: torch.dtype | None) -> Callable[[torch.Tensor], torch.dtype]:
    """The function from a tensor to its dtype: ``dtype`` for parameters and saved buffers, else its own."""
    saved = _saved(model)

    def of(x: torch.Tensor) -> torch.dtype:
        return dtype if dtype is not None and x.is_floating_point() and id(x) in saved else x.dtype

    return of


def _names(model: nn.Module) -> dict[int, tuple[str, torch.Tensor]]:
    """Names and tensors by id; keeping the tensors alive keeps the ids unique."""
    return {
        id(x): (strip_wrappers(name), x)
        for name, x in (*model.named_parameters(), *model.named_buffers())
    }


def _saved(model: nn.Module) -> dict[int, torch.Tensor]:
    """Parameters and persistent buffers, by id."""
    found: dict[int, torch.Tensor] = {id(x): x for x in model.parameters()}
    for module in model.modules():
        for name, x in module._buffers.items():
            if x is not None and name not in module._non_persistent_buffers_set:
                found[id(x)] = x
    return found


def _ties(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Places of each parameter or buffer that has several."""
    places: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for name, x in (*module._parameters.items(), *module._buffers.items()):
            if x is not None:
                places[id(x)].append((module, name))
    return [found for found in places.values() if len(found) > 1]

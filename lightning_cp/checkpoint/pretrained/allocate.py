"""Memory for what is on the meta device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import nn

from lightning_cp.checkpoint.pretrained.memory import no_room
from lightning_cp.checkpoint.pretrained.names import plain
from lightning_cp.comm.local import local_part


def materialize(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """Give meta tensors memory, uninitialised, and floating-point parameters their dtype; ties are kept.

    Args:
        model: plain, or sharded by FSDP2, whose own records follow.
        device: for what is on the meta device.
        dtype: of floating-point parameters and saved buffers; ``None`` leaves theirs.

    Raises:
        CheckpointError: no memory for one of them, which it names.
    """
    ties, names, dtype_of = _ties(model), _names(model), dtypes(model, dtype)
    made: dict[int, torch.Tensor] = {}

    def give(x: torch.Tensor) -> torch.Tensor:
        wanted = dtype_of(x)
        try:
            if not x.is_meta:
                return x if x.dtype == wanted else x.to(wanted)
            if id(x) not in made:  # tied: PyTorch asks once for each place
                made[id(x)] = torch.empty_like(x, device=device, dtype=wanted)
            return made[id(x)]
        except (RuntimeError, MemoryError) as error:  # torch's out of memory is a RuntimeError
            name = names.get(id(x), ("a gradient", x))[0]
            raise no_room(name, local_part(x), wanted, device, error) from error

    with torch.no_grad():
        model._apply(give)
    for (first, name), *others in ties:
        for module, other in others:
            setattr(module, other, getattr(first, name))


def dtypes(model: nn.Module, dtype: torch.dtype | None) -> Callable[[torch.Tensor], torch.dtype]:
    """The dtype that a tensor of a model gets: ``dtype``, if it is a parameter or a buffer that is saved."""
    saved = _saved(model)

    def of(x: torch.Tensor) -> torch.dtype:
        return dtype if dtype is not None and x.is_floating_point() and id(x) in saved else x.dtype

    return of


def _names(model: nn.Module) -> dict[int, tuple[str, torch.Tensor]]:
    """By id, with the tensor: what is replaced lives on until all is, so no id comes twice."""
    return {
        id(x): (plain(name), x) for name, x in (*model.named_parameters(), *model.named_buffers())
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
    """Places of one parameter or buffer, where there are several."""
    places: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for name, x in (*module._parameters.items(), *module._buffers.items()):
            if x is not None:
                places[id(x)].append((module, name))
    return [found for found in places.values() if len(found) > 1]

"""Reading a checkpoint into what a run has, once everything in it is known to fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_cp.checkpoint.compare import require_same
from lightning_cp.checkpoint.plain import Place
from lightning_cp.checkpoint.read import Template
from lightning_cp.checkpoint.tensors import Stored, fill, like, stored_whole
from lightning_cp.errors import CheckpointError
from lightning_cp.strategies.saves.optimizers import names_as_saved, parameters_of


def spread_of(
    modules: Mapping[str, nn.Module], optimizers: Mapping[Place, tuple[Optimizer, Sequence[str]]]
) -> Template:
    """Templates for the spreading of a checkpoint's tensors.

    Args:
        modules: the key of each one's state -> module.
        optimizers: the place of each one's state -> optimizer, and names of the parameters that it numbered.
    """
    known: dict[Place, torch.Tensor] = {
        (key, name): x for key, module in modules.items() for name, x in module.state_dict().items()
    }
    named: dict[Place, dict[str, torch.Tensor]] = {
        place: dict(zip(names_as_saved(saved, x, modules), parameters_of(x), strict=True))
        for place, (x, saved) in optimizers.items()
    }

    def template(place: Place) -> torch.Tensor | None:
        match place:
            case (*above, "state", int(number), _) if (of := tuple(above)) in optimizers:
                optimizer, saved = optimizers[of]
            case _:
                return known.get(place)
        if number < len(saved) and saved[number] in named[of]:
            return named[of][saved[number]]
        parameters = parameters_of(optimizer)
        return parameters[number] if number < len(parameters) else None

    return template


def load_module(
    module: nn.Module,
    state: Mapping[str, torch.Tensor],
    *,
    strict: bool = True,
    dtype: torch.dtype | None = None,
    check_only: bool = False,
) -> None:
    """Load a module's state once all of it fits, whole or spread, into whole or spread parameters.

    Args:
        module: which may hold ``DTensor``.
        state: by name; not changed.
        strict: names must be the same.
        dtype: that the module's floating-point parameters are going to have.
        check_only: load nothing.

    Raises:
        CheckpointError: a name, shape or dtype differs; the module is as it was.
    """
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"what the checkpoint has for {type(module).__name__} is no model's state, but "
            f"{type(state).__name__}. Nothing was loaded. Look for its key in the checkpoint."
        )
    own = module.state_dict()
    tensors = {name: x for name, x in own.items() if isinstance(x, torch.Tensor)}
    if dtype is not None:
        tensors = {name: _as_if(x, dtype) for name, x in tensors.items()}
    given = {name: x for name, x in state.items() if isinstance(x, torch.Tensor)}
    require_same(given, tensors, what="model", strict=strict)
    if check_only:
        return
    made = dict(state)
    targets: dict[str, torch.Tensor] = {}
    stored: dict[str, Stored] = {}
    for name, x in given.items():
        if isinstance(own.get(name), DTensor) and not isinstance(x, DTensor):
            stored[name] = stored_whole(x)
            targets[name] = like(own[name], stored[name])
    fill(targets, stored)
    module.load_state_dict({**made, **targets}, strict=strict)


def _as_if(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(x.shape, dtype=dtype, device="meta") if x.is_floating_point() else x


def listed_names(names: Sequence[Sequence[str]]) -> dict[str, list[str]]:
    """Of Lightning's list of optimizers, by their dotted names."""
    return {f"optimizer_states.{at}": list(each) for at, each in enumerate(names)}

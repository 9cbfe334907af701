"""Loading of a checkpoint into a run, after a check that everything fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_cp.checkpoint.optimizers import names_as_saved, parameters_of
from lightning_cp.checkpoint.read import Template
from lightning_cp.checkpoint.tensors import StoredTensor, as_stored, empty_like, read_into
from lightning_cp.checkpoint.tree import Place
from lightning_cp.errors import CheckpointError

# Comparison of a checkpoint with a run: names, shapes and dtypes, before anything is loaded.


def check_same_tensors(
    got: Mapping[str, torch.Tensor],
    want: Mapping[str, torch.Tensor],
    *,
    what: str,
    strict: bool = True,
) -> None:
    """Check that tensors fit; the error names the first that does not.

    Args:
        got: the checkpoint's, by name; may be ``StoredTensor``.
        want: the run's.
        what: their owner, for the message.
        strict: names must be the same too.

    Raises:
        CheckpointError: a name, shape or dtype differs.
    """
    missing = [name for name in want if name not in got]
    unexpected = [name for name in got if name not in want]
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"the checkpoint is of another {what}: {_listed(missing, 'it has no')}"
            f"{' and ' if missing and unexpected else ''}{_listed(unexpected, 'this run has no')}. "
            "Nothing was "
            "loaded. What would work: the model that was saved, or strict=False for what both have."
        )
    for name, tensor in want.items():
        if name not in got:
            continue
        if tuple(got[name].shape) != tuple(tensor.shape):
            raise CheckpointError(
                f"{name} has shape {list(got[name].shape)} in the checkpoint and {list(tensor.shape)} in "
                f"this {what}. Nothing was loaded."
            )
        if got[name].dtype != tensor.dtype:
            raise CheckpointError(
                f"{name} is {_short(got[name].dtype)} in the checkpoint and {_short(tensor.dtype)} in this "
                f"{what}. Nothing was loaded. Train in the dtype of the checkpoint, or convert the weights "
                "and save them."
            )


def _listed(names: list[str], verb: str) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{verb} {', '.join(names[:3])}{more}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def templates_for(
    modules: Mapping[str, nn.Module], optimizers: Mapping[Place, tuple[Optimizer, Sequence[str]]]
) -> Template:
    """Templates for the distribution of a checkpoint's tensors.

    Args:
        modules: key of each state -> module.
        optimizers: place of each state -> optimizer, and names of its parameters by number.
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
    """Check that a module's state fits, then load it; both may be whole or distributed.

    Args:
        module: may hold ``DTensor``.
        state: by name; not changed.
        strict: names must be the same.
        dtype: the later dtype of the module's floating-point parameters.
        check_only: load nothing.

    Raises:
        CheckpointError: a name, shape or dtype differs; the module is unchanged.
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
    check_same_tensors(given, tensors, what="model", strict=strict)
    if check_only:
        return
    made = dict(state)
    targets: dict[str, torch.Tensor] = {}
    stored: dict[str, StoredTensor] = {}
    for name, x in given.items():
        if isinstance(own.get(name), DTensor) and not isinstance(x, DTensor):
            stored[name] = as_stored(x)
            targets[name] = empty_like(own[name], stored[name])
    read_into(targets, stored)
    module.load_state_dict({**made, **targets}, strict=strict)


def _as_if(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(x.shape, dtype=dtype, device="meta") if x.is_floating_point() else x


def names_by_optimizer(names: Sequence[Sequence[str]]) -> dict[str, list[str]]:
    """Lightning's list of optimizers by the dotted names of their states."""
    return {f"optimizer_states.{at}": list(each) for at, each in enumerate(names)}

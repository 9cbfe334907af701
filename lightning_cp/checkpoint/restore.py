"""Loading of a checkpoint into a run, after a check that everything fits; matching of optimizer states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_cp.checkpoint.read import Template
from lightning_cp.checkpoint.reshard import StoredTensor, as_stored, empty_like, read_into
from lightning_cp.checkpoint.tree import Place
from lightning_cp.errors import CheckpointError
from lightning_cp.utils.tensors import optimizer_parameters

# Check of the optimizer's kind: another kind would fail at its next step, or train differently.


_OF_SCHEDULERS = frozenset(
    ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")
)
_NO_OPTIONS = frozenset(("params", "param_names")) | _OF_SCHEDULERS


def kinds_of(optimizer: Optimizer) -> list[str]:
    """Names of PyTorch's optimizer classes that it is or inherits from: ``AdamW`` is an ``Adam`` as well.

    Empty for other optimizers: two of those may do the same under two names.
    """
    return [x.__name__ for x in type(optimizer).__mro__ if x is not Optimizer and _is_torchs(x)]


def _is_torchs(kind: type) -> bool:
    return issubclass(kind, Optimizer) and f"{kind.__module__}.".startswith("torch.optim.")


def check_kind(
    groups: Sequence[Mapping[str, Any]], optimizer: Optimizer, kinds: Sequence[str]
) -> None:
    """Check that a state is of the same kind of optimizer.

    Options that only one of the two has are accepted, as new versions of PyTorch add some.

    Args:
        groups: the saved parameter groups.
        optimizer: the optimizer to load into.
        kinds: ``kinds_of`` the saved one; empty if unknown.

    Raises:
        CheckpointError: naming its kind, or its options.
    """
    for saved, own in zip(groups, optimizer.param_groups, strict=True):
        strange = sorted(saved.keys() - own.keys() - _OF_SCHEDULERS)
        missing = sorted(own.keys() - saved.keys() - _OF_SCHEDULERS)
        if strange and missing:
            raise _kind_error(
                f"with {', '.join(strange[:3])}, without {', '.join(missing[:3])}, which "
                f"{type(optimizer).__name__} has"
            )
    own_kinds = kinds_of(optimizer)
    if own_kinds and not kinds:
        kinds = _kinds_with_options(groups, own_kinds[0])
    if own_kinds and kinds and not set(kinds) & set(own_kinds):
        raise _kind_error(f"of {kinds[0]}, and this one is {own_kinds[0]}")


def _kind_error(how: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint has the state of another kind of optimizer: {how}. The optimizer has not "
        "changed. Use the one that was saved, or load the weights alone."
    )


def _kinds_with_options(groups: Sequence[Mapping[str, Any]], likely: str) -> list[str]:
    """PyTorch's optimizers with exactly these options, ``likely`` first; often none or one."""
    found = [
        kind.__name__
        for kind in vars(torch.optim).values()
        if isinstance(kind, type) and kind is not Optimizer and _is_torchs(kind)
        if all(group.keys() - _NO_OPTIONS == _options_of(kind) for group in groups)
    ]
    return [likely] if likely in found else found


def _options_of(kind: Any) -> set[str]:
    """Names of the options of its parameter groups."""
    made: Optimizer = kind([torch.nn.Parameter(torch.zeros(1, 1))])
    return made.param_groups[0].keys() - _NO_OPTIONS


def names_of(optimizer: Optimizer, named: Mapping[str, torch.Tensor]) -> list[str]:
    """The parameters' names, in the order in which a state dict numbers them; ``""`` for unknown ones."""
    by_id = {id(parameter): name for name, parameter in named.items()}
    return [by_id.get(id(parameter), "") for parameter in optimizer_parameters(optimizer)]


def named_parameters(modules: Mapping[str, nn.Module]) -> dict[str, torch.Tensor]:
    """Parameters by name, with the module's key as prefix if there are several modules."""
    prefix = (lambda key: f"{key}.") if len(modules) > 1 else (lambda key: "")
    return {
        prefix(key) + name: parameter
        for key, module in modules.items()
        for name, parameter in module.named_parameters()
    }


def names_as_saved(
    saved: Sequence[str], optimizer: Optimizer, modules: Mapping[str, nn.Module]
) -> list[str]:
    """The names of an optimizer's parameters, with or without their module's key, in the form of ``saved``.

    It may have been saved with several modules and be loaded with one of them, or the reverse.

    Args:
        saved: names of the saved state's parameters, by number.
        optimizer: the optimizer to load into.
        modules: key -> module.
    """
    own = names_of(optimizer, named_parameters(modules))
    both = [
        (f"{key}.{name}", name)
        for key, module in modules.items()
        for name, _ in module.named_parameters()
    ]
    other = dict(both) if len(modules) > 1 else {name: keyed for keyed, name in both}
    ways = (own, [other.get(name, "") for name in own])
    return next((way for way in ways if sorted(way) == sorted(saved)), own)


def fit_state(
    state: Mapping[str, Any],
    optimizer: Optimizer,
    saved: Sequence[str],
    own: Sequence[str],
    kinds: Sequence[str] = (),
) -> dict[str, Any]:
    """The state dict in the form that this optimizer loads, without loading it.

    Args:
        state: of a checkpoint.
        optimizer: the optimizer to load into.
        saved: names of the saved state's parameters, by number; empty if unknown.
        own: names of this optimizer's parameters, by number.
        kinds: ``kinds_of`` the saved one; empty if unknown.

    Raises:
        CheckpointError: not an optimizer's state, or one with other parameters, groups, shapes or of
            another kind; names the first difference.
    """
    _check_state(state)
    order = _order(saved, own)
    groups = [len(group["params"]) for group in optimizer.param_groups]
    found = [len(group["params"]) for group in state["param_groups"]]
    if groups != found:
        raise CheckpointError(
            f"the checkpoint's optimizer has parameter groups of {found} parameters, this one of {groups}. "
            "The optimizer has not changed. Make it as it was when the checkpoint was saved."
        )
    check_kind(state["param_groups"], optimizer, kinds)
    entries = {
        at: state["state"][number] for at, number in enumerate(order) if number in state["state"]
    }
    parameters = list(optimizer_parameters(optimizer))
    for at, entry in entries.items():
        name = own[at] if own and own[at] else f"parameter {at}"
        _check_shapes(entry, parameters[at], name, optimizer)
    numbered: list[dict[str, Any]] = []
    for group, now in zip(
        state["param_groups"], optimizer.state_dict()["param_groups"], strict=True
    ):
        numbered.append({**group, "params": now["params"]})
    fitted = {at: _distribute(entry, parameters[at]) for at, entry in entries.items()}
    return {**state, "state": fitted, "param_groups": numbered}


def _check_state(state: object) -> None:
    """Check that a state has the form of an optimizer's ``state_dict``."""
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    known = isinstance(groups, list) and all(isinstance(x, Mapping) for x in groups)
    if not known or not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
        raise CheckpointError(
            "what the checkpoint has for an optimizer is not an optimizer's state (state and param_groups). "
            "The optimizer has not changed. Look for its key in the checkpoint, or leave it out."
        )


def _order(saved: Sequence[str], own: Sequence[str]) -> list[int]:
    """The saved number of each of this optimizer's parameters."""
    known = bool(saved) and all(saved) and all(own)
    if not known:
        return list(range(len(own)))
    if sorted(saved) != sorted(own):
        missing = [name for name in own if name not in saved] or [x for x in saved if x not in own]
        raise CheckpointError(
            f"the checkpoint's optimizer is of other parameters: only one of the two has {missing[0]}. The "
            "optimizer has not changed. Freeze and group parameters as they were when it was saved."
        )
    place = {name: at for at, name in enumerate(saved)}
    return [place[name] for name in own]


_FACTORED = ("row_var", "col_var")
"""Keys of Adafactor's state for a matrix; all other state of PyTorch's optimizers has the parameter's
shape.
"""


def _check_shapes(
    entry: Mapping[str, Any], parameter: torch.Tensor, name: str, optimizer: Optimizer
) -> None:
    """Check that state tensors which must have the parameter's shape do.

    This is known for PyTorch's optimizers, for keys that this optimizer has used with that shape, and for
    distributed parameters, as nothing else is distributed. Other state may have any shape: a row and a
    column, or a projection.
    """
    own = optimizer.state.get(parameter, {})
    torchs = f"{type(optimizer).__module__}.".startswith("torch.optim.")
    for key, value in entry.items():
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            continue
        known = isinstance(parameter, DTensor) or (torchs and key not in _FACTORED)
        like_it = getattr(own.get(key), "shape", None) == parameter.shape
        odd = value.dim() == parameter.dim() and value.shape != parameter.shape
        if odd and (known or like_it):
            raise CheckpointError(
                f"the optimizer's {key} of {name} has shape {list(value.shape)} in the checkpoint, the "
                f"parameter has {list(parameter.shape)}. The optimizer has not changed."
            )


def _distribute(entry: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """Whole tensors of the parameter's shape, as this rank's shards of it."""
    if not isinstance(parameter, DTensor):
        return dict(entry)
    made, targets = dict(entry), {}
    stored: dict[str, StoredTensor] = {}
    for key, value in entry.items():
        plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
        if plain and value.dim() and value.shape == parameter.shape:
            stored[key] = as_stored(value)
            targets[key] = empty_like(parameter, stored[key])
    read_into(targets, stored)
    return {**made, **targets}


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
        place: dict(zip(names_as_saved(saved, x, modules), optimizer_parameters(x), strict=True))
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
        parameters = list(optimizer_parameters(optimizer))
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
            f"what the checkpoint has for {type(module).__name__} is not a model's state, but "
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

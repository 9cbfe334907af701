"""Results of workers for the program that has started them: whole tensors, also where theirs are parts."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_cp import console
from lightning_cp.checkpoint.gathered import gather
from lightning_cp.checkpoint.plain import plain, restored
from lightning_cp.checkpoint.pretrained.allocate import materialize
from lightning_cp.errors import ConfigError
from lightning_cp.strategies.engines.fresh import is_on_meta
from lightning_cp.strategies.replaced import Replaced

State = dict[str, Any]
_STATE = "state"
_CPU = torch.device("cpu")


@contextmanager
def sending_whole(module: nn.Module, *, keeps: bool) -> Iterator[None]:
    """``state_dict()`` is what is sent back, on the ranks that send it. Collective."""
    replaced = Replaced()
    replaced.replace(module, "state_dict", lambda own: lambda: _sent(module, own(), keeps=keeps))
    try:
        yield
    finally:
        replaced.undo()


@contextmanager
def receiving(module: nn.Module) -> Iterator[None]:
    """``load_state_dict()`` takes what was sent."""
    replaced = Replaced()
    replaced.replace(
        module, "load_state_dict", lambda own: lambda sent, strict: _receive(module, own, sent)
    )
    try:
        yield
    finally:
        replaced.undo()


def _sent(module: nn.Module, state: State, *, keeps: bool) -> State:
    """A module's state and its other buffers, tied weights once; on ranks that do not keep it, nothing."""
    first = _first_names(module, state)
    made = plain({_STATE: {**dict(module.named_buffers()), **state}}, may_lack=[_STATE])
    once = {name: x for name, x in made.tree[_STATE].items() if first.get(name, name) == name}
    gathered = gather(once, keeps=keeps)
    if not keeps:
        return {}
    if made.left_out:
        names = [name.removeprefix(f"{_STATE}.") for name in made.left_out[:3]]
        rank_zero_only(console.warn)(
            f"{', '.join(names)} of the module does not come back to the program that has "
            "started the workers: what is sent are tensors, numbers, strings and plain containers."
        )
    return {_STATE: gathered.whole(once), "notes": made.notes, "tied": first}


def _first_names(module: nn.Module, state: State) -> dict[str, str]:
    """Of each parameter's names in a state the first; the same on all ranks."""
    first: dict[int, str] = {}
    named = module.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(id(x), name) for name, x in named if name in state}


def _receive(module: nn.Module, load: Callable[..., Any], sent: State) -> Any:
    """Copy what was sent into the module, whose dtypes and devices stay."""
    state = restored({_STATE: sent[_STATE]}, sent["notes"])[_STATE]
    state |= {name: state[first] for name, first in sent["tied"].items() if first in state}
    if is_on_meta(module):
        materialize(module, _CPU, None)
    beside = dict(module.named_buffers())
    for name in module.state_dict():
        beside.pop(name, None)
    for name in beside.keys() & state.keys():
        path, _, own = name.rpartition(".")
        setattr(module.get_submodule(path), own, state.pop(name).to(beside[name], copy=True))
    loaded = load(state, strict=False)
    _say_what_is_lost(getattr(loaded, "unexpected_keys", []))
    return loaded


def _say_what_is_lost(names: list[str]) -> None:
    if names:
        rank_zero_only(console.warn)(
            f"workers have trained {', '.join(names[:3])}{', ...' * (len(names) > 3)}, which the module of "
            "the program that has started them has not, so that did not come back. Build it in __init__ and "
            "not in configure_model or setup, or save a checkpoint."
        )


class Packing:
    """The function that a worker of Fabric runs: the first rank's result goes into a file.

    Tensors themselves would be sent as memory that both processes share, and the worker has ended by then.
    """

    def __init__(self, function: Callable[..., Any], strategy: Any, file: Path) -> None:
        self._function, self._strategy, self._file = function, strategy, file

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        result = self._function(*args, **kwargs)
        if self._strategy.local_rank:
            return
        apply_to_collection(result, (torch.Tensor, nn.Module), _require_whole)
        with self._file.open("wb") as file:
            pickle.dump(move_data_to_device(result, "cpu"), file)


def unpacked(file: Path) -> Any:
    """The result that ``Packing`` in a worker of this program has put there, a folder of its user alone."""
    with file.open("rb") as packed:
        return pickle.load(packed)  # noqa: S301


def _require_whole(x: torch.Tensor | nn.Module) -> None:
    tensors = x.state_dict().values() if isinstance(x, nn.Module) else [x]
    if any(isinstance(each, DTensor) for each in tensors):
        raise ConfigError(
            "the function that fabric.launch has run returns tensors that are spread over ranks, and this "
            "rank has its part alone. Let it return lightning_cp.checkpoint.whole(x) of each, called on "
            "every rank, or save them with fabric.save(path, state)."
        )

"""Options of loading a checkpoint, checked before processes start, and the state of an unfinished load."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from lightning_cp.checkpoint.pretrained.initial_values import Initialize, Names, meta_tensors
from lightning_cp.checkpoint.pretrained.keys import rules_of
from lightning_cp.errors import CheckpointError, ConfigError
from lightning_cp.mesh import ContextParallelMesh


@dataclass(frozen=True)
class PretrainedOptions:
    """Options of loading a checkpoint; see ``load_pretrained``."""

    dtype: torch.dtype | str | None = None
    strict: bool = True
    allow_missing: Sequence[str] = ()
    allow_unexpected: Sequence[str] = ()
    keys: Mapping[str, str] | None = None
    prefix: str | None = None
    check_finite: bool = False
    progress: bool = True
    initialize: Initialize | None = None


def read_options(options: Mapping[str, Any]) -> PretrainedOptions:
    """Return the options of a load.

    Raises:
        ConfigError: an unknown option, or a value of a wrong type.
    """
    unknown = set(options) - set(PretrainedOptions.__dataclass_fields__)
    if unknown:
        raise ConfigError(
            f"unknown option(s) of pretrained: {', '.join(sorted(unknown))}. There are: "
            f"{', '.join(PretrainedOptions.__dataclass_fields__)}."
        )
    given = {name: x for name, x in options.items() if x is not None}  # an empty line of YAML
    chosen = PretrainedOptions(**given)
    for name in ("strict", "check_finite", "progress"):
        if type(getattr(chosen, name)) is not bool:
            raise ConfigError(
                f"{name} must be True or False, got {getattr(chosen, name)!r}. "
                "Leave it out for the default."
            )
    for name in ("allow_missing", "allow_unexpected"):
        given = getattr(chosen, name)
        listed = isinstance(given, Iterable) and not isinstance(given, str)
        if not listed or not all(isinstance(x, str) for x in given):
            raise ConfigError(
                f"{name} must be a list of patterns, got {given!r}. "
                "Put the pattern into a list, even if it is the only one."
            )
    if chosen.prefix is not None and not isinstance(chosen.prefix, str):
        raise ConfigError(
            f"prefix must be text, or None to have it found, got {chosen.prefix!r}. "
            "Leave it out if you do not know it."
        )
    if chosen.initialize is not None and not callable(chosen.initialize):
        raise ConfigError(
            f"initialize must be a function of a module, got {chosen.initialize!r}. "
            "Pass a function that fills the module's own parameters."
        )
    rules_of(chosen.keys)
    dtype_of(chosen.dtype)
    return chosen


def check_device_arguments(mesh: Any, device: Any) -> None:
    """Check that arguments determine a device.

    Raises:
        ConfigError: naming the argument.
    """
    if mesh is not None and not isinstance(mesh, ContextParallelMesh | DeviceMesh):
        raise ConfigError(
            f"mesh must be a ContextParallelMesh (or None), got {mesh!r}. "
            "Leave it out without context parallelism."
        )
    try:
        if device is None or (torch.device(device).type != "meta" and not isinstance(device, int)):
            return
    except (RuntimeError, TypeError):
        pass
    raise ConfigError(
        f"device must be a torch.device with memory, or its name such as 'cuda', got {device!r}. "
        "Leave it out to load to the device of the model."
    )


def dtype_of(given: torch.dtype | str | None) -> torch.dtype | None:
    """A floating-point dtype by name.

    Raises:
        ConfigError: not one.
    """
    found = getattr(torch, given, None) if isinstance(given, str) else given
    if found is not None and isinstance(found, torch.dtype) and found.is_floating_point:
        return found
    if given is None:
        return None
    raise ConfigError(
        f"dtype must be a floating-point dtype such as 'bfloat16', got {given!r}. "
        "Leave it out to keep the dtype of the model."
    )


# A model that was loaded in part raises when it is called.


_started: WeakKeyDictionary[nn.Module, list[RemovableHandle]] = WeakKeyDictionary()
_empty: WeakKeyDictionary[nn.Module, list[str]] = WeakKeyDictionary()
"""Tensors of modules that had no values at the start of a load that has not succeeded."""


@contextmanager
def incomplete_until_done(model: nn.Module) -> Iterator[None]:
    """Make every forward raise until the block ends without an error."""
    if model not in _started:
        _started[model] = [
            module.register_forward_pre_hook(_raise_incomplete, prepend=True)
            for module in model.modules()
        ]
    _empty.update(without_values(model))
    yield
    for handle in _started.pop(model, []):
        handle.remove()
    for module in model.modules():
        _empty.pop(module, None)


def without_values(model: nn.Module) -> Names:
    """Tensors by module that are on the meta device, or have memory of a load that failed."""
    on_meta, found = meta_tensors(model), Names()
    for module in model.modules():
        own = {**module._parameters, **module._buffers}
        names = dict.fromkeys([*_empty.get(module, ()), *on_meta.get(module, ())])
        if there := [name for name in names if own.get(name) is not None]:
            found[module] = there
    return found


def check_complete(model: nn.Module) -> None:
    """Check that no load of a model began without success.

    Raises:
        CheckpointError: one did.
    """
    if any(module in _started for module in model.modules()):
        _raise_incomplete()


def _raise_incomplete(*_: Any) -> NoReturn:
    raise CheckpointError(
        "this model is incomplete: loading its pretrained weights began and did not end, so some of them are "
        "whatever was in memory. It may not be trained, evaluated or saved. Load it again, or make a new one."
    )

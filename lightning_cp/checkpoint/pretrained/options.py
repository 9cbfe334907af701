"""Options of loading a checkpoint, checked before there are processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from lightning_cp.checkpoint.pretrained.fresh import Initialize
from lightning_cp.checkpoint.pretrained.keys import rules_of
from lightning_cp.errors import ConfigError
from lightning_cp.mesh import ContextParallelMesh


@dataclass(frozen=True)
class Options:
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


def check_options(options: Mapping[str, Any]) -> Options:
    """Read the options of a load.

    Raises:
        ConfigError: one that is unknown, or of another kind.
    """
    unknown = set(options) - set(Options.__dataclass_fields__)
    if unknown:
        raise ConfigError(
            f"unknown option(s) of pretrained: {', '.join(sorted(unknown))}. There are: "
            f"{', '.join(Options.__dataclass_fields__)}."
        )
    given = {name: x for name, x in options.items() if x is not None}  # an empty line of YAML
    chosen = Options(**given)
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


def require_kinds(mesh: Any, device: Any) -> None:
    """Refuse what tells no device.

    Raises:
        ConfigError: naming it.
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
        ConfigError: it is none.
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

"""``pretrained=``: weights that others made, loaded once into each model, before it is trained."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_cp.checkpoint.pretrained.load import load_pretrained
from lightning_cp.checkpoint.pretrained.options import check_complete, check_options
from lightning_cp.config import StrategyConfig
from lightning_cp.errors import ConfigError


def check_pretrained(settings: StrategyConfig) -> None:
    """Refuse what cannot be loaded from, before there are processes.

    Raises:
        ConfigError: neither a path nor a mapping with one, unknown options, or a path that is not there.
    """
    given = settings.pretrained
    if given is None:
        return
    path = _path(given)
    check_options(_options(given))
    if not Path(path).exists():
        raise ConfigError(
            f"pretrained={str(path)!r} does not exist. Give a directory with safetensors files, as "
            "save_pretrained writes it; huggingface_hub.snapshot_download gives one for a name of the hub."
        )


def _path(given: Any) -> Any:
    path = given.get("path") if isinstance(given, Mapping) else given
    if not isinstance(path, str | PathLike) or not str(path):
        raise ConfigError(
            "pretrained must be a path, or a mapping with path= and options of load_pretrained, got "
            f"{given!r}. "
            "Write pretrained='path/of/a/checkpoint'."
        )
    return path


def _options(given: Any) -> dict[str, Any]:
    given = given if isinstance(given, Mapping) else {}
    return {key: value for key, value in given.items() if key != "path"}


class Pretrained:
    """The models that have their weights already.

    A model is loaded at its first setup. If that fails, its next setup tries again: it is never taken for
    loaded, and refuses to be called meanwhile.

    Args:
        given: the setting.
        offload: parameters live in host memory.
    """

    def __init__(self, given: Any, *, offload: bool = False) -> None:
        self._given, self._offload = given, offload
        self._loaded: list[weakref.ref[nn.Module]] = []

    def load(self, module: nn.Module, device: torch.device) -> None:
        """Load into ``module`` unless that was done.

        Args:
            module: sharded already, if it is to be.
            device: where the module computes.

        Raises:
            CheckpointError: see ``load_pretrained``; or a model that was left incomplete, where nothing is
                to be loaded.
            RankFailure: another rank has raised.
        """
        if self._given is None:
            check_complete(module)
            return
        if any(known() is module for known in self._loaded):
            return
        home = torch.device("cpu") if self._offload else device
        load_pretrained(module, _path(self._given), device=home, **_options(self._given))
        if home != device:
            _move_buffers(module, device)
        self._loaded.append(weakref.ref(module))

    def __getstate__(self) -> dict[str, Any]:
        """For processes that are spawned with the strategy: they load what they train."""
        return {"_given": self._given, "_offload": self._offload, "_loaded": []}


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    """Of what is offloaded, only parameters are brought to where they are used."""
    for part in module.modules():
        part._buffers.update({k: x.to(device) for k, x in part._buffers.items() if x is not None})

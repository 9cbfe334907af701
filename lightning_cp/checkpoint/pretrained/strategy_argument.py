"""The setting ``pretrained=``: weights that are loaded once into each model, before training."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_cp.config import StrategyConfig
from lightning_cp.errors import ConfigError


def check_pretrained(settings: StrategyConfig) -> None:
    """Check the setting before processes start.

    Raises:
        ConfigError: neither a path nor a mapping with one, unknown options, or a path that does not
            exist.
    """
    setting = settings.pretrained
    if setting is None:
        return
    from lightning_cp.checkpoint.pretrained.options import read_options

    path = _path(setting)
    read_options(_options(setting))
    if not Path(path).exists():
        raise ConfigError(
            f"pretrained={str(path)!r} does not exist. Give a directory with safetensors files, as "
            "save_pretrained writes it; huggingface_hub.snapshot_download gives one for a name of the hub."
        )


def _path(setting: Any) -> Any:
    path = setting.get("path") if isinstance(setting, Mapping) else setting
    if not isinstance(path, str | PathLike) or not str(path):
        raise ConfigError(
            "pretrained must be a path, or a mapping with path= and options of load_pretrained, got "
            f"{setting!r}. "
            "Write pretrained='path/of/a/checkpoint'."
        )
    return path


def _options(setting: Any) -> dict[str, Any]:
    setting = setting if isinstance(setting, Mapping) else {}
    return {key: value for key, value in setting.items() if key != "path"}


class Pretrained:
    """Loads each model once.

    A model is loaded at its first setup. If that fails, its next setup tries again: until then it does not
    count as loaded, and raises when called.

    Args:
        setting: the setting.
        offload: parameters are in host memory.
    """

    def __init__(self, setting: Any, *, offload: bool = False) -> None:
        self._setting, self._offload = setting, offload
        self._loaded: list[weakref.ref[nn.Module]] = []

    def load(self, module: nn.Module, device: torch.device) -> None:
        """Load into ``module``, unless it is loaded already.

        Args:
            module: with its final sharding.
            device: the device of computation.

        Raises:
            CheckpointError: see ``load_pretrained``; or a model that was left incomplete, without the
                setting.
            RankFailure: another rank has raised.
        """
        from lightning_cp.checkpoint.pretrained.load import load_pretrained
        from lightning_cp.checkpoint.pretrained.meta_init import move_buffers
        from lightning_cp.checkpoint.pretrained.options import check_complete

        if self._setting is None:
            check_complete(module)
            return
        if any(known() is module for known in self._loaded):
            return
        home = torch.device("cpu") if self._offload else device
        load_pretrained(module, _path(self._setting), device=home, **_options(self._setting))
        if home != device:
            move_buffers(module.modules(), device)
        self._loaded.append(weakref.ref(module))

    def __getstate__(self) -> dict[str, Any]:
        """For processes that are spawned with the strategy: they load what they train."""
        return {"_setting": self._setting, "_offload": self._offload, "_loaded": []}

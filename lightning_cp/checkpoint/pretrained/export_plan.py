"""What an export writes: which parameters under which keys, in which files; nothing is written yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lightning_cp.checkpoint.pretrained.keys import Rule, names_for, require_used, rules_of
from lightning_cp.checkpoint.pretrained.names import plain, tensors_of
from lightning_cp.checkpoint.pretrained.write import Shape, in_files
from lightning_cp.errors import ConfigError


@dataclass(frozen=True)
class Export:
    """What is written where."""

    network: nn.Module
    parts: dict[str, list[torch.Tensor]]
    """Key -> the parameters that make it up, side by side along dimension 0."""
    shapes: dict[str, Shape]
    files: dict[str, list[str]]


def plan_export(
    model: nn.Module,
    keys: Mapping[str, str] | None,
    prefix: str | None,
    dtype: torch.dtype | None,
    file_bytes: int,
) -> Export:
    """Decide it; the arguments are those of ``export_pretrained``.

    Raises:
        ConfigError: options that cannot be.
    """
    if type(file_bytes) is not int or file_bytes < 1:
        raise ConfigError(f"file_bytes must be an integer of at least 1, got {file_bytes!r}.")
    if prefix is not None and not isinstance(prefix, str):
        raise ConfigError(f"prefix must be text, or None to have it found, got {prefix!r}.")
    path, network = _network(model, prefix)
    held = tensors_of(model, path).by_name
    if not held:
        raise ConfigError(f"no parameter of the model begins with prefix={path!r}.")
    rules = rules_of(keys)
    require_used(rules, held)
    parts = _parts(held, rules)
    shapes = {key: _shape(key, tensors, dtype) for key, tensors in parts.items()}
    return Export(network, parts, shapes, in_files(shapes, file_bytes))


def _network(model: nn.Module, prefix: str | None) -> tuple[str, nn.Module]:
    """Where the network begins, and which it is: the outermost that says how it is saved."""
    for path, module in model.named_modules():
        at = f"{plain(path)}." if path else ""
        saves = callable(getattr(module, "save_pretrained", None)) and hasattr(module, "config")
        if at == prefix or (prefix is None and saves):
            return at, module
    return prefix or "", model


def _parts(
    held: Mapping[str, torch.Tensor], rules: Sequence[Rule]
) -> dict[str, list[torch.Tensor]]:
    parts: dict[str, list[torch.Tensor]] = {}
    for name in held:
        parameters, keys = names_for(name, rules)
        key = keys[0]
        if len(keys) > 1:
            raise ConfigError(
                f"{name} cannot be written as {' + '.join(keys)}: nothing says where one ends and the next "
                "begins. Leave that line of keys out, and have the fused name in the files."
            )
        missing = [other for other in parameters if other not in held]
        if missing:
            raise ConfigError(f"{key} is made of {missing[0]} too, which the model does not have.")
        made_of = [held[other] for other in parameters]
        if key in parts and [id(x) for x in parts[key]] != [id(x) for x in made_of]:
            raise ConfigError(
                f"{name} cannot be written as {key}, which is the name of other parameters already: one of "
                "them would be lost. Give it a name of its own in keys."
            )
        parts[key] = made_of
    return parts


def _shape(key: str, tensors: Sequence[torch.Tensor], dtype: torch.dtype | None) -> Shape:
    first = tensors[0]
    if any((x.dtype, x.shape[1:]) != (first.dtype, first.shape[1:]) for x in tensors):
        raise ConfigError(
            f"{key} cannot be made of tensors of shapes {', '.join(str(list(x.shape)) for x in tensors)}: "
            "only the first dimension may differ."
        )
    own = first.dtype
    made = dtype if dtype is not None and own.is_floating_point else own
    shape = list(first.shape)
    if len(tensors) > 1:
        shape[0] = sum(len(x) for x in tensors)
    return Shape(made, tuple(shape))

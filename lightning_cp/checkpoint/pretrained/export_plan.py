"""The plan of an export: which parameters under which keys, in which files; nothing is written yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lightning_cp.checkpoint.pretrained.keys import (
    Rule,
    joinable,
    require_used,
    rule_for,
    rules_of,
)
from lightning_cp.checkpoint.pretrained.names import Tensors, plain, tensors_of
from lightning_cp.checkpoint.pretrained.write import Shape, in_files
from lightning_cp.errors import ConfigError


@dataclass(frozen=True)
class Joined:
    """Parameters that are written as one tensor."""

    tensors: tuple[torch.Tensor, ...]
    dim: int = 0
    """Along which they lie side by side."""

    def shape(self, dtype: torch.dtype | None) -> Shape:
        """In the file."""
        first, shape = self.tensors[0], list(self.tensors[0].shape)
        if len(self.tensors) > 1:
            shape[self.dim] = sum(x.shape[self.dim] for x in self.tensors)
        made = dtype if dtype is not None and first.is_floating_point() else first.dtype
        return Shape(made, tuple(shape))


@dataclass(frozen=True)
class Export:
    """The files of an export, and their tensors."""

    network: nn.Module
    parts: dict[str, Joined]
    shapes: dict[str, Shape]
    files: dict[str, list[str]]
    is_adapter: bool = False
    """The network writes it by itself, as adapters have files of their own; ``files`` is empty."""


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
        raise ConfigError(
            f"file_bytes must be an integer of at least 1, got {file_bytes!r}. "
            "Leave it out for files of 5 GB."
        )
    if prefix is not None and not isinstance(prefix, str):
        raise ConfigError(
            f"prefix must be text, or None to have it found, got {prefix!r}. "
            "Leave it out if you do not know it."
        )
    path, network = _network(model, prefix)
    held = tensors_of(model, path)
    if not held.by_name:
        raise ConfigError(
            f"no parameter of the model begins with prefix={path!r}. "
            "Leave prefix out to have it found."
        )
    rules = rules_of(keys)
    require_used(rules, [name for names in held.aliases.values() for name in names])
    if adapters := adapters_of(network):
        _leave_adapters(held, adapters)
    parts = _parts(held, rules)
    shapes = {key: joined.shape(dtype) for key, joined in parts.items()}
    files = {} if adapters else in_files(shapes, file_bytes)
    return Export(network, parts, shapes, files, is_adapter=bool(adapters))


def adapters_of(network: nn.Module) -> frozenset[str]:
    """The names of a network's adapters, as peft and transformers hold them."""
    configs = getattr(network, "peft_config", None)
    return frozenset(configs) if isinstance(configs, Mapping) else frozenset()


def _leave_adapters(held: Tensors, adapters: frozenset[str]) -> None:
    """Forget what belongs to the frozen network: names have the adapter's in them, or are trained as well."""
    for name, x in list(held.by_name.items()):
        named = any(adapters & set(alias.split(".")) for alias in held.aliases[name])
        if not (named or x.requires_grad):
            del held.by_name[name], held.aliases[name]


def _network(model: nn.Module, prefix: str | None) -> tuple[str, nn.Module]:
    """Where the network begins, and which it is: the outermost that says how it is saved."""
    for path, module in model.named_modules():
        at = f"{plain(path)}." if path else ""
        saves = callable(getattr(module, "save_pretrained", None)) and hasattr(module, "config")
        if at == prefix or (prefix is None and saves):
            return at, module
    return prefix or "", model


def _parts(held: Tensors, rules: Sequence[Rule]) -> dict[str, Joined]:
    parts: dict[str, Joined] = {}
    tensors = {alias: x for name, x in held.by_name.items() for alias in held.aliases[name]}
    for name, rule in _rules(held, rules):
        key, keys = rule.sources[0], rule.sources
        if len(keys) > 1:
            raise ConfigError(
                f"{name} cannot be written as {' + '.join(keys)}: nothing says where one ends and the next "
                "begins. Leave that line of keys out, and have the fused name in the files."
            )
        made_of = tuple(tensors[other] for other in rule.parameters)
        if key in parts and [id(x) for x in parts[key].tensors] != [id(x) for x in made_of]:
            raise ConfigError(
                f"{name} cannot be written as {key}, which is the name of other parameters already: one of "
                "them would be lost. Give it a name of its own in keys."
            )
        parts[key] = Joined(made_of, _dim(key, made_of, rule.dim))
    return parts


def _rules(held: Tensors, rules: Sequence[Rule]) -> Iterator[tuple[str, Rule]]:
    """The rule for each: tied ones under the first of their names that has a line in ``keys``."""
    for names in held.aliases.values():
        found = ((name, made) for name in names for rule in rules if (made := rule.of(name)))
        yield next(found, (names[0], rule_for(names[0], ())))


def _dim(key: str, tensors: Sequence[torch.Tensor], wanted: int | None) -> int:
    """Along which the file has them side by side."""
    if len(tensors) == 1:
        return 0
    dims = joinable([tuple(x.shape) for x in tensors], wanted)
    shapes = ", ".join(str(list(x.shape)) for x in tensors)
    if not dims or len({x.dtype for x in tensors}) > 1:
        raise ConfigError(
            f"{key} cannot be made of tensors of shapes {shapes}: they have one dtype, and lie side by side "
            "along one dimension, the only one that may differ. "
            "Write a line of keys that joins tensors which fit."
        )
    if len(dims) > 1:
        raise ConfigError(
            f"{key}: parts of shapes {shapes} fit along dimension {' and '.join(map(str, dims))}. Say which "
            "it is in keys: 'a +0 b' joins rows (outputs of nn.Linear), 'a +1 b' columns."
        )
    return dims[0]

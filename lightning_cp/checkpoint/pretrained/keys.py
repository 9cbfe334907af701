"""Names of a parameter's tensors in a checkpoint: prefixes, other names, fused projections.

A user's ``keys`` maps parameter names to checkpoint keys. ``*`` matches anything without a dot, and
``+`` joins tensors along one dimension::

    {"blocks.*.qkv.weight": "model.layers.*.self_attn.q_proj.weight + model.layers.*.self_attn.k_proj.weight"}
    {"q.weight + k.weight + v.weight": "qkv.weight"}

A load finds that dimension from the shapes; ``+1`` sets it, for exports of equal shapes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_cp.checkpoint.pretrained.files import TensorEntry
from lightning_cp.errors import CheckpointError, ConfigError
from lightning_cp.utils.patching import strip_wrappers

Shape = tuple[int, ...]
_JOIN, _JOIN_DIM = re.compile(r" \+\d* "), re.compile(r" \+(\d*) ")


@dataclass(frozen=True)
class Source:
    """A checkpoint tensor, or a part of it along one dimension, that fills a part of a parameter."""

    entry: TensorEntry
    dim: int = 0
    entry_start: int = 0
    start: int = 0
    """Start in the parameter, along ``dim``."""
    length: int | None = None
    """Length along ``dim``; ``None``: the whole tensor is the whole parameter."""


@dataclass(frozen=True)
class Rule:
    """One line of ``keys``: at least one side has a single name."""

    parameters: tuple[str, ...]
    sources: tuple[str, ...]
    dim: int | None = None
    """The dimension to join along; ``None``: the one that the shapes allow."""

    def of(self, name: str) -> Rule | None:
        """The rule with the stars of ``name`` filled in, if ``name`` is one of its parameters."""
        for pattern in self.parameters:
            found = re.fullmatch(_regex(pattern), name)
            if found is not None:
                left, right = (
                    tuple(_fill(x, found.groups()) for x in side)
                    for side in (self.parameters, self.sources)
                )
                return Rule(left, right, self.dim)
        return None


def rules_of(keys: Mapping[str, str] | None) -> tuple[Rule, ...]:
    """Read ``keys``.

    Raises:
        ConfigError: not text, several names on both sides, or stars that do not match.
    """
    if keys is not None and not isinstance(keys, Mapping):
        raise ConfigError(
            f"keys is a mapping of names in the model to names in files, got {keys!r}. "
            "Write keys={'model.norm.weight': 'norm.weight'}."
        )
    rules: list[Rule] = []
    for left, right in (keys or {}).items():
        if not isinstance(left, str) or not isinstance(right, str):
            raise ConfigError(
                f"keys maps text to text, got {left!r}: {right!r}. "
                "Name tensors by text on both sides."
            )
        sides = [tuple(part.strip() for part in _JOIN.split(side)) for side in (left, right)]
        dims = {int(dim) if dim else None for dim in _JOIN_DIM.findall(left + right)}
        if len(dims) > 1:
            raise ConfigError(
                f"a line of keys joins along one dimension, got {left!r}: {right!r}. "
                "Name one dimension, the same for all tensors of the line."
            )
        if min(map(len, sides)) > 1 or not all(all(side) for side in sides):
            raise ConfigError(
                f"keys joins several names by ' + ' on one side only, got {left!r}: {right!r}. "
                "Write one name on the other side."
            )
        stars = {part.count("*") for side in sides for part in side}
        if len(stars) > 1:
            raise ConfigError(
                f"every name of a line of keys has as many stars as the others, got {left!r}: {right!r}. "
                "Write a star for each number that differs, on both sides."
            )
        rules.append(Rule(sides[0], sides[1], *dims))
    return tuple(rules)


def check_rules_used(rules: Iterable[Rule], names: Collection[str]) -> None:
    """Check that the model has the parameters of each line of ``keys``.

    Raises:
        ConfigError: naming the line.
    """
    known = set(names)
    for rule in rules:
        found = [made for name in names if (made := rule.of(name)) is not None]
        lacking = [x for made in found for x in made.parameters if x not in known]
        if not found or lacking:
            raise ConfigError(
                f"keys has a line for {lacking[0] if lacking else ' + '.join(rule.parameters)}, and no "
                f"parameter of the model is called that: there are {', '.join(list(names)[:3])}, ... On the "
                "left stand the model's names, without prefix."
            )


def rule_for(name: str, rules: Iterable[Rule]) -> Rule:
    """The rule with the parameters that share checkpoint tensors with ``name`` (itself among them)."""
    return next((made for rule in rules if (made := rule.of(name))), Rule((name,), (name,)))


def sources_of(
    name: str,
    shapes: Mapping[str, Shape],
    entries: Mapping[str, TensorEntry],
    rules: Sequence[Rule],
) -> tuple[Source, ...]:
    """The tensors that fill a parameter; all keys must exist.

    Args:
        name: of the parameter.
        shapes: of all parameters.
        entries: of the checkpoint.
        rules: the user's.

    Raises:
        CheckpointError: shapes that do not fit, naming both.
    """
    rule = rule_for(name, rules)
    parameters, keys = rule.parameters, rule.sources
    shape, parts = shapes[name], [entries[key] for key in keys]
    if len(parts) == len(parameters) == 1:
        if parts[0].shape != shape:
            raise CheckpointError(
                f"{name} has shape {list(shape)}, but {keys[0]!r} in {parts[0].file.name} has "
                f"{list(parts[0].shape)}. Build the model from the configuration that the checkpoint came "
                "with."
            )
        return (Source(parts[0]),)
    if len(parts) > 1:
        shapes_of = [part.shape for part in parts]
        dim = _joined(shape, shapes_of, f"{name} <- {' + '.join(keys)}", rule.dim)
        starts = _starts([part.shape[dim] for part in parts])
        return tuple(
            Source(part, dim, 0, start, part.shape[dim])
            for part, start in zip(parts, starts, strict=True)
        )
    sizes = [shapes[other] for other in parameters]
    dim = _joined(parts[0].shape, sizes, f"{' + '.join(parameters)} <- {keys[0]}", rule.dim)
    start = _starts([size[dim] for size in sizes])[parameters.index(name)]
    return (Source(parts[0], dim, start, 0, shape[dim]),)


def _joined(whole: Shape, parts: Sequence[Shape], what: str, wanted: int | None) -> int:
    """The dimension along which the parts make up the whole."""
    for dim in joinable(parts, wanted):
        size = sum(part[dim] for part in parts)
        if whole == (*parts[0][:dim], size, *parts[0][dim + 1 :]):
            return dim
    along = "any dimension" if wanted is None else f"dimension {wanted}"
    raise CheckpointError(
        f"{what}: shapes {', '.join(str(list(part)) for part in parts)} side by side do not make "
        f"{list(whole)} along {along}. Name in keys the tensors that do."
    )


def joinable(parts: Sequence[Shape], wanted: int | None = None) -> list[int]:
    """The dimensions along which tensors of these shapes can be joined; only ``wanted``, if given."""
    if len({len(part) for part in parts}) > 1:
        return []
    rests = [{(*part[:dim], *part[dim + 1 :]) for part in parts} for dim in range(len(parts[0]))]
    return [dim for dim, rest in enumerate(rests) if len(rest) == 1 and wanted in (None, dim)]


def _starts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:at]) for at in range(len(sizes))]


def _regex(pattern: str) -> str:
    return r"([^.]+)".join(re.escape(part) for part in pattern.split("*"))


def _fill(pattern: str, values: Sequence[str]) -> str:
    parts = pattern.split("*")
    return "".join(part + value for part, value in zip(parts, (*values, ""), strict=True))


# The tensors of a model by the names that a checkpoint uses.


@dataclass
class Tensors:
    """Parameters and persistent buffers of a model, each once."""

    by_name: dict[str, torch.Tensor] = field(default_factory=dict)
    aliases: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """All names of each tensor: tied weights have several."""


def tensors_of(model: nn.Module, prefix: str = "") -> Tensors:
    """The tensors of a state dict, by plain names without ``prefix``; nothing is gathered."""
    names: dict[int, list[str]] = defaultdict(list)
    seen: dict[int, torch.Tensor] = {}
    for name, x in _named(model):
        if name.startswith(prefix):
            seen[id(x)] = x
            names[id(x)].append(name[len(prefix) :])
    found = Tensors()
    for key, x in seen.items():
        found.by_name[names[key][0]] = x
        found.aliases[names[key][0]] = tuple(names[key])
    return found


def _named(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in model.named_modules(remove_duplicate=False):
        for name, x in (*module._parameters.items(), *module._buffers.items()):
            if x is not None and name not in module._non_persistent_buffers_set:
                yield strip_wrappers(f"{path}.{name}" if path else name), x


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module, without the wrappers of Fabric, DDP and torch.compile.

    Raises:
        ConfigError: not a module.
    """
    given: Any = model
    if not isinstance(given, nn.Module):
        raise ConfigError(
            f"model must be a module of torch.nn, got {type(given).__name__}. Give the model itself, not its "
            "state dict."
        )
    while True:
        within = model._modules.get("_forward_module") or model._modules.get("_orig_mod")
        if isinstance(model, DistributedDataParallel):
            within = model.module
        if within is None:
            return model
        model = within

"""A match of the tensors of a part of the model with those of the files, and what is left on either side."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from lightning_cp.checkpoint.pretrained.keys import Rule, rule_for
from lightning_cp.checkpoint.pretrained.names import Tensors, plain, tensors_of
from lightning_cp.checkpoint.pretrained.same_names import Allowed

Keys = tuple[str, ...]
"""Of the files: what one parameter is made of."""
Known = tuple[str, Keys]
"""The name of a tensor that the checkpoint knows it by, and the keys that it takes."""


def keys_of(name: str, rules: Sequence[Rule], put: str) -> Keys:
    """A parameter's name in the files; ``put`` stands in front where no rule says another name."""
    keys = rule_for(name, rules).sources
    return (put + name,) if keys == (name,) else keys


@dataclass(frozen=True)
class Match:
    """A part of the model beside the files.

    Args:
        model: the user's.
        taken: what the names of the part begin with in the model.
        put: what they begin with in the files instead.
        files: keys of the checkpoint, in its order.
        rules: other names.
        found: the part was found and not told: what is beside it counts, too.
    """

    model: nn.Module
    taken: str
    put: str
    files: Collection[str]
    rules: Sequence[Rule]
    found: bool

    @cached_property
    def tensors(self) -> Tensors:
        """Of the part."""
        return tensors_of(self.model, self.taken)

    @cached_property
    def chosen(self) -> dict[str, Known | None]:
        """By the first name of each tensor: the first one of which the files have everything."""
        return {name: next(iter(self._known(name)), None) for name in self.tensors.by_name}

    @cached_property
    def used(self) -> set[str]:
        """Keys that are read."""
        return {key for known in self.chosen.values() if known is not None for key in known[1]}

    @cached_property
    def missing(self) -> list[str]:
        """Tensors of the part that are not in the files."""
        return [name for name, known in self.chosen.items() if known is None]

    @cached_property
    def beside(self) -> list[str]:
        """Parameters that are not in the part, and are not tied to one that is, by their whole names."""
        if not self.found:
            return []
        known = {id(x) for x in self.tensors.by_name.values()}
        names = ((plain(name), x) for name, x in self.model.named_parameters())
        return [name for name, x in names if not name.startswith(self.taken) and id(x) not in known]

    def twins(self, allowed: Allowed) -> list[tuple[str, Known]]:
        """The tensors to compare: tied ones under their other names, unless they may be left unread."""
        return [
            (name, known)
            for name, known in self._twins
            if not any(allowed.unread(key) for key in known[1] if key not in self.used)
        ]

    def unexpected(self, allowed: Allowed) -> list[str]:
        """Keys that are neither read nor compared."""
        compared = {key for _, (_, keys) in self.twins(allowed) for key in keys}
        return [key for key in self.files if key not in self.used and key not in compared]

    @cached_property
    def _twins(self) -> list[tuple[str, Known]]:
        found: dict[Keys, tuple[str, Known]] = {}
        for name, first in self.chosen.items():
            for alias, keys in self._known(name):
                if first is not None and keys != first[1]:
                    found[keys] = name, (alias, keys)
        return list(found.values())

    def _known(self, name: str) -> list[Known]:
        """The names of a tensor of which the files have everything."""
        every = [(x, keys_of(x, self.rules, self.put)) for x in self.tensors.aliases[name]]
        return [known for known in every if all(key in self.files for key in known[1])]

    def sought(self, name: str) -> str:
        """A missing tensor, and what it should be made of, if ``keys`` says that."""
        for alias in self.tensors.aliases.get(name, ()):
            keys = rule_for(alias, self.rules).sources
            if keys != (alias,):
                lacking = " and ".join(repr(key) for key in keys if key not in self.files)
                return f"{name}, of which keys= says that it is made of {lacking}"
        return name

    def refused(self, allowed: Allowed) -> tuple[list[str], list[str]]:
        """Missing and unexpected names that no pattern allows."""
        return (
            allowed.refused_missing([*self.missing, *self.beside]),
            allowed.refused_unexpected(self.unexpected(allowed)),
        )

    def same_names(self) -> Mapping[str, Keys]:
        """Names in the model to those in the files, whole and in order: what ranks have to agree on."""
        return {
            self.taken + name: () if known is None else known[1]
            for name, known in sorted(self.chosen.items())
        }

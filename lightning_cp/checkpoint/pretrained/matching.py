"""Matching of a part of the model with the tensors of the files, and the remainder of both."""

from __future__ import annotations

import copy
import fnmatch
import sys
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from lightning_cp.checkpoint.pretrained.files import WeightFiles
from lightning_cp.checkpoint.pretrained.keys import Rule, Tensors, rule_for, tensors_of
from lightning_cp.errors import CheckpointError
from lightning_cp.utils.patching import strip_wrappers

# Names that only the model or only the checkpoint has, and patterns of allowed ones.


@dataclass(frozen=True)
class AllowedNames:
    """Names that one side may lack."""

    missing: Sequence[str] = ()
    """Patterns (``*`` is anything) of parameters that may be missing in the files."""
    unexpected: Sequence[str] = ()
    """Patterns of keys that may stay unread."""
    strict: bool = True
    """True to allow only these."""

    def by_lists(self) -> AllowedNames:
        """The same lists, enforced even where everything is allowed."""
        return replace(self, strict=True)

    def may_stay_unread(self, key: str) -> bool:
        """True if a key of the files need not be read or compared."""
        return not self.strict or _matches(key, self.unexpected)

    def refused_missing(self, names: Iterable[str]) -> list[str]:
        """The names that are not allowed."""
        return [name for name in names if self.strict and not _matches(name, self.missing)]

    def refused_unexpected(self, keys: Iterable[str]) -> list[str]:
        """The keys that are not allowed."""
        return [key for key in keys if not self.may_stay_unread(key)]


def check_names(
    missing: Sequence[str], unexpected: Sequence[str], checkpoint: WeightFiles, prefix: str
) -> None:
    """Check that both sides have the same names, except allowed ones.

    Raises:
        CheckpointError: naming the others.
    """
    if not missing and not unexpected:
        return
    said = []
    if missing:
        said.append(f"it lacks {len(missing)} parameters of the model ({first_names(missing)})")
    if unexpected:
        said.append(
            f"it has {len(unexpected)} tensors that the model lacks ({first_names(unexpected)})"
        )
    at = f" under {prefix!r}" if prefix else ""
    raise CheckpointError(
        f"{checkpoint.display_name} is not of this model{at}: {'; '.join(said)}. Nothing was "
        "loaded. Other names are declared with keys=, what may be left out with allow_missing= and "
        "allow_unexpected= (or strict=False); "
        f"prefix= says which part of the model it is of.{checkpoint.advice}"
    )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    """True if a pattern matches the name."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def first_names(names: Sequence[str], at_most: int = 5) -> str:
    """The first names, for a message."""
    return ", ".join(names[:at_most]) + (", ..." if len(names) > at_most else "")


def lost_names(network: Any, names: Collection[str]) -> str:
    """Return a warning if ``from_pretrained`` would not read some names of an export; empty if it reads all.

    A network of transformers whose modules were replaced (by adapters of the user's own, say) has other names
    than a new one of its class.
    """
    transformers: Any = sys.modules.get("transformers")
    if transformers is None or not isinstance(network, transformers.PreTrainedModel):
        return ""
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            new = type(network)(copy.deepcopy(network.config))
    except Exception:  # the class takes more than its config; an export does not fail for a warning
        return ""
    aliases = list(tensors_of(new).aliases.values())
    read = {name for each in aliases for name in each}
    if not (lost := [name for name in names if name not in read]):
        return ""
    kind = type(network).__name__.removeprefix("FSDP")
    missing = [each[0] for each in aliases if not any(name in names for name in each)]
    instead = f", and would draw new values for {first_names(missing, 2)}" if missing else ""
    return (
        f"{kind}.from_pretrained would not read {len(lost)} tensors of this export ({first_names(lost, 2)})"
        f"{instead}: a {kind} has no such parameters. Merge adapters into the weights before the export, or "
        "name tensors by keys=. load_pretrained reads the export into a model with the same modules."
    )


Keys = tuple[str, ...]
"""Keys of the files that make one parameter."""
Known = tuple[str, Keys]
"""A tensor's name in the checkpoint, and its keys."""


def keys_of(name: str, rules: Sequence[Rule], file_prefix: str) -> Keys:
    """A parameter's keys in the files; ``file_prefix`` is the prefix if no rule renames it."""
    keys = rule_for(name, rules).sources
    return (file_prefix + name,) if keys == (name,) else keys


@dataclass(frozen=True)
class Match:
    """A part of the model matched with the files.

    Args:
        model: the user's.
        model_prefix: prefix of the part's names in the model.
        file_prefix: prefix of these names in the files.
        files: keys of the checkpoint, in its order.
        rules: other names.
        found: the part was found, not set by the user, so parameters outside of it count as missing, too.
    """

    model: nn.Module
    model_prefix: str
    file_prefix: str
    files: Collection[str]
    rules: Sequence[Rule]
    found: bool

    @cached_property
    def tensors(self) -> Tensors:
        """The tensors of the part."""
        return tensors_of(self.model, self.model_prefix)

    @cached_property
    def chosen(self) -> dict[str, Known | None]:
        """By the first name of each tensor, its first name for which the files have all keys."""
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
    def outside(self) -> list[str]:
        """Parameters outside of the part that are not tied to one inside, by full name."""
        if not self.found:
            return []
        known = {id(x) for x in self.tensors.by_name.values()}
        names = ((strip_wrappers(name), x) for name, x in self.model.named_parameters())
        return [
            name
            for name, x in names
            if not name.startswith(self.model_prefix) and id(x) not in known
        ]

    def tied_names(self, allowed: AllowedNames) -> list[tuple[str, Known]]:
        """Tied tensors to compare under their other names, unless these may stay unread."""
        return [
            (name, known)
            for name, known in self._tied_names
            if not any(allowed.may_stay_unread(key) for key in known[1] if key not in self.used)
        ]

    def unexpected(self, allowed: AllowedNames) -> list[str]:
        """Keys that are neither read nor compared."""
        compared = {key for _, (_, keys) in self.tied_names(allowed) for key in keys}
        return [key for key in self.files if key not in self.used and key not in compared]

    @cached_property
    def _tied_names(self) -> list[tuple[str, Known]]:
        found: dict[Keys, tuple[str, Known]] = {}
        for name, first in self.chosen.items():
            for alias, keys in self._known(name):
                if first is not None and keys != first[1]:
                    found[keys] = name, (alias, keys)
        return list(found.values())

    def _known(self, name: str) -> list[Known]:
        """The names of a tensor for which the files have all keys."""
        every = [(x, keys_of(x, self.rules, self.file_prefix)) for x in self.tensors.aliases[name]]
        return [known for known in every if all(key in self.files for key in known[1])]

    def describe_missing(self, name: str) -> str:
        """A missing tensor, with its keys if ``keys`` defines them."""
        for alias in self.tensors.aliases.get(name, ()):
            keys = rule_for(alias, self.rules).sources
            if keys != (alias,):
                lacking = " and ".join(repr(key) for key in keys if key not in self.files)
                return f"{name}, of which keys= says that it is made of {lacking}"
        return name

    def refused(self, allowed: AllowedNames) -> tuple[list[str], list[str]]:
        """Missing and unexpected names that no pattern allows."""
        return (
            allowed.refused_missing([*self.missing, *self.outside]),
            allowed.refused_unexpected(self.unexpected(allowed)),
        )

    def same_names(self) -> Mapping[str, Keys]:
        """Names in the model to those in the files, complete and in order: ranks must agree on them."""
        return {
            self.model_prefix + name: () if known is None else known[1]
            for name, known in sorted(self.chosen.items())
        }


# The part of a model that a checkpoint fits, and the prefix of its names in the files.
#
# A LightningModule may call its network ``self.model``; and a checkpoint of a bare encoder lacks the name
# that the encoder has in a larger model, or has one more. The part is found by names, and never guessed: the
# last part of a name, such as ``weight``, is the same in any two modules.


DEPTH = 3
"""Maximum depth of the network in modules."""
_LAST = chr(0x10FFFF)
"""Sorts after all other letters."""


def find_match(
    model: nn.Module,
    checkpoint: WeightFiles,
    rules: Sequence[Rule],
    prefix: str | None,
    allowed: AllowedNames,
) -> Match:
    """The part of the model with most names in common, if the names show that it belongs to the files.

    Args:
        model: the user's.
        checkpoint: the files.
        rules: other names, which get no prefix.
        prefix: of the part, if the user sets it.
        allowed: decides between parts with as many names in common.

    Raises:
        CheckpointError: several parts fit equally.
    """
    files, by_user = checkpoint.entries, prefix is not None
    prefixes = _prefixes(model) if prefix is None else [prefix]

    def match(pair: _Pair) -> Match:
        return Match(model, pair.model_prefix, pair.file_prefix, files, rules, found=not by_user)

    pairs = [
        pair for pair in _pairs(model, files, rules, prefixes) if pair.is_evident(by_user=by_user)
    ]
    most = max((len(pair.matches) for pair in pairs), default=0)
    best: dict[frozenset[tuple[str, Keys]], _Pair] = {}
    for pair in pairs:
        if len(pair.matches) == most:
            best.setdefault(frozenset(pair.matches.items()), pair)  # outer ones come first
    tied = list(best.values()) or [_Pair(prefixes[0], "")]
    if len(tied) > 1 and not tied[0].is_literal(by_user=by_user):
        lists = allowed.by_lists()
        fits = [pair for pair in tied if not any(match(pair).refused(lists))]
        if len(fits) != 1:
            raise _ambiguous_match_error(checkpoint, tied)
        tied = fits
    return match(tied[0])


@dataclass
class _Pair:
    """The prefix to remove from a parameter's name, and the one to add, for a key of the files."""

    model_prefix: str
    file_prefix: str
    matches: dict[str, Keys] = field(default_factory=dict)
    """Keys in the files of the model's tensors, by their first full names."""
    names: list[str] = field(default_factory=list)
    """Common rest of the names that no rule changes."""
    by_rule: bool = False
    """True if names of rules were found, too."""
    part_of_model: float = 1.0
    """Share of the names with prefix ``model_prefix`` that was found."""
    part_of_files: float = 1.0
    """Share of the keys with prefix ``file_prefix`` that was found."""
    all_of_one: bool = True
    """True if all of the model, or all of the files, was found."""

    def is_literal(self, *, by_user: bool) -> bool:
        """True if names need no change; ``by_user``: the user set ``model_prefix``."""
        return not self.file_prefix and (by_user or not self.model_prefix)

    def is_evident(self, *, by_user: bool) -> bool:
        """True if the names show that the two belong together."""
        if self.is_literal(by_user=by_user) or (self.by_rule and not self.file_prefix):
            return True
        named = any(_has_module(name) for name in self.names)
        if self.model_prefix and self.file_prefix and not by_user and not self.by_rule:
            most = max(self.part_of_model, self.part_of_files) > 0.5
            return named and len(self.matches) > 1 and most
        return named or self.all_of_one


def _has_module(name: str) -> bool:
    """True if a name has more than numbers and its last part, which are the same anywhere."""
    return any(not part.isdigit() for part in name.split(".")[:-1])


def _prefixes(model: nn.Module) -> list[str]:
    """Prefixes of the model and its modules, outer ones first; otherwise in the model's order, equal on every
    rank.
    """
    paths = [
        strip_wrappers(f"{path}.")
        for path, _ in model.named_modules(remove_duplicate=False)
        if path
    ]
    near = dict.fromkeys(path for path in paths if path.count(".") <= DEPTH)
    return ["", *sorted(near, key=lambda path: path.count("."))]


def _pairs(
    model: nn.Module, files: Collection[str], rules: Sequence[Rule], prefixes: Sequence[str]
) -> Iterator[_Pair]:
    """All pairs with a name in common."""
    every = tensors_of(model).aliases
    part_of, starts = _NameIndex(every), _KeyPrefixes(files)
    for model_prefix in prefixes:
        named = [(first, name[len(model_prefix) :]) for first, name in part_of(model_prefix)]
        known = [(first, name, keys_of(name, rules, "")) for first, name in named]
        count = len({first for first, _ in named})
        wanted = len(every) if len(prefixes) > 1 else count
        same = [name for _, name, plain_keys in known if plain_keys == (name,)]
        most = sum(len(plain_keys) for *_, plain_keys in known)
        if count < wanted and most < len(files):  # a pair then needs a module's name
            same = [name for name in same if _has_module(name)]
        for file_prefix in starts.prefixes_of(same):
            pair, keys = _Pair(model_prefix, file_prefix), set[str]()
            for first, name, plain_keys in known:
                same_name = plain_keys == (name,)
                made = (file_prefix + name,) if same_name else plain_keys
                if all(key in files for key in made):
                    pair.matches.setdefault(first, made)
                    keys.update(made)
                    pair.names += [name] if same_name else []
                    pair.by_rule |= not same_name
            if pair.matches:
                pair.part_of_model = len(pair.matches) / count
                pair.part_of_files = len(pair.names) / max(1, starts.below[file_prefix])
                pair.all_of_one = len(pair.matches) == wanted or len(keys) == len(files)
                yield pair


class _KeyPrefixes:
    """Prefixes of the files' keys: empty, or their first part."""

    def __init__(self, files: Collection[str]) -> None:
        self.below = Counter({"": len(files)})
        """Number of keys by prefix."""
        self._of: dict[str, list[str]] = defaultdict(list)
        for key in files:
            start, dot, rest = key.partition(".")
            if dot:
                self.below[start + dot] += 1
                self._of[rest].append(start + dot)

    def prefixes_of(self, names: Sequence[str]) -> list[str]:
        """The prefixes with which one of the names is a key; always the empty one."""
        return ["", *sorted({start for name in names for start in self._of.get(name, ())})]


class _NameIndex:
    """An index of names by prefix, for many parts and many names."""

    def __init__(self, aliases: Mapping[str, Sequence[str]]) -> None:
        pairs = ((first, name) for first, names in aliases.items() for name in names)
        self._sorted = sorted((name, at, first) for at, (first, name) in enumerate(pairs))

    def __call__(self, start: str) -> list[tuple[str, str]]:
        """Pairs of first name and name, in the model's order."""
        begin, end = (bisect_left(self._sorted, (x,)) for x in (start, start + _LAST))
        part = sorted(self._sorted[begin:end], key=itemgetter(1))
        return [(first, name) for name, _, first in part]


def _ambiguous_match_error(checkpoint: WeightFiles, pairs: Sequence[_Pair]) -> CheckpointError:
    parts = list(dict.fromkeys(repr(pair.model_prefix) for pair in pairs))
    starts = list(dict.fromkeys(repr(pair.file_prefix) for pair in pairs))
    if len(parts) > 1:
        said = f"{checkpoint.display_name} fits several parts of the model equally well: "
        said += f"{first_names(parts)}. Say which one it is of: prefix={parts[-1]}, or with allow_missing= "
        said += "that the "
        said += "others may be missing."
    else:
        said = f"several parts of {checkpoint.display_name} fit the model equally well: "
        said += f"{first_names(starts)}. Say with allow_unexpected= which of them are to be left unread, "
        said += "or with "
        said += "keys= which names are meant."
    return CheckpointError(f"{said} Nothing was loaded.")

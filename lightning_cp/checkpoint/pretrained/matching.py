"""A match of the tensors of a part of the model with those of the files, and what is left on either side."""

from __future__ import annotations

import fnmatch
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter

from torch import nn

from lightning_cp.checkpoint.pretrained.files import WeightFiles
from lightning_cp.checkpoint.pretrained.keys import Rule, Tensors, rule_for, tensors_of
from lightning_cp.errors import CheckpointError
from lightning_cp.utils.module_hooks import strip_wrappers

# Names that only the model or only the checkpoint has: which of them are allowed.


@dataclass(frozen=True)
class AllowedNames:
    """Names that one side may lack."""

    missing: Sequence[str] = ()
    """Patterns (``*`` is anything) of parameters that need not be in the files."""
    unexpected: Sequence[str] = ()
    """Patterns of keys that may be left unread."""
    strict: bool = True
    """Nothing else may be."""

    def by_lists(self) -> AllowedNames:
        """The same with its lists in force, where everything is allowed as well."""
        return replace(self, strict=True)

    def unread(self, key: str) -> bool:
        """True if a key of the files need not be read, nor compared."""
        return not self.strict or _matches(key, self.unexpected)

    def refused_missing(self, names: Iterable[str]) -> list[str]:
        """Those that are not allowed."""
        return [name for name in names if self.strict and not _matches(name, self.missing)]

    def refused_unexpected(self, keys: Iterable[str]) -> list[str]:
        """Those that are not allowed."""
        return [key for key in keys if not self.unread(key)]


def check_names(
    missing: Sequence[str], unexpected: Sequence[str], checkpoint: WeightFiles, prefix: str
) -> None:
    """Refuse names that only one side has, and that are not allowed.

    Raises:
        CheckpointError: naming them.
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
        f"{checkpoint.shown} is not of this model{at}: {'; '.join(said)}. Nothing was "
        "loaded. Other names are declared with keys=, what may be left out with allow_missing= and "
        "allow_unexpected= (or strict=False); "
        f"prefix= says which part of the model it is of.{checkpoint.advice}"
    )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    """True if one of the patterns is of this name."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def first_names(names: Sequence[str], at_most: int = 5) -> str:
    """The first ones, for a message."""
    return ", ".join(names[:at_most]) + (", ..." if len(names) > at_most else "")


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
        names = ((strip_wrappers(name), x) for name, x in self.model.named_parameters())
        return [name for name, x in names if not name.startswith(self.taken) and id(x) not in known]

    def twins(self, allowed: AllowedNames) -> list[tuple[str, Known]]:
        """The tensors to compare: tied ones under their other names, unless they may be left unread."""
        return [
            (name, known)
            for name, known in self._twins
            if not any(allowed.unread(key) for key in known[1] if key not in self.used)
        ]

    def unexpected(self, allowed: AllowedNames) -> list[str]:
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

    def refused(self, allowed: AllowedNames) -> tuple[list[str], list[str]]:
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


# The part of a model that a checkpoint is of, and the beginning of its names in the files.
#
# A LightningModule calls its network ``self.model``, say; and a checkpoint of a bare encoder lacks the name
# that the encoder has in a larger model, or has one more. The names tell; where they do not, it is not
# guessed: the last part of a name, such as ``weight``, is the same in any two modules.


DEPTH = 3
"""How many modules deep the network may be."""
_LAST = chr(0x10FFFF)
"""Sorted behind all other letters."""


def find_match(
    model: nn.Module,
    checkpoint: WeightFiles,
    rules: Sequence[Rule],
    prefix: str | None,
    allowed: AllowedNames,
) -> Match:
    """The part of the model with most names in common, if the names say that it is the files'.

    Args:
        model: the user's.
        checkpoint: what the files hold.
        rules: other names, which have nothing put in front.
        prefix: of the part, if the user says it.
        allowed: decides between parts that have as many names in common.

    Raises:
        CheckpointError: several parts, and nothing says which.
    """
    files, told = checkpoint.entries, prefix is not None
    prefixes = _prefixes(model) if prefix is None else [prefix]

    def match(pair: _Pair) -> Match:
        return Match(model, pair.taken, pair.put, files, rules, found=not told)

    pairs = [pair for pair in _pairs(model, files, rules, prefixes) if pair.is_evident(told=told)]
    most = max((len(pair.found) for pair in pairs), default=0)
    best: dict[frozenset[tuple[str, Keys]], _Pair] = {}
    for pair in pairs:
        if len(pair.found) == most:
            best.setdefault(frozenset(pair.found.items()), pair)  # outer ones come first
    tied = list(best.values()) or [_Pair(prefixes[0], "")]
    if len(tied) > 1 and not tied[0].is_literal(told=told):
        lists = allowed.by_lists()
        fits = [pair for pair in tied if not any(match(pair).refused(lists))]
        if len(fits) != 1:
            raise _ambiguous_match_error(checkpoint, tied)
        tied = fits
    return match(tied[0])


@dataclass
class _Pair:
    """The text to take away from a parameter's name, and to put in front, to get a key of the files."""

    taken: str
    put: str
    found: dict[str, Keys] = field(default_factory=dict)
    """What the files have of the model's tensors, which go by their first whole names."""
    names: list[str] = field(default_factory=list)
    """What is the same on both sides: the rest of the names that no rule changes."""
    by_rule: bool = False
    """Other names were found, too."""
    part_of_model: float = 1.0
    """How much is found of what begins with ``taken``."""
    part_of_files: float = 1.0
    """The same of ``put``."""
    all_of_one: bool = True
    """All of the model, or all of the files."""

    def is_literal(self, *, told: bool) -> bool:
        """True if names are taken as they are; ``told``: ``taken`` is the user's word."""
        return not self.put and (told or not self.taken)

    def is_evident(self, *, told: bool) -> bool:
        """True if the names say that the two belong together."""
        if self.is_literal(told=told) or (self.by_rule and not self.put):
            return True
        named = any(_has_module(name) for name in self.names)
        if self.taken and self.put and not told and not self.by_rule:
            most = max(self.part_of_model, self.part_of_files) > 0.5
            return named and len(self.found) > 1 and most
        return named or self.all_of_one


def _has_module(name: str) -> bool:
    """True if there is more in a name than numbers and its last part, which are the same anywhere."""
    return any(not part.isdigit() for part in name.split(".")[:-1])


def _prefixes(model: nn.Module) -> list[str]:
    """The model itself and its modules, outer ones first; else as the model has them, on every rank."""
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
    """Every pair that has a name in common."""
    every = tensors_of(model).aliases
    part_of, starts = _NameIndex(every), _KeyPrefixes(files)
    for taken in prefixes:
        named = [(first, name[len(taken) :]) for first, name in part_of(taken)]
        known = [(first, name, keys_of(name, rules, "")) for first, name in named]
        count = len({first for first, _ in named})
        wanted = len(every) if len(prefixes) > 1 else count
        same = [name for _, name, plain_keys in known if plain_keys == (name,)]
        most = sum(len(plain_keys) for *_, plain_keys in known)
        if count < wanted and most < len(files):  # then a pair needs a module's name
            same = [name for name in same if _has_module(name)]
        for put in starts.before(same):
            pair, keys = _Pair(taken, put), set[str]()
            for first, name, plain_keys in known:
                same_name = plain_keys == (name,)
                made = (put + name,) if same_name else plain_keys
                if all(key in files for key in made):
                    pair.found.setdefault(first, made)
                    keys.update(made)
                    pair.names += [name] if same_name else []
                    pair.by_rule |= not same_name
            if pair.found:
                pair.part_of_model = len(pair.found) / count
                pair.part_of_files = len(pair.names) / max(1, starts.below[put])
                pair.all_of_one = len(pair.found) == wanted or len(keys) == len(files)
                yield pair


class _KeyPrefixes:
    """Beginnings of the files' keys: nothing, or their first part."""

    def __init__(self, files: Collection[str]) -> None:
        self.below = Counter({"": len(files)})
        """How many keys begin with each."""
        self._of: dict[str, list[str]] = defaultdict(list)
        for key in files:
            start, dot, rest = key.partition(".")
            if dot:
                self.below[start + dot] += 1
                self._of[rest].append(start + dot)

    def before(self, names: Sequence[str]) -> list[str]:
        """With which one of the names is a key; nothing always."""
        return ["", *sorted({start for name in names for start in self._of.get(name, ())})]


class _NameIndex:
    """Finds names by what they begin with, as there are many parts and many names."""

    def __init__(self, aliases: Mapping[str, Sequence[str]]) -> None:
        pairs = ((first, name) for first, names in aliases.items() for name in names)
        self._sorted = sorted((name, at, first) for at, (first, name) in enumerate(pairs))

    def __call__(self, start: str) -> list[tuple[str, str]]:
        """First names and names, in the model's order."""
        begin, end = (bisect_left(self._sorted, (x,)) for x in (start, start + _LAST))
        part = sorted(self._sorted[begin:end], key=itemgetter(1))
        return [(first, name) for name, _, first in part]


def _ambiguous_match_error(checkpoint: WeightFiles, pairs: Sequence[_Pair]) -> CheckpointError:
    parts = list(dict.fromkeys(repr(pair.taken) for pair in pairs))
    starts = list(dict.fromkeys(repr(pair.put) for pair in pairs))
    if len(parts) > 1:
        said = f"{checkpoint.shown} fits several parts of the model equally well: "
        said += f"{first_names(parts)}. Say which one it is of: prefix={parts[-1]}, or with allow_missing= "
        said += "that the "
        said += "others may be missing."
    else:
        said = f"several parts of {checkpoint.shown} fit the model equally well: "
        said += f"{first_names(starts)}. Say with allow_unexpected= which of them are to be left unread, "
        said += "or with "
        said += "keys= which names are meant."
    return CheckpointError(f"{said} Nothing was loaded.")

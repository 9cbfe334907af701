"""The part of a model that a checkpoint is of, and the beginning of its names in the files.

A LightningModule calls its network ``self.model``, say; and a checkpoint of a bare encoder lacks the name
that the encoder has in a larger model, or has one more. The names tell; where they do not, it is not
guessed: the last part of a name, such as ``weight``, is the same in any two modules.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from torch import nn

from lightning_cp.checkpoint.pretrained.index import Checkpoint
from lightning_cp.checkpoint.pretrained.keys import Rule
from lightning_cp.checkpoint.pretrained.matching import Keys, Match, keys_of
from lightning_cp.checkpoint.pretrained.names import plain, tensors_of
from lightning_cp.checkpoint.pretrained.same_names import Allowed, some
from lightning_cp.errors import CheckpointError

DEPTH = 3
"""How many modules deep the network may be."""
_LAST = chr(0x10FFFF)
"""Sorted behind all other letters."""


def find_match(
    model: nn.Module,
    checkpoint: Checkpoint,
    rules: Sequence[Rule],
    prefix: str | None,
    allowed: Allowed,
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
            raise _several(checkpoint, tied)
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
    paths = [plain(f"{path}.") for path, _ in model.named_modules(remove_duplicate=False) if path]
    near = dict.fromkeys(path for path in paths if path.count(".") <= DEPTH)
    return ["", *sorted(near, key=lambda path: path.count("."))]


def _pairs(
    model: nn.Module, files: Collection[str], rules: Sequence[Rule], prefixes: Sequence[str]
) -> Iterator[_Pair]:
    """Every pair that has a name in common."""
    every = tensors_of(model).aliases
    part_of, starts = _Parts(every), _Starts(files)
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


class _Starts:
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


class _Parts:
    """Finds names by what they begin with, as there are many parts and many names."""

    def __init__(self, aliases: Mapping[str, Sequence[str]]) -> None:
        pairs = ((first, name) for first, names in aliases.items() for name in names)
        self._sorted = sorted((name, at, first) for at, (first, name) in enumerate(pairs))

    def __call__(self, start: str) -> list[tuple[str, str]]:
        """First names and names, in the model's order."""
        begin, end = (bisect_left(self._sorted, (x,)) for x in (start, start + _LAST))
        part = sorted(self._sorted[begin:end], key=itemgetter(1))
        return [(first, name) for name, _, first in part]


def _several(checkpoint: Checkpoint, pairs: Sequence[_Pair]) -> CheckpointError:
    parts = list(dict.fromkeys(repr(pair.taken) for pair in pairs))
    starts = list(dict.fromkeys(repr(pair.put) for pair in pairs))
    if len(parts) > 1:
        said = f"{checkpoint.shown} fits several parts of the model equally well: "
        said += f"{some(parts)}. Say which one it is of: prefix={parts[-1]}, or with allow_missing= that the "
        said += "others may be missing."
    else:
        said = f"several parts of {checkpoint.shown} fit the model equally well: "
        said += f"{some(starts)}. Say with allow_unexpected= which of them are to be left unread, or with "
        said += "keys= which names are meant."
    return CheckpointError(f"{said} Nothing was loaded.")

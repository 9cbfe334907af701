"""What an optimizer was given: names and parameters, or a model, of which more is known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_cp.errors import ConfigError

Named = tuple[str, torch.Tensor]


class Given(NamedTuple):
    """Parameters by name, tied ones under each of their names where these are known."""

    named: list[Named]
    tables: frozenset[int]
    """``id`` of those of modules that are embeddings."""

    @classmethod
    def of(cls, given: nn.Module | Iterable[Named]) -> Given:
        """Of a model, or of ``model.named_parameters()``, which tells neither embeddings nor all ties.

        Raises:
            ConfigError: it is something else, or empty.
        """
        if isinstance(given, nn.Module):
            found = cls(list(given.named_parameters(remove_duplicate=False)), _tables(given))
        else:
            found = cls(_listed(given), frozenset())
        if not found.named:
            raise ConfigError(
                "Muon was given no parameters. Pass a model, or its named_parameters()."
            )
        return found


def _tables(model: nn.Module) -> frozenset[int]:
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return frozenset(id(x.weight) for x in model.modules() if isinstance(x, kinds))


def _listed(given: Any) -> list[Named]:
    listed = list(given) if isinstance(given, Iterable) else [given]
    for one in listed:
        named = isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], str)
        if not named or not isinstance(one[1], torch.Tensor):
            raise ConfigError(
                f"Muon is given a model, or its named_parameters(), not {type(one).__name__}: names tell "
                "embeddings and heads, which have two dimensions as well."
            )
    return listed


def require_patterns(setting: str, patterns: Any, names: Sequence[str] = ()) -> None:
    """Refuse what is no list of patterns, or has one that fits none of the names, if there are any.

    Raises:
        ConfigError: naming the setting.
    """
    is_list = isinstance(patterns, Iterable) and not isinstance(patterns, str)
    if not is_list or not all(isinstance(x, str) for x in patterns):
        raise ConfigError(
            f"{setting}= is a list of patterns of names, got {patterns!r}. "
            "Put the pattern into a list, even if it is the only one."
        )
    for pattern in patterns if names else ():
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"{setting}= has {pattern!r}, which fits no parameter. There are: "
                f"{', '.join(names[:8])}{', ...' * (len(names) > 8)}."
            )


def require_sizes(fused: Any) -> None:
    """Refuse fused projections that are no sizes by pattern.

    Raises:
        ConfigError: showing what was got.
    """
    good = isinstance(fused, Mapping) and all(
        isinstance(sizes, Iterable) and all(type(n) is int and n > 0 for n in sizes)
        for sizes in fused.values()
    )
    if not good:
        raise ConfigError(
            f"fused= maps patterns of names to positive sizes of projections, got {fused!r}: "
            '{"*.qkv_proj.weight": (4096, 1024, 1024)}.'
        )

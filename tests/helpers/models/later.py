"""Families of models that come, or are exact, from a version of transformers on, and what is said before."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from importlib.metadata import version
from typing import Any, NamedTuple

import pytest

from tests.helpers.models.zoo import ZOO


class Later(NamedTuple):
    """Before ``since`` a family is refused, with a message that matches."""

    since: tuple[int, int]
    match: str


LATER = {
    "modernbert": Later((5, 1), "ModernBertForMaskedLM does not use transformers' attention interface"),
    "opt": Later((5, 2), "OPTAttention was given a dense attention mask of shape"),
    "esm_rotary": Later((5, 6), "RotaryEmbedding of EsmForMaskedLM takes no positions"),
}  # fmt: skip

COMES_WITH = {
    "youtu": (5, 1),
    "mistral4": (5, 4),
    "mimo_v2_flash": (5, 13),
    "minicpm3": (5, 13),
    "axk1": (5, 15),
}
"""Versions of transformers that are the first to have a family, by its name there."""


def transformers_version() -> tuple[int, int]:
    """Of what is installed: 5, 0 and so on."""
    major, minor, *_ = version("transformers").split(".")
    return int(major), int(minor)


def is_refused(family: str) -> bool:
    """Whether this version of transformers is older than the one that the family is exact with."""
    return transformers_version() < LATER[family].since


BLOOMS_LOSS = Later((5, 17), "BloomForCausalLM computes its loss by itself")
"""Called with labels: it does not tell its loss function what it is told."""


def all_families(but: Collection[str] = ()) -> list[Any]:
    """Names of all models of the tests, as parameters of a test."""
    return as_parameters(sorted({*ZOO, "llama", "gpt2", "bert"} - {*but}))


def as_parameters(families: Iterable[str]) -> list[Any]:
    """Names of models as parameters of a test, which is skipped for those that this transformers lacks."""
    later = {*LATER, *COMES_WITH}
    return [pytest.param(name, marks=[needs(name)] if name in later else []) for name in families]


def needs(family: str) -> pytest.MarkDecorator:
    """Skips what cannot be computed by models that are missing, or are refused: see ``test_versions``."""
    if family in COMES_WITH:
        since, reason = COMES_WITH[family], f"{family} comes with transformers"
    else:
        since, reason = LATER[family].since, f"{family} is refused before transformers"
    shown = ".".join(map(str, since))
    return pytest.mark.skipif(transformers_version() < since, reason=f"{reason} {shown}")

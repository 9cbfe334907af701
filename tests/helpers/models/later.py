"""Families of models that are exact from a version of transformers on, and what is said of them before."""

from __future__ import annotations

from collections.abc import Collection
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
    names = sorted({*ZOO, "llama", "gpt2", "bert"} - {*but})
    return [pytest.param(name, marks=[needs(name)] if name in LATER else []) for name in names]


def needs(family: str) -> pytest.MarkDecorator:
    """Skips what cannot be computed by models that are refused: that they are is in ``test_versions``."""
    since = ".".join(map(str, LATER[family].since))
    return pytest.mark.skipif(
        is_refused(family), reason=f"{family} is refused before transformers {since}"
    )

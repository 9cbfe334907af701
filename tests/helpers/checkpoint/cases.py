"""Cases of which a few stand for all in the quick suite."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def cases(every: Iterable[tuple[Any, ...]], quick: Collection[tuple[Any, ...]]) -> list[Any]:
    """Parameters for ``parametrize``: what is not in ``quick`` is slow."""
    found = list(every)
    assert set(quick) <= set(found)
    return [pytest.param(*x, marks=[] if x in quick else [pytest.mark.nightly]) for x in found]

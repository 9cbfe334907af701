"""Families that are refused with older versions of transformers, and exact with later ones."""

from __future__ import annotations

import pytest

from lightning_cp.errors import ConfigError
from tests.models.later import LATER, is_refused
from tests.models.steps import Case, parallel
from tests.models.test_windows import compare
from tests.pool import expect_on_every_rank


@pytest.mark.parametrize("family", LATER)
def test_families_that_come_later(family: str) -> None:
    case, match = Case(model=family), LATER[family].match
    if is_refused(family):
        expect_on_every_rank(2, parallel, case, 1, 2, error=ConfigError, match=match, timeout=20)
    else:
        compare(case, 1, 2)

"""The variables of a process that was told something of its rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.helpers.launch.start import STALE


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """Makes this a process that was told these variables and no others."""
    for name in STALE:
        monkeypatch.delenv(name, raising=False)

    def tell(variables: dict[str, str]) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return tell

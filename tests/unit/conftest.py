"""Tests of one process: none starts another, and none has ranks."""

from __future__ import annotations

import os
import subprocess
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

import pytest

from tests.helpers.pool.master import Pool


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise AssertionError("a test in tests/unit starts a process. Move its file to tests/ranks.")


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pool, "run", _refuse)
    monkeypatch.setattr(subprocess.Popen, "__init__", _refuse)
    monkeypatch.setattr(subprocess.Popen, "__del__", lambda self: None)  # it was never made
    monkeypatch.setattr(BaseProcess, "start", _refuse)
    monkeypatch.setattr(os, "fork", _refuse)

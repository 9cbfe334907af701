"""Tests of one process: none starts another, and none has ranks."""

from __future__ import annotations

import os
import subprocess
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

import pytest
import torch

from tests.helpers.pool.master import Pool


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise AssertionError("a test in tests/unit starts a process. Move its file to tests/ranks.")


def refused() -> list[tuple[Any, str]]:
    """What starts a process: owner and name. On a GPU Triton has to start its compiler."""
    forks = [(Pool, "run"), (BaseProcess, "start"), (os, "fork")]
    return forks if torch.cuda.is_available() else [*forks, (subprocess.Popen, "__init__")]


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in refused():
        monkeypatch.setattr(owner, name, _refuse)
        if owner is subprocess.Popen:
            monkeypatch.setattr(owner, "__del__", lambda self: None)  # it was never made

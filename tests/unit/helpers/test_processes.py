"""Which ways to start a process tests of one process are refused."""

from __future__ import annotations

import subprocess

import pytest
import torch

from tests.unit.conftest import refused


@pytest.mark.parametrize("has_gpu", [False, True])
def test_only_on_a_gpu_may_a_compiler_start(has_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert ((subprocess.Popen, "__init__") in refused()) != has_gpu


@pytest.mark.skipif(torch.cuda.is_available(), reason="a compiler may start")
def test_they_start_none() -> None:
    with pytest.raises(AssertionError, match="starts a process"):
        subprocess.run(["true"], check=True)

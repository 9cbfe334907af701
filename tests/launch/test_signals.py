"""SIGTERM: every rank stops after the same step, having saved it, and the run goes on from there exactly."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launch.start import SCRIPTS, Done, all_succeeded, ranks, torchrun_variables

SCRIPT = SCRIPTS / "stopped.py"
AT = 2
"""The step in which the signal comes; there are six."""


def run(folder: Path, how: str, *arguments: object) -> list[Done]:
    """Two ranks, started by torchrun or by Lightning."""
    folder.mkdir(exist_ok=True)
    told = torchrun_variables(2) if how == "torchrun" else [{}]
    return ranks(folder, told, SCRIPT, folder, 2, *arguments)


def left(folder: Path) -> list[str]:
    """Digests of what each rank has at the end."""
    return [digest(torch.load(folder / f"rank{rank}.pt")) for rank in range(2)]


def digest(result: Any) -> str:
    """Of weights and the optimizer's state, bit by bit."""
    made = hashlib.sha256(result["weights"].numpy().tobytes())
    for index in sorted(result["state"]):
        for name in sorted(result["state"][index]):
            made.update(result["state"][index][name].numpy().tobytes())
    made.update(str(result["steps"]).encode())
    return made.hexdigest()


@lru_cache(maxsize=1)
def uninterrupted(folder: Path) -> list[str]:
    all_succeeded(run(folder, "torchrun", "none", 0, 0, "none"))
    return left(folder)


@pytest.mark.parametrize(
    ("how", "who", "saves"),
    [
        ("torchrun", "1", "file"),
        ("lightning", "0,1", "none"),
        pytest.param("lightning", "1", "file", marks=pytest.mark.slow),
        pytest.param("torchrun", "0", "link", marks=pytest.mark.slow),
        pytest.param("torchrun", "0,1", "sharded", marks=pytest.mark.slow),
    ],
)
def test_every_rank_saves_the_same_step(
    how: str, who: str, saves: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path / "run"
    done = run(folder, how, "SIGTERM", who, AT, saves)
    assert [one.status for one in done] == [143] * len(done), done[0].output[-3000:]
    said = "".join(one.output for one in done)
    assert said.count("SIGNAL SENT") == len(who.split(","))
    assert f"stopped by a signal after step {AT}, saved as last.ckpt" in said
    assert not list(folder.glob(".*"))  # nothing half-written
    all_succeeded(run(folder, how, "none", 0, 0, saves, folder / "last.ckpt"))
    assert left(folder) == uninterrupted(tmp_path_factory.getbasetemp() / "uninterrupted")

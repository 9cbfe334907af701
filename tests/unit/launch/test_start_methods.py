"""Ways to start processes that cannot work where they are asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.fabric import Fabric

import lightning_cp
import lightning_cp.fabric
from lightning_cp.errors import ConfigError
from tests.helpers.launch.start import torchrun_variables
from tests.ranks.launch.test_slurm import srun

Variables = dict[str, str]


@pytest.mark.parametrize(
    "variables", [torchrun_variables(2)[1], srun(2)[1]], ids=["torchrun", "SLURM"]
)
def test_workers_of_processes_that_were_started(
    variables: Variables, told: Callable[[Variables], None]
) -> None:
    told(variables)
    with pytest.raises(ConfigError, match=r"start_method='spawn' starts processes, but .* already"):
        pl.Trainer(accelerator="cpu", devices=2, strategy="ulysses_ring_spawn")


@pytest.mark.parametrize("start", [lightning_cp, lightning_cp.fabric])
def test_start_methods_that_cannot_work(start: Any) -> None:
    with pytest.raises(ConfigError, match=r"forkserver.* shared memory"):
        start.UlyssesRingStrategy(start_method="forkserver")
    with pytest.raises(ConfigError, match="one of popen, spawn, fork, got 'threads'"):
        start.UlyssesRingStrategy(start_method="threads")


@pytest.mark.parametrize("made_by", [pl.Trainer, Fabric])
@pytest.mark.parametrize("strategy", ["ulysses_ring", "ulysses_ring_spawn"])
def test_notebooks_are_told_what_works_there(
    made_by: Any,
    strategy: str,
    told: Callable[[Variables], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told({})
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(ConfigError, match=r"in a notebook .* Use strategy='ulysses_ring_fork'"):
        made_by(accelerator="cpu", devices=2, strategy=strategy)
    made_by(accelerator="cpu", devices=2, strategy="ulysses_ring_fork")

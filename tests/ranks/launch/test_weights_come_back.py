"""What workers have trained is in the program's module, whatever engine has spread it over them."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from tests.helpers.launch.scripts.engines import CASES, Counting, loss_of_a_test
from tests.helpers.launch.scripts.model import QUIET, text
from tests.helpers.launch.start import SCRIPTS, all_succeeded, ranks
from tests.helpers.pool import run_ranks
from tests.helpers.strategies.small import alone as never_heard_of_others


def fitted_alone(rank: int, world_size: int) -> dict[str, Any]:
    """One process, a Trainer without any strategy."""
    never_heard_of_others()
    module = Counting()
    pl.Trainer(devices=1, **QUIET).fit(module, text())
    return {"state": module.state_dict(), "losses": module.losses, "tested": loss_of_a_test(module)}


@lru_cache(maxsize=1)
def of_one_process() -> dict[str, Any]:
    (made,) = run_ranks(1, fitted_alone)
    return made


def came_back(folder: Path, case: str) -> None:
    """All of what the ranks had; where they read the same batches, that is what one process comes to."""
    alone, got = of_one_process(), torch.load(folder / f"{case}.pt")
    of_ranks: Any = torch.load(folder / f"{case}-ranks.pt")
    assert got["state"].keys() == alone["state"].keys()
    for name, weight in of_ranks["weights"].items():
        assert torch.equal(got["state"][name], weight), name
        assert not torch.equal(weight, Counting().get_parameter(name)), "nothing was trained"
    assert got["state"]["seen"] == len(of_ranks["losses"]) > 1
    assert got["tied"]
    if case not in ("hsdp", "meta"):  # two data ranks; other weights at first
        torch.testing.assert_close(got["state"], alone["state"], rtol=1e-5, atol=1e-8)
        assert got["tested"] == pytest.approx(alone["tested"], rel=1e-6)
        assert got["tested"] != pytest.approx(alone["losses"][0], rel=1e-2)


def run(folder: Path, how: str, *cases: str) -> None:
    (done,) = all_succeeded(ranks(folder, [{}], SCRIPTS / "engines.py", folder, how, *cases))
    assert "DeviceMesh" not in done.output  # a rank's part was sent, and not the whole
    for case in cases:
        came_back(folder, case)


def test_of_shards(tmp_path: Path) -> None:
    run(tmp_path, "fork", "fsdp")


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES)
def test_of_every_engine(case: str, tmp_path: Path) -> None:
    run(tmp_path, "fork", case)


@pytest.mark.nightly
def test_of_spawned_workers(tmp_path: Path) -> None:
    run(tmp_path, "spawn", "fsdp")

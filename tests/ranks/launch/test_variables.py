"""What a process was told of its rank: everything that does not fit is refused before anybody waits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning import Trainer
from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)

from lightning_cp import UlyssesRingStrategy
from lightning_cp.errors import ConfigError
from lightning_cp.launch.ranks import check_ranks
from tests.helpers.launch.start import SCRIPTS, ranks, torchrun_variables
from tests.ranks.launch.test_slurm import srun

Variables = dict[str, str]
MEET = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def changed(variables: Variables, **changes: str | None) -> Variables:
    """Without those that are None."""
    together = {**variables, **changes}
    return {name: value for name, value in together.items() if value is not None}


ELASTIC = torchrun_variables(2)[1]
SLURM = srun(2)[1]
OWN = {"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2", **MEET}
NODE = {"NODE_RANK": "1", **MEET}

Wrong = list[tuple[Variables, int, int, str]]
"""What it was told, devices, num_nodes, and what the error says."""

BY_TORCHRUN: Wrong = [
    (changed(ELASTIC, RANK="2"), 2, 1, "RANK=2, but WORLD_SIZE=2: ranks go from 0 to 1"),
    (changed(ELASTIC, RANK="-1"), 2, 1, "RANK=-1, but WORLD_SIZE=2"),
    (changed(ELASTIC, RANK="one"), 2, 1, "RANK=one is set, but .* integer"),
    (
        changed(ELASTIC, LOCAL_RANK=None),
        2,
        1,
        r"LOCAL_RANK is not set \(set: RANK=1, WORLD_SIZE=2\)",
    ),
    ({}, 2, 1, r"RANK and WORLD_SIZE and LOCAL_RANK are not set \(set: none"),
    (ELASTIC, 4, 1, "WORLD_SIZE=2 .* devices=4 x num_nodes=1 is 4.*-node=4 --nnodes=1"),
    (ELASTIC, 2, 2, "WORLD_SIZE=2 .* devices=2 x num_nodes=2 is 4"),
    (ELASTIC, 1, 2, "LOCAL_RANK=1, but devices=1"),
    (torchrun_variables(2)[0], 1, 2, "LOCAL_WORLD_SIZE=2 .* devices=1 x num_nodes=2"),
]
BY_SLURM: Wrong = [
    (changed(SLURM, SLURM_PROCID="3"), 2, 1, "SLURM_PROCID=3, but SLURM_NTASKS=2"),
    (changed(SLURM, SLURM_LOCALID=None), 2, 1, r"SLURM_LOCALID is not set \(set: SLURM_PROCID=1"),
    (SLURM, 4, 1, "SLURM_NTASKS=2 .* devices=4 x num_nodes=1 is 4.*srun --ntasks-per-node=4"),
    (srun(2)[0], 1, 2, "SLURM_NTASKS_PER_NODE=2 .* devices=1 x num_nodes=2"),
]
BY_HAND: Wrong = [
    (changed(OWN, LOCAL_RANK="2"), 2, 1, "LOCAL_RANK=2, but devices=2"),
    (changed(OWN, NODE_RANK="1"), 2, 1, "NODE_RANK=1, but num_nodes=1"),
    (OWN, 4, 1, "WORLD_SIZE=2 is set, but devices=4 x num_nodes=1 is 4"),
    ({"LOCAL_RANK": "0"}, 2, 1, "LOCAL_RANK=0 is set, as in 2 .* MASTER_PORT is not"),
    ({"RANK": "1", "WORLD_SIZE": "2"}, 1, 1, "RANK=1, WORLD_SIZE=2 are set, but LOCAL_RANK is not"),
    # one program on each node
    ({}, 2, 2, "num_nodes=2, but MASTER_ADDR and MASTER_PORT and NODE_RANK are not set"),
    (changed(NODE, MASTER_ADDR=None), 2, 2, "num_nodes=2, but MASTER_ADDR is not set"),
    (changed(NODE, NODE_RANK="2"), 2, 2, "NODE_RANK=2, but num_nodes=2"),
]
WRONG = [
    *((TorchElasticEnvironment, *case) for case in BY_TORCHRUN),
    *((SLURMEnvironment, *case) for case in BY_SLURM),
    *((LightningEnvironment, *case) for case in BY_HAND),
]


@pytest.mark.parametrize(
    ("environment", "variables", "devices", "num_nodes", "match"),
    WRONG,
    ids=[case[-1][:40] for case in WRONG],
)
def test_what_does_not_fit_is_named(
    environment: type[ClusterEnvironment],
    variables: Variables,
    devices: int,
    num_nodes: int,
    match: str,
    told: Callable[[Variables], None],
) -> None:
    told(variables)
    with pytest.raises(ConfigError, match=match):
        check_ranks(environment(), "popen", devices, num_nodes)


RIGHT: list[tuple[type, Variables, str, int, int]] = [
    (TorchElasticEnvironment, ELASTIC, "popen", 2, 1),
    (TorchElasticEnvironment, torchrun_variables(4, 2)[3], "popen", 2, 2),
    (SLURMEnvironment, SLURM, "popen", 2, 1),
    (SLURMEnvironment, srun(4, 2)[2], "popen", 2, 2),
    (LightningEnvironment, {}, "popen", 4, 1),
    (LightningEnvironment, OWN, "popen", 2, 1),
    (LightningEnvironment, changed(OWN, RANK="1"), "popen", 2, 1),
    (LightningEnvironment, {"RANK": "0", "WORLD_SIZE": "1"}, "popen", 4, 1),
    (LightningEnvironment, {"RANK": "1", "WORLD_SIZE": "2", **NODE}, "popen", 4, 2),
    (LightningEnvironment, NODE, "popen", 2, 2),
    (
        LightningEnvironment,
        {**NODE, "LOCAL_RANK": "1", "WORLD_SIZE": "4", "RANK": "3"},
        "popen",
        2,
        2,
    ),
    (LightningEnvironment, {"LOCAL_RANK": "3", "WORLD_SIZE": "2"}, "spawn", 4, 1),  # a worker
]


@pytest.mark.parametrize("case", RIGHT, ids=lambda case: f"{case[0].__name__[:5]} {case[3:]}")
def test_what_fits_is_left_alone(case: Any, told: Callable[[Variables], None]) -> None:
    environment, variables, start_method, devices, num_nodes = case
    told(variables)
    check_ranks(environment(), start_method, devices, num_nodes)


def test_other_clusters_know_best(told: Callable[[Variables], None]) -> None:
    told({"RANK": "7", "WORLD_SIZE": "2", "LOCAL_RANK": "9"})
    check_ranks(MPIEnvironment.__new__(MPIEnvironment), "popen", 1, 1)


def test_where_no_sample_is_shared_ddp_decides(told: Callable[[Variables], None]) -> None:
    """A job of one task whose Trainer asks for two devices, and nodes that were not told of each other."""

    def trainer(**sizes: Any) -> Trainer:
        strategy = UlyssesRingStrategy(**sizes)
        return Trainer(accelerator="cpu", devices=2, num_nodes=nodes, strategy=strategy)

    for nodes, variables in (1, changed(srun(2)[0], SLURM_NTASKS_PER_NODE="1")), (2, {}):
        told(variables)
        with pytest.raises(ConfigError, match=f"devices=2|num_nodes={nodes}"):
            trainer()
        trainer(context_parallel_size=1, data_parallel_size=2 * nodes)


# -- in programs --------------------------------------------------------------------------------------


@pytest.mark.quick("LOCAL_RANK-trainer.py")
@pytest.mark.parametrize("script", ["trainer.py", "fabric.py"])
@pytest.mark.parametrize(
    ("second", "match"),
    [
        ({"RANK": "2"}, "ConfigError: RANK=2, but WORLD_SIZE=2"),
        ({"LOCAL_RANK": None}, "but LOCAL_RANK is not set (set: RANK=1, WORLD_SIZE=2)"),
    ],
    ids=["RANK", "LOCAL_RANK"],
)
def test_the_rank_that_is_wrong_says_so(
    script: str, second: Variables, match: str, tmp_path: Path
) -> None:
    """By itself: whoever has started it ends the others."""
    wrong = changed(torchrun_variables(2)[1], **second)
    (done,) = ranks(tmp_path, [wrong], SCRIPTS / script, tmp_path, 2, 1, "ulysses_ring")
    assert done.status == 1
    assert match in done.output
    assert "ConfigError" in done.output


@pytest.mark.quick("SLURM-trainer.py", "torchrun-fabric.py")
@pytest.mark.parametrize("script", ["trainer.py", "fabric.py"])
@pytest.mark.parametrize("start", [torchrun_variables, srun], ids=["torchrun", "SLURM"])
def test_a_wrong_number_of_processes_ends_all_of_them(
    script: str, start: Callable[[int], list[Variables]], tmp_path: Path
) -> None:
    done = ranks(tmp_path, start(2), SCRIPTS / script, tmp_path, 3, 1, "ulysses_ring")
    assert [one.status for one in done] == [1, 1]
    assert "=2 processes were started by" in done[0].output
    assert "devices=3 x num_nodes=1 is 3" in done[0].output
    assert "rank 1 ended: rank 0 shows the ConfigError" in done[1].output

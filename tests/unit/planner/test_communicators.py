"""What communicators take of a device, and what offloaded tensors take of a host and of a step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_cp.planner.attention import AttentionCost, attention_cost
from lightning_cp.planner.communicators import BEGIN, END, communicator_bytes
from lightning_cp.planner.job import Job, MeshSizes, PlanCase, TrainingMethod
from lightning_cp.planner.machines import GIB, MACHINES
from lightning_cp.planner.memory import Memory, memory_of
from lightning_cp.planner.model import model_from_config
from lightning_cp.planner.time_model import step_seconds
from tests.helpers.planner.configs import SMALL

MODEL = model_from_config(SMALL, "small")
BOTH, NEAR = BEGIN + END, 16 * (BEGIN + END)
"""Bytes of a connection, and of a neighbour's or a peer's on 16 channels."""
FAR = 16 * 2 * END
"""Of neighbours where the group has ranks on several nodes."""
SHARED = 128 << 20


def case_of(
    mesh: MeshSizes, engine: str = "fsdp", exchange: str = "ring", **changed: object
) -> PlanCase:
    job = Job(MODEL, MACHINES["h100"], mesh.devices, 4096, mesh.data)
    return PlanCase(job, replace(TrainingMethod(mesh, engine, exchange), **changed))  # type: ignore[arg-type]


def memory(case: PlanCase) -> Memory:
    costs: dict[int | None, AttentionCost] = {None: attention_cost(case, None)}
    return memory_of(case, costs)


@pytest.mark.parametrize(
    ("mesh", "engine", "exchange", "wanted"),
    [
        (MeshSizes(), "ddp", "ring", 0),
        (MeshSizes(dp_replicate=4), "ddp", "ring", NEAR),
        (MeshSizes(dp_replicate=16), "ddp", "ring", FAR),
        (MeshSizes(ring=8), "fsdp", "ring", NEAR + 7 * NEAR),
        (MeshSizes(ring=8), "fsdp", "rotation", NEAR + NEAR),
        (MeshSizes(ring=8), "fsdp", "all_gather", NEAR + NEAR),
        (MeshSizes(ulysses=4, tp=2), "fsdp", "ring", NEAR + NEAR + 3 * NEAR),
        (MeshSizes(dp_replicate=2, dp_shard=2), "hsdp", "ring", NEAR + NEAR),
        # Of a ring of 16 over two nodes, 7 peers are near; of one around Ulysses of 2 a node has 4 ranks.
        (MeshSizes(ring=16), "fsdp", "ring", FAR + 7 * 4 * BOTH + SHARED),
        (MeshSizes(ring=8, ulysses=2), "fsdp", "ring", FAR + NEAR + 3 * 4 * BOTH + SHARED),
        (MeshSizes(ring=16), "fsdp", "rotation", FAR + 4 * BOTH + SHARED),
    ],
    ids=str,
)
def test_connections_by_hand(mesh: MeshSizes, engine: str, exchange: str, wanted: int) -> None:
    case = case_of(mesh, engine, exchange)
    assert communicator_bytes(case) == wanted
    assert memory(case).by_kind["communicators"] == wanted


def test_a_cpu_and_a_model_that_is_only_loaded_have_none() -> None:
    case = case_of(MeshSizes(ring=8))
    machine = replace(case.job.machine, is_cpu=True)
    assert communicator_bytes(PlanCase(replace(case.job, machine=machine), case.choice)) == 0
    loaded = PlanCase(replace(case.job, optimizer="none"), case.choice)
    assert memory_of(loaded, {}).communicators == 0


def test_they_count_beside_the_reserve() -> None:
    found = memory(case_of(MeshSizes(ring=8)))
    assert found.reserve == 3 * GIB
    kinds = {k: size for k, size in found.by_kind.items() if k != "communicators"}
    assert found.total == sum(kinds.values()) + 8 * NEAR + 3 * GIB


@pytest.mark.parametrize(("tokens", "rounded"), [(4096, 4096), (4104, 8192), (6144, 8192)])
def test_pinned_blocks_are_powers_of_two(tokens: int, rounded: int) -> None:
    """Hidden states, attention's results and its log-sum-exps: each a block of a power of two for a layer."""
    case = case_of(MeshSizes(ring=2), checkpointing="keep_attention", offload=True)
    case = PlanCase(replace(case.job, seq_len=2 * tokens), case.choice)
    features, heads = MODEL.features * 2, MODEL.heads
    blocks = (features, heads * MODEL.head_dim * 2, heads * 4)
    assert all(size & (size - 1) == 0 for size in blocks), "so that only tokens are rounded"
    assert memory(case).host == len(MODEL.layers) * rounded * sum(blocks)
    kept = PlanCase(case.job, replace(case.choice, offload=False))
    assert memory(kept).host == 0


def test_copies_wait_where_a_pass_is_shorter() -> None:
    """Forward hides less than backward; the input of the last block is never hidden."""
    case = case_of(MeshSizes(ring=2), checkpointing="blocks", offload=True)
    costs: dict[int | None, AttentionCost] = {None: attention_cost(case, None)}
    nbytes, layers = MODEL.features * 2 * case.local_tokens, len(MODEL.layers)

    def waiting(seconds: float) -> float:
        """Of a step in which a layer's input travels for some time."""
        machine = replace(case.job.machine, host_link=nbytes / seconds)
        slower = PlanCase(replace(case.job, machine=machine), case.choice)
        return step_seconds(slower, costs).offload

    computing = step_seconds(case, costs).computing / layers
    for within, times in ((0.01, 1), (0.3, layers + 1), (5.0, 2 * layers + 1)):
        begin, end = within * computing, 1.1 * within * computing
        assert waiting(end) - waiting(begin) == pytest.approx(times * (end - begin))
    assert waiting(0.01 * computing) == pytest.approx(0.01 * computing)

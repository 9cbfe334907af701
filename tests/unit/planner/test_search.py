"""Which plans are found: the story of the 405B model, limits, order, and that more of anything costs more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_cp.apps.plan.report import (
    advice,
    find_out_of_memory,
    find_poorly_sharded,
    largest_stacked_parameter,
    parameter_memory,
)
from lightning_cp.apps.plan.write import as_call, strategy_settings, trainer_settings
from lightning_cp.config import StrategyConfig
from lightning_cp.errors import ConfigError
from lightning_cp.layout import Mask, attention_traffic, schedule
from lightning_cp.layout.axes import Axis, Flat
from lightning_cp.planner.attention import AttentionCost, attention_cost
from lightning_cp.planner.job import Job, MeshSizes, PlanCase, TrainingMethod
from lightning_cp.planner.machines import GIB, MACHINES
from lightning_cp.planner.memory import memory_of
from lightning_cp.planner.model import model_from_config
from lightning_cp.planner.search import Limits, SearchResult, meshes, search, training_methods
from lightning_cp.planner.time_model import comm_volumes, step_seconds
from lightning_cp.strategies.validation import check
from tests.helpers.planner.configs import LLAMA_405B, SMALL

MIB = 1 << 20
Costs = dict[int | None, AttentionCost]
FREE = Limits({})
BIG = model_from_config(LLAMA_405B, "405b")
LLAMA_8B = model_from_config(
    {
        **LLAMA_405B,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "8b",
)


def job(**changed: Any) -> Job:
    given: dict[str, Any] = {
        "model": LLAMA_8B,
        "machine": MACHINES["h100"],
        "devices": 16,
        "seq_len": 131072,
        "global_batch": 2,
        **changed,
    }
    return Job(**given)


def of_story(**mesh: int) -> PlanCase:
    """The 405B model in float32 on 128 TPU v4, loaded only."""
    asked = job(
        model=BIG, machine=MACHINES["tpu_v4"], devices=128, precision="fp32", optimizer="none"
    )
    return PlanCase(asked, TrainingMethod(MeshSizes(**mesh), "hsdp"))


def memory(case: PlanCase) -> Any:
    return memory_of(
        case, {window: attention_cost(case, window) for window in case.job.model.windows}
    )


def seconds(case: PlanCase) -> float:
    costs = {window: attention_cost(case, window) for window in case.job.model.windows}
    return step_seconds(case, costs).total


def test_the_story_of_405b_on_128_devices() -> None:
    case = of_story(dp_replicate=8, dp_shard=16)
    # 1,512 GiB of float32; sixteen ranks share them, and eight hold the same.
    assert BIG.num_parameters * 4 // GIB == 1511
    assert BIG.num_parameters * 4 / GIB == pytest.approx(1512, abs=0.1)
    assert memory(case).missing > 60 * GIB
    assert any("87.5% of the devices" in line for line in advice(case))
    # A tensor of 3,328 MiB is one of 208 for each, and loading ends where less is free.
    mlp = next(part for part in parameter_memory(case) if "gate_proj" in part.name)
    assert (mlp.whole, mlp.local) == (3328 * MIB, 208 * MIB)
    stop = find_out_of_memory(case)
    assert stop is not None
    assert stop.part.name == "model.layers.42.mlp.up_proj.weight"
    assert stop.free < stop.part.local == 208 * MIB
    assert 0.33 < stop.read < 0.35
    # With all projections of a kind in one, made whole:
    assert largest_stacked_parameter(case)[1] == 135_291_469_824 == 126 * 16384**2 * 4
    assert largest_stacked_parameter(case)[1] / GIB == pytest.approx(126.0, abs=1e-3)


def test_what_the_runtime_keeps_moves_where_loading_ends() -> None:
    """The story's 199 MiB were free where 208 were wanted: 11.7 MiB belonged to nobody's tensors."""
    case = of_story(dp_replicate=8, dp_shard=16)
    kept = replace(case.job.machine, reserve=round(11.7 * MIB))
    stop = find_out_of_memory(PlanCase(replace(case.job, machine=kept), case.choice))
    assert stop is not None
    assert stop.part.name == "model.layers.42.mlp.gate_proj.weight"
    assert stop.free / MIB == pytest.approx(199, abs=0.1)


def test_loaded_over_all_128_devices_it_fits() -> None:
    asked = of_story(dp_shard=128).job
    found = search(asked, FREE)
    assert found.plans[0].case.choice.mesh == MeshSizes(dp_shard=128)
    assert found.plans[0].memory.parameters / GIB == pytest.approx(1512 / 128, rel=1e-3)
    assert find_out_of_memory(found.plans[0].case) is None


@pytest.fixture(scope="module")
def plans_405b() -> SearchResult:
    return search(job(model=BIG, devices=1024, seq_len=1 << 20, global_batch=16), FREE)


@pytest.mark.nightly
def test_a_million_tokens_of_405b_fit_1024_devices(plans_405b: SearchResult) -> None:
    best = plans_405b.plans[0]
    assert best.memory.total <= best.case.job.machine.memory
    assert best.case.choice.mesh.devices == 1024
    assert best.case.choice.mesh.cp >= 64
    assert 0.3 < best.mfu < 0.6
    assert [plan.seconds.total for plan in plans_405b.plans] == sorted(
        plan.seconds.total for plan in plans_405b.plans
    )


@pytest.mark.nightly
def test_why_a_mesh_does_not_do(plans_405b: SearchResult) -> None:
    """By bytes, with which and how many; or since data ranks have no sequence."""
    reasons = [one.why for one in plans_405b.rejected]
    assert any("would be idle: global_batch=16" in why for why in reasons)
    whole = [one for one in plans_405b.rejected if one.engine == "ddp" and one.memory]
    assert whole
    for one in whole:
        assert one.memory is not None
        assert "parameters 1,511.9" in one.why
        assert one.missing == one.memory.fullest - one.memory.capacity > 0
    # What is rejected is so with every setting: the one that needs least was tried.
    assert all(one.missing > 0 for one in plans_405b.rejected if one.memory)


@pytest.mark.parametrize("axis", list(Axis))
def test_an_axis_that_is_set_is_kept(axis: Axis) -> None:
    found = search(job(global_batch=16, seq_len=8192), Limits({axis: 2}))
    assert found.plans
    assert all(plan.case.choice.mesh.by_axis[axis] == 2 for plan in found.plans)


def test_settings_that_are_set_are_kept() -> None:
    limits = Limits({}, "fsdp", "all_gather", "blocks", True, True, True)
    found = search(job(), limits)
    assert found.plans
    for plan in found.plans:
        choice = plan.case.choice
        kept = (choice.engine, choice.mode, choice.checkpointing, choice.offload)
        assert kept == ("fsdp", "zigzag_llama3", "blocks", True)
        assert choice.chunked_loss
        assert choice.tiled_mlp
    assert any("do not go with it" in one.why for one in found.rejected)


@pytest.mark.nightly
def test_nothing_that_a_strategy_refuses_is_proposed() -> None:
    for plan in search(job(global_batch=16, seq_len=32768), FREE).plans:
        choice, mesh = plan.case.choice, plan.case.choice.mesh
        if mesh.tp > 1:
            assert choice.engine in ("fsdp", "hsdp")
            assert not choice.chunked_loss
            assert not choice.tiled_mlp
        assert mesh.devices == 16
        assert LLAMA_8B.heads % (mesh.tp * mesh.ulysses) == 0
        assert (choice.engine == "hsdp") <= (mesh.dp_replicate > 1)
        assert mesh.data <= 16


def test_meshes_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="no mesh of 16 devices has ring=3"):
        search(job(), Limits({Axis.RING: 3}))
    whole = dict.fromkeys(Axis, 1)
    with pytest.raises(ConfigError, match="has 32 devices, got devices=16"):
        search(job(), Limits({**whole, Axis.RING: 32}))
    with pytest.raises(
        ConfigError, match=r"mesh\.tp=16 cannot share 8b. What would work: 1, 2, 4, 8"
    ):
        search(job(), Limits({**whole, Axis.TP: 16}))


@pytest.mark.parametrize(
    ("replicate", "shard", "engines"),
    [(1, 2, {"fsdp"}), (2, 1, {"ddp", "zero1", "hsdp"}), (1, 1, {"ddp", "fsdp", "zero1"})],
)
def test_engines_of_a_mesh_that_is_set_whole(replicate: int, shard: int, engines: set[str]) -> None:
    """Those that have as many copies."""
    whole = {**dict.fromkeys(Axis, 1), Axis.DP_REPLICATE: replicate, Axis.DP_SHARD: shard}
    found = list(meshes(job(), Limits(whole)))
    assert {mesh for mesh, _ in found} == {MeshSizes(dp_replicate=replicate, dp_shard=shard)}
    assert sorted(engine for _, engine in found) == sorted(engines)


def test_idle_devices_are_told() -> None:
    case = PlanCase(job(devices=128), TrainingMethod(MeshSizes(ring=16)))
    assert "112 of 128 devices (87.5%) are idle: the mesh has 16" in list(advice(case))


def test_experts_that_more_ranks_share_than_there_are_experts() -> None:
    """FSDP cuts along the experts: of 64 ranks 56 hold nothing of them, and take memory for one."""
    mixtral = model_from_config(
        {
            **LLAMA_405B,
            "model_type": "mixtral",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_local_experts": 8,
        },
        "mixtral",
    )
    case = PlanCase(job(model=mixtral, devices=64), TrainingMethod(MeshSizes(dp_shard=64)))
    worst = find_poorly_sharded(case)[0]
    assert "experts.gate_up_proj" in worst.name
    assert worst.local * worst.ranks == 8 * worst.whole


@pytest.mark.parametrize(
    "more",
    [
        {"seq_len": 2 * 131072},
        {"model": replace(LLAMA_8B, layers=LLAMA_8B.layers * 2)},
        {"model": replace(LLAMA_8B, vocabulary=2 * LLAMA_8B.vocabulary)},
        {"global_batch": 4},
    ],
    ids=["length", "layers", "vocabulary", "batch"],
)
def test_more_costs_more(more: dict[str, Any]) -> None:
    choice = TrainingMethod(MeshSizes(dp_shard=2, ring=4, ulysses=2))
    less, other = PlanCase(job(), choice), PlanCase(job(**more), choice)
    assert seconds(other) > seconds(less)
    assert memory(other).total > memory(less).total


@pytest.mark.parametrize("axis", ["dp_shard", "ring", "ulysses"])
def test_more_ranks_hold_less(axis: str) -> None:
    sizes = {"dp_shard": 2, "ring": 2, "ulysses": 2}
    few = PlanCase(job(global_batch=8), TrainingMethod(MeshSizes(**sizes)))
    many = PlanCase(job(global_batch=8), TrainingMethod(MeshSizes(**{**sizes, axis: 4})))
    assert memory(many).total < memory(few).total


def test_saving_memory_saves_memory_and_takes_time() -> None:
    mesh = MeshSizes(dp_shard=2, ring=4, ulysses=2)
    order = [
        TrainingMethod(mesh),
        TrainingMethod(mesh, checkpointing="keep_attention"),
        TrainingMethod(mesh, checkpointing="blocks"),
        TrainingMethod(mesh, checkpointing="blocks", chunked_loss=1024),
    ]
    cases = [PlanCase(job(), choice) for choice in order]
    sizes, times = [memory(case).total for case in cases], [seconds(case) for case in cases]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 4
    assert times == sorted(times)


def test_bytes_on_the_wire_are_those_of_the_schedule() -> None:
    """Attention's by ``attention_traffic``, whose figures are counted; forward again if recomputed."""
    mesh = MeshSizes(dp_shard=2, ring=4, ulysses=2)
    for checkpointing, times in (("none", 1), ("blocks", 2), ("keep_attention", 1)):
        case = PlanCase(job(), TrainingMethod(mesh, checkpointing=checkpointing))
        costs: Costs = {None: attention_cost(case, None)}
        sent = {(flow.what, flow.axis): flow for flow in comm_volumes(case, costs)}
        plan = schedule(case.layout, None, Mask())
        forward, backward = attention_traffic(
            *(plan, case.heads, 0), batch=1, head_dim=128, itemsize=2, accumulate_itemsize=4
        )
        ring = times * forward.p2p_bytes + backward.p2p_bytes
        ulysses = times * forward.all_to_all_bytes + backward.all_to_all_bytes
        assert sent["keys and values", Axis.RING].sent == 32 * ring
        assert sent["sequence for heads", Axis.ULYSSES].sent == 32 * ulysses
        # Each parameter is gathered twice in two bytes, 15/16 of it from others, the model's own once.
        own = (2 * 128256 + 1) * 4096
        gathered = (2 * (LLAMA_8B.num_parameters - own) + own) * 2 * 15 / 16
        assert sent["parameters", Flat.FSDP].sent == pytest.approx(gathered)
        reduced = LLAMA_8B.num_parameters * 4 * 15 / 16
        assert sent["gradients", Flat.FSDP].sent == pytest.approx(reduced)


def test_which_groups_leave_a_node() -> None:
    mesh = MeshSizes(dp_replicate=2, dp_shard=2, ring=4, ulysses=2, tp=2)
    beyond = {axis: mesh.crosses_nodes(axis, 8) for axis in (*Axis, *Flat)}
    assert beyond == {
        Axis.TP: False,
        Axis.ULYSSES: False,
        Axis.RING: True,
        Axis.DP_SHARD: True,
        Axis.DP_REPLICATE: True,
        Flat.CP: True,
        Flat.FSDP: True,
        Flat.DATA: True,
        Flat.LOSS: True,
    }
    assert not MeshSizes(ulysses=8).crosses_nodes(Axis.ULYSSES, 8)
    assert MeshSizes(ulysses=8).crosses_nodes(Axis.ULYSSES, 4)


def test_gradients_that_are_added_up_stay_whole() -> None:
    """Several sequences of a rank: what is not reduced yet is a whole model's in float32."""
    choice = TrainingMethod(MeshSizes(dp_shard=2, ring=8))
    case = PlanCase(job(global_batch=8), choice)
    assert case.sequences == 4
    assert memory(case).accumulated == 4 * LLAMA_8B.num_parameters


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"devices": 0}, "devices must be an integer of at least 1"),
        ({"seq_len": 1.5}, "seq_len must be an integer"),
        ({"precision": "int8"}, "precision must be one of bf16-mixed"),
        ({"optimizer": "lion"}, "optimizer must be one of adamw"),
    ],
)
def test_jobs_that_cannot_be(changed: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        job(**changed)


def test_a_model_without_context_parallelism_is_planned_too() -> None:
    found = search(
        job(model=model_from_config(SMALL, "small"), devices=1, seq_len=4096, global_batch=1), FREE
    )
    assert found.plans[0].case.choice.mesh == MeshSizes()


def every_case(asked: Job, mesh: MeshSizes, engine: str) -> list[PlanCase]:
    return [PlanCase(asked, choice) for choice in training_methods(asked, mesh, engine, FREE)]


REJECTING = {
    "405b": {"model": BIG, "devices": 256, "seq_len": 8192, "global_batch": 256},
    "405b, long": {"model": BIG, "devices": 512, "seq_len": 1 << 18, "global_batch": 8},
    "8b": {"machine": MACHINES["tpu_v4"], "seq_len": 1 << 17, "global_batch": 4},
}


@pytest.mark.nightly
@pytest.mark.parametrize("changed", REJECTING.values(), ids=REJECTING)
def test_what_is_rejected_misses_by_what_its_least_setting_needs(changed: dict[str, Any]) -> None:
    """At the fullest moment of a step, however much parameters alone exceed; closest first."""
    asked = job(**changed)
    rejected = [one for one in search(asked, FREE).rejected if one.memory is not None]
    assert rejected
    for one in rejected:
        least = min(memory(case).missing for case in every_case(asked, one.mesh, one.engine))
        assert one.missing == least > 0
    assert [one.missing for one in rejected] == sorted(one.missing for one in rejected)


def test_a_mesh_needs_as_much_whatever_a_device_has() -> None:
    """Eight copies of 8B parameters in float32 with AdamW: 89.7 GiB of state, and gradients, and more."""
    limits, needed = Limits(dict(zip(Axis, (1, 1, 8, 1, 1), strict=True)), engine="ddp"), set()
    for hardware in ("h100", "h200"):
        asked = job(machine=MACHINES[hardware], devices=8, global_batch=1)
        found = search(asked, limits).rejected[0]
        assert found.memory is not None
        needed.add(found.memory.total)
    assert len(needed) == 1
    assert needed.pop() > 5 * 4 * LLAMA_8B.num_parameters


@pytest.mark.nightly
def test_an_optimizer_without_states_comes_closer() -> None:
    missing = [
        next(one.missing for one in search(asked, FREE).rejected if one.engine == "ddp")
        for asked in (
            job(devices=8, global_batch=1, optimizer=optimizer)
            for optimizer in ("sgd", "momentum", "adamw")
        )
    ]
    assert missing == sorted(set(missing))


def test_tensors_of_the_optimizers_step_are_no_activations() -> None:
    """On a GPU it makes one like each parameter."""
    choice = TrainingMethod(MeshSizes(ring=8), "ddp", checkpointing="blocks", chunked_loss=1024)
    found = memory(PlanCase(job(devices=8, global_batch=1), choice))
    assert found.moment.name == "optimizer's step"
    kinds = found.by_kind
    assert kinds["optimizer's temporaries"] == found.parameters
    assert kinds["activations"] <= 16 * 131072  # ids, labels and positions of its tokens


@pytest.mark.nightly
def test_a_machine_of_which_no_host_is_known() -> None:
    """As one that was measured: whatever fits without the host is found."""
    asked = job(seq_len=8192, global_batch=16)
    blind = replace(asked, machine=replace(asked.machine, host_memory=0, host_link=0.0))
    wanted = [plan.case.choice for plan in search(asked, replace(FREE, offload=False)).plans]
    assert wanted
    assert [plan.case.choice for plan in search(blind, FREE).plans] == wanted


@pytest.mark.quick("1-1")
@pytest.mark.parametrize(
    ("devices", "nodes"),
    [
        (1, 1),
        (6, 1),
        (8, 1),
        (12, 2),
        (16, 2),
        (18, 3),
        pytest.param(1024, 128, marks=pytest.mark.nightly),
    ],
)
def test_a_run_has_as_many_ranks_as_its_mesh(devices: int, nodes: int) -> None:
    for plan in search(job(devices=devices, global_batch=devices, seq_len=4096), FREE).plans:
        given = trainer_settings(plan.case)
        assert (given["num_nodes"], given["devices"]) == (nodes, devices // nodes)
        assert plan.case.devices_per_node == devices // nodes
        if devices == 12 and plan.case.choice.mesh.ulysses == 4:
            assert any("ulysses of 4 goes beyond nodes of 6" in line for line in advice(plan.case))


@pytest.mark.nightly
def test_plans_are_settings_of_the_strategy() -> None:
    for plan in search(job(devices=8, global_batch=8, seq_len=4096), FREE).plans:
        settings: dict[str, Any] = strategy_settings(plan.case)
        check(StrategyConfig(**settings))


def test_a_plan_as_python_has_its_settings() -> None:
    names = {"Trainer": lambda **given: given, "UlyssesRingStrategy": StrategyConfig}
    for plan in search(job(devices=8, global_batch=8, seq_len=4096), FREE).plans:
        given = eval(as_call(plan.case), names)
        settings: dict[str, Any] = strategy_settings(plan.case)
        assert given.pop("strategy") == StrategyConfig(**settings)
        assert given == trainer_settings(plan.case)


def test_a_mesh_that_leaves_devices_idle_runs_on_its_own() -> None:
    given = trainer_settings(PlanCase(job(devices=16), TrainingMethod(MeshSizes(ring=12))))
    assert (given["num_nodes"], given["devices"]) == (2, 6)


@pytest.mark.parametrize(
    ("precision", "itemsize"), [("bf16-mixed", 4), ("bf16-true", 2), ("fp32", 4)]
)
def test_gradients_travel_as_the_run_adds_them(precision: str, itemsize: int) -> None:
    """Float32 where ``mixed_precision`` is given, else as parameters are."""
    case = PlanCase(
        job(precision=precision, global_batch=4, devices=4),
        TrainingMethod(MeshSizes(dp_shard=2, ring=2)),
    )
    costs: Costs = {None: attention_cost(case, None)}
    sent = {flow.what: flow.sent for flow in comm_volumes(case, costs)}
    assert sent["gradients"] == LLAMA_8B.num_parameters * itemsize * 3 / 4
    assert memory(case).accumulated == LLAMA_8B.num_parameters * itemsize


def test_zero1_gathers_once_however_many_sequences_follow() -> None:
    mesh = MeshSizes(dp_replicate=2, ring=4)
    for engine, once in (("zero1", True), ("fsdp", False)):
        sizes = mesh if engine == "zero1" else MeshSizes(dp_shard=2, ring=4)
        found: list[float] = []
        for batch in (2, 8):
            case = PlanCase(job(devices=8, global_batch=batch), TrainingMethod(sizes, engine))
            costs: Costs = {None: attention_cost(case, None)}
            found += [flow.sent for flow in comm_volumes(case, costs) if flow.what == "parameters"]
        assert found[1] == (found[0] if once else 4 * found[0])


def test_more_tokens_than_positions_are_told() -> None:
    few = replace(LLAMA_8B, positions=4096)
    for length, told in ((4096, 0), (8192, 1)):
        case = PlanCase(job(model=few, seq_len=length), TrainingMethod(MeshSizes(ring=16)))
        assert sum("4,096 positions" in line for line in advice(case)) == told


def ring_seconds(exchange: str, cards: int, ulysses: int = 1, devices: int = 16) -> float:
    """Seconds of waiting for the ring in a step over nodes of 8."""
    machine = replace(MACHINES["h100"], network_cards=cards)
    asked = job(machine=machine, devices=devices, seq_len=65536, global_batch=1)
    choice = TrainingMethod(MeshSizes(ring=devices // ulysses, ulysses=ulysses), exchange=exchange)
    case = PlanCase(asked, choice)
    return step_seconds(case, {None: attention_cost(case, None)}).ring


def test_cards_that_devices_share_slow_direct_sends_down() -> None:
    """At hop 8 of 16 all of a node's ranks send to the other node, in a rotation only one of them."""
    assert ring_seconds("ring", 0) == ring_seconds("ring", 8)
    assert ring_seconds("ring", 1) > 6 * ring_seconds("ring", 8)
    assert ring_seconds("rotation", 1) == pytest.approx(ring_seconds("rotation", 8))
    assert ring_seconds("rotation", 1) < 1.1 * ring_seconds("ring", 8)
    # Around Ulysses of 8 a node has one rank of each of 8 rings: there is nothing that a rotation would save.
    assert ring_seconds("rotation", 1, 8, 32) == pytest.approx(ring_seconds("ring", 1, 8, 32))


@pytest.mark.parametrize(("cards", "wanted"), [(1, {"ring", "rotation"}), (8, {"ring"})])
def test_a_rotation_is_tried_where_devices_share_cards(cards: int, wanted: set[str]) -> None:
    machine = replace(MACHINES["h100"], network_cards=cards)
    asked, mesh = job(machine=machine, devices=16, global_batch=1), MeshSizes(ring=16)
    found = {method.exchange for method in training_methods(asked, mesh, "fsdp", FREE)}
    assert found == wanted | {"all_gather"}
    asked_for = replace(FREE, exchange="rotation")
    found = {method.exchange for method in training_methods(asked, mesh, "fsdp", asked_for)}
    assert found == {"rotation"}


def test_the_planner_chooses_a_rotation() -> None:
    asked = job(machine=replace(MACHINES["h100"], network_cards=1), devices=16, global_batch=1)
    limits = Limits({Axis.RING: 16}, engine="fsdp")
    best = search(asked, limits).plans[0].case
    assert best.choice.exchange == "rotation"
    assert strategy_settings(best)["exchange"] == "rotation"
    assert any("8 devices share 1 network card" in line for line in advice(best))
    assert (
        search(replace(asked, machine=MACHINES["h100"]), limits).plans[0].case.choice.exchange
        == "ring"
    )


def test_rings_that_do_not_fill_nodes_go_beyond_them() -> None:
    """Four rings of 6 over nodes of 8: the first one is within a node, the second one is not."""
    asked = job(devices=24, seq_len=24576, global_batch=4)
    across, within = (
        attention_cost(PlanCase(replace(asked, devices=mesh.devices), TrainingMethod(mesh)), None)
        for mesh in (MeshSizes(dp_shard=4, ring=6), MeshSizes(ring=6))
    )
    assert within.over_ring.forward == within.computing.forward
    assert across.over_ring.forward > 1.5 * across.computing.forward

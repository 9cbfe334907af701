"""The best plan against the code that would run it: its groups, and what ranks hold, without devices."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_cp.bench.quiet import quiet_lightning
from lightning_cp.bench.table import aligned
from lightning_cp.plan.group_ranks import GroupRanks
from lightning_cp.plan.measured import MeasuredState, measured_groups, measured_state
from lightning_cp.plan.settings import hf_config
from lightning_cp.planner.memory import rank_state
from lightning_cp.planner.search import Plan
from lightning_cp.planner.state import StateBytes

WITHIN = 0.01
"""Parts of the measured bytes that a prediction may be off."""
KINDS = ("parameters", "gradients", "optimizer")
HEAD = ("rank", "bytes of", "predicted", "measured", "ratio")
DTYPES = {4: "float32", 2: "bfloat16"}


def verify(plan: Plan, config: Mapping[str, Any]) -> bool:
    """Shard the model as training would, for the first rank and the last, and print what differs.

    Args:
        plan: what was chosen.
        config: the whole, whose ``model.network.config`` is built without values.

    Returns:
        Whether all groups and bytes are as predicted.
    """
    with quiet_lightning():
        return _verify(plan, config)


def _verify(plan: Plan, config: Mapping[str, Any]) -> bool:
    began = time.monotonic()
    mesh, engine = plan.case.choice.mesh, plan.case.choice.engine
    ranks = sorted({0, mesh.devices - 1})
    groups = [group for rank in ranks for group in measured_groups(mesh.by_axis, rank)]
    print(
        f"\nVerified without devices: {mesh.devices:,} rank{'s' * (mesh.devices > 1)}, "
        f"{engine}; of {' and '.join(map(str, ranks))}.\n"
    )
    print(f"{_of_groups(groups)}\n")
    rows: list[list[str]] = []
    good = all(group.agrees for group in groups)
    for rank in ranks:
        job = plan.case.job
        found = measured_state(
            *(hf_config(config["model"]), mesh.by_axis, engine, rank),
            dtype=DTYPES[job.itemsize],
            optimizer=job.optimizer,
        )
        good &= found.parameter_count == job.model.num_parameters
        wanted = rank_state(plan.case, rank)
        rows += _rows(rank, wanted, found, trains=job.trains)
        good &= all(abs(float(row[-1]) - 1) <= WITHIN for row in rows)
        if rank == 0:
            print(f"{_of_tensors(found, plan)}\n")
    print(aligned(HEAD, rows))
    print(
        f"\n{'as predicted' if good else 'NOT as predicted'}, in {time.monotonic() - began:.0f} s"
    )
    return good


def verify_steps(config: Mapping[str, Any]) -> bool:
    """Real steps of small models on this machine's processors: their memory, and, where ``hardware`` is a
    file that was measured here, their CPU-seconds. Takes tens of minutes.

    Returns:
        Whether all cells are within their bounds.
    """
    from lightning_cp.plan.compared_step import verify as verify_memory
    from lightning_cp.plan.measured_cost import as_asked, measured_cost, summary_of, table_of
    from lightning_cp.planner.hardware import Hardware
    from lightning_cp.planner.machines import MACHINES

    table, good = verify_memory()
    print(f"\nPeaks of real steps on CPU ranks, in bytes of tensors:\n\n{table}")
    if config["hardware"] in MACHINES:
        print("\nCPU-seconds were not compared: hardware= is no file measured here.")
        return good
    cells = measured_cost(Hardware.load(config["hardware"]))
    print(f"\n{table_of(cells)}\n\n{summary_of(cells)}")
    return good and as_asked(cells)


def _of_groups(groups: list[GroupRanks]) -> str:
    wrong = [group for group in groups if not group.agrees]
    if not wrong:
        return f"Process groups: all {len(groups)} hold the ranks that they have to."
    lines = [f"  {g.name}: {list(g.found)}, not {list(g.expected)}" for g in wrong]
    return "Process groups that hold other ranks:\n" + "\n".join(lines)


def _of_tensors(found: MeasuredState, plan: Plan) -> str:
    counted, known = found.parameter_count, plan.case.job.model.num_parameters
    same = "as many as" if counted == known else f"NOT the {known:,} that"
    lines = [f"{counted:,} parameters, {same} the planner counts. Largest parts of the first rank:"]
    lines += [
        f"  {held.name} {list(held.shape)}: {held.nbytes / (1 << 20):,.2f} MiB, cut by "
        f"{', '.join(held.cut_by) or 'no axis'}"
        for held in found.largest[:5]
    ]
    if found.whole:
        lines.append(f"No axis cuts {len(found.whole)} of them, such as {found.whole[0].name}.")
    return "\n".join(lines)


def _rows(
    rank: int, wanted: StateBytes, found: MeasuredState, *, trains: bool
) -> Iterator[list[str]]:
    for kind in KINDS if trains else KINDS[:1]:
        predicted, measured = getattr(wanted, kind), getattr(found, kind)
        ratio = predicted / measured if measured else float(predicted == measured)
        yield [str(rank), kind, f"{predicted:,}", f"{measured:,}", f"{ratio:.4f}"]

"""What a user should know of a plan before starting it: idle axes, copies, slow links."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_cp.axes import Axis
from lightning_cp.planner.job import Case
from lightning_cp.planner.loading import Part, parts

FEW_TOKENS = 2048
"""Of a rank: below so many, gathering a layer takes longer than computing it on most links."""
MANY_COPIES = 1.5
"""Of a parameter, over all ranks of one copy of the model."""


def advice(case: Case) -> Iterator[str]:
    """Sentences, most important first."""
    job, mesh, heads = case.job, case.choice.mesh, case.heads
    idle = job.devices - mesh.devices
    if idle:
        share = f"{idle} of {job.devices} devices ({idle / job.devices:.1%})"
        yield f"{share} are idle: the mesh has {mesh.devices}"
    full, each = min(mesh.devices, job.machine.devices_per_node), case.devices_per_node
    if each < full:
        nodes = mesh.devices // each
        yield f"{mesh.devices} devices are {nodes} nodes of {each}, as each has equally many"
    copies = mesh.devices // (case.choice.shard_ranks * mesh.tp)
    if copies > 1:
        yield (
            f"{copies} copies of the model's state: {1 - 1 / copies:.1%} of the devices hold what others "
            "hold already. dp_shard in place of dp_replicate shards it"
        )
    for axis in (Axis.TP, Axis.ULYSSES, Axis.RING):
        if case.crosses_nodes(axis):
            beyond = (
                f"{axis.value} of {mesh.size(axis)} goes beyond nodes of {case.devices_per_node}"
            )
            yield f"{beyond}: its messages take the slower link"
    sent = sum(map(heads.num_local_kv, range(heads.ulysses_size))) / heads.num_kv_heads
    if sent > 1:
        above = f"ulysses of {mesh.ulysses} is above {heads.num_kv_heads} K/V heads"
        yield f"{above}: each is sent to {sent:g} ranks"
    most = job.model.positions
    if most is not None and job.seq_len > most:
        yield (
            f"seq_len={job.seq_len:,} is above the {most:,} positions of the model's config "
            "(max_position_embeddings)"
        )
    padding = case.layout.padded_len - job.seq_len
    if padding:
        yield f"{padding:,} tokens of padding ({padding / job.seq_len:.2%}), which cost no attention"
    if case.local_tokens < FEW_TOKENS:
        yield f"{case.local_tokens:,} tokens a rank are few: gathering parameters may take longer"
    if case.sequences > 1:
        yield (
            f"{case.sequences} sequences one after the other: until the last one, gradients stay whole"
        )


def barely_sharded(case: Case, most: int = 5) -> list[Part]:
    """Parameters that take notably more than a rank's even share, those that waste most first."""
    found: dict[tuple[str, int], Part] = {}
    for part in parts(case):
        if part.local * part.ranks > MANY_COPIES * part.whole and part.ranks > 1:
            kind = (".".join(p for p in part.name.split(".") if not p.isdecimal()), part.local)
            found.setdefault(kind, part)
    return sorted(found.values(), key=lambda part: -part.excess)[:most]

"""Device memory of NCCL's communicators, by their connections: read in NCCL's source (2.30), not measured.

A connection has buffers of all three protocols where it ends (0.5, 4.7 and 4 MiB, in blocks of 2 MiB), and
one block where it begins; between nodes both ends have buffers. Collectives connect a rank with two
neighbours on every channel. Sends and all-to-alls connect it with each peer, on more channels within a node
than between nodes, and share their buffers between nodes. A connection is made by the first call that needs
it.
"""

from __future__ import annotations

from lightning_cp.layout.axes import Axis, Flat
from lightning_cp.planner.job import PlanCase

MIB = 1 << 20
BEGIN, END = 2 * MIB, 10 * MIB
"""Bytes of both ends of a connection within a node."""
CHANNELS = 16
"""Channels of a collective, and of a peer if all of them are within a node."""
CHANNELS_BETWEEN_NODES = 4
"""Channels of each peer if some are on other nodes."""
SHARED_BETWEEN_NODES = 2 * 64 * MIB
"""Buffers of all sends to other nodes, and of all receives: 32 channels, 16 steps, 128 KiB."""


def communicator_bytes(case: PlanCase) -> int:
    """Return the bytes of one rank's communicators; axes of size 1 have none."""
    choice = case.choice
    if not case.job.machine.has_nccl:
        return 0
    mesh, shards = choice.mesh, Flat.FSDP if choice.engine in ("fsdp", "hsdp") else Flat.LOSS
    collectives: list[Axis | Flat] = [Axis.TP, shards]
    peers = [(Axis.ULYSSES, mesh.ulysses - 1, mesh.tp)]
    if choice.engine == "hsdp":
        collectives.append(Axis.DP_REPLICATE)
    if choice.exchange == "all_gather":
        collectives.append(Axis.RING)
    else:
        most = 1 if choice.exchange == "rotation" else mesh.ring - 1
        peers.append((Axis.RING, most, mesh.ulysses * mesh.tp))
    found = sum(_collective(case, axis) for axis in collectives if mesh.size(axis) > 1)
    return found + sum(_peers(case, *each) for each in peers if mesh.size(each[0]) > 1)


def _collective(case: PlanCase, axis: Axis | Flat) -> int:
    return CHANNELS * (END + (END if case.crosses_nodes(axis) else BEGIN))


def _peers(case: PlanCase, axis: Axis, peers: int, stride: int) -> int:
    """Return the bytes of connections with peers, between which there are ``stride`` devices."""
    if not case.crosses_nodes(axis):
        return peers * CHANNELS * (BEGIN + END)
    near = min(peers, max(case.devices_per_node // stride, 1) - 1)
    return near * CHANNELS_BETWEEN_NODES * (BEGIN + END) + SHARED_BETWEEN_NODES

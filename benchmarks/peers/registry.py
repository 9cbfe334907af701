"""Other implementations of context parallelism, as ways to compute the same cases.

Each package has its own file, and is imported when a way makes its call, only in the benchmark's processes.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Protocol

from lightning_cp.bench.methods import AttentionCase, ShardedMethod


class Peer(ShardedMethod, Protocol):
    """A way of another package."""

    @property
    def package(self) -> str:
        """The name of the imported package."""
        ...


def all_peers(case: AttentionCase) -> list[Peer]:
    """Return every way of every package; its ``obstacle`` names the missing package or feature."""
    from benchmarks.peers import ring_flash_attn, torch_context_parallel, yunchang

    return [*yunchang.ways(case.ranks), *ring_flash_attn.ways(), *torch_context_parallel.ways()]


def peer_ways(case: AttentionCase) -> list[Peer]:
    """Return the ways whose package is installed."""
    return [peer for peer in all_peers(case) if find_spec(peer.package) is not None]

"""Other implementations of context parallelism, as ways to compute the same cases.

Packages are imported when a way makes its call, each in its own file, and only in the benchmark's processes.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Protocol

from lightning_cp.bench.case import Case
from lightning_cp.bench.ways import Sharded


class Peer(Sharded, Protocol):
    """A way of another package."""

    @property
    def package(self) -> str:
        """What is imported."""
        ...


def all_peers(case: Case) -> list[Peer]:
    """Every way of every package; ``obstacle`` says of each what to install, or why it cannot."""
    from lightning_cp.bench.peers import ring_flash_attn, torch_context_parallel, yunchang

    return [*yunchang.ways(case.ranks), *ring_flash_attn.ways(), *torch_context_parallel.ways()]


def peer_ways(case: Case) -> list[Peer]:
    """Those whose package is installed."""
    return [peer for peer in all_peers(case) if find_spec(peer.package) is not None]

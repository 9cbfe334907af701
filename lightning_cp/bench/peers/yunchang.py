"""The yunchang package (USP): Ulysses, its zigzag ring, and both."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType

import torch
import torch.distributed as dist

from lightning_cp.bench.case import Case
from lightning_cp.bench.peers import shards
from lightning_cp.bench.peers.edited import import_repaired
from lightning_cp.bench.peers.flash import provide, without_kernel
from lightning_cp.bench.ways import Attend, Step, local_step

PACKAGE = "yunchang"


@dataclass(frozen=True)
class Yunchang:
    """Its hybrid layer; with a ring of one its Ulysses layer, as the hybrid one then sends to itself."""

    ulysses: int
    ring: int
    package: str = PACKAGE

    @property
    def name(self) -> str:
        """Of the package and the sizes."""
        if self.ring == 1:
            return "yunchang ulysses"
        return (
            "yunchang zigzag ring"
            if self.ulysses == 1
            else f"yunchang usp {self.ulysses}x{self.ring}"
        )

    def obstacle(self, case: Case) -> str | None:
        """What is missing, or what its layers do not do."""
        if find_spec(PACKAGE) is None:
            return "not installed: pip install yunchang"
        if case.packed:
            return "its layers take no documents; its packed rings call flash-attn as it was before 2.7"
        if case.kv_heads % self.ulysses:
            return f"{case.kv_heads} K/V heads do not divide by {self.ulysses}"
        if self.ring > 1 and not case.causal:
            return "its zigzag ring is for causal attention"
        return without_kernel(case)

    def positions(self, case: Case, rank: int) -> torch.Tensor:
        """Ulysses ranks are neighbours."""
        return shards.of_grid(case.tokens, self.ulysses, self.ring, rank)

    def attention(self, case: Case) -> Attend:
        """A layer, whose groups its constructor reads from the package's globals."""
        provide(case)
        package = _package()
        package.set_seq_parallel_pg(self.ulysses, self.ring, dist.get_rank(), case.ranks)
        if self.ring == 1:
            layer = package.UlyssesAttention(dist.group.WORLD)
        else:
            layer = package.LongContextAttention(ring_impl_type="zigzag")
        return lambda q, k, v: layer(q, k, v, causal=case.causal)

    def step(self, case: Case, *, backward: bool = True) -> Step:
        """On random inputs of this rank."""
        return local_step(self, case, backward=backward)


def ways(ranks: int) -> list[Yunchang]:
    """All splits into Ulysses and ring."""
    return [Yunchang(size, ranks // size) for size in range(ranks, 0, -1) if ranks % size == 0]


def _package() -> ModuleType:
    if PACKAGE in sys.modules:
        return sys.modules[PACKAGE]
    return import_repaired(PACKAGE, f"{PACKAGE}.ring.")

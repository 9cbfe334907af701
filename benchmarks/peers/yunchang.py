"""The yunchang package (USP): Ulysses, its zigzag ring, and both."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType

import torch
import torch.distributed as dist

from benchmarks.peers import common as shards
from benchmarks.peers.common import import_repaired
from benchmarks.peers.flash_standin import missing_flash_attn, provide_flash_attn
from lightning_cp.bench.methods import Attend, AttentionCase, Step, local_step

PACKAGE = "yunchang"


@dataclass(frozen=True)
class Yunchang:
    """The hybrid layer; with a ring of one the Ulysses layer, because the hybrid one then sends to itself."""

    ulysses: int
    ring: int
    package: str = PACKAGE

    @property
    def name(self) -> str:
        """The name of the package and the sizes."""
        if self.ring == 1:
            return "yunchang ulysses"
        return (
            "yunchang zigzag ring"
            if self.ulysses == 1
            else f"yunchang usp {self.ulysses}x{self.ring}"
        )

    def obstacle(self, case: AttentionCase) -> str | None:
        """Return the missing package or feature, or ``None``."""
        if find_spec(PACKAGE) is None:
            return "not installed: pip install yunchang"
        if case.packed:
            return "its layers take no documents; its packed rings call flash-attn as it was before 2.7"
        if case.kv_heads % self.ulysses:
            return f"{case.kv_heads} K/V heads do not divide by {self.ulysses}"
        if self.ring > 1 and not case.causal:
            return "its zigzag ring is for causal attention"
        return missing_flash_attn(case)

    def positions(self, case: AttentionCase, rank: int) -> torch.Tensor:
        """Return positions; Ulysses ranks are neighbours."""
        return shards.of_grid(case.tokens, self.ulysses, self.ring, rank)

    def attention(self, case: AttentionCase) -> Attend:
        """Return a layer, whose constructor reads its groups from the package's globals."""
        provide_flash_attn(case)
        package = _package()
        package.set_seq_parallel_pg(self.ulysses, self.ring, dist.get_rank(), case.ranks)
        if self.ring == 1:
            layer = package.UlyssesAttention(dist.group.WORLD)
        else:
            layer = package.LongContextAttention(ring_impl_type="zigzag")
        return lambda q, k, v: layer(q, k, v, causal=case.causal)

    def step(self, case: AttentionCase, *, backward: bool = True) -> Step:
        """Return a step on random inputs of this rank."""
        return local_step(self, case, backward=backward)


def ways(ranks: int) -> list[Yunchang]:
    """Return all splits into Ulysses and ring."""
    return [Yunchang(size, ranks // size) for size in range(ranks, 0, -1) if ranks % size == 0]


def _package() -> ModuleType:
    if PACKAGE in sys.modules:
        return sys.modules[PACKAGE]
    return import_repaired(PACKAGE, f"{PACKAGE}.ring.")

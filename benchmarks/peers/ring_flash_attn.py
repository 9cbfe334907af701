"""The ring-flash-attn package: its rings, and its all-gather (llama3), dense and packed."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Literal

import torch
import torch.distributed as dist

from benchmarks.peers import common as shards
from benchmarks.peers.common import import_repaired
from benchmarks.peers.flash_standin import missing_flash_attn, provide_flash_attn
from lightning_cp.bench.methods import Attend, AttentionCase, Step, local_step

Kind = Literal["ring", "zigzag", "stripe", "llama3"]
PACKAGE = "ring_flash_attn"
MODULES: dict[Kind, str] = {
    "ring": "ring_flash_attn",
    "zigzag": "zigzag_ring_flash_attn",
    "stripe": "stripe_flash_attn",
    "llama3": "llama3_flash_attn_varlen",
}
_ALIAS = "_lightning_cp_bench_ring_flash_attn"


@dataclass(frozen=True)
class RingFlashAttn:
    """One of the package's functions."""

    kind: Kind
    heads_k_stride: int = 1
    """K/V heads that llama3 gathers at a time; 0 is all."""
    package: str = PACKAGE

    @property
    def name(self) -> str:
        """The name of the package and the function."""
        every = ", all heads at once" if self.kind == "llama3" and not self.heads_k_stride else ""
        return f"ring-flash-attn {self.kind}{every}"

    def obstacle(self, case: AttentionCase) -> str | None:
        """Return the missing package or feature, or ``None``."""
        if find_spec(PACKAGE) is None:
            return "not installed: pip install ring-flash-attn"
        if self.kind in ("zigzag", "stripe") and not case.causal:
            return "is for causal attention"
        if self.kind == "stripe" and case.packed:
            return "takes no documents"
        if self._varlen(case) and case.batch > 1:
            return "takes one row of documents"
        return missing_flash_attn(case)

    def _varlen(self, case: AttentionCase) -> bool:
        return bool(case.packed) or self.kind == "llama3"

    def positions(self, case: AttentionCase, rank: int) -> torch.Tensor:
        """Return positions; the rings pad each document, llama3 pads the end."""
        if self.kind == "stripe":
            return shards.striped(case.tokens, case.ranks, rank)
        if self.kind == "llama3":
            return shards.of_documents([case.tokens], case.ranks, rank, zigzag=False)
        return shards.of_documents(case.lengths, case.ranks, rank, zigzag=self.kind == "zigzag")

    def attention(self, case: AttentionCase) -> Attend:
        """Return the function on the group of all ranks."""
        provide_flash_attn(case)
        if self.kind == "llama3":
            return self._llama3(case)
        return self._packed_ring(case) if case.packed else self._ring(case)

    def _ring(self, case: AttentionCase) -> Attend:
        module = MODULES[self.kind]
        function = _function(module, f"{module}_func")
        return lambda q, k, v: function(q, k, v, causal=case.causal, group=dist.group.WORLD)

    def _packed_ring(self, case: AttentionCase) -> Attend:
        name = f"{MODULES[self.kind]}_varlen"
        function = _function(name, f"{name}_func")
        parts = 2 * case.ranks if self.kind == "zigzag" else case.ranks
        sizes = [-(-length // parts) * parts // case.ranks for length in case.lengths]
        cu_seqlens = shards.boundaries(sizes).to(case.device_type)
        settings = {"causal": case.causal, "group": dist.group.WORLD}
        return _one_row(lambda *qkv: function(*qkv, cu_seqlens, max(sizes), **settings))

    def _llama3(self, case: AttentionCase) -> Attend:
        name = MODULES[self.kind]
        function = _function(name, f"{name}_func")
        prepare = _function(name, "llama3_flash_attn_prepare_cu_seqlens")
        lengths = case.lengths
        padding = -case.tokens % case.ranks
        whole = shards.boundaries([*lengths, padding] if padding else lengths)
        rank = dist.get_rank()
        cu_q, cu_k, max_q, max_k, keys = prepare(whole, case.causal, rank, case.ranks)
        sizes = (cu_q.to(case.device_type), cu_k.to(case.device_type), max_q, max_k)
        settings: dict[str, Any] = {
            "heads_k_stride": self.heads_k_stride or case.kv_heads,
            "local_k_slice": keys,
            "causal": case.causal,
            "group": dist.group.WORLD,
        }
        return _one_row(lambda *qkv: function(*qkv, *sizes, **settings))

    def step(self, case: AttentionCase, *, backward: bool = True) -> Step:
        """Return a step on random inputs of this rank."""
        return local_step(self, case, backward=backward)


def ways() -> list[RingFlashAttn]:
    """Return each function as a way."""
    return [
        RingFlashAttn("ring"),
        RingFlashAttn("zigzag"),
        RingFlashAttn("stripe"),
        RingFlashAttn("llama3"),
        RingFlashAttn("llama3", heads_k_stride=0),
    ]


def _one_row(function: Callable[..., torch.Tensor]) -> Attend:
    """Adapt a packed function, which takes [T, H, D], to a batch of one row."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return function(q[0], k[0], v[0])[None]

    return attend


def _function(module: str, name: str) -> Callable[..., Any]:
    """Import from the repaired package without its ``__init__``, which needs one version of transformers."""
    if _ALIAS not in sys.modules:
        found = find_spec(PACKAGE)
        assert found is not None
        package = ModuleType(_ALIAS)
        package.__path__ = list(found.submodule_search_locations or ())
        sys.modules[_ALIAS] = package
        # Its llama3 calls collectives by names that PyTorch has deprecated.
        warnings.filterwarnings("ignore", ".*is deprecated.*", FutureWarning)
    return getattr(import_repaired(f"{_ALIAS}.{module}", f"{_ALIAS}."), name)

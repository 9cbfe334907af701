"""PyTorch's own context_parallel: its public call where it runs, and the ring inside it.

On CPU the public call has no rule for the operator that ``scaled_dot_product_attention`` chooses; it is tried
anyway, and its error is shown. The inner ring takes the operator as an argument, so it is measured
separately, with both of its rotations.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from benchmarks.peers import common as shards
from lightning_cp.bench.methods import Attend, AttentionCase, Step, local_step

_ATEN = torch.ops.aten


@dataclass(frozen=True)
class PublicCall:
    """``with context_parallel(...): scaled_dot_product_attention(...)``."""

    name: str = "torch context_parallel"
    package: str = "torch"

    def obstacle(self, case: AttentionCase) -> str | None:
        """Return the error of a trial with a few tokens, or ``None``; all ranks must call this together."""
        if case.packed:
            return "takes no documents"
        if not dist.is_initialized():
            return None  # unknown before there are ranks
        return _try_public(replace(case, tokens=16 * case.ranks))

    def positions(self, case: AttentionCase, rank: int) -> torch.Tensor:
        """Return positions of the head and tail chunks."""
        return shards.of_documents([case.tokens], case.ranks, rank, zigzag=True)

    def attention(self, case: AttentionCase) -> Attend:
        """Return the context's replacement of ``scaled_dot_product_attention``."""
        shared, grouped = _shared_attention(case), case.heads != case.kv_heads

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            _inner().set_rotate_method(
                "allgather"
            )  # its own default; rows of the inner ring change it
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return shared(q, k, v, is_causal=case.causal, enable_gqa=grouped).transpose(1, 2)

        return attend

    def step(self, case: AttentionCase, *, backward: bool = True) -> Step:
        """Return a step on random inputs of this rank."""
        return local_step(self, case, backward=backward)


@dataclass(frozen=True)
class InnerRing:
    """``_templated_ring_attention`` and its backward, with the operator of the device."""

    rotation: Literal["allgather", "alltoall"]
    package: str = "torch"

    @property
    def name(self) -> str:
        """The name with the rotation."""
        return f"torch's inner ring, {self.rotation}"

    def obstacle(self, case: AttentionCase) -> str | None:
        """Return the feature that the ring lacks, or ``None``."""
        if case.packed:
            return "takes no documents"
        return None if case.causal else "its balanced ring is for causal attention"

    def positions(self, case: AttentionCase, rank: int) -> torch.Tensor:
        """Return positions of the head and tail chunks."""
        return shards.of_documents([case.tokens], case.ranks, rank, zigzag=True)

    def attention(self, case: AttentionCase) -> Attend:
        """Return the ring's call; its own tensors are [B, H, L, D]."""
        forward, backward = OPERATORS[case.device_type]
        rotation = self.rotation

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return _Ring.apply(q, k, v, rotation, forward, backward).transpose(1, 2)

        return attend

    def step(self, case: AttentionCase, *, backward: bool = True) -> Step:
        """Return a step on random inputs of this rank."""
        return local_step(self, case, backward=backward)


def ways() -> list[PublicCall | InnerRing]:
    """Return the public call, and the ring with its two rotations."""
    return [PublicCall(), InnerRing("allgather"), InnerRing("alltoall")]


OPERATORS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "cpu": (
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default,
    ),
    "cuda": (
        _ATEN._scaled_dot_product_flash_attention.default,
        _ATEN._scaled_dot_product_flash_attention_backward.default,
    ),
}
"""Forward and backward, by device type."""
REST = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset")
"""Results of CUDA's forward between the log-sum-exp and a debug mask, which its backward needs."""


class _Ring(torch.autograd.Function):
    """The operator and its backward around the ring, as context_parallel's dispatcher calls them."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotation: str,
        forward: Callable[..., Any],
        backward: Callable[..., Any],
    ) -> torch.Tensor:
        inner = _inner()
        inner.set_rotate_method(rotation)
        out, lse, *rest = inner._templated_ring_attention(
            dist.group.WORLD, 2, forward, q, k, v, is_causal=True, dropout_p=0.0
        )
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = dict(zip(REST, rest, strict=False))
        ctx.rotation, ctx.operator = rotation, backward
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        inner = _inner()
        inner.set_rotate_method(ctx.rotation)
        q, k, v, out, lse = ctx.saved_tensors
        gradients = inner._templated_ring_attention_backward(
            *(dist.group.WORLD, 2, ctx.operator, dout, "grad_out", q, k, v, out, lse),
            is_causal=True,
            dropout_p=0.0,
            **ctx.rest,
        )
        return (*gradients[:3], None, None, None)


def _inner() -> Any:
    from torch.distributed.tensor.experimental._context_parallel import _attention

    return _attention


def _shared_attention(case: AttentionCase) -> Callable[..., torch.Tensor]:
    """Return ``scaled_dot_product_attention`` as it is inside ``context_parallel`` over all ranks.

    A training step is inside the context from its first layer to the end of backward. Here the context is
    entered once and stays open, so that no call pays for entering; the replaced function is restored at once,
    because other ways call it. The context shards its buffers and needs at least one.
    """
    return _entered(case.device_type, case.ranks)


@lru_cache
def _entered(device_type: str, ranks: int) -> Callable[..., torch.Tensor]:
    """Return the function; the context closes at the end of the process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh(device_type, (ranks,))
    tokens = torch.zeros(2 * ranks, device=device_type)
    context = context_parallel(mesh, buffers=[tokens], buffer_seq_dims=[0])
    own = F.scaled_dot_product_attention
    try:
        context.__enter__()
        atexit.register(context.__exit__, None, None, None)
        return F.scaled_dot_product_attention
    finally:
        F.scaled_dot_product_attention = own


@lru_cache
def _try_public(case: AttentionCase) -> str | None:
    """Return the first line of the call's error, or ``None``."""
    try:
        PublicCall().step(case)()
    except Exception as error:
        return f"fails: {type(error).__name__}: {str(error).splitlines()[0]}"
    return None

"""Peak bytes of one rank's attention call when all keys are gathered, beside the published formulas.

    python -m lightning_cp.bench.gather_memory

One rank of ``--ranks`` runs the real code, forward and backward, with CUDA's flash operator on tensors
without memory (PyTorch's fake tensors) and a process group that moves nothing; every storage that is made
and freed is counted. What the call is given is not counted (q, k, v; in backward also dout and what forward
saved), so the figure is what an attention call adds on top. What an operator allocates and frees inside
itself is not seen. With ``--device cuda`` tensors are real, and the allocator's own peak is printed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_cp.attention.exchange import Exchange
from lightning_cp.attention.function import ContextParallelAttention
from lightning_cp.attention.plan import make_plan
from lightning_cp.attention.spec import AttentionSpec
from lightning_cp.kernels.aten import AtenCudaFlash
from lightning_cp.layout import SequenceLayout
from lightning_cp.layout.gathered import EXECUTIONS
from lightning_cp.mesh import ContextParallelMesh


@dataclass(frozen=True)
class Shape:
    """One attention call in bfloat16, batch 1."""

    ranks: int = 8
    tokens: int = 65536
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    def megabytes(self, tokens: int, heads: int) -> float:
        """A bfloat16 tensor of some tokens and heads, in 10^6 bytes."""
        return tokens * heads * self.head_dim * 2 / 1e6


def published_backward(shape: Shape) -> dict[str, float]:
    """The guide's lists of buffers with the shapes that they have, in 10^6 bytes, by execution.

    Gathered K and V, dq, dk and dv; then, per chunk, dq and slices of dk and dv (``two_kernel``); or
    repeated K and V, their gradients, and q and dq of both chunks again (``fused``). All in bfloat16.
    """
    local, chunk = shape.tokens // shape.ranks, shape.tokens // shape.ranks // 2
    keys = 2 * shape.megabytes(shape.tokens, shape.kv_heads)
    dq = shape.megabytes(local, shape.heads)
    repeated = keys * 1.5  # half of the keys for the early chunk, all of them for the late one
    return {
        "two_kernel": keys + dq + keys + shape.megabytes(chunk, shape.heads) + keys,
        "fused": keys + repeated + dq + dq + keys + dq + repeated,
    }


class PeakBytes(TorchDispatchMode):
    """Bytes of the storages that are made while it is on, and how many of them lived at once."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = {id(x.untyped_storage()) for x in _tensors((args, kwargs))}
        made = func(*args, **(kwargs or {}))
        for x in _tensors(made):
            storage = x.untyped_storage()
            if id(storage) not in given:
                ref = StorageWeakRef(storage)
                self._live[ref.cdata] = (ref, storage.nbytes())
        self._live = {key: pair for key, pair in self._live.items() if not pair[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return made


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def peaks(shape: Shape, rank: int, exchange: Exchange, *, real: bool) -> tuple[float, float]:
    """Peak of (forward, backward) of one rank, in 10^6 bytes."""
    store: Any = FakeStore()
    dist.init_process_group("fake", rank=rank, world_size=shape.ranks, store=store)
    mesh = ContextParallelMesh(ring_size=shape.ranks, device_type="cpu")  # groups that move nothing
    try:
        with nullcontext() if real else FakeTensorMode():
            layout = SequenceLayout(shape.tokens, shape.ranks)
            q, k, v, dout = (
                torch.zeros(
                    (1, layout.local_len, heads, shape.head_dim),
                    dtype=torch.bfloat16,
                    device="cuda" if real else "cpu",
                )
                for heads in (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
            )
            plan = make_plan(q, k, v, mesh, layout, AttentionSpec(), "reference", exchange=exchange)
            plan = replace(plan, kernel=AtenCudaFlash())
            ctx = _Context()
            function = ContextParallelAttention
            forward = _peak(lambda: function.forward(ctx, q, k, v, None, plan, None), real)
            backward = _peak(lambda: function.backward(ctx, dout, None), real)
            return forward, backward
    finally:
        mesh.destroy()
        dist.destroy_process_group()


class _Context:
    """What autograd would keep between the passes: its engine cannot run on tensors without memory."""

    saved_tensors: tuple[torch.Tensor, ...] = ()
    needs_input_grad = (True, True, True, False)

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None:
        pass


def _peak(run: Callable[[], Any], real: bool) -> float:
    if not real:
        with PeakBytes() as found:
            run()
        return found.peak / 1e6
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, default in vars(Shape()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--device", choices=["fake", "cuda"], default="fake")
    given = vars(parser.parse_args())
    real = given.pop("device") == "cuda"
    shape = Shape(**given)
    published = published_backward(shape)
    print(
        "| forward | backward | K/V heads at a time | forward peak, MB | backward peak, MB "
        "| published backward list, MB |\n|---|---|---|---|---|---|"
    )
    for kv_heads, forward, backward in product((None, 1), EXECUTIONS, EXECUTIONS):
        exchange = Exchange("all_gather", forward, backward, kv_heads)
        found = [peaks(shape, rank, exchange, real=real) for rank in (0, shape.ranks - 1)]
        most = [max(of_rank) for of_rank in zip(*found, strict=True)]
        print(
            f"| {forward} | {backward} | {kv_heads or 'all'} | {most[0]:.0f} | {most[1]:.0f} "
            f"| {published[backward]:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()

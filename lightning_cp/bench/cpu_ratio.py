"""CPU-seconds of context-parallel attention, summed over ranks, over those of one process.

    python -m lightning_cp.bench.cpu_ratio --tokens 1024 4096 16384 --ranks 2 4

Causal attention, forward and backward, float32, one thread per rank, PyTorch's CPU flash operator on
both sides; the one process calls ``scaled_dot_product_attention``. CPU time counts every thread of a
rank, gloo's included, so copies and waiting that burns cycles are in it, and other jobs on the machine
are not. Each figure is the minimum of the repeats; the spread is (maximum - minimum) / minimum.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

from lightning_cp.attention.api import context_parallel_attention
from lightning_cp.layout import SequenceLayout
from lightning_cp.mesh import ContextParallelMesh


@dataclass(frozen=True)
class Shape:
    """One measurement."""

    tokens: int
    ulysses: int
    ring: int
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    repeats: int = 3

    @property
    def ranks(self) -> int:
        """Processes."""
        return self.ulysses * self.ring

    @property
    def mode(self) -> str:
        """What the field calls it."""
        if self.ring == 1:
            return "ulysses"
        return "zigzag ring" if self.ulysses == 1 else f"hybrid {self.ulysses}x{self.ring}"


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kv-heads", type=int, default=8)
    options = parser.parse_args()
    print("| tokens | ranks | mode | one process, s | ranks together, s | ratio | spread |")
    print("|---|---|---|---|---|---|---|")
    for tokens in options.tokens:
        fixed = {"kv_heads": options.kv_heads, "repeats": options.repeats}
        alone, _ = measure(Shape(tokens, 1, 1, **fixed))
        for ranks in options.ranks:
            splits = [(u, ranks // u) for u in range(ranks, 0, -1) if ranks % u == 0]
            for ulysses, ring in splits:
                shape = Shape(tokens, ulysses, ring, **fixed)
                seconds, spread = measure(shape)
                print(
                    f"| {tokens} | {ranks} | {shape.mode} | {alone:.3f} | {seconds:.3f} | "
                    f"{seconds / alone:.3f} | {spread:.0%} |",
                    flush=True,
                )


def measure(shape: Shape) -> tuple[float, float]:
    """CPU-seconds over all ranks: minimum and relative spread of the repeats."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        queue = context.SimpleQueue()
        store = str(Path(folder) / "store")
        mp.start_processes(_rank, (shape, store, queue), nprocs=shape.ranks, start_method="spawn")
        times = [queue.get() for _ in range(shape.ranks)]
    totals = [sum(per_rank) for per_rank in zip(*times, strict=True)]
    best = min(totals)
    return best, (max(totals) - best) / best


def _rank(rank: int, shape: Shape, store: str, queue: mp.SimpleQueue) -> None:  # type: ignore[type-arg]
    torch.set_num_threads(1)
    file_store = dist.FileStore(store, shape.ranks)
    dist.init_process_group("gloo", store=file_store, rank=rank, world_size=shape.ranks)
    step = _alone(shape) if shape.ranks == 1 else _together(shape)
    times: list[float] = []
    for index in range(shape.repeats + 1):
        dist.barrier()
        start = time.process_time()
        step()
        if index:  # the first one warms up
            times.append(time.process_time() - start)
    queue.put(times)
    dist.barrier()
    dist.destroy_process_group()


def _inputs(shape: Shape, tokens: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    return [torch.randn(1, tokens, h, shape.head_dim).requires_grad_() for h in heads]


def _alone(shape: Shape) -> Callable[[], None]:
    q, k, v = _inputs(shape, shape.tokens)
    gradient = torch.randn(1, shape.heads, shape.tokens, shape.head_dim)

    def step() -> None:
        q_BHSD, k_BKSD, v_BKSD = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            q_BHSD, k_BKSD, v_BKSD, is_causal=True, enable_gqa=True
        )
        torch.autograd.grad(out, [q, k, v], gradient)

    return step


def _together(shape: Shape) -> Callable[[], None]:
    mesh = ContextParallelMesh(ring_size=shape.ring, ulysses_size=shape.ulysses)
    layout = SequenceLayout(shape.tokens, shape.ring, shape.ulysses)
    q, k, v = _inputs(shape, layout.local_len)
    gradient = torch.randn_like(q)

    def step() -> None:
        out = context_parallel_attention(q, k, v, mesh=mesh, layout=layout, kernel="aten")
        torch.autograd.grad(out, [q, k, v], gradient)

    return step


if __name__ == "__main__":
    main()

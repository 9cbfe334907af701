"""What one rank does to measure some ways together: check each, count what it does, then time them in rounds.

Repeats go round over the ways, so that noise hits all alike; rank 0 computes the case alone in the same
rounds. Time that a stand-in for flash-attn copies is taken off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lightning_cp.bench.case import Case
from lightning_cp.bench.clock import Samples, measure
from lightning_cp.bench.counts import Counts
from lightning_cp.bench.peers.cpu_flash import copy_seconds
from lightning_cp.bench.ways import OneProcess, Sharded

Results = tuple[torch.Tensor, ...]
"""out, dq, dk and dv [B, L, heads, D]."""


@dataclass(frozen=True)
class Found:
    """What one rank measured of one way."""

    samples: Samples
    counts: dict[str, int]
    """Bytes sent, and those of agreements; kernel calls, peak bytes, tokens of padding."""
    error: float


def measure_rank(
    case: Case, ways: Sequence[Sharded], repeats: int
) -> tuple[Samples, list[Found | str]]:
    """This rank's part: one process's time (rank 0 only), and of each way what was found, or an obstacle."""
    rank = dist.get_rank()
    whole = [*case.inputs(case.tokens)]
    whole.append(torch.randn_like(whole[0]))
    baseline = OneProcess().step(case)
    wanted = _reference(case, baseline)
    found: list[Found | str] = []
    steps: dict[int, Callable[[], Results]] = {}
    checked: dict[int, tuple[dict[str, int], float]] = {}
    for index, way in enumerate(ways):
        obstacle = way.obstacle(case)
        found.append(obstacle or "")
        if obstacle is None:
            positions = way.positions(case, rank)
            steps[index] = _step(way, case, whole, positions)
            checked[index] = _check(steps[index], wanted, positions, case.tokens)
    samples = {index: Samples([], []) for index in (-1, *steps)}
    del whole, wanted
    rounds = {-1: baseline if rank == 0 else _nothing, **steps}
    for repeat in range(repeats + 1):
        for index, step in rounds.items():
            before = copy_seconds()
            once = measure(step, repeats=1, warm_up=0, device_type=case.device_type)
            copied = copy_seconds() - before
            if repeat:  # the first round warms up
                samples[index].cpu.append(once.cpu[0] - copied)
                samples[index].wall.append(once.wall[0] - copied)
    for index in steps:
        found[index] = Found(samples[index], *checked[index])
    return samples[-1], found


def _nothing() -> None:
    """What other ranks do while rank 0 computes alone."""


def _step(
    way: Sharded, case: Case, whole: Sequence[torch.Tensor], positions: torch.Tensor
) -> Callable[[], Results]:
    q, k, v, dout = (_shard(x, positions) for x in whole)
    attend = way.attention(case)
    for x in (q, k, v):
        x.requires_grad_()

    def step() -> Results:
        out = attend(q, k, v)
        return (out, *torch.autograd.grad(out, [q, k, v], dout))

    return step


def _shard(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Local tokens; padding is 0, the gradient of its output too."""
    tokens = x.shape[1]
    local = x.detach()[:, positions.clamp(max=tokens - 1).to(x.device)]
    local[:, (positions >= tokens).to(x.device)] = 0
    return local


def _check(
    step: Callable[[], Results], wanted: Results, positions: torch.Tensor, tokens: int
) -> tuple[dict[str, int], float]:
    """Count what a step does, and compare what it returns with one process."""
    with Counts() as counts:
        results = tuple(x.detach() for x in step())
    real = positions < tokens
    here = positions[real].to(wanted[0].device)
    error = max(
        float((got[:, real.to(got.device)] - want[:, here]).abs().max() / want.abs().max())
        for got, want in zip(results, wanted, strict=True)
    )
    padding = int((~real).sum())
    sent = {"sent": counts.data, "control": counts.control}
    return {**sent, "kernels": counts.kernels, "peak": counts.peak, "padding": padding}, error


def _reference(case: Case, baseline: Callable[[], object]) -> Results:
    """out, dq, dk and dv of the whole sequence, computed by rank 0."""
    shapes = [x.detach() for x in case.inputs(case.tokens)]
    results = [torch.empty_like(x) for x in (shapes[0], *shapes)]
    if dist.get_rank() == 0:
        outs, gradients = baseline()  # type: ignore[misc]
        results[0].copy_(torch.cat(outs, dim=2).transpose(1, 2))
        for result, gradient in zip(results[1:], gradients, strict=True):
            result.copy_(gradient)
    for result in results:
        dist.broadcast(result, 0)
    return tuple(results)

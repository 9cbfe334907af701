"""How fast each kernel is, on every device at once, each with a whole sequence of its own.

Forward and backward are timed apart, as context parallelism calls them; together they are their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from lightning_cp.bench.case import BACKWARD_FLOPS, Case
from lightning_cp.bench.clock import Samples, busy, widest
from lightning_cp.bench.settings import Settings
from lightning_cp.bench.together import together
from lightning_cp.bench.ways import Step
from lightning_cp.errors import ConfigError
from lightning_cp.kernels.api import (
    ALIASES,
    QKV,
    Kernel,
    Merged,
    Request,
    Scores,
    accumulate_dtype,
    kernels,
)
from lightning_cp.kernels.merge import Accumulator
from lightning_cp.kernels.sums import GradientSums
from lightning_cp.layout import SequenceLayout, schedule


@dataclass(frozen=True)
class KernelRow:
    """One kernel with one mask at one length, or why there is no figure."""

    kernel: str
    dtype: str
    head_dim: int
    heads: int
    kv_heads: int
    mask: str
    tokens: int
    obstacle: str | None = None
    forward_seconds: float | None = None
    """Of the slowest device, the least of the repeats. On CPU, CPU-seconds of the mean rank."""
    backward_seconds: float | None = None
    forward_tflops: float | None = None
    """10^12 operations a second of one device; visible pairs only."""
    backward_tflops: float | None = None
    both_tflops: float | None = None
    """Forward and backward one after the other."""
    spread: float | None = None
    """(most - least) / least of the repeats; of forward or backward, whichever is larger. ``None`` of one."""
    failed: bool = False
    """There is an obstacle where there should be a figure."""


class Passes(NamedTuple):
    """A kernel's forward and backward of one whole sequence."""

    forward: Step
    backward: Step


def passes(kernel: Kernel, case: Case) -> Passes:
    """The two, with their inputs made; forward has run once."""
    layout = SequenceLayout(case.tokens, documents=case.documents)
    tiles = schedule(layout, None, case.spec.mask).rank(0).hops[0].tiles
    inputs = QKV(*(x.detach() for x in case.inputs(case.tokens)))
    scores = Scores(case.spec.scale(case.head_dim), case.spec.mask)
    dtype = accumulate_dtype(case.dtype)

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        state = Accumulator(inputs.q, dtype)
        kernel.forward(inputs, tiles, scores, state)
        return state.result(case.dtype)

    merged = Merged(torch.randn_like(inputs.q), *forward())

    def backward() -> tuple[torch.Tensor, ...]:
        gradients = GradientSums.like(inputs, dtype)
        kernel.backward(merged, inputs, tiles, scores, gradients)
        return tuple(gradient.result for gradient in gradients)

    return Passes(forward, backward)


def obstacle(kernel: Kernel, case: Case) -> str | None:
    """Why a kernel is not measured here, or ``None``."""
    request = request_of(case)
    if request.device_type in kernel.capabilities.only_by_name:
        return f"is for tests on {request.device_type}"
    return kernel.capabilities.refusal(request)


def request_of(case: Case) -> Request:
    """What a case asks of a kernel."""
    kinds = {"full", "causal"} if case.causal else {"full"}
    masks = kinds if case.window == (-1, -1) else {"full", "causal", "band"}
    return Request(case.device_type, case.dtype, case.head_dim, frozenset(masks))


def check(settings: Settings) -> None:
    """Refuse what no kernel can do, before any process is started.

    Raises:
        ConfigError: heads that do not fit, an unknown kernel, or none that takes a dtype or head dim.
    """
    check_heads(settings.heads, settings.kv_heads)
    every = chosen(settings)
    masks = settings.masks if "kernels" in settings.suites else ("causal",)
    for case in settings.cases(1):
        found = [settings.masked(case, mask) for mask in masks]
        if all(obstacle(kernel, one) for kernel in every.values() for one in found):
            raise ConfigError(_nothing(settings, found[0], masks[0], every))


def _nothing(settings: Settings, case: Case, mask: str, asked: Mapping[str, Kernel]) -> str:
    """What each kernel that was asked for has against a case."""
    dtype = str(case.dtype).removeprefix("torch.")
    where = f"{case.device_type} with {dtype}, head dim {case.head_dim}, {mask}"
    told = [f"  {name}: {obstacle(kernel, case)}" for name, kernel in asked.items()]
    auto = "kernel=auto takes every kernel that can run here."
    hint = [] if settings.kernel == "auto" else [auto]
    return "\n".join([f"there is nothing to measure on {where}.", *told, *hint])


def check_heads(heads: int, kv_heads: int) -> None:
    """Refuse query heads that cannot share key/value heads evenly.

    Raises:
        ConfigError: that; names the numbers that fit.
    """
    if heads % kv_heads:
        fitting = [str(n) for n in range(1, heads + 1) if heads % n == 0]
        raise ConfigError(
            f"heads={heads} is no multiple of kv_heads={kv_heads}, so they cannot share them. kv_heads may "
            f"be {', '.join(fitting)}."
        )


def chosen(settings: Settings) -> dict[str, Kernel]:
    """The kernels that ``settings.kernel`` stands for; all of them for ``auto``.

    Raises:
        ConfigError: an unknown name.
    """
    every = kernels()
    if settings.kernel == "auto":
        return every
    names = ALIASES.get(settings.kernel, (settings.kernel,))
    if unknown := [name for name in names if name not in every]:
        known = ", ".join(["auto", *ALIASES, *every])
        raise ConfigError(f"unknown kernel {', '.join(unknown)}. Known: {known}.")
    return {name: every[name] for name in names}


def measure_kernels(settings: Settings, tell: Callable[[str], None]) -> list[KernelRow]:
    """Every kernel with every mask, shortest sequences first; on all ranks, which find the same.

    Args:
        settings: what to measure.
        tell: told what is measured now.
    """
    return [
        row
        for mask in settings.masks
        for kernel in chosen(settings).values()
        for row in _of_lengths(kernel, mask, settings, tell)
    ]


def _of_lengths(
    kernel: Kernel, mask: str, settings: Settings, tell: Callable[[str], None]
) -> Iterator[KernelRow]:
    pace: dict[tuple[torch.dtype, int], float] = {}  # seconds per operation at the length before
    for dense in settings.cases(1):
        case = settings.masked(dense, mask)
        shape = (case.dtype, case.head_dim)
        expected = pace.get(shape, 0.0) * case.flops * (1 + BACKWARD_FLOPS)
        why = obstacle(kernel, case)
        if why is None and expected > settings.seconds_per_run:
            limit = f"seconds_per_run={settings.seconds_per_run:g}"
            why = f"is left out: a run would take about {expected:.0f} s ({limit})"
        row = row_of(kernel, mask, case, why)
        if why is None:
            tell(f"{kernel.name}, {mask}, {case.tokens:,} tokens")
            row = timed(row, kernel, case, lambda step: together(step, settings))
            assert row.forward_seconds is not None
            assert row.backward_seconds is not None
            took = row.forward_seconds + row.backward_seconds
            pace[shape] = took / (case.flops * (1 + BACKWARD_FLOPS))
        yield row


def row_of(kernel: Kernel, mask: str, case: Case, why: str | None) -> KernelRow:
    """A row without figures, which has none if there is an obstacle."""
    dtype = str(case.dtype).removeprefix("torch.")
    heads = (case.heads, case.kv_heads)
    return KernelRow(kernel.name, dtype, case.head_dim, *heads, mask, case.tokens, why)


def timed(
    row: KernelRow, kernel: Kernel, case: Case, run: Callable[[Step], list[Samples]]
) -> KernelRow:
    """The row with figures.

    Args:
        row: of the kernel and the case.
        kernel: forward and backward are timed apart.
        case: one whole sequence.
        run: repeats a step; the samples of every rank.
    """
    forward, backward = (busy(run(step), case.device_type) for step in passes(kernel, case))
    operations = case.flops / 1e12
    return replace(
        row,
        forward_seconds=forward.best,
        backward_seconds=backward.best,
        forward_tflops=operations / forward.best,
        backward_tflops=operations * BACKWARD_FLOPS / backward.best,
        both_tflops=operations * (1 + BACKWARD_FLOPS) / (forward.best + backward.best),
        spread=widest((forward.spread, backward.spread)),
    )

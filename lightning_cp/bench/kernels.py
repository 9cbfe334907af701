"""Speed of each kernel, on all devices at once, each with its own whole sequence.

Forward and backward are timed separately, as context parallelism calls them; the total is their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from lightning_cp.bench.methods import BACKWARD_FLOPS, AttentionCase, Step
from lightning_cp.bench.settings import BenchSettings
from lightning_cp.bench.timers import Samples, device_seconds, largest_spread, measure_on_ranks
from lightning_cp.errors import ConfigError
from lightning_cp.kernels.merge import Accumulator, GradientSums
from lightning_cp.kernels.protocol import QKV, Kernel, Output, Request, Scores, accumulate_dtype
from lightning_cp.kernels.select import ALIASES, kernels
from lightning_cp.layout import SequenceLayout, schedule


@dataclass(frozen=True)
class KernelRow:
    """One kernel with one mask at one length, or the obstacle."""

    kernel: str
    dtype: str
    head_dim: int
    heads: int
    kv_heads: int
    mask: str
    tokens: int
    obstacle: str | None = None
    forward_seconds: float | None = None
    """Seconds of the slowest device, the minimum of the repeats. On CPU, CPU-seconds of the mean rank."""
    backward_seconds: float | None = None
    forward_tflops: float | None = None
    """10^12 operations per second of one device; visible pairs only."""
    backward_tflops: float | None = None
    both_tflops: float | None = None
    """The rate of forward and backward in sequence."""
    spread: float | None = None
    """(maximum - minimum) / minimum of the repeats, the larger of forward's and backward's. ``None`` for one
    repeat."""
    failed: bool = False
    """True if the obstacle is an error of the kernel."""


class KernelPasses(NamedTuple):
    """A kernel's forward and backward of one whole sequence."""

    forward: Step
    backward: Step


def kernel_passes(kernel: Kernel, case: AttentionCase) -> KernelPasses:
    """Return both passes with their inputs; forward has run once."""
    layout = SequenceLayout(case.tokens, documents=case.documents)
    tiles = schedule(layout, None, case.spec.mask).rank(0).hops[0].tiles
    inputs = QKV(*(x.detach() for x in case.inputs(case.tokens)))
    scores = Scores(case.spec.scale(case.head_dim), case.spec.mask)
    dtype = accumulate_dtype(case.dtype)

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        state = Accumulator(inputs.q, dtype)
        kernel.forward(inputs, tiles, scores, state)
        return state.result(case.dtype)

    merged = Output(torch.randn_like(inputs.q), *forward())

    def backward() -> tuple[torch.Tensor, ...]:
        gradients = GradientSums.like(inputs, dtype)
        kernel.backward(merged, inputs, tiles, scores, gradients)
        return tuple(gradient.result for gradient in gradients)

    return KernelPasses(forward, backward)


def obstacle(kernel: Kernel, case: AttentionCase) -> str | None:
    """Return the reason why a kernel is not measured here, or ``None``."""
    request = request_of(case)
    if request.device_type in kernel.capabilities.only_by_name:
        return f"is for tests on {request.device_type}"
    return kernel.capabilities.refusal(request)


def request_of(case: AttentionCase) -> Request:
    """Return a case's requirements on a kernel."""
    kinds = {"full", "causal"} if case.causal else {"full"}
    masks = kinds if case.window == (-1, -1) else {"full", "causal", "band"}
    given = (case.device_type, case.dtype, case.head_dim, frozenset(masks))
    return Request(*given, packed=bool(case.packed))


def check(settings: BenchSettings) -> None:
    """Check that a kernel can compute each case, before any process starts.

    Raises:
        ConfigError: heads that do not fit, an unknown kernel, or no kernel for a dtype or head dim.
    """
    check_heads(settings.heads, settings.kv_heads)
    every = chosen_kernels(settings)
    masks = settings.masks if "kernels" in settings.suites else ("causal",)
    for case in settings.cases(1):
        found = [settings.masked(case, mask) for mask in masks]
        if all(obstacle(kernel, one) for kernel in every.values() for one in found):
            raise ConfigError(_no_kernel_message(settings, found[0], masks[0], every))


def _no_kernel_message(
    settings: BenchSettings, case: AttentionCase, mask: str, asked: Mapping[str, Kernel]
) -> str:
    """Return the error message with the obstacle of every kernel that was asked for."""
    dtype = str(case.dtype).removeprefix("torch.")
    where = f"{case.device_type} with {dtype}, head dim {case.head_dim}, {mask}"
    told = [f"  {name}: {obstacle(kernel, case)}" for name, kernel in asked.items()]
    auto = "kernel=auto takes every kernel that can run here."
    hint = [] if settings.kernel == "auto" else [auto]
    return "\n".join([f"there is nothing to measure on {where}.", *told, *hint])


def check_heads(heads: int, kv_heads: int) -> None:
    """Check that query heads share key/value heads evenly.

    Raises:
        ConfigError: they do not; the message names the numbers that fit.
    """
    if heads % kv_heads:
        fitting = [str(n) for n in range(1, heads + 1) if heads % n == 0]
        raise ConfigError(
            f"heads={heads} is not a multiple of kv_heads={kv_heads}, so the heads do not "
            f"split evenly. kv_heads may be {', '.join(fitting)}."
        )


def chosen_kernels(settings: BenchSettings) -> dict[str, Kernel]:
    """Return the kernels that ``settings.kernel`` names; all of them for ``auto``.

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


def measure_kernels(settings: BenchSettings, tell: Callable[[str], None]) -> list[KernelRow]:
    """Measure every kernel with every mask, shortest sequences first; all ranks return the same rows.

    Args:
        settings: the measurements asked for.
        tell: shows progress.
    """
    return [
        row
        for mask in settings.masks
        for kernel in chosen_kernels(settings).values()
        for row in _of_lengths(kernel, mask, settings, tell)
    ]


def _of_lengths(
    kernel: Kernel, mask: str, settings: BenchSettings, tell: Callable[[str], None]
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
            row = with_times(row, kernel, case, lambda step: measure_on_ranks(step, settings))
            assert row.forward_seconds is not None
            assert row.backward_seconds is not None
            took = row.forward_seconds + row.backward_seconds
            pace[shape] = took / (case.flops * (1 + BACKWARD_FLOPS))
        yield row


def row_of(kernel: Kernel, mask: str, case: AttentionCase, why: str | None) -> KernelRow:
    """Return a row without figures, with the obstacle if there is one."""
    dtype = str(case.dtype).removeprefix("torch.")
    heads = (case.heads, case.kv_heads)
    return KernelRow(kernel.name, dtype, case.head_dim, *heads, mask, case.tokens, why)


def with_times(
    row: KernelRow, kernel: Kernel, case: AttentionCase, run: Callable[[Step], list[Samples]]
) -> KernelRow:
    """Return the row with figures.

    Args:
        row: the row of the kernel and the case.
        kernel: the kernel; forward and backward are timed separately.
        case: one whole sequence.
        run: repeats a step and returns the samples of every rank.
    """
    forward, backward = (
        device_seconds(run(step), case.device_type) for step in kernel_passes(kernel, case)
    )
    operations = case.flops / 1e12
    return replace(
        row,
        forward_seconds=forward.best,
        backward_seconds=backward.best,
        forward_tflops=operations / forward.best,
        backward_tflops=operations * BACKWARD_FLOPS / backward.best,
        both_tflops=operations * (1 + BACKWARD_FLOPS) / (forward.best + backward.best),
        spread=largest_spread((forward.spread, backward.spread)),
    )

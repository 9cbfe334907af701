"""Events of a Chrome trace, made by hand: what happens when is plain in a test, in milliseconds."""

from __future__ import annotations

from typing import Any

from lightning_cp.utils.tracing import PREFIX

ZERO = 1_000_000.0
"""Where a trace's clock stands when the step begins, in microseconds."""
HOST, BACKWARD_THREAD = 7, 8


def event(name: str, start: float, end: float, *, tid: int = HOST, **others: Any) -> dict[str, Any]:
    """A range of the host; ``start`` and ``end`` count from the beginning of the step."""
    times = {"ts": ZERO + start * 1e3, "dur": (end - start) * 1e3}
    return {"ph": "X", "cat": "cpu_op", "name": name, "tid": tid, "args": {}, **times, **others}


def ours(name: str, start: float, end: float, **others: Any) -> dict[str, Any]:
    """A named range of ours."""
    return event(PREFIX + name, start, end, **others)


def step(length: float) -> list[dict[str, Any]]:
    """The ranges around a step; what came before it, and is not to be counted."""
    before = ours("hop 0 compute", -5, -4)
    return [ours("step begins", -3, 0), ours("step ends", length, length + 1), before]


def kernel(
    name: str, start: float, end: float, launched: float, *, cat: str = "kernel", **others: Any
) -> list[dict[str, Any]]:
    """Something that ran on the GPU, and its launch by a thread of the host."""
    number = hash((name, start))
    tied: dict[str, Any] = {"args": {"correlation": number}}
    launch = event("cudaLaunchKernel", launched, launched + 0.01, cat="cuda_runtime", **others)
    return [{**launch, **tied}, {**event(name, start, end, tid=0, cat=cat), **tied}]

"""Communication that computing does not hide, by mode, as ``lightning_cp.bench``'s suite ``modes`` has it."""

from __future__ import annotations

from functools import partial

from benchmarks.gpus.line import Line, Place, WrongResultError
from lightning_cp.bench.methods import context_parallel_methods
from lightning_cp.bench.modes import ModeRow, measure_modes
from lightning_cp.bench.settings import BenchSettings


def settings_of(way: str, place: Place) -> BenchSettings:
    """8,192 tokens of each GPU and the heads of an 8-billion-parameter Llama; next to nothing on CPU."""
    tokens, heads, head_dim, dtype = 8192, (32, 8), 128, "bfloat16"
    if place.rehearses:
        tokens, heads, head_dim, dtype = 32, (place.count, place.count), 16, "float32"
    return BenchSettings(
        suites=("modes",),
        device_type=place.device_type,
        devices=place.count,
        tokens=(tokens * place.count,),
        heads=heads[0],
        kv_heads=heads[1],
        head_dims=(head_dim,),
        dtypes=(dtype,),
        documents=0,
        masks=("causal",),
        kernel="auto",
        modes=(way,),
        message_bytes=(1024,),
        repeats=2 if place.rehearses else 10,
        warm_up=1,
        seconds_per_run=1.0,
    )


def communication_line(way: str, place: Place) -> str:
    """Measure forward, and forward with backward, with and without computing and communication."""
    rows = measure_modes(settings_of(way, place), lambda what: None)
    if failures := [row.obstacle for row in rows if row.obstacle is not None or not row.both]:
        raise WrongResultError(f"not measured: {failures[0] or 'no time'}")
    return "; ".join(map(_figures, rows))


def _figures(row: ModeRow) -> str:
    passes = "forward and backward" if row.backward else "forward"
    assert row.both is not None
    exposed = "less than repeats differ" if row.exposed is None else f"{1e3 * row.exposed:.3f} ms"
    share = "" if row.exposed is None else f" ({row.exposed / row.both:.1%})"
    efficiency = "" if row.efficiency is None else f", efficiency {row.efficiency:.3f}"
    return f"{passes} {1e3 * row.both:.3f} ms, exposed {exposed}{share}{efficiency}"


def lines(count: int) -> list[Line]:
    """Each mode."""
    return [
        Line(
            f"exposed communication, {way.name}",
            partial(communication_line, way.name),
            is_short=index == 0,
        )
        for index, way in enumerate(context_parallel_methods(count))
    ]

"""Plans of attention calls: made once in a batch for calls that are alike, and never for another call."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from lightning_cp.attention.spec import AttentionSpec
from lightning_cp.batch.step_state import StepState
from lightning_cp.layout import SequenceLayout
from lightning_cp.models import handle
from lightning_cp.models.handle import SwapHandle

SINKS, OTHER_SINKS = torch.zeros(4), torch.zeros(4)


def q(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, *(2, 8, 4, 8)[len(shape) :], dtype=dtype)


CALLS: dict[str, tuple[torch.Tensor, torch.Tensor, AttentionSpec]] = {
    "plain": (q(), q(), AttentionSpec()),
    "rows": (q(1), q(1), AttentionSpec()),
    "K/V heads": (q(), q(2, 8, 2), AttentionSpec()),
    "dtype": (q(dtype=torch.float64), q(dtype=torch.float64), AttentionSpec()),
    "window": (q(), q(), AttentionSpec(window=(3, -1))),
    "not causal": (q(), q(), AttentionSpec(causal=False)),
    "scale": (q(), q(), AttentionSpec(softmax_scale=0.5)),
    "softcap": (q(), q(), AttentionSpec(softcap=2.0)),
    "sinks": (q(), q(), AttentionSpec(sinks=SINKS)),
    "other sinks": (q(), q(), AttentionSpec(sinks=OTHER_SINKS)),
    "slopes": (q(), q(), AttentionSpec(alibi_slopes=SINKS)),
}


def state_of(length: int) -> StepState:
    layout = SequenceLayout(length, 2, 1)
    return StepState(layout, layout.positions(0)[None])


def plans_of(swapped: SwapHandle, state: StepState) -> list[Any]:
    return [swapped._plan(q, k, k, spec, state) for q, k, spec in CALLS.values()]


def test_calls_that_differ_in_anything_have_plans_of_their_own() -> None:
    swapped = SwapHandle(mock.Mock(cp_size=1, sample_size=1))
    with mock.patch.object(handle, "make_plan", side_effect=lambda *_, **__: object()) as made:
        first, second = state_of(16), state_of(16)
        plans = plans_of(swapped, first)
        assert made.call_count == len(CALLS) == len({*map(id, plans)})
        alike = [
            swapped._plan(q.clone(), k.clone(), k, AttentionSpec(**vars_of(spec)), first)
            for q, k, spec in CALLS.values()
        ]
        assert [*map(id, alike)] == [*map(id, plans)]
        assert made.call_count == len(CALLS)
        others = plans_of(swapped, second)  # another batch
        assert not {*map(id, plans)} & {*map(id, others)}


def test_a_run_with_rows_of_many_lengths_is_told_apart() -> None:
    """Nine lengths, twice; no plan knows more of them than came before it."""
    swapped = SwapHandle(mock.Mock(cp_size=1, sample_size=1))
    x, keys, spec = CALLS["plain"]
    with mock.patch.object(handle, "make_plan", side_effect=lambda *_, **__: object()) as made:
        for _ in range(2):
            for length in range(16, 16 + 4 * 9, 4):
                swapped._plan(x, keys, keys, spec, state_of(length))
    assert [call.kwargs["varied"] for call in made.call_args_list] == [False] * 8 + [True] * 10
    assert all(tiles.varied for tiles in swapped.ranks.requests.values())


def vars_of(spec: AttentionSpec) -> dict[str, Any]:
    """What it was made with."""
    return {name: getattr(spec, name) for name in AttentionSpec.__dataclass_fields__}

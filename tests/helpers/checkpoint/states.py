"""States to be saved, and whether two are the same to the last bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def state_of(step: int) -> dict[str, Any]:
    """Tensors of several kinds, all of whose values tell the step, and plain values around them."""
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(37, 16, dtype=torch.float64, generator=generator)
    return {
        "state_dict": {
            "weight": weight,
            "half": torch.randn(5, generator=generator).bfloat16(),
            "scalar": torch.tensor(float(step)),
            "empty": torch.empty(0, 3),
            "count": torch.tensor([step, 2**40]),
            "flag": torch.tensor([True, False]),
        },
        "optimizer_states": [
            {
                "state": {0: {"step": torch.tensor(step), "exp": weight * 2}},
                "param_groups": [{"params": [0]}],
            }
        ],
        "global_step": step,
        "nested": {"pair": (1, [2.5, None]), 3: b"bytes", "infinite": float("inf"), "set": {1, 2}},
    }


def same(got: Any, want: Any) -> bool:
    """Equal in structure, kinds, dtypes and bits."""
    if isinstance(want, torch.Tensor):
        return (
            isinstance(got, torch.Tensor)
            and got.dtype == want.dtype
            and got.shape == want.shape
            and torch.equal(got.cpu(), want.cpu())
        )
    if isinstance(want, Mapping):
        return list(got) == list(want) and all(same(got[key], want[key]) for key in want)
    if isinstance(want, (list, tuple)):
        return type(got) is type(want) and len(got) == len(want) and all(map(same, got, want))
    return type(got) is type(want) and got == want

"""Values that Lightning is asked to reduce over ranks, which it would get wrong."""

from __future__ import annotations

from typing import Any

import torch


def in_floating_point(x: Any, reduce_op: Any) -> Any:
    """Integers whose mean over ranks is asked for, in float64: Lightning would cut the mean off.

    Its epoch means divide by the mean of the batch sizes that ranks have seen.
    """
    mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
    integer = isinstance(x, torch.Tensor) and not (x.is_floating_point() or x.is_complex())
    return x.to(torch.float64) if mean and integer else x

"""One rank that runs the code of several ranks, and a count of its kernel calls.

A single rank shares no sample, so with default settings the strategy leaves its model and batches alone.
``token_weighting="global"`` counts the targets of all data ranks. With it one rank also reads and shards
batches on the host, swaps attention, weights losses and ends accumulation windows; it sends no messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from lightning_cp.kernels.select import kernels

ONE_RANK: dict[str, Any] = {"token_weighting": "global"}
"""The strategy's arguments with which one rank runs the code of several."""


@contextmanager
def kernel_calls() -> Iterator[Counter[str]]:
    """Count the forward passes of the package's kernels within the block, by the kernel's name.

    On one rank a call of attention is one pass. A model's own attention is none.
    """
    calls: Counter[str] = Counter()

    def counted(own: Callable[..., None]) -> Callable[..., None]:
        def forward(kernel: Any, *args: Any, **options: Any) -> None:
            calls[kernel.name] += 1
            own(kernel, *args, **options)

        return forward

    with ExitStack() as stack:
        for kind in map(type, kernels().values()):
            stack.enter_context(patch.object(kind, "forward", counted(kind.forward)))
        yield calls

"""What a step logs, averaged over its context-parallel ranks in one exchange at its end.

One collective per call would wait for ever where only one rank logs something, which Lightning allows. So
calls are collected, and when the step is over ranks compare the names: what all of them logged is averaged
together, anything else is logged by the ranks that did, as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


class Averages(Protocol):
    """What is needed of the strategy's core."""

    def average_all(self, values: list[torch.Tensor]) -> list[torch.Tensor]: ...
    def names_on_every_rank(self, names: list[str]) -> set[str]: ...


@dataclass(frozen=True)
class _Call:
    key: str
    """The name, and how many calls of that name came before in this step."""
    value: torch.Tensor
    emit: Callable[[torch.Tensor, bool], None]


class StepLog:
    """The calls of one step; ``None`` as a queue means that no step function is running."""

    def __init__(self) -> None:
        self._calls: list[_Call] | None = None
        self._counts: Counter[str] = Counter()

    @property
    def open(self) -> bool:
        """Whether calls are being collected."""
        return self._calls is not None

    def begin(self) -> None:
        """A step function starts."""
        self._calls, self._counts = [], Counter()

    def drop(self) -> None:
        """Forget everything: the step failed."""
        self._calls = None

    def add(
        self, name: str, value: torch.Tensor, emit: Callable[[torch.Tensor, bool], None]
    ) -> None:
        """Keep one call.

        Args:
            name: what it is logged as.
            value: this rank's mean.
            emit: logs a value; whether it is that of all ranks.
        """
        assert self._calls is not None
        key = f"{name}#{self._counts[name]}"
        self._counts[name] += 1
        self._calls.append(_Call(key, value.detach().clone(), emit))

    def end(self, core: Averages) -> None:
        """The step function is over: average what every rank logged, and log everything in order."""
        calls, self._calls = self._calls, None
        assert calls is not None
        shared = core.names_on_every_rank([call.key for call in calls])
        together = sorted((call for call in calls if call.key in shared), key=lambda call: call.key)
        means = core.average_all([call.value for call in together])
        mean_of = {call.key: mean for call, mean in zip(together, means, strict=True)}
        for call in calls:
            call.emit(mean_of.get(call.key, call.value), call.key in mean_of)

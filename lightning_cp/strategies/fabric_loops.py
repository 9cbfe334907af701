"""Loops over Fabric's loaders: a step ends with the loop that gave its batch.

The loop is the user's, and does not say that it is over; what can be seen is that its loader has no batch
left, or that its iterator is gone, after ``break``, ``return`` or an error.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from lightning_cp.loaders.synchronized import LoaderProxy
from lightning_cp.runtime.runtime import ContextParallelRuntime


class Loops:
    """The loops of one run, and whose batch the current step has."""

    def __init__(self, runtime: ContextParallelRuntime) -> None:
        self._runtime = runtime
        self._last: object = None
        self._of_step: object = None
        self._ahead: object = None
        """A loop whose body called a model with a batch after it had asked for the next one."""
        self._calls = 0
        """Of the current step, when the last batch was given."""

    def begin_batch(self, loop: object) -> None:
        """A loop gives a batch."""
        self._last, self._calls = loop, self._runtime.step.calls

    def begin_step(self) -> None:
        """A batch is about to be sharded: the one that was given last, as far as can be seen."""
        if self._of_step is self._last and self._runtime.step.calls > self._calls:
            self._ahead = self._last
        self._of_step = self._last

    def end(self, loop: object) -> None:
        """A loop has no batch left. A loop that reads ahead is here within its last step, which lasts on; of
        other loops the last batch was left out, if it was not used.

        Raises:
            ConfigError: the models were called in its last step, and no attention call was intercepted.
        """
        runtime = self._runtime
        if not self._has_step(loop) or self._ahead is loop:
            return
        if runtime.step.is_unused:
            runtime.leave_step()
        elif not runtime.step.is_pending:
            runtime.close_step()

    def leave(self, loop: object) -> None:
        """A loop was left, maybe by an error within its step. Nothing is raised, and ranks do nothing
        together: each collects its garbage when it likes."""
        if not sys.is_finalizing() and self._has_step(loop):
            self._runtime.leave_step()

    def _has_step(self, loop: object) -> bool:
        """True if the current step is this loop's."""
        return self._of_step is loop and self._runtime.in_step


class FabricLoader(LoaderProxy):
    """A loader of a run, whose loops are known.

    Args:
        loader: gives whole batches.
        loops: of the run; a loader that outlives its strategy is the plain loader again.
        shard: moves a batch to the device and shards it; ``None``: the script does so.
    """

    __slots__ = ("__weakref__", "_loops", "_shard")

    def __init__(self, loader: Any, loops: Loops, shard: Callable[[Any], Any] | None) -> None:
        super().__init__(loader)
        self._loops = weakref.ref(loops)
        self._shard = shard

    def __iter__(self) -> Iterator[Any]:
        loop = object()
        try:
            for batch in self._loader:
                self._tell(Loops.begin_batch, loop)
                yield batch if self._shard is None else self._shard(batch)
        except BaseException:  # its end by the garbage collector, too
            self._tell(Loops.leave, loop)
            raise
        self._tell(Loops.end, loop)

    def _tell(self, what: Callable[[Loops, object], None], loop: object) -> None:
        loops = self._loops()
        if loops is not None:
            what(loops, loop)

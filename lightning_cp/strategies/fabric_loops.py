"""Loops over Fabric's loaders: a step ends with the loop that gave its batch.

The loop belongs to the user, and Fabric does not see its end. Its loader sees that it has no batch left, or
that its iterator is gone, after ``break``, ``return`` or an error.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from lightning_cp.loaders.shared_loader import LoaderProxy
from lightning_cp.runtime.runtime import ContextParallelRuntime


class Loops:
    """The loops of one run, and the one that gave the current step's batch."""

    def __init__(self, runtime: ContextParallelRuntime) -> None:
        self._runtime = runtime
        self._last_loop: object = None
        self._step_loop: object = None
        self._loop_ahead: object = None
        """A loop that reads ahead: it asked for the next batch before it called a model with the last one."""
        self._calls = 0
        """Attention calls of the current step at the time of the last batch."""

    def begin_batch(self, loop: object) -> None:
        """Note that a loop gives a batch."""
        self._last_loop, self._calls = loop, self._runtime.step.calls

    def begin_step(self) -> None:
        """Note that a batch is sharded next: the last one that a loop gave, as far as can be seen."""
        if self._step_loop is self._last_loop and self._runtime.step.calls > self._calls:
            self._loop_ahead = self._last_loop
        self._step_loop = self._last_loop

    def end(self, loop: object) -> None:
        """End the step of a loop that has no batch left.

        A loop that reads ahead is still in its last step, which continues. Another loop has skipped its last
        batch if no model was called with it.

        Raises:
            ConfigError: the models were called in its last step, and no attention call was intercepted.
        """
        runtime = self._runtime
        if not self._has_step(loop) or self._loop_ahead is loop:
            return
        if runtime.step.is_unused:
            self._leave_step()
        elif not runtime.step.is_pending:
            self.end_step()

    def end_step(self) -> None:
        """Check the step, if one is current, and end it.

        Raises:
            ConfigError: the models were called in the step, and no attention call was intercepted.
        """
        try:
            if self._runtime.in_step:
                self._runtime.check_step()
        finally:
            self._runtime.end_step()

    def leave(self, loop: object) -> None:
        """End the step of a loop that was left, perhaps by an error in it.

        It raises nothing and is not collective: Python's garbage collector calls it, on each rank at another
        time.
        """
        if not sys.is_finalizing() and self._has_step(loop):
            self._leave_step()

    def _leave_step(self) -> None:
        """End the step; suspend an unused step until a call with its batch."""
        if self._runtime.step.is_unused and self._runtime.binding.handle is not None:
            self._runtime.binding.handle.suspend()
        else:
            self._runtime.end_step()

    def _has_step(self, loop: object) -> bool:
        """True if the current step is this loop's."""
        return self._step_loop is loop and self._runtime.in_step


class FabricLoader(LoaderProxy):
    """A loader that reports its loops.

    Args:
        loader: a loader of whole batches.
        loops: of the run; a loader that outlives its strategy is the plain loader.
        shard: a function that moves a batch to the device and shards it; ``None``: the script does so.
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
                self._call(Loops.begin_batch, loop)
                yield batch if self._shard is None else self._shard(batch)
        except BaseException:  # the garbage collector's GeneratorExit, too
            self._call(Loops.leave, loop)
            raise
        self._call(Loops.end, loop)

    def _call(self, method: Callable[[Loops, object], None], loop: object) -> None:
        loops = self._loops()
        if loops is not None:
            method(loops, loop)

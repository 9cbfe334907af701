"""A run's watch, from the moment there is a process group until the strategy ends."""

from __future__ import annotations

import atexit
import gc
import subprocess
import threading
from typing import Any

import torch.distributed as dist
from lightning.fabric.strategies.launchers.subprocess_script import _launch_process_observer

from lightning_cp import console
from lightning_cp.faults.watch import Watch
from lightning_cp.strategies.arguments.settings import Settings
from lightning_cp.strategies.arguments.sizes import context_size
from lightning_cp.strategies.watch.last_words import LastWords


class RunWatch(Watch):
    """Knows, besides, of processes that Lightning has started, and of errors that nobody catches."""

    _launcher: Any = None
    _last_words: LastWords | None = None
    _began = False

    def begin(
        self, settings: Settings, address: str, launcher: Any, *, handles_sigterm: bool
    ) -> None:
        """On all ranks together.

        Args:
            settings: tell which ranks share samples.
            address: rank 0's machine.
            launcher: Lightning's; its observer would end everything with SIGKILL once one process is gone,
                before anybody can say which.
            handles_sigterm: somebody else does, and goes on (the Trainer).
        """
        self.start(name_of(dist.get_rank(), dist.get_world_size(), settings), address)
        if not self.is_on or self._began:
            return
        self._began = True
        console.listen(self._hears)
        if not handles_sigterm:
            self._last_words = LastWords(self)
            self._last_words.begin()
        if procs := _processes(launcher):
            self._launcher, launcher.procs = launcher, list(procs)
            procs.clear()  # the observer has this list, and ends

    def note(self, error: BaseException) -> None:
        """As any watch's; and this process, if it ends now, does so without delay.

        The others wait until it has, and where thousands of modules are loaded, the collections of garbage
        with which Python ends take seconds on a busy machine. What is frozen is left out of them.
        """
        super().note(error)
        if self.failed:
            atexit.unregister(gc.freeze)
            atexit.register(gc.freeze)

    def stop(self) -> None:
        """The strategy ends; Lightning watches its processes again, unless Python ends as well."""
        super().stop()
        if not self.failed:
            console.leave(self._hears)
        if self._last_words is not None:
            self._last_words.end()
        launcher, self._launcher, self._last_words, self._began = self._launcher, None, None, False
        goes_on = threading.main_thread().is_alive()  # not in what atexit calls
        if launcher is not None and not self.failed and launcher.procs and goes_on:
            _launch_process_observer(launcher.procs)

    def _hears(self, error: BaseException) -> None:
        """Of an error that ends the program, as with Fabric nobody else tells of it."""
        self.note(error)
        self.shows()


def name_of(rank: int, world_size: int, settings: Settings) -> str:
    """``rank 2 (cp_rank 1 of 4, data_rank 0)``."""
    tp, cp_size = settings.tensor_parallel_size, context_size(settings, world_size)
    sample, cp_rank = divmod(rank // tp, cp_size)
    of_tp = f", tp_rank {rank % tp}" if tp > 1 else ""
    return f"rank {rank} (cp_rank {cp_rank} of {cp_size}, data_rank {sample}{of_tp})"


def _processes(launcher: Any) -> list[Any]:
    """The processes that it has started by running the program again; the list itself."""
    procs = getattr(launcher, "procs", [])
    return procs if all(isinstance(process, subprocess.Popen) for process in procs) else []

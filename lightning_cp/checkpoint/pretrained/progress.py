"""One line about the whole model, over all ranks: what matters is when it is there, not which file is.

Ranks add the bytes that they have read to a number in the store through which the process group met, a few
times a second. A thread of rank 0 reads it and writes the line, also while rank 0 itself has nothing left to
read. Nobody waits for anybody.
"""

from __future__ import annotations

import math
import re
import sys
import threading
import time
from contextlib import suppress
from typing import Any, TextIO

import torch.distributed as dist

from lightning_cp.checkpoint.pretrained.memory import peak_bytes
from lightning_cp.checkpoint.pretrained.plan import LoadPlan

EVERY = 0.5
"""Seconds between two lines."""

_lock = threading.Lock()
_count = 0


class Progress:
    """Of one load; a context manager, to be left once all ranks have ended, however they do.

    Args:
        plan: this rank's.
        total: bytes that all ranks read.
        shown: rank 0 writes.
        stream: where; standard error by default.
    """

    def __init__(
        self, plan: LoadPlan, total: int, *, shown: bool = True, stream: TextIO | None = None
    ) -> None:
        compared = {one.entry.name: one.entry.nbytes for one in plan.twins}
        self._model, self._total = plan.model_bytes + sum(compared.values()), max(1, total)
        self._stream = stream if stream is not None else sys.stderr
        self._board = _Board()
        self._shown = shown and self._board.rank == 0
        self._layers = _layers(one.parameter for one in plan.slices)
        self._name, self._pending = "taking memory", 0
        self._started = self._last = time.monotonic()
        self._written = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep_showing, name="loading", daemon=True)

    def __enter__(self) -> Progress:
        if self._shown:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._over.set()
        if not self._shown:
            return
        self._thread.join()
        if kind is None:
            self._write(self.line(1.0))
        self._stream.write("\n" if self._written else "")
        self._stream.flush()

    def now(self, name: str) -> None:
        """The work under way: the parameter that is being read, or in words what else takes time."""
        self._name = name

    def begin(self) -> None:
        """Reading begins, by which the rate is measured."""
        self._started = self._last = time.monotonic()

    def add(self, count: int) -> None:
        """Bytes that were just read."""
        self._pending += count
        if time.monotonic() - self._last >= EVERY:
            self.flush()

    def finish(self) -> None:
        """This rank has read everything; others may not have."""
        self.flush()
        self._name = ""

    def flush(self) -> None:
        """Let the others know."""
        self._last = time.monotonic()
        self._board.add(self._pending)
        self._pending = 0

    def show(self) -> None:
        """Write the line as it is now."""
        self._write(self.line(self._board.read() / self._total))

    def _keep_showing(self) -> None:
        while not self._over.wait(EVERY):
            self.show()

    def line(self, share: float) -> str:
        """The progress shown: of the whole model, by the ``share`` of all ranks' bytes that were read."""
        share = min(1.0, share)
        seconds = max(1e-9, time.monotonic() - self._started)
        rate = share * self._model / seconds
        left = (1 - share) * self._model / rate if rate else float("inf")
        at, of = self._layers
        name = self._name or ("done" if share == 1 else "rank 0 is done")
        layer = f", layer {at[name]} of {of}" if name in at else ""
        return (
            f"loading {math.floor(100 * share):3d}% {_size(share * self._model)} of {_size(self._model)}, "
            f"{_size(rate)}/s, {_time(left)} left, {name}{layer}, "
            f"peak {self._board.peaks()}"
        )

    def _write(self, line: str) -> None:
        end = "\r" if self._stream.isatty() else "\n"
        padded = line.ljust(self._written) if end == "\r" else line
        self._written = len(line)
        self._stream.write(padded + end)
        self._stream.flush()


class _Board:
    """Numbers of this load in the group's store; this rank's alone where there is none."""

    def __init__(self) -> None:
        global _count
        with _lock:
            _count += 1  # ranks load together, so they count alike
            self._key = f"lightning_cp/loading/{_count}"
        self._store: Any = _store()
        together = dist.is_initialized()
        self.rank = dist.get_rank() if together else 0
        self._world = dist.get_world_size() if together else 1
        self._own = 0

    def add(self, count: int) -> None:
        self._own += count
        if self._store is None:
            return
        with suppress(RuntimeError):  # a store that is gone is no reason not to load
            self._store.add(self._key, count)
            self._store.set(f"{self._key}/{self.rank}", str(peak_bytes()))

    def read(self) -> int:
        """Bytes of all ranks."""
        with suppress(RuntimeError):
            if self._store is not None:
                return int(self._store.add(self._key, 0))
        return self._own * self._world

    def peaks(self) -> str:
        """The most memory of a rank, and which."""
        known = [(peak_bytes(), self.rank)]
        keys = [f"{self._key}/{rank}" for rank in range(self._world)]
        with suppress(RuntimeError):
            if self._store is not None and self._store.check(keys):  # all have told
                known += [(int(x), rank) for rank, x in enumerate(self._store.multi_get(keys))]
        most, worst = max(known)
        return f"{_size(most)} (rank {worst})"


def _store() -> Any:
    """PyTorch's own, which has no public name."""
    find = getattr(dist.distributed_c10d, "_get_default_store", None)
    return find() if find is not None and dist.is_initialized() else None


def _layers(names: Any) -> tuple[dict[str, int], int]:
    """The layer of each name, counted from 1, and how many there are: the first number in the name."""
    found = {name: int(m[1]) + 1 for name in names if (m := re.search(r"\.(\d+)\.", f".{name}"))}
    return found, max(found.values(), default=0)


def _size(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count / 1e3:.1f} kB"


def _time(seconds: float) -> str:
    if seconds == float("inf"):
        return "?"
    minutes, rest = divmod(int(seconds + 0.5), 60)
    return f"{minutes}:{rest:02d}"

"""What goes wrong in ``script.py``, when and where."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from lightning_cp.utils.containers import tensors_of

AT = 3
"""The step, counted from 1, and so the batch."""
FIRED = "FAULT FIRED"
SUSPENDED = 12.0
"""Seconds."""
NAP = 1.3
"""Seconds that a crawling rank takes for everything that it does."""
SLEEP_CYCLES = 10**12
"""About ten minutes of a GPU."""


def fire(kind: str) -> None:
    """The fault itself; says first that it happens, and when."""
    print(f"{FIRED} {kind} {os.getpid()} {time.time()}", flush=True)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)
    elif kind == "raise":
        raise ValueError("the user's own mistake")
    elif kind == "timeout":
        raise RuntimeError("DataLoader timed out after 5 seconds")
    elif kind == "suspend":
        _suspend(SUSPENDED)
    elif kind == "sleep":
        time.sleep(600)
    elif kind == "exit":
        os._exit(3)


def _sleep_on_gpu() -> None:
    """The stream sleeps, and the host does not."""
    torch.cuda._sleep(SLEEP_CYCLES)


def _suspend(seconds: float) -> None:
    """All processes of this job, as Ctrl-Z does; another one lets them go on, as ``fg`` does."""
    group = os.getpgrp()
    script = f"kill -STOP -{group}; sleep {seconds}; kill -CONT -{group}"
    subprocess.Popen(["sh", "-c", script], start_new_session=True)


class SlowHash:
    """A module and a hash in one: what is hashed while it is written takes a while, for some seconds."""

    WAIT = 0.5
    """Seconds."""
    left = 16
    """Times that it still takes as long."""

    def __init__(self) -> None:
        self._own = hashlib.sha256()

    @classmethod
    def sha256(cls) -> SlowHash:
        """A new one."""
        return cls()

    def update(self, data: Any) -> None:
        """Some more bytes."""
        if SlowHash.left:
            SlowHash.left -= 1
            time.sleep(self.WAIT)
        self._own.update(data)

    def hexdigest(self) -> str:
        """Of all of them."""
        return self._own.hexdigest()


class Fault:
    """Happens once, at one place on one rank; ``crawl`` in all of a step.

    Args:
        kind: of those above; or ``crawl``; or ``alone``: the rank calls the model by itself; or ``device``:
            its device stops, and its host needs a result of it later; or what is wrong with tensors: ``nan``,
            ``inf``; or with a batch: ``values``, ``shape``, ``dtype``, ``early``.
        rank: whose.
        where: ``forward``, ``backward``, ``optimizer`` or ``loss``; ``data`` for batches; ``again`` (within a
            step) and ``between`` (steps) for ``alone``.
    """

    def __init__(self, kind: str, rank: int, where: str) -> None:
        self.kind, self.rank, self.where = kind, rank, where
        self.step = 0
        self.fired = False
        self.stop_device: Callable[[], None] = _sleep_on_gpu

    def at(self, where: str, step: int | None = None) -> bool:
        """The program comes to this place; whether it is there that something goes wrong.

        Args:
            where: the place.
            step: by default the one that is under way.
        """
        step = self.step if step is None else step
        here = dist.is_initialized() and dist.get_rank() == self.rank
        if here and self.kind == "crawl" and step == AT:
            self._once()
            time.sleep(NAP)
        if self.fired or not here or (where, step) != (self.where, AT):
            return False
        self._once()
        return True

    def _once(self) -> None:
        if not self.fired:
            self.fired = True
            fire(self.kind)
            if self.kind == "device":
                self.stop_device()

    def spoil(self, where: str, x: torch.Tensor) -> torch.Tensor:
        """A tensor of this place, with numbers that are none if that is what goes wrong."""
        return x + float(self.kind) if self.at(where) and self.kind in ("nan", "inf") else x

    def batch(self, index: int, row: dict[str, Any]) -> dict[str, Any] | None:
        """A sample as this rank's loader gives it; ``None``: it gives no more."""
        if self.where != "data" or not self.at("data", index + 1):
            return row
        if self.kind == "early":
            return None
        ids = row["input_ids"].clone()
        if self.kind == "values":
            ids[5] += 1
        changed = {"values": ids, "shape": ids[:12], "dtype": ids.int()}[self.kind]
        return {"input_ids": changed, "labels": row["labels"][: len(changed)]}


def digest_of(*states: Any) -> str:
    """Of all numbers in them that this rank has, bit by bit."""
    made = hashlib.sha256()
    for state in states:
        for name, x in tensors_of(state):
            own = x.to_local() if isinstance(x, DTensor) else x
            made.update(name.encode() + own.detach().cpu().contiguous().numpy().tobytes())
    return made.hexdigest()[:16]

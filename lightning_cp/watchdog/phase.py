"""Where a rank is in its training: written at every change, readable by others once the rank is dead.

A rank that is killed says nothing any more. So its position lies in a small file that it has mapped into
memory, where writing takes less than a microsecond and makes no system call, and that outlives it. The other
ranks of its machine have the file open; it has no name any more once all of them do.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_cp.utils.module_hooks import add_hook, strip_wrappers


class Phase(IntEnum):
    """The work that a rank is doing."""

    SETUP = 0
    LOAD = 1
    FORWARD = 2
    BACKWARD = 3
    OPTIMIZER = 4
    BETWEEN_STEPS = 5
    VALIDATION = 6
    TEST = 7
    PREDICTION = 8
    SAVE = 9


STEPS = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
_SHOWN = {
    Phase.SETUP: "in setup",
    Phase.LOAD: "in loading a checkpoint",
    Phase.BETWEEN_STEPS: "between steps",
    Phase.SAVE: "in saving a checkpoint",
}
_SLOT = struct.Struct("<qqqq")
_TOKEN = 16


class PhasePosition(NamedTuple):
    """A position at one moment."""

    step: int = 0
    """Of training, counted from 1; 0 before the first."""
    micro_batch: int = 0
    """Of the step, counted from 1."""
    phase: int = Phase.SETUP

    def __str__(self) -> str:
        phase = Phase(self.phase)
        where = _SHOWN.get(phase, f"in {phase.name.lower()}")
        several = f" of micro-batch {self.micro_batch}" if self.micro_batch > 1 else ""
        if phase in STEPS:
            return f"at step {self.step}, {where}{several}"
        return f"after step {self.step}, {where}" if self.step else where


class Position:
    """This rank's own; changed by its main thread, and counted up by any.

    ``count`` grows with every sign of progress (an increment that two threads make at once may be lost);
    ``began`` is what it was when the micro-batch began.
    """

    def __init__(self) -> None:
        self.count = self.began = 0
        self.place = PhasePosition()
        self.is_first = True
        """No step has ended yet, so that things are made and compiled."""
        self._stepped = True
        self._slot: Slot | None = None
        self._numbers: Counter[str] = Counter()
        self._calls: list[str] = []

    def connect(self, slot: Slot | None) -> None:
        """Write every change there, too."""
        self._slot = slot
        self._write(self.place)

    def restart(self) -> None:
        """A run begins."""
        self._stepped = self.is_first = True
        self.enter(Phase.SETUP)

    def progress(self, *_: Any) -> None:
        """Something was done; also a hook for anything."""
        self.count += 1

    def call(self, name: str) -> None:
        """A module is called that all ranks have to call together."""
        self.count += 1
        self._numbers[name] += 1
        self._calls.append(f"call {self._numbers[name]} of {name}")

    def end_call(self) -> None:
        """The module that was called last returns."""
        if self._calls:
            self._calls.pop()

    @property
    def within(self) -> str:
        """``call 2 of model.layers.3``: where this rank is, counted since its phase began, or nothing."""
        calls = self._calls[-1:]  # at once, as the watcher's thread reads it
        return calls[0] if calls else ""

    def _forget_calls(self) -> None:
        self._numbers.clear()
        self._calls.clear()

    def begin_micro_batch(self, after: int | None = None) -> None:
        """A training batch is there, and goes forward.

        Args:
            after: steps before this one, where somebody else counts them.
        """
        step, micro_batch, _ = self.place
        if self._stepped:
            step, micro_batch = (step if after is None else after) + 1, 0
            self._stepped = False
        self.began = self.count
        self._forget_calls()
        self._write(PhasePosition(step, micro_batch + 1, Phase.FORWARD))

    def enter(self, phase: Phase) -> None:
        """The rank does something else from now on."""
        if phase not in STEPS:
            self._forget_calls()
        self._write(self.place._replace(phase=phase))

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """A block in which the rank does something else; what raises stays there."""
        before = self.place.phase
        self.enter(phase)
        yield
        self.enter(Phase(before))

    def end_step(self) -> None:
        """An optimizer has stepped."""
        self._stepped, self.is_first = True, False
        self.enter(Phase.BETWEEN_STEPS)

    def _write(self, place: PhasePosition) -> None:
        self.count += 1
        self.place = place
        if self._slot is not None:
            self._slot.write(place, is_first=self.is_first)


class Slot:
    """A position in a file of this machine.

    Args:
        path: an existing one, to be read; by default a new one is made.
        token: what it must begin with.

    Raises:
        OSError: it cannot be made or read, or is another one.
    """

    def __init__(self, path: str = "", token: bytes = b"") -> None:
        self.path = path
        if path:
            descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
        else:
            descriptor, self.path = tempfile.mkstemp(prefix="lightning_cp-position-")
        try:
            if not path:
                os.write(descriptor, token + bytes(_SLOT.size))
            access = mmap.ACCESS_READ if path else mmap.ACCESS_WRITE
            self._map = mmap.mmap(descriptor, _TOKEN + _SLOT.size, access=access)
        except ValueError as error:  # it is shorter
            raise OSError(f"{path}: {error}") from None
        finally:
            os.close(descriptor)
        if self._map[:_TOKEN] != token:
            raise OSError(f"{path} is not the file that was meant")

    def write(self, place: PhasePosition, *, is_first: bool = False) -> None:
        """The position from now on, and whether no step has ended yet."""
        with suppress(ValueError):  # closed in this moment
            _SLOT.pack_into(self._map, _TOKEN, *place, is_first)

    def read(self) -> PhasePosition:
        """The position now, or when its rank died."""
        return PhasePosition(*_SLOT.unpack_from(self._map, _TOKEN)[:3])

    @property
    def is_first(self) -> bool:
        """True if no step had ended then."""
        return bool(_SLOT.unpack_from(self._map, _TOKEN)[3])

    def unlink(self) -> None:
        """Nobody else will look for it."""
        with suppress(OSError):
            Path(self.path).unlink()

    def close(self) -> None:
        """Let go of it."""
        self._map.close()


# Signs of life from work that takes long and knows of no run: files that are read, hashed and written.
#
# A file system may be slow for longer than any limit. As long as bytes move, nobody hangs: whoever moves
# them says so after every piece, and every run of this process that is watched counts that as its progress.


PIECE = 16 * 2**20
"""Bytes after which a sign is given at the latest."""

_watched: tuple[Position, ...] = ()  # replaced as a whole, as other threads go through it


def sign_of_life() -> None:
    """Something was done; from any thread."""
    for position in _watched:
        position.progress()


def pieces(data: memoryview) -> Iterator[memoryview]:
    """Bytes to be written piece by piece, with a sign after each."""
    for start in range(0, len(data), PIECE):
        yield data[start : start + PIECE]
        sign_of_life()


def count(position: Position) -> None:
    """From now on signs of life are this run's progress."""
    global _watched
    ignore(position)
    _watched = (*_watched, position)


def ignore(position: Position) -> None:
    """The run has ended."""
    global _watched
    _watched = tuple(each for each in _watched if each is not position)


# Signs of progress within a step, for ranks that are slow and not stuck: gradients that have arrived, and
# attention modules that were called where no attention is intercepted.


_ATTENTION = re.compile(r"(Attention|Attn)(Layer|Block)?(V?\d+)?$")


class ProgressHooks:
    """Hooks of one run."""

    def __init__(self, position: Position) -> None:
        self._position = position
        self._hooks: list[Callable[[], None]] = []

    def follow(self, module: nn.Module, *, attention: bool) -> None:
        """Count what happens in a module from now on.

        Args:
            module: as it is called, wrapped for data parallelism.
            attention: calls of attention modules count, as nobody else counts attention.
        """
        count = self._position.progress
        for parameter in module.parameters():
            own = parameter.requires_grad and parameter.is_leaf
            # FSDP2's groups are counted by the engine, reduced or not: a hook here would be called only where
            # gradients are reduced, and have each wait for its copy to the CPU.
            if own and not isinstance(parameter, DTensor):
                hook = parameter.register_post_accumulate_grad_hook(count)
                self._hooks.append(hook.remove)
        for name, part in module.named_modules():
            if issubclass(type(part), FSDPModule):  # isinstance would hide that it is a module
                self._follow_calls(
                    strip_wrappers(name) or f"the {type(part).__name__.removeprefix('FSDP')}", part
                )
        for part in module.modules() if attention else ():
            if _ATTENTION.search(type(part).__name__) and not isinstance(
                part, nn.MultiheadAttention
            ):
                self._hooks.append(add_hook(part.register_forward_pre_hook, self._called))

    def _follow_calls(self, name: str, part: nn.Module) -> None:
        """Note calls before FSDP's own hook, which waits for the other ranks."""

        def begin(*_: Any) -> None:
            if not torch.compiler.is_compiling():
                self._position.call(name)

        def end(*_: Any) -> None:
            if not torch.compiler.is_compiling():
                self._position.end_call()

        self._hooks.append(add_hook(part.register_forward_pre_hook, begin, prepend=True))
        self._hooks.append(add_hook(part.register_forward_hook, end))

    def begin_with(self, module: nn.Module) -> None:
        """A forward pass of this module begins a micro-batch, where nothing else does."""
        self._hooks.append(add_hook(module.register_forward_pre_hook, self._begins))

    def forget(self) -> None:
        """Take all hooks back."""
        while self._hooks:
            self._hooks.pop()()

    def _called(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._position.progress()

    def _begins(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if not (module.training and torch.is_grad_enabled()):
            self._position.enter(Phase.VALIDATION)
        elif self._position.place.phase != Phase.FORWARD:
            self._position.begin_micro_batch()

"""Training position of a rank, in a small mapped file that other ranks can read after it died.

A killed rank cannot report. So its position is in a file that it has mapped into memory: writing takes
less than a microsecond and no system call, and the file outlives the process. The other ranks of the
machine hold it open; once all of them do, it is unlinked.
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
from torch.distributed.tensor import DTensor

from lightning_cp.comm import waits
from lightning_cp.utils.dtensor import gathering_parts, is_unit
from lightning_cp.utils.patching import add_hook, strip_wrappers
from lightning_cp.watchdog.device import DeviceQueue


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
_PHASE_TEXTS = {
    Phase.SETUP: "in setup",
    Phase.LOAD: "in loading a checkpoint",
    Phase.BETWEEN_STEPS: "between steps",
    Phase.SAVE: "in saving a checkpoint",
}
_HOST = struct.Struct("<qqqq")
_DEVICE = struct.Struct("<qqqqqq")
_TOKEN = 16


class PhasePosition(NamedTuple):
    """A position of training: step, micro-batch and phase."""

    step: int = 0
    """Training step, counted from 1; 0 before the first."""
    micro_batch: int = 0
    """Micro-batch within the step, counted from 1."""
    phase: int = Phase.SETUP

    def __str__(self) -> str:
        phase = Phase(self.phase)
        where = _PHASE_TEXTS.get(phase, f"in {phase.name.lower()}")
        several = f" of micro-batch {self.micro_batch}" if self.micro_batch > 1 else ""
        if phase in STEPS:
            return f"at step {self.step}, {where}{several}"
        return f"after step {self.step}, {where}" if self.step else where


class DevicePosition(NamedTuple):
    """A position that a device has reached, of the work that its host enqueued."""

    place: PhasePosition = PhasePosition()
    since: int = 0
    """Number of the host's signs of progress since the micro-batch began, when it enqueued this."""
    is_busy: bool = False
    """True if the device has more to do."""
    waits: bool = False
    """True if what it has to do next is to wait for other ranks."""
    name: str = ""
    """``cuda:1``."""


class Position:
    """This rank's position: the main thread changes it, any thread may count progress.

    ``count`` grows with every sign of progress (if two threads increment it at once, one may be lost);
    ``began`` is its value at the start of the micro-batch.
    """

    def __init__(self) -> None:
        self.count = self.began = 0
        self.place = PhasePosition()
        self.device: DeviceQueue[DevicePosition] | None = None
        """This rank's device, if it works apart from the host."""
        self.is_first = True
        """True until the first step has ended: things are still built and compiled."""
        self._stepped = True
        self._slot: Slot | None = None
        self._numbers: Counter[str] = Counter()
        self._calls: list[str] = []

    def connect(self, slot: Slot | None) -> None:
        """Write every change to this slot, too."""
        self._slot = slot
        self._write(self.place)

    def restart(self) -> None:
        """Set the position to the start of a run."""
        self._stepped = self.is_first = True
        self.enter(Phase.SETUP)

    def progress(self, *_: Any) -> None:
        """Count progress; accepts any arguments, so that it can be a hook."""
        self.count += 1

    def record_work(self, *_: Any) -> None:
        """Count progress of the host, and later that of the device, once it has done the same work."""
        self.count += 1
        if self.device is not None:  # also tested there: a call less for every hook on a CPU
            self._record()

    def mark_wait(self, waits: bool) -> None:
        """Record that the device goes to wait for other ranks, or that it has what it waited for."""
        self._record(waits=waits)

    def _record(self, *, waits: bool = False) -> None:
        if (device := self.device) is not None:
            device.record(DevicePosition(self.place, self.count - self.began, waits=waits))

    def poll_device(self) -> DevicePosition | None:
        """Return the position of the device, and show it to other ranks; called by the watcher's thread."""
        device = self.device  # one read: the run may end
        if device is None:
            return None
        device.poll()
        reached = device.reached or DevicePosition()
        found = reached._replace(is_busy=device.is_busy, name=device.name)
        if self._slot is not None:
            self._slot.write_device(found)
        return found

    @property
    def signs(self) -> int:
        """Signs of progress so far, of the host and of its device."""
        device = self.device
        return self.count + (device.completed if device is not None else 0)

    def call(self, name: str) -> None:
        """Record the call of a module that all ranks must call together."""
        self.count += 1
        self._numbers[name] += 1
        self._calls.append(f"call {self._numbers[name]} of {name}")

    def end_call(self) -> None:
        """Record that the module that was called last returned."""
        if self._calls:
            self._calls.pop()

    @property
    def module_call(self) -> str:
        """The call in progress, as in ``call 2 of model.layers.3``, counted since its phase began; or
        empty."""
        calls = self._calls[-1:]  # one read, as the watcher's thread also reads it
        return calls[0] if calls else ""

    def _forget_calls(self) -> None:
        self._numbers.clear()
        self._calls.clear()

    def begin_micro_batch(self, after: int | None = None) -> None:
        """Record that a training batch goes forward.

        Args:
            after: number of steps before this one, where the caller counts them.
        """
        step, micro_batch, _ = self.place
        if self._stepped:
            step, micro_batch = (step if after is None else after) + 1, 0
            self._stepped = False
        self.began = self.count
        self._forget_calls()
        self._write(PhasePosition(step, micro_batch + 1, Phase.FORWARD))

    def enter(self, phase: Phase) -> None:
        """Change the phase."""
        if phase not in STEPS:
            self._forget_calls()
        self._write(self.place._replace(phase=phase))

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Set the phase within a block and restore it afterwards; after an error it stays."""
        before = self.place.phase
        self.enter(phase)
        yield
        self.enter(Phase(before))

    def end_step(self) -> None:
        """Record that an optimizer has stepped."""
        self._stepped, self.is_first = True, False
        self.enter(Phase.BETWEEN_STEPS)

    def _write(self, place: PhasePosition) -> None:
        self.place = place
        self.count += 1
        if self.device is not None:
            self._record()
        if self._slot is not None:
            self._slot.write(place, is_first=self.is_first)


class Slot:
    """A position in a file on this machine.

    Args:
        path: an existing file to read; by default a new one is made.
        token: the bytes that the file begins with.

    Raises:
        OSError: the file cannot be made or read, or begins with another token.
    """

    def __init__(self, path: str = "", token: bytes = b"") -> None:
        self.path = path
        if path:
            descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
        else:
            descriptor, self.path = tempfile.mkstemp(prefix="lightning_cp-position-")
        try:
            if not path:
                os.write(descriptor, token + bytes(_HOST.size + _DEVICE.size))
            access = mmap.ACCESS_READ if path else mmap.ACCESS_WRITE
            size = _TOKEN + _HOST.size + _DEVICE.size
            self._map = mmap.mmap(descriptor, size, access=access)
        except ValueError as error:  # it is shorter
            raise OSError(f"{path}: {error}") from None
        finally:
            os.close(descriptor)
        if self._map[:_TOKEN] != token:
            raise OSError(f"{path} is not the file that was meant")

    def write(self, place: PhasePosition, *, is_first: bool = False) -> None:
        """Write a position, and whether no step has ended yet."""
        with suppress(ValueError):  # closed in this moment
            _HOST.pack_into(self._map, _TOKEN, *place, is_first)

    def write_device(self, reached: DevicePosition) -> None:
        """Write the position of the rank's device."""
        with suppress(ValueError):  # closed in this moment
            values = (*reached.place, reached.since, reached.is_busy, reached.waits)
            _DEVICE.pack_into(self._map, _TOKEN + _HOST.size, *values)

    def read(self) -> PhasePosition:
        """Return the position: the present one, or that at its rank's death."""
        return PhasePosition(*_HOST.unpack_from(self._map, _TOKEN)[:3])

    def read_device(self) -> DevicePosition:
        """Return the position of the rank's device when its watcher asked last."""
        *place, since, busy, waits = _DEVICE.unpack_from(self._map, _TOKEN + _HOST.size)
        return DevicePosition(PhasePosition(*place), since, bool(busy), bool(waits))

    @property
    def is_first(self) -> bool:
        """True if no step had ended."""
        return bool(_HOST.unpack_from(self._map, _TOKEN)[3])

    def unlink(self) -> None:
        """Remove the file's name; those that have it open can still read it."""
        with suppress(OSError):
            Path(self.path).unlink()

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()


# Signs of life from long file operations that know of no run: reading, hashing and writing.
#
# A file system may be slower than any limit. As long as bytes move, the rank does not hang: the operation
# signals after every piece, and each watched run of this process counts that as progress.


PIECE = 16 * 2**20
"""Bytes after which a sign is given at the latest."""

_watched: tuple[Position, ...] = ()  # replaced as a whole, as other threads iterate over it


def sign_of_life() -> None:
    """Count progress for every watched run; callable from any thread."""
    for position in _watched:
        position.progress()


def sign_of_work() -> None:
    """Count progress of host and device for every watched run, where a device was given work."""
    for position in _watched:
        position.record_work()


def pieces(data: memoryview) -> Iterator[memoryview]:
    """Split bytes into pieces to write, with a sign of life after each."""
    for start in range(0, len(data), PIECE):
        yield data[start : start + PIECE]
        sign_of_life()


def count(position: Position) -> None:
    """Count signs of life as this run's progress from now on."""
    global _watched
    ignore(position)
    _watched = (*_watched, position)
    if position.device is not None:
        waits.marks = (*waits.marks, position.mark_wait)


def ignore(position: Position) -> None:
    """Stop counting signs of life for this run."""
    global _watched
    _watched = tuple(each for each in _watched if each is not position)
    waits.marks = tuple(each for each in waits.marks if each != position.mark_wait)


# Signs of progress within a step, which tell slow ranks from stuck ones: gradients that arrived, and calls
# of attention modules where no attention is intercepted.


def _sharded_roots(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the units that are in no other one."""
    if is_unit(module):
        yield module
    else:
        for child in module.children():
            yield from _sharded_roots(child)


_ATTENTION = re.compile(r"(Attention|Attn)(Layer|Block)?(V?\d+)?$")


class ProgressHooks:
    """The progress hooks of one run."""

    def __init__(self, position: Position) -> None:
        self._position = position
        self._hooks: list[Callable[[], None]] = []

    def follow(self, module: nn.Module, *, attention: bool) -> None:
        """Count progress in a module from now on.

        Args:
            module: the wrapped module that the training step calls.
            attention: also count calls of attention modules, where attention is not intercepted.
        """
        count = self._position.record_work
        for parameter in module.parameters():
            own = parameter.requires_grad and parameter.is_leaf
            # FSDP2's groups are counted by the engine, reduced or not: a hook here would be called only where
            # gradients are reduced, and have each wait for its copy to the CPU.
            if own and not isinstance(parameter, DTensor):
                hook = parameter.register_post_accumulate_grad_hook(count)
                self._hooks.append(hook.remove)
        gathering = {part for root in _sharded_roots(module) for part in gathering_parts(root)}
        for name, part in module.named_modules():
            if is_unit(part) or part in gathering:
                whole = f"the {type(part).__name__.removeprefix('FSDP')}"
                self._follow_calls(strip_wrappers(name) or whole, part)
        for part in module.modules() if attention else ():
            if _ATTENTION.search(type(part).__name__) and not isinstance(
                part, nn.MultiheadAttention
            ):
                self._hooks.append(add_hook(part.register_forward_pre_hook, self._called))

    def _follow_calls(self, name: str, part: nn.Module) -> None:
        """Record calls before FSDP's hook, which waits for the other ranks."""

        def begin(*_: Any) -> None:
            if not torch.compiler.is_compiling():
                self._position.call(name)

        def end(*_: Any) -> None:
            if not torch.compiler.is_compiling():
                self._position.end_call()

        self._hooks.append(add_hook(part.register_forward_pre_hook, begin, prepend=True))
        # Recomputation ends a call early, by an exception.
        self._hooks.append(add_hook(part.register_forward_hook, end, always_call=True))

    def begin_with(self, module: nn.Module) -> None:
        """Begin a micro-batch at each training forward of this module, where nothing else marks it."""
        self._hooks.append(add_hook(module.register_forward_pre_hook, self._begins))

    def forget(self) -> None:
        """Remove all hooks."""
        while self._hooks:
            self._hooks.pop()()

    def _called(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._position.record_work()

    def _begins(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if not (module.training and torch.is_grad_enabled()):
            self._position.enter(Phase.VALIDATION)
        elif self._position.place.phase != Phase.FORWARD:
            self._position.begin_micro_batch()

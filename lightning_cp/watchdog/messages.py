"""Messages of the watchdog: heartbeats, errors, verdicts, and the socket protocol that carries them."""

from __future__ import annotations

import json
import os
import re
import socket
import struct
import traceback
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from lightning_cp.error_display import short_line_of
from lightning_cp.errors import LightningCPError, RankFailure, without_home
from lightning_cp.watchdog.phase import DevicePosition, PhasePosition

MAX_TRACEBACK_CHARS = 20_000
"""Characters of a traceback that are sent: the last ones."""

OWN, COMMON, BROKEN = "own", "told", "broken"
_CLOSED = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection refused|timed? ?out|gloo|nccl|remote process",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class RankIdentity:
    """The identity of a rank, known to all ranks."""

    rank: int
    name: str
    """``rank 2 (cp_rank 1 of 4, data_rank 0)``."""
    machine: str
    pid: int
    path: str
    """Path of its position file, on its machine."""
    output: str = ""
    """Identity of its standard error on its machine; ranks that were started together may share it."""


@dataclass(frozen=True)
class Note:
    """A rank's report of its own error."""

    error: str
    """``ValueError: no such file``."""
    traceback: str = ""
    kind: str = OWN
    """``own``: the rank's own error; ``told``: an error that every rank raises, since ranks agreed on
    it; ``broken``: likely a consequence of another rank's failure, as a connection was closed."""
    place: PhasePosition = field(default_factory=PhasePosition)
    is_shown: bool = False
    """True if the rank shows its message last, after the verdict line."""

    @classmethod
    def of_error(cls, error: BaseException, place: PhasePosition) -> Note:
        """Make a note of an error that this rank's main thread raised."""
        text = "".join(traceback.format_exception(error))[-MAX_TRACEBACK_CHARS:]
        is_shown = isinstance(error, LightningCPError)
        line = "".join(traceback.format_exception_only(error)).strip().splitlines()[0][:2000]
        line = short_line_of(error) if is_shown else line
        return cls(without_home(line), without_home(text), _kind_of_error(error), place, is_shown)

    def as_message(self) -> list[Any]:
        """Return a list that JSON can encode."""
        return [self.error, self.traceback, self.kind, list(self.place), self.is_shown]

    @classmethod
    def of_message(cls, message: list[Any]) -> Note:
        """Read what ``as_message`` returned."""
        error, text, kind, place, is_shown = message
        return cls(
            str(error), str(text), str(kind), PhasePosition(*map(int, place)), bool(is_shown)
        )


@dataclass(frozen=True)
class Heartbeat:
    """A sign of life of a rank, sent every half second."""

    count: int = 0
    """Number of signs of progress since the run began, those of its device included."""
    since: int = 0
    """Number of signs of progress since the micro-batch began."""
    place: PhasePosition = field(default_factory=PhasePosition)
    limit: float | None = None
    """Seconds without progress that the rank allows at its present position; ``None``: no limit."""
    stack: str = ""
    """Stack of its main thread, if it made no progress for half of the limit."""
    module_call: str = ""
    """The module that it is calling, of those that all ranks must call together."""
    device: DevicePosition | None = None
    """The position of its device, if that works apart from the host."""

    @property
    def reached(self) -> tuple[int, int, int]:
        """Step, micro-batch and signs of progress in it: of the device, if it has more to do."""
        device = self.device
        if device is not None and device.is_busy:
            return *device.place[:2], device.since
        return *self.place[:2], self.since

    def as_message(self) -> list[Any]:
        """Return a list that JSON can encode."""
        device = self.device and [list(self.device.place), *self.device[1:]]
        at = list(self.place)
        return [self.count, self.since, at, self.limit, self.stack, self.module_call, device]

    @classmethod
    def of_message(cls, message: list[Any]) -> Heartbeat:
        """Read what ``as_message`` returned."""
        count, since, place, limit, stack, within, device = message
        limit = None if limit is None else float(limit)
        at = PhasePosition(*map(int, place))
        if device is not None:
            reached, of_device, busy, waits, name = device
            reached = PhasePosition(*map(int, reached))
            device = DevicePosition(reached, int(of_device), bool(busy), bool(waits), str(name))
        return cls(int(count), int(since), at, limit, str(stack), str(within), device)


@dataclass(frozen=True)
class Verdict:
    """The decision which rank failed, sent to all ranks.

    Args:
        kind: ``lost`` (its process is gone), ``left`` (it ended in good order, others have not),
            ``raised``, ``frozen`` (no heartbeat) or ``stuck`` (all are alive, none makes progress).
        ranks: the ranks that failed.
        line: the last line that every other rank prints.
        details: a traceback or stacks, or empty.
        is_shown: the failed rank shows its error after this line.
    """

    kind: str
    ranks: tuple[int, ...]
    line: str
    details: str = ""
    is_shown: bool = False

    @property
    def is_standstill(self) -> bool:
        """True if ranks are alive and wait for each other; ``details`` are then their stacks."""
        return self.kind in ("stuck", "left")

    def as_message(self) -> list[Any]:
        """Return a list that JSON can encode."""
        return [self.kind, list(self.ranks), self.line, self.details, self.is_shown]

    @classmethod
    def of_message(cls, message: list[Any]) -> Verdict:
        """Read what ``as_message`` returned."""
        kind, ranks, line, details, is_shown = message
        return cls(str(kind), tuple(map(int, ranks)), str(line), str(details), bool(is_shown))


def _kind_of_error(error: BaseException) -> str:
    if isinstance(error, RankFailure):
        return COMMON
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if _is_connection_error(cause):
            return BROKEN
        cause = cause.__cause__ or cause.__context__
    return OWN


def _is_connection_error(error: BaseException) -> bool:
    if isinstance(error, (dist.DistError, ConnectionError)):
        return True
    return type(error) is RuntimeError and bool(_CLOSED.search(str(error)))


# Messages between watchers: JSON behind a 4-byte length. Never pickles.


Message = dict[str, Any]
_LENGTH = struct.Struct("<I")
MAX_MESSAGE_BYTES = 256 * 1024
"""Largest message in bytes; a longer one cannot come from a watcher."""
PATIENCE = 2.0
"""Seconds to wait while a receiver's buffer is full."""

_open: weakref.WeakSet[Any] = weakref.WeakSet()


class Connection:
    """A socket that sends and receives framed JSON messages."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._received = bytearray()
        self.closed = False
        connection.settimeout(PATIENCE)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        close_in_children(connection)

    def fileno(self) -> int:
        """Return the descriptor, for selectors."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send a message. If the other side is gone, set ``closed``."""
        data = json.dumps(message, ensure_ascii=False).encode(errors="backslashreplace")
        assert len(data) <= MAX_MESSAGE_BYTES
        try:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)
        except OSError:
            self.closed = True

    def receive(self) -> list[Message]:
        """Return the messages that have arrived, after a selector reported data; set ``closed`` at the
        end of the stream."""
        try:
            data = self._socket.recv(1 << 16)
        except TimeoutError:
            return []
        except OSError:
            data = b""
        if not data:
            self.closed = True
        self._received += data
        return self._messages()

    def _messages(self) -> list[Message]:
        found: list[Message] = []
        while len(self._received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received)
            end = _LENGTH.size + length
            if length > MAX_MESSAGE_BYTES:
                self.closed = True  # not from a watcher
                self._received.clear()
            if len(self._received) < end:
                break
            try:
                message = json.loads(self._received[_LENGTH.size : end])
            except (ValueError, RecursionError):
                message = None
            del self._received[:end]
            if not isinstance(message, dict):
                self.closed = True
                break
            found.append(message)
        return found

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def close_in_children(connection: socket.socket) -> socket.socket:
    """Have children that are forked later (loader workers) close this socket; return it."""
    _open.add(connection)
    return connection


def _close_in_child() -> None:
    for connection in list(_open):
        connection.close()
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)

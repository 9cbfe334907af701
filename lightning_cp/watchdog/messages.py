"""Messages of ranks about themselves: signs of life, errors, and who failed."""

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
from lightning_cp.watchdog.phase import PhasePosition

LONGEST = 20_000
"""Characters of a traceback that are passed on: the last ones."""

OWN, TOLD, BROKEN = "own", "told", "broken"
_CLOSED = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection refused|timed? ?out|gloo|nccl|remote process",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Card:
    """The facts that ranks know of each other."""

    rank: int
    name: str
    """``rank 2 (cp_rank 1 of 4, data_rank 0)``."""
    machine: str
    pid: int
    path: str
    """Where its position is to be read, on its machine."""
    output: str = ""
    """What its standard error goes to, on its machine; ranks that were started together may share it."""


@dataclass(frozen=True)
class Note:
    """A rank's message about an error that it has."""

    error: str
    """``ValueError: no such file``."""
    traceback: str = ""
    kind: str = OWN
    """``told``: every rank raises, as all were told of some rank's error; ``broken``: it looks as if another
    rank had failed before, as a connection was closed."""
    place: PhasePosition = field(default_factory=PhasePosition)
    is_shown: bool = False
    """The rank shows its message as the last of all, so that others only name it."""

    @classmethod
    def of_error(cls, error: BaseException, place: PhasePosition) -> Note:
        """Of what this rank's main thread has raised."""
        text = "".join(traceback.format_exception(error))[-LONGEST:]
        is_shown = isinstance(error, LightningCPError)
        line = "".join(traceback.format_exception_only(error)).strip().splitlines()[0][:2000]
        line = short_line_of(error) if is_shown else line
        return cls(without_home(line), without_home(text), _kind(error), place, is_shown)

    def as_message(self) -> list[Any]:
        """For the wire."""
        return [self.error, self.traceback, self.kind, list(self.place), self.is_shown]

    @classmethod
    def of_message(cls, message: list[Any]) -> Note:
        """From the wire."""
        error, text, kind, place, is_shown = message
        return cls(
            str(error), str(text), str(kind), PhasePosition(*map(int, place)), bool(is_shown)
        )


@dataclass(frozen=True)
class Beat:
    """A rank's message about itself, sent all the time."""

    count: int = 0
    """Grows with every sign of progress."""
    since: int = 0
    """Of these, since the micro-batch began."""
    place: PhasePosition = field(default_factory=PhasePosition)
    limit: float | None = None
    """Seconds without any progress that it allows now."""
    stack: str = ""
    """Where its main thread is, if it has stood there for long."""
    within: str = ""
    """The module that it is calling, of those that all ranks have to call together."""

    def as_message(self) -> list[Any]:
        """For the wire."""
        return [self.count, self.since, list(self.place), self.limit, self.stack, self.within]

    @classmethod
    def of_message(cls, message: list[Any]) -> Beat:
        """From the wire."""
        count, since, place, limit, stack, within = message
        limit = None if limit is None else float(limit)
        at = PhasePosition(*map(int, place))
        return cls(int(count), int(since), at, limit, str(stack), str(within))


@dataclass(frozen=True)
class Verdict:
    """The message to all ranks.

    Args:
        kind: ``lost`` (its process is gone), ``left`` (it has ended in good order, and others go on),
            ``raised``, ``frozen`` (no sign of life) or ``stuck`` (all live, and none goes on).
        ranks: who failed.
        line: what every other rank prints last.
        details: a traceback, or stacks, if there are any.
        is_shown: who failed shows it after this line.
    """

    kind: str
    ranks: tuple[int, ...]
    line: str
    details: str = ""
    is_shown: bool = False

    @property
    def stands(self) -> bool:
        """Ranks live, and wait for each other: details are their stacks."""
        return self.kind in ("stuck", "left")

    def as_message(self) -> list[Any]:
        """For the wire."""
        return [self.kind, list(self.ranks), self.line, self.details, self.is_shown]

    @classmethod
    def of_message(cls, message: list[Any]) -> Verdict:
        """From the wire."""
        kind, ranks, line, details, is_shown = message
        return cls(str(kind), tuple(map(int, ranks)), str(line), str(details), bool(is_shown))


def _kind(error: BaseException) -> str:
    if isinstance(error, RankFailure):
        return TOLD
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if _is_of_a_connection(cause):
            return BROKEN
        cause = cause.__cause__ or cause.__context__
    return OWN


def _is_of_a_connection(error: BaseException) -> bool:
    if isinstance(error, (dist.DistError, ConnectionError)):
        return True
    return type(error) is RuntimeError and bool(_CLOSED.search(str(error)))


# Short messages between watchers: JSON with its length in front, never pickles.


Message = dict[str, Any]
_LENGTH = struct.Struct("<I")
LIMIT = 256 * 1024
"""Bytes of a message; more is no message of ours."""
PATIENCE = 2.0
"""Seconds that a receiver's full buffer is waited for."""

_open: weakref.WeakSet[Any] = weakref.WeakSet()


class Connection:
    """One connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._received = bytearray()
        self.closed = False
        connection.settimeout(PATIENCE)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        kept(connection)

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send, unless the other side is gone, which shows when it is read from."""
        data = json.dumps(message, ensure_ascii=False).encode(errors="backslashreplace")
        assert len(data) <= LIMIT
        try:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)
        except OSError:
            self.closed = True

    def receive(self) -> list[Message]:
        """What has come, once a selector says so; ``closed`` is set where nothing will come any more."""
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
            if length > LIMIT:
                self.closed = True  # a stranger
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
        """Hang up."""
        self._socket.close()


def kept(connection: socket.socket) -> socket.socket:
    """A socket that children forked from now on (workers of loaders) do not hold open."""
    _open.add(connection)
    return connection


def _close_in_child() -> None:
    for connection in list(_open):
        connection.close()
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)

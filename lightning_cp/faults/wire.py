"""Short messages between watchers: JSON with its length in front, never pickles."""

from __future__ import annotations

import json
import os
import socket
import struct
import weakref
from typing import Any

Message = dict[str, Any]
_LENGTH = struct.Struct("<I")
LIMIT = 256 * 1024
"""Bytes of a message; more is no message of ours."""
PATIENCE = 2.0
"""Seconds that a receiver's full buffer is waited for."""

_open: weakref.WeakSet[Any] = weakref.WeakSet()


class Link:
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

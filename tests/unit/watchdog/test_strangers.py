"""The watch's connections: who does not know the run's token is cut off, and changes nothing."""

from __future__ import annotations

import json
import os
import pickle
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lightning_cp.watchdog.messages import (
    MAX_MESSAGE_BYTES,
    MAX_TRACEBACK_CHARS,
    Connection,
    Note,
    RankIdentity,
    Verdict,
)
from lightning_cp.watchdog.phase import Position, Slot
from lightning_cp.watchdog.thread import Hub
from lightning_cp.watchdog.watch import _listen

TOKEN = "a5" * 16
LOOPBACK = "127.0.0.1"


def message(content: Any) -> bytes:
    """On the wire."""
    data = json.dumps(content).encode()
    return struct.pack("<I", len(data)) + data


HELLO = message({"hello": TOKEN, "rank": 1})
NOTE = {"note": ["ValueError: forged", "", "own", [1, 1, 2]]}
STRANGERS = {
    "another token": message({"hello": "b6" * 16, "rank": 1}) + message(NOTE),
    "no token": message({"rank": 1}),
    "a token that is no text": message({"hello": [TOKEN], "rank": 1}),
    "no hello": message(NOTE),
    "a rank that there is not": message({"hello": TOKEN, "rank": 7}),
    "the first rank": message({"hello": TOKEN, "rank": 0}),
    "a rank that is no number": message({"hello": TOKEN, "rank": "1"}),
    "brackets without end": struct.pack("<I", 200_000) + b"[" * 200_000,
    "a list": message(["hello"]),
    "a pickle": struct.pack("<I", 60) + pickle.dumps({"hello": TOKEN, "rank": 1}).ljust(60, b"."),
    "a message that is too long": struct.pack("<I", MAX_MESSAGE_BYTES + 1) + b" " * 64,
}


@pytest.fixture
def hub() -> Iterator[tuple[int, list[Verdict]]]:
    """A watcher of two ranks, of which the second has not come yet: its port, and what it said."""
    said: list[Verdict] = []
    made, port = hub_of_two(said)
    made.start()
    yield port, said
    made.leave()
    made.join(10)
    assert not made.is_alive()


def hub_of_two(said: list[Verdict]) -> tuple[Hub, int]:
    """A watcher that has not started, and its port."""
    listener = _listen(LOOPBACK)
    assert listener.getsockname()[0] == LOOPBACK
    port = listener.getsockname()[1]
    identities = [RankIdentity(rank, f"rank {rank}", "here", os.getpid(), "") for rank in range(2)]
    made = Hub(
        0, identities, Position(), {}, lambda *_: None, TOKEN, said.append, listener=listener
    )
    return made, port


def connected(port: int, data: bytes) -> socket.socket:
    connection = socket.create_connection((LOOPBACK, port), 10)
    connection.sendall(data)
    return connection


@pytest.mark.parametrize("name", STRANGERS)
def test_a_stranger_is_cut_off(name: str, hub: tuple[int, list[Verdict]]) -> None:
    port, said = hub
    # A connection of which not all was read is reset.
    with connected(port, STRANGERS[name]) as stranger, suppress(ConnectionResetError):
        assert stranger.recv(1 << 16) == b""
    with connected(port, message({"hello": TOKEN, "rank": 1})) as member:
        while "ready" not in heard(member):
            pass
        member.sendall(message({"bye": 1}))
    assert said == []


def test_a_stranger_that_says_nothing_is_cut_off_too(hub: tuple[int, list[Verdict]]) -> None:
    port, said = hub
    with connected(port, b"") as stranger, connected(port, HELLO) as member:
        while "ready" not in heard(member):
            pass
        assert stranger.recv(1) == b""
        member.sendall(message({"bye": 1}))
    assert said == []


def test_a_stranger_that_hangs_up_as_the_last_member_comes_is_no_failure() -> None:
    """Both are heard of at once: the first one's coming cuts off the other, of which there is news, too."""
    said: list[Verdict] = []
    made, port = hub_of_two(said)
    with connected(port, HELLO) as member:
        made._accept(made._listener)
        connected(port, b"").close()
        made._accept(made._listener)
        assert len(made._unidentified) == 2
        made.start()
        while "ready" not in heard(member):
            pass
        assert "beat" in heard(member)
        member.sendall(message({"bye": 1}))
        made.leave()
        made.join(10)
    assert said == []


def test_long_errors_in_any_script_are_passed_on(hub: tuple[int, list[Verdict]]) -> None:
    """What asks for most bytes: signs beyond 16 bits, controls, and half a sign of a file's name."""
    port, _ = hub
    note = Note(
        "E: \udc80", "\U0001f600" * (MAX_TRACEBACK_CHARS // 2) + "\x01" * (MAX_TRACEBACK_CHARS // 2)
    )
    with _listen(LOOPBACK) as listener, connected(listener.getsockname()[1], b"") as ours:
        Connection(ours).send({"note": note.as_message()})
        with listener.accept()[0] as theirs:
            sent = heard(theirs)
    assert Note.of_message(sent["note"]) == note
    with connected(port, HELLO + message(sent)) as member:
        while "verdict" not in (told := heard(member)):
            pass
        member.sendall(message({"bye": 1}))
    assert Verdict.of_message(told["verdict"]).details == note.traceback


def heard(member: socket.socket) -> dict[str, Any]:
    """The next message."""
    (length,) = struct.unpack("<I", received(member, 4))
    return json.loads(received(member, length))


def received(member: socket.socket, count: int) -> bytes:
    """So many bytes; a socket with a time limit does not wait for all of them by itself."""
    found = b""
    while len(found) < count:
        part = member.recv(count - len(found))
        assert part, "hung up"
        found += part
    return found


def test_a_position_is_read_from_the_file_that_was_meant(tmp_path: Path) -> None:
    own = Slot(token=b"x" * 16)
    try:
        assert Slot(own.path, b"x" * 16).read().step == 0
        with pytest.raises(OSError, match="is not the file that was meant"):
            Slot(own.path, b"y" * 16)
        (tmp_path / "link").symlink_to(own.path)
        with pytest.raises(OSError, match=r"symbolic links|ELOOP"):
            Slot(str(tmp_path / "link"), b"x" * 16)
    finally:
        own.unlink()

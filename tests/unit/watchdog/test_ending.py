"""A rank that is told to end does end, whatever is in the way."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from lightning_cp.launch.worker_results import _read_verdict
from lightning_cp.watchdog import attribution as ending
from lightning_cp.watchdog.messages import Verdict

NO_TEXT = "rank 1 raised at step 3, in forward: OSError: no file name\udce9 …"
WRITTEN = NO_TEXT.replace("\udce9", "\\udce9")


@pytest.fixture
def statuses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[int]]:
    """What this process would have ended with."""
    found: list[int] = []
    monkeypatch.setattr(ending.os, "_exit", found.append)
    monkeypatch.setenv(ending.FOLDER, str(tmp_path))
    yield found
    ending.exit_actions.clear()


def end(line: str) -> None:
    """As a watcher does it, in a thread."""
    thread = threading.Thread(target=ending.end_process, args=(Verdict("raised", (1,), line),))
    thread.start()
    thread.join()


def test_a_message_that_is_no_text(
    statuses: list[int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    end(NO_TEXT)
    assert statuses == [1]
    assert capfd.readouterr().err == f"\n{WRITTEN}\n"
    assert _read_verdict(tmp_path) == WRITTEN


def test_a_callback_that_exits(statuses: list[int], capfd: pytest.CaptureFixture[str]) -> None:
    def leave() -> NoReturn:
        raise SystemExit(0)

    ending.exit_actions.append(leave)
    end("a line")
    assert statuses == [1]
    assert capfd.readouterr().err == "\na line\n"


def test_something_that_nobody_thought_of(
    statuses: list[int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ending, "report_to_parent", lambda verdict: 1 / 0)
    end("a line")
    assert statuses == [1]
    assert capfd.readouterr().err == "\na line\n"

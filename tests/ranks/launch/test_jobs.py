"""A job and all that it has started end with the program that runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_cp.utils.subprocess import describe_status, run_job
from tests.helpers.launch.programs import OURS, environment, program

RANKS = """
SETTING
child = subprocess.Popen([sys.executable, "-c", "import time; SETTING2; time.sleep(600)"])
time.sleep(0.5)  # it has to be deaf before anyone hears of it
open("pids.new", "w").write(f"{os.getpid()} {child.pid}")
os.rename("pids.new", "pids")
time.sleep(600)
"""
DEAF = "signal.signal(signal.SIGINT, signal.SIG_IGN)"


def job_with_a_rank(folder: Path, *, deaf: bool = False) -> Path:
    """An application whose job starts a process, and then both wait; deaf ones do not hear Ctrl-C."""
    body = RANKS.replace("SETTING2", f"import signal; {DEAF}" if deaf else "pass")
    body = body.replace("SETTING", DEAF if deaf else "pass")
    return program(folder, "\n    ".join(body.strip().splitlines()))


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def within(seconds: float, condition: object) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.05)
    return False


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("number", "deaf"),
    [
        (signal.SIGINT, False),
        (signal.SIGTERM, False),
        (signal.SIGHUP, False),
        (signal.SIGINT, True),
    ],
    ids=["ctrl-c", "term", "terminal-closed", "ctrl-c-unheard"],
)
def test_signals_to_the_sweep_end_the_job_and_its_ranks(
    tmp_path: Path, number: int, deaf: bool
) -> None:
    app = job_with_a_rank(tmp_path, deaf=deaf)
    app.write_text(
        f"import lightning_cp.utils.subprocess\nlightning_cp.utils.subprocess.GRACE = 1.0\n{app.read_text()}"
    )
    sweep = subprocess.Popen(
        [sys.executable, str(app), "-m", OURS, "+x=1,2"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    pids: list[int] = []
    printed = ""
    try:
        file = tmp_path / "pids"
        assert within(30, lambda: sweep.poll() or (file.is_file() and len(file.read_text()) > 2))
        pids = [int(pid) for pid in file.read_text().split()]
        assert len(pids) == 2
        sweep.send_signal(number)  # to the sweep alone: what it started has to hear of it from us
        printed, _ = sweep.communicate(timeout=30)
        assert sweep.returncode == -number, printed
        assert within(5, lambda: not any(map(alive, pids)))
        assert printed.count("SAID ") == 1  # the second job was not started
    finally:
        for pid in [sweep.pid, *pids]:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        if not printed:
            print(sweep.communicate()[0])


def test_ranks_that_wait_for_one_that_failed_are_ended(tmp_path: Path) -> None:
    pids = tmp_path / "pid"
    code = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(pids)!r}, "w").write(str(child.pid))
sys.exit(7)
"""
    assert run_job([sys.executable, "-c", code]) == 7
    assert within(5, lambda: not alive(int(pids.read_text())))


def test_output_goes_to_a_file_if_one_is_given(tmp_path: Path) -> None:
    code = "import os, sys; print(os.environ['MORE']); sys.stderr.write('and errors')"
    file = tmp_path / "new" / "output.txt"
    assert run_job([sys.executable, "-c", code], {"MORE": "words"}, file) == 0
    assert sorted(file.read_text().split("\n")) == ["and errors", "words"]


def test_statuses_in_words() -> None:
    assert describe_status(3) == "exit status 3"
    assert describe_status(-9) == "signal SIGKILL"
    assert describe_status(-63) == "signal 63"

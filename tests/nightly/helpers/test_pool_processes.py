"""No process outlives the pytest session, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MARK = "POOL_ORPHAN_MARK"

SESSION = """
import os, time
from pathlib import Path
from tests.helpers import pool
from tests.helpers.pool import master

master.PRELOAD = ("torch.distributed",)  # starts faster; what is tested is the ending

def work(rank, world_size, seconds):
    Path(os.environ["STARTED"], str(rank)).touch()
    if rank == 0 and os.fork() == 0:  # a child of a rank must not outlive it either
        time.sleep(600)
    time.sleep(seconds)

def test_work():
    pool.run_ranks(2, work, float(os.environ["SECONDS_PER_CASE"]), timeout=300.0)
"""

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="finds processes by their environment in /proc"
)


def marked(mark: str) -> list[int]:
    """Live processes that inherited the mark, by whatever path."""
    found: list[int] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = (process / "environ").read_bytes()  # empty for a zombie
        except OSError:
            continue
        if f"{MARK}={mark}".encode() in environment:
            found.append(int(process.name))
    return found


def start_session(directory: Path, mark: str, seconds: float) -> subprocess.Popen[str]:
    (directory / "test_session.py").write_text(SESSION)
    (directory / "pytest.ini").write_text("[pytest]\n")
    (directory / "started").mkdir()
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.conftest",
        "-p",
        "no:cacheprovider",
    ]
    environment = os.environ | {
        MARK: mark,
        "PYTHONPATH": str(ROOT),
        "STARTED": str(directory / "started"),
        "SECONDS_PER_CASE": str(seconds),
    }
    return subprocess.Popen(
        [*command, str(directory)],
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


SCRIPT = """
from tests.helpers import pool
from tests.helpers.pool import master
from tests.ranks.helpers.test_pool import make_mesh

if __name__ == "__main__":
    master.PRELOAD = ("torch.distributed",)
    print(pool.run_ranks(2, make_mesh))
"""


def test_a_plain_script_ends(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    mark = uuid.uuid4().hex
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")],
        env=os.environ | {MARK: mark, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120.0,
    )
    assert (done.returncode, done.stdout) == (0, "[2.0, 2.0]\n"), done.stderr
    wait_until(lambda: not marked(mark), 10.0, "every process ends")


def wait_until(happened: Callable[[], bool], limit: float, what: str) -> None:
    deadline = time.monotonic() + limit
    while not happened():
        assert time.monotonic() < deadline, f"{what} within {limit} s"
        time.sleep(0.05)


ENDINGS = {"success": None, "ctrl-c": signal.SIGINT, "kill": signal.SIGKILL}
EXIT_CODES = {"success": 0, "ctrl-c": 2, "kill": -signal.SIGKILL}


@pytest.fixture
def session(name: str, tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """One with that ending, and what marks its processes."""
    mark, seconds = uuid.uuid4().hex, 0.5 if ENDINGS[name] is None else 600.0
    session = start_session(tmp_path, mark, seconds)
    yield mark, session
    for pid in marked(mark):
        os.kill(pid, signal.SIGKILL)
    session.communicate()


# That processes end with a success is what ``test_a_plain_script_ends`` says too.
@pytest.mark.quick("kill")
@pytest.mark.parametrize("name", ENDINGS)
def test_no_process_is_left(
    name: str, session: tuple[str, subprocess.Popen[str]], tmp_path: Path
) -> None:
    mark, process = session

    def ranks_have_started() -> bool:
        assert process.poll() is None, process.communicate()[0]
        return len(list((tmp_path / "started").iterdir())) == 2

    wait_until(ranks_have_started, 240.0, "the ranks start")
    if (ending := ENDINGS[name]) is not None:
        assert len(marked(mark)) >= 4, "pytest, fork server and two ranks should be seen"
        process.send_signal(ending)
    output, _ = process.communicate(timeout=60.0)
    assert process.returncode == EXIT_CODES[name], output
    wait_until(lambda: not marked(mark), 10.0, "every process ends")

"""What is printed of an error of ours: its message once, last, with the user's frames and none of ours."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest

from lightning_cp import error_display
from lightning_cp.errors import ConfigError, RankFailure, ShapeError
from lightning_cp.launch import worker_results as launchers
from tests.helpers.launch.start import SCRIPTS, free_port, program

LIMIT = 280
OF_ALL = (
    "ConfigError: attention dropout must be 0.0 under context parallelism, and attention_dropout in the "
    "config of LlamaForCausalLM is 0.1"
)
OF_ONE = "ShapeError: cu_seqlens must start at 0, got 3 at index 0."


def printed(folder: Path, *command: object, **variables: str) -> str:
    """All that a program and its ranks print, which must fail."""
    with program(folder, *command, **variables) as process:
        output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 1, output[-6000:]
    return output


def check(output: str, message: str, ranks: int, *, as_workers: bool = False) -> None:
    """The message once and last, after the user's frames; one line of each other rank.

    Args:
        output: of all ranks.
        message: of the error.
        ranks: how many there are.
        as_workers: PyTorch ends the others when one has ended, maybe before they have said anything.
    """
    assert output.count(f"\n{message}") == 1, output  # the parity check's line may quote it
    assert message in output.rstrip().splitlines()[-1], output
    assert "/lightning_cp/" not in output.partition("your own frames")[2], output
    assert "in run\n" in output.partition("your own frames")[2], output
    assert output.count("your own frames") == 1, output
    assert output.count("Traceback") == 1, output
    pointing = [
        line for line in output.splitlines() if " shows the " in line or " raised at " in line
    ]
    assert len(pointing) == ranks - 1 or (as_workers and len(pointing) < ranks), output


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("way", "strategy", "ranks", "who"),
    [
        ("trainer", "ulysses_ring", 2, "1"),
        ("fabric", "ulysses_ring_fork", 2, "1"),
        pytest.param("fsdp", "ulysses_ring", 2, "1", marks=pytest.mark.nightly),
        pytest.param("trainer", "ulysses_ring", 4, "all", marks=pytest.mark.nightly),
        pytest.param("trainer", "ulysses_ring", 3, "0", marks=pytest.mark.nightly),
        pytest.param("trainer", "ulysses_ring_spawn", 3, "1", marks=pytest.mark.nightly),
        pytest.param("trainer", "ulysses_ring_fork", 4, "all", marks=pytest.mark.nightly),
        pytest.param("fabric", "ulysses_ring", 3, "2", marks=pytest.mark.nightly),
        pytest.param("fabric", "ulysses_ring_spawn", 2, "0", marks=pytest.mark.nightly),
        pytest.param("hydra", "ulysses_ring", 3, "1", marks=pytest.mark.nightly),
        pytest.param("hydra", "ulysses_ring", 4, "all", marks=pytest.mark.nightly),
        pytest.param("hydra", "ulysses_ring_fork", 2, "all", marks=pytest.mark.nightly),
    ],
)
def test_a_message_is_printed_once_and_last(
    way: str, strategy: str, ranks: int, who: str, tmp_path: Path
) -> None:
    output = printed(tmp_path, SCRIPTS / "refused.py", way, strategy, ranks, who)
    as_workers = strategy != "ulysses_ring"
    check(output, OF_ALL if who == "all" else OF_ONE, ranks, as_workers=as_workers)
    check_libraries(output)
    assert output.count(f"starting {ranks} ranks") == 1, output


def check_libraries(output: str) -> None:
    """What libraries say on every rank is shown once."""
    for said in ("LeafSpec", "`loss_type=None`", "litmodels", "litlogger"):
        lines = [line for line in output.splitlines() if said in line]
        assert len(lines) <= 1, output


@pytest.mark.nightly
@pytest.mark.parametrize(("way", "who"), [("trainer", "all"), ("fabric", "1"), ("trainer", "0")])
def test_the_same_with_torchrun(way: str, who: str, tmp_path: Path) -> None:
    """Its agent prints more after the ranks have ended."""
    options = ("--nproc-per-node=3", f"--master-port={free_port()}")
    command = ("-m", "torch.distributed.run", *options, SCRIPTS / "refused.py")
    output = printed(tmp_path, *command, way, "ulysses_ring", 3, who)
    lines = output.splitlines()
    agents = [at for at, line in enumerate(lines) if "torch/distributed/elastic" in line]
    check("\n".join(lines[: agents[0] if agents else None]), OF_ALL if who == "all" else OF_ONE, 3)
    check_libraries(output)


@pytest.mark.nightly
def test_all_is_shown_on_request(tmp_path: Path) -> None:
    command = (SCRIPTS / "refused.py", "trainer", "ulysses_ring", 2, "all")
    output = printed(tmp_path, *command, LIGHTNING_CP_FULL_ERROR="1")
    assert output.count(OF_ALL) == output.count("Traceback (most recent call last)") == 2
    assert "/lightning_cp/models/" in output


@pytest.mark.nightly
def test_all_that_libraries_say_is_shown_on_request(tmp_path: Path) -> None:
    command = (SCRIPTS / "refused.py", "trainer", "ulysses_ring", 2, "1")
    output = printed(tmp_path, *command, LIGHTNING_CP_FULL_ERROR="1")
    assert output.count("LeafSpec") >= 2  # a line and the code beside it, of each rank


@pytest.mark.nightly
def test_an_error_of_the_user_s_is_printed_by_python(tmp_path: Path) -> None:
    output = printed(tmp_path, SCRIPTS / "refused.py", "trainer", "ulysses_ring", 2, "user")
    assert output.count("Traceback (most recent call last)") == 2
    assert "your own frames" not in output


# What ranks of one machine do


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("LOCAL_RANK", "SLURM_LOCALID", error_display.FULL):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(error_display, "_place", None)
    monkeypatch.setattr(error_display, "_asked_hydra", False)
    monkeypatch.setattr(error_display, "ELECTION_SECONDS", 0.1)
    monkeypatch.setattr(
        sys, "excepthook", sys.__excepthook__
    )  # process groups of other tests leave theirs
    return monkeypatch


def test_ranks_of_other_machines_are_not_waited_for(here: pytest.MonkeyPatch) -> None:
    """Lightning tells the ranks that it starts how many there are on all machines."""
    counts: list[int] = []

    class Lightning:
        def _call_children_scripts(self) -> None:
            counts.append(error_display._here().count)

    class Launcher(launchers._AnnouncingLauncher, Lightning):
        num_processes = 2

    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", error_display.RANKS_HERE):
        here.delenv(name, raising=False)
    here.setenv("LOCAL_RANK", "1")
    here.setenv("WORLD_SIZE", "4")
    assert error_display._here().count == 4
    Launcher()._call_children_scripts()
    assert counts == [2]
    assert error_display.RANKS_HERE not in os.environ


def test_of_the_error_itself_nothing_is_changed(
    here: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        raise ShapeError("it is odd", 3)
    except ShapeError as raised:
        error, trace = raised, raised.__traceback__
    hook: Any = sys.excepthook
    hook(ShapeError, error, trace)
    assert type(error) is ShapeError
    assert error.args == ("it is odd", 3)
    assert error.__traceback__ is trace
    shown = capsys.readouterr().err
    assert shown.startswith("\nTraceback, your own frames (LIGHTNING_CP_FULL_ERROR=1 shows all")
    assert 'raise ShapeError("it is odd", 3)' in shown
    assert shown.rstrip().endswith("ShapeError: ('it is odd', 3)")


def test_a_hook_of_the_program_s_is_asked(
    here: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found: list[BaseException] = []
    here.setattr(sys, "excepthook", lambda kind, error, trace: found.append(error))
    error = ConfigError("sizes")
    sys.excepthook(ConfigError, error, None)
    other = ValueError("mine")
    sys.excepthook(ValueError, other, None)
    assert found == [error, other]
    assert capsys.readouterr().err == ""


def _end_with(rank: int, count: int, error: Exception, folder: Path, limit: float) -> None:
    error_display.ELECTION_SECONDS = limit
    seat = error_display.ProcessPlace(rank, f"rank {rank} of {count}", count)
    election = error_display.ErrorElection(folder / "election", seat)
    with (folder / "terminal").open("a") as terminal, redirect_stderr(terminal):
        election.show(error, lambda: error_display.write(error_display.text_of(error)))


def told(folder: Path, *errors: Exception, count: int = 0, limit: float = 20.0) -> list[str]:
    """What ranks print that end with these errors, one after the other or at once."""
    (folder / "election").mkdir()
    context = multiprocessing.get_context("fork")
    count = count or len(errors)
    ranks = [
        context.Process(target=_end_with, args=(at, count, error, folder, limit))
        for at, error in enumerate(errors)
    ]
    for rank in reversed(ranks):
        rank.start()
    for rank in ranks:
        rank.join(60)
        assert rank.exitcode == 0
    return (folder / "terminal").read_text().split("\n\n")


def test_rank_0_shows_what_all_have(tmp_path: Path) -> None:
    *lines, last = told(tmp_path, *(ConfigError("sizes") for _ in range(4)))
    assert last.endswith("ConfigError: sizes\n")
    assert sorted(line.strip() for line in lines) == [
        f"rank {at} of 4 ended: rank 0 of 4 shows the ConfigError" for at in (1, 2, 3)
    ]
    assert not (tmp_path / "election").exists()


def test_the_rank_that_found_it_shows_it(tmp_path: Path) -> None:
    repeated = RankFailure("stopped, because rank 1 raised ShapeError: odd")
    *lines, last = told(tmp_path, repeated, ShapeError("odd"), repeated)
    assert last.endswith("ShapeError: odd\n")
    assert len(lines) == 2
    assert all("rank 1 of 3 shows the ShapeError" in line for line in lines)


def _show_all(rank: int, folder: Path) -> None:
    os.environ[error_display.FULL], tempfile.tempdir = "1", str(folder)
    error_display.set_place(error_display.ProcessPlace(rank, f"rank {rank} of 2", 2))
    error_display.ELECTION_SECONDS = 20.0
    time.sleep(rank)
    with (folder / "terminal").open("a") as terminal, redirect_stderr(terminal):
        error_display.show(ConfigError("sizes"))
        error_display.write("ended")


def test_no_rank_ends_before_all_have_shown_their_whole_errors(tmp_path: Path) -> None:
    """Launchers end the others when one has ended."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_show_all, args=(rank, tmp_path)) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
        assert rank.exitcode == 0
    printed = (tmp_path / "terminal").read_text().split()
    assert [word for word in printed if word in ("sizes", "ended")] == ["sizes"] * 2 + ["ended"] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["terminal"]


def test_another_message_is_named(tmp_path: Path) -> None:
    line, last = told(tmp_path, ShapeError("13 tokens"), ShapeError("14 tokens"))
    assert last.endswith("ShapeError: 13 tokens\n")
    assert (
        line.strip() == "rank 1 of 2 ended with ShapeError: 14 tokens (rank 0 of 2 shows its own)"
    )


def test_a_rank_ends_as_the_election_is_cleared_away(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def gone(folder: Path, pattern: str) -> Any:
        raise FileNotFoundError(folder)

    election = error_display.ErrorElection(
        tmp_path, error_display.ProcessPlace(0, "rank 0 of 1", 1)
    )
    monkeypatch.setattr(Path, "glob", gone)
    monkeypatch.setattr(error_display, "ELECTION_SECONDS", 0.0)
    shown: list[bool] = []
    election.show(ConfigError("sizes"), lambda: shown.append(True))
    assert shown == [True]


def test_a_watcher_s_thread_takes_no_file_of_the_thread_that_raised(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    election = error_display.ErrorElection(
        tmp_path, error_display.ProcessPlace(0, "rank 0 of 2", 2)
    )
    monkeypatch.setattr(error_display, "ELECTION_SECONDS", 0.0)
    monkeypatch.setattr(error_display, "SHOWING", 0.0)
    rename, kinds = Path.rename, []

    def end_as_well(path: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "rename", rename)
        watcher = threading.Thread(target=election.give_way, args=("rank 1 shows its error",))
        watcher.start()
        watcher.join()
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", end_as_well)
    election.show(
        ConfigError("sizes"), lambda: kinds.append(json.loads((tmp_path / "0.card").read_text())[0])
    )
    assert kinds == ["own"]


def test_an_error_is_shown_where_the_others_do_not_come(
    here: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (last,) = told(tmp_path, RankFailure("rank 9 raised"), count=3, limit=0.1)
    assert last.endswith("RankFailure: rank 9 raised\n")
    cards = [path for path in (tmp_path / "election").iterdir() if path.suffix == ".card"]
    assert [json.loads(path.read_text())[0] for path in cards] == ["report"]
    _end_with(1, 3, ConfigError("late"), tmp_path, 0.1)
    assert "ended with ConfigError: late" in (tmp_path / "terminal").read_text()

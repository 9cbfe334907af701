"""Faults that are tried elsewhere: rows of the table that run those tests, and say what came of them."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.installed import ROOT
from tests.nightly.faults.run import Outcome

LIMIT = 1500.0
"""Seconds."""
_COUNTS = re.compile(r"\d+ of \d+ killed in a save, \d+ old, \d+ new")


@dataclass(frozen=True)
class Reference:
    """One of them.

    Args:
        name: what goes wrong.
        bound: what has to come of it.
        tests: who makes it happen, and asserts that.
    """

    name: str
    bound: str
    tests: tuple[str, ...]

    def prove(self, folder: Path) -> Outcome:
        """Run the tests, slow ones too.

        Raises:
            AssertionError: one of them fails, or is not run.
        """
        command = [sys.executable, "-m", "pytest", "-q", "-s", "-m", "", "-p", "no:cacheprovider"]
        began = time.monotonic()
        done = subprocess.run(
            [*command, f"--basetemp={folder / 'tests'}", *self.tests],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        last = (done.stdout.rstrip().splitlines() or [""])[-1]
        passed = re.match(r"\d+ passed", last.strip("= "))
        assert passed is not None, done.stdout[-6000:] + done.stderr[-2000:]
        assert not re.search("failed|skipped|error", last), last
        said = "; ".join([passed[0], *_COUNTS.findall(done.stdout)])
        return Outcome(time.monotonic() - began, said, (0,), (done.stdout,))


_KILLS, _DAMAGE = "tests/ranks/checkpoint/test_kills.py::", "tests/unit/checkpoint/test_damage.py::"
_FULL_DISK = "tests/ranks/checkpoint/test_full_disk.py::"
_SIGNALS, _RESUME = "tests/ranks/launch/test_signals.py::", "tests/ranks/resume/"
REFERENCES = (
    Reference(
        "SIGKILL at each point of a save: in the data, before the manifest and the rename, after the rename",
        "one of the two checkpoints is read bit by bit, the partial one is refused by name",
        (f"{_KILLS}test_a_kill_at_each_point_of_a_save",),
    ),
    Reference(
        "SIGKILL at 20 random points of a save, each of full, sharded, and both in the background",
        "the same",
        (f"{_KILLS}test_kills_at_twenty_random_points",),
    ),
    Reference(
        "old checkpoints are pruned while a save is unfinished",
        "nothing is removed before what replaces it is whole",
        (
            "tests/ranks/checkpoint/test_trainer.py::test_saves_and_resumes",
            "tests/unit/checkpoint/test_refused.py::test_only_checkpoints_are_removed",
        ),
    ),
    Reference(
        "a flipped byte, a truncated file, a missing shard, one of another step",
        "refused, and the file named",
        (
            f"{_DAMAGE}test_a_flipped_byte_of_any_file_is_found",
            f"{_DAMAGE}test_a_flipped_byte_of_the_one_file_is_found",
            f"{_DAMAGE}test_a_truncated_file_is_refused",
            f"{_DAMAGE}test_a_missing_shard_is_named",
            f"{_DAMAGE}test_a_shard_of_another_step_is_named",
            f"{_DAMAGE}test_any_changed_byte_is_found",
        ),
    ),
    Reference(
        "the disk is full, or read-only, on all ranks or on one",
        "an error on every rank that names the path; the old checkpoint is read bit by bit",
        (
            f"{_FULL_DISK}test_a_full_disk_leaves_the_old_checkpoint",
            f"{_FULL_DISK}test_a_file_that_may_not_grow_is_a_full_disk",
            f"{_FULL_DISK}test_a_full_disk_of_one_rank_is_an_error_on_all",
        ),
    ),
    Reference(
        "stopped anywhere, also within an accumulation window, and resumed on the same mesh",
        "weights, optimizer, random numbers, losses, samples: equal sha256",
        (f"{_RESUME}test_trainer.py", f"{_RESUME}test_fabric.py"),
    ),
    Reference(
        "resumed on another mesh",
        "weights and optimizer bit by bit, the next losses to 1e-10",
        ("tests/nightly/resume/test_other_mesh.py",),
    ),
    Reference(
        "SIGTERM to one rank, to all, to the process that spawned them, to torchrun",
        "all ranks save the same step, and exit with 143; the run goes on exactly",
        (
            f"{_SIGNALS}test_every_rank_saves_the_same_step",
            f"{_SIGNALS}test_a_loop_is_told_by_should_stop",
            f"{_SIGNALS}test_the_agent_of_torchrun_passes_it_on",
        ),
    ),
    Reference(
        "a rank has another version of the code, or of torch",
        "a ConfigError at setup, on every rank",
        ("tests/ranks/watchdog/test_same_start.py",),
    ),
    Reference(
        "the main job is killed, and torchrun starts it again",
        "lines and weights are those of a run that was left alone",
        (
            "tests/ranks/apps/test_train_resume.py::test_a_run_that_torchrun_starts_again_is_the_run",
        ),
    ),
)

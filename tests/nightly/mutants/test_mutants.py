"""Two seeded mutants a day must be killed, or all of them. And the script must tell.

``MUTANTS_SEED`` chooses the two; without it they change every day.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.nightly.mutants.__main__ import main
from tests.nightly.mutants.mutant import Mutant
from tests.nightly.mutants.run import ROOT, judge
from tests.nightly.mutants.table import MUTANTS, sample, seed_of_today

QUICK = Mutant(
    "half the ranks",
    "lightning_cp/layout/heads.py",
    "return self.num_heads // self.ulysses_size",
    "return self.num_heads // self.ulysses_size // 2",
    ("tests/unit/layout/test_heads.py::test_groups_that_straddle_ranks",),
    "",
)


def check_killed(mutants: Sequence[Mutant], hint: str) -> None:
    """Fail with all that were not, and why."""
    others = [verdict for verdict in judge(mutants) if verdict.outcome != "killed"]
    shown = "\n".join(f"{v.outcome} {v.mutant.name!r}: {v.details[-3000:]}" for v in others)
    assert not others, f"{hint}\n{shown}"


@pytest.mark.timeout(900)
def test_two_of_them_are_killed(capsys: pytest.CaptureFixture[str]) -> None:
    seed = seed_of_today()
    chosen = sample(list(MUTANTS.values()), 2, seed)
    with capsys.disabled():
        print(f"\nmutants of MUTANTS_SEED={seed}: {', '.join(mutant.name for mutant in chosen)}")
    check_killed(chosen, f"MUTANTS_SEED={seed}")


@pytest.mark.timeout(4 * 3600)
def test_all_of_them_are_killed() -> None:
    check_killed(list(MUTANTS.values()), "")


def test_the_script_tells_what_became_of_a_mutant(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mutants = {
        "killed": QUICK,
        "SURVIVED": replace(QUICK, new=f"{QUICK.old}  # as it was"),
        "error": replace(QUICK, new=f"{QUICK.old} + not_there"),
        "stale": replace(QUICK, old="no such text"),
    }
    named = {outcome: replace(mutant, name=outcome) for outcome, mutant in mutants.items()}
    broken = replace(QUICK, name="broken", tests=("tests/unit/layout/test_heads.py::no_such_test",))
    monkeypatch.setattr("tests.nightly.mutants.__main__.MUTANTS", {**named, "broken": broken})
    monkeypatch.setattr(sys, "argv", ["tests.nightly.mutants"])
    assert main() == 1
    lines = capsys.readouterr().out.splitlines()
    for outcome in mutants:
        assert any(line.startswith(f"{outcome:8} {outcome} (") for line in lines), lines
    assert any(line.startswith("error    broken (") for line in lines), lines
    assert lines[-1] == "1 of 5 mutants killed"


def test_the_tests_they_name_are_quick() -> None:
    named = sorted({test for mutant in MUTANTS.values() for test in mutant.tests})
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", *named]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    collected = done.stdout.splitlines()
    nightly = [
        name
        for name in named
        if not any(cell == name or cell.startswith((f"{name}[", f"{name}::")) for cell in collected)
    ]
    assert not nightly, nightly

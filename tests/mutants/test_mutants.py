"""When asked for, two seeded mutants a day must be killed, or all of them. And the script must tell.

``MUTANTS_SEED`` chooses the two; without it they change every day.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutants.__main__ import main
from tests.mutants.mutant import Mutant, StaleMutantError
from tests.mutants.run import ROOT, TestRun, Verdict, judge
from tests.mutants.table import MUTANTS, sample, seed_of_today

QUICK = Mutant(
    "half the ranks",
    "lightning_cp/layout/heads.py",
    "return self.num_heads // self.ulysses_size",
    "return self.num_heads // self.ulysses_size // 2",
    ("tests/layout/test_heads.py::test_groups_that_straddle_ranks",),
    "",
)


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=lambda mutant: mutant.name)
def test_mutants_fit_the_code(mutant: Mutant, tmp_path: Path) -> None:
    copy = tmp_path / mutant.file
    copy.parent.mkdir(parents=True)
    copy.write_text((ROOT / mutant.file).read_text())
    mutant.apply(tmp_path)
    assert copy.read_text() != (ROOT / mutant.file).read_text()


def test_the_tests_they_name_exist() -> None:
    named = sorted({test for mutant in MUTANTS.values() for test in mutant.tests})
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", *named]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def check_killed(mutants: Sequence[Mutant], hint: str) -> None:
    """Fail with all that were not, and why."""
    others = [verdict for verdict in judge(mutants) if verdict.outcome != "killed"]
    shown = "\n".join(f"{v.outcome} {v.mutant.name!r}: {v.details[-3000:]}" for v in others)
    assert not others, f"{hint}\n{shown}"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_of_them_are_killed(capsys: pytest.CaptureFixture[str]) -> None:
    seed = seed_of_today()
    chosen = sample(list(MUTANTS.values()), 2, seed)
    with capsys.disabled():
        print(f"\nmutants of MUTANTS_SEED={seed}: {', '.join(mutant.name for mutant in chosen)}")
    check_killed(chosen, f"MUTANTS_SEED={seed}")


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_all_of_them_are_killed() -> None:
    check_killed(list(MUTANTS.values()), "")


@pytest.mark.slow
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
    broken = replace(QUICK, name="broken", tests=("tests/layout/test_heads.py::no_such_test",))
    monkeypatch.setattr("tests.mutants.__main__.MUTANTS", {**named, "broken": broken})
    monkeypatch.setattr(sys, "argv", ["tests.mutants"])
    assert main() == 1
    lines = capsys.readouterr().out.splitlines()
    for outcome in mutants:
        assert any(line.startswith(f"{outcome:8} {outcome} (") for line in lines), lines
    assert any(line.startswith("error    broken (") for line in lines), lines
    assert lines[-1] == "1 of 5 mutants killed"


def test_the_script_succeeds_if_all_are_killed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def kill(mutants: Sequence[Mutant]) -> list[Verdict]:
        return [Verdict(mutant, "killed") for mutant in mutants]

    monkeypatch.setattr("tests.mutants.__main__.judge", kill)
    monkeypatch.setattr(sys, "argv", ["tests.mutants", "--sample", "2", "--seed", "x"])
    assert main() == 0
    assert capsys.readouterr().out.startswith("seed x\nkilled   ")
    monkeypatch.setattr(sys, "argv", ["tests.mutants", "no such mutant"])
    with pytest.raises(SystemExit):
        main()
    assert "no such mutant: 'no such mutant'" in capsys.readouterr().err


def test_a_sample_follows_its_seed() -> None:
    every = list(MUTANTS.values())
    assert sample(every, 6, "a") == sample(every, 6, "a")
    assert sample(every, 6, "a") != sample(every, 6, "b")
    assert len(sample(every, 1000, "a")) == len(every)


def test_a_mutant_that_is_no_python_is_stale(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("x = 1\n")
    with pytest.raises(StaleMutantError, match=r"x\.py is no Python any more"):
        Mutant("", "x.py", "1", "(", (), "").apply(tmp_path)


@pytest.mark.parametrize(
    ("failure", "bites"),
    [
        ("AssertionError: 2 of 4 cells", True),
        ("4 ranks\n--- rank 1 raised: ValueError\n--- rank 0 still running: after 5 s", True),
        ("4 ranks\n--- ranks 0, 1 still running: after 60 s", False),
        ("4 ranks\n--- rank 1 died: -11\n--- rank 0 raised: RuntimeError: closed", False),
        ("Failed: Timeout (>300.0s) from pytest-timeout.", False),
        ("NameError: name 'q' is not defined", False),
    ],
)
def test_what_counts_as_a_finding(failure: str, bites: bool) -> None:
    assert TestRun(1, (failure,), "").bit == bites
    assert not TestRun(2, (failure,), "").bit
    assert not TestRun(1, (), "").bit

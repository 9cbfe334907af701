"""Seeded mutants fit the code, and what is said of them; whether tests kill them is found nightly."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.nightly.mutants.__main__ import main
from tests.nightly.mutants.mutant import Mutant, StaleMutantError
from tests.nightly.mutants.run import COPIED, ROOT, TestRun, Verdict
from tests.nightly.mutants.table import MUTANTS, sample


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=lambda mutant: mutant.name)
def test_mutants_fit_the_code(mutant: Mutant, tmp_path: Path) -> None:
    assert mutant.file.startswith(tuple(f"{folder}/" for folder in COPIED))
    copy = tmp_path / mutant.file
    copy.parent.mkdir(parents=True)
    copy.write_text((ROOT / mutant.file).read_text())
    mutant.apply(tmp_path)
    assert copy.read_text() != (ROOT / mutant.file).read_text()


def test_the_script_succeeds_if_all_are_killed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def kill(mutants: Sequence[Mutant]) -> list[Verdict]:
        return [Verdict(mutant, "killed") for mutant in mutants]

    monkeypatch.setattr("tests.nightly.mutants.__main__.judge", kill)
    monkeypatch.setattr(sys, "argv", ["tests.nightly.mutants", "--sample", "2", "--seed", "x"])
    assert main() == 0
    assert capsys.readouterr().out.startswith("seed x\nkilled   ")
    monkeypatch.setattr(sys, "argv", ["tests.nightly.mutants", "no such mutant"])
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

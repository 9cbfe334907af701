"""Running tests against a copy of the repository, as it is or with one mutant applied."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

from tests.nightly.mutants.mutant import Mutant, StaleMutantError

ROOT = Path(__file__).parents[3]
COPIED = ("lightning_cp", "benchmarks", "tests", "pyproject.toml")
LIMIT = 120.0
"""Seconds for each test (or file) of a run until it is given up; a busy machine takes its time."""

Outcome = Literal["killed", "SURVIVED", "stale", "error"]

NO_FINDING = re.compile(
    r"Timeout \(?>|\b(NameError|ImportError|ModuleNotFoundError|SyntaxError)\b"
    r"|\A(?:(?!--- rank).)*--- ranks? [\d, ]+ (?:died|still running)",
    re.DOTALL,
)
"""Failures that say nothing about results: a test that hangs, dies first of all or does not even run."""


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant."""

    mutant: Mutant
    outcome: Outcome
    details: str = ""
    """Output that explains it, unless it was killed."""


@dataclass(frozen=True)
class TestRun:
    """How pytest ended."""

    __test__ = False

    status: int | None
    """Its exit status; ``None`` if it was given up."""
    failures: tuple[str, ...]
    """The text of each test that failed."""
    output: str

    @property
    def passed(self) -> bool:
        """Whether every test passed, and there was one."""
        return self.status == 0

    @property
    def bit(self) -> bool:
        """Whether a test failed because of what it found."""
        return self.status == 1 and any(not NO_FINDING.search(text) for text in self.failures)


def judge(mutants: Sequence[Mutant]) -> Iterator[Verdict]:
    """What becomes of each mutant, one after the other; its tests are run as they are beforehand."""
    sound = _sound({mutant.tests for mutant in mutants})
    for mutant in mutants:
        if mutant.tests not in sound:
            yield Verdict(mutant, "error", f"its tests fail without it: {', '.join(mutant.tests)}")
        else:
            yield _judge(mutant)


def _judge(mutant: Mutant) -> Verdict:
    with _copy() as root:
        try:
            mutant.apply(root)
        except StaleMutantError as stale:
            return Verdict(mutant, "stale", str(stale))
        run = run_tests(root, mutant.tests)
    if run.bit:
        return Verdict(mutant, "killed")
    return Verdict(mutant, "SURVIVED" if run.passed else "error", run.output)


def _sound(selections: Iterable[tuple[str, ...]]) -> set[tuple[str, ...]]:
    """Selections whose tests pass as things are: all of them at once, or one by one if any fails."""
    found = set(selections)
    with _copy() as root:
        if run_tests(root, sorted({test for tests in found for test in tests})).passed:
            return found
        return {tests for tests in found if run_tests(root, tests).passed}


def run_tests(root: Path, tests: Sequence[str]) -> TestRun:
    """Run quick tests of a selection in a copy of the repository, up to the first failure."""
    report, limit = root / "report.xml", LIMIT * (1 + len(tests))
    options = [
        "-x",
        "-q",
        "--hypothesis-profile=any_failure",
        f"--junitxml={report}",
    ]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    # Before an editable installation of this repository, and for the ranks that tests start.
    environment["PYTHONPATH"] = os.pathsep.join([str(root), environment.get("PYTHONPATH", "")])
    environment["TRITON_INTERPRET"] = "1"  # what is selected of Triton's tests, where CUDA is too
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return TestRun(None, (), f"given up after {limit:g} s")
    failures = ElementTree.parse(report).iter("failure") if report.exists() else ()
    return TestRun(
        done.returncode,
        tuple(f"{failure.get('message')}\n{failure.text}" for failure in failures),
        done.stdout + done.stderr,
    )


@contextmanager
def _copy() -> Iterator[Path]:
    """A copy of what tests need. Compiled files come along: they are found valid by their times."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        root = Path(folder)
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, root / name)
            else:
                shutil.copy2(ROOT / name, root / name)
        yield root

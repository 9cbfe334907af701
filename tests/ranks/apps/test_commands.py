"""``python -m lightning_cp`` and ``lightning-cp``: the list of commands, their start, and completion."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_cp.__main__ import COMMANDS, SCRIPTS, candidates, listing, main

ROOT = Path(__file__).parents[3]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_every_documented_command_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/reference/cli.md").read_text()
    assert {name for name in COMMANDS if f"\n## {name}\n" in page} == set(COMMANDS)
    assert page.count("\n## ") == len(COMMANDS)
    for asked in ([], ["--help"], ["-h"], ["completion", "--help"]):
        assert main(asked) == 0
        assert capsys.readouterr().out.strip() == listing()


@pytest.mark.parametrize("words", [["trains"], ["completion"], ["completion", "tcsh"]])
def test_what_is_no_command_is_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    said = capsys.readouterr()
    assert not said.out
    assert said.err.startswith(f"no such command: '{' '.join(words)}'")
    assert listing() in said.err


def test_a_command_is_started_with_its_arguments_and_status() -> None:
    refused = ("train", "strategy=triangle")
    plain, here = run(f"lightning_cp.{refused[0]}", refused[1]), run("lightning_cp", *refused)
    assert plain.returncode == here.returncode == 1
    assert plain.stderr == here.stderr
    assert "triangle" in here.stderr


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("lightning-cp ", [*(f"{name} " for name in COMMANDS), "completion "]),
        ("lightning-cp com", ["compare ", "completion "]),
        ("lightning-cp  com", ["compare ", "completion "]),
        ("lightning-cp completion ", ["bash", "zsh", "fish"]),
        ("lightning-cp checkpoint fi", []),
        ("lightning-cp nothing ", []),
        ("lightning-cp train strategy=r", ["strategy=ring"]),
        ("lightning-cp train strategy=ring experiment=s", ["experiment=smoke"]),
        ("lightning-cp train strategy.mo", ["strategy.mode="]),
    ],
)
def test_candidates(line: str, found: list[str]) -> None:
    assert candidates(line) == found


@pytest.mark.parametrize("shell", ["bash", "zsh"])
@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("lightning-cp train strategy=zig", "<strategy=zigzag_llama3>"),
        ("lightning-cp com", "<compare ><completion >"),
    ],
)
def test_shells_complete(shell: str, line: str, found: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    program = tmp_path / "lightning-cp"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m lightning_cp "$@"\n')
    program.chmod(0o755)
    script = (
        f"compdef() {{ :; }}\n{SCRIPTS[shell]}\nCOMP_LINE='{line}'\nCOMP_POINT={len(line)}\n"
        '_lightning_cp\nprintf "<%s>" "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(
        [shell, "-c", script],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == found
    assert not done.stderr

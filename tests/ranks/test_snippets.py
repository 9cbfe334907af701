"""Snippets of the docs run: programs and commands as a reader starts them, other code after common imports.

``docs/snippets.yaml`` lists those that do not run, each with a reason. Commands that do not run still have to
name settings that exist.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep

from lightning_cp.apps.plan.__main__ import main as plan_program
from lightning_cp.utils.run_folder import config_dir
from tests.helpers.launch.start import environment

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FENCED = re.compile(r"^```(python|sh|bash)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"-m lightning_cp\.(train|doctor|plan|compare|bench)(?![.\w])([^#\n]*)")
PLACEHOLDER = re.compile(r"<(\w+)>")
FOLDERS = {"compare": "compare", "bench": "bench"}
CONFIGS = {"doctor": "train"}
PRELUDE = """
import warnings
warnings.filterwarnings("ignore")
from itertools import islice
import lightning as L
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, IterableDataset
from lightning_cp import *
from lightning_cp import config as _config
globals().update({k: v for k, v in vars(_config).items() if k.endswith("Settings")})
"""
"""What a reader of a part of a program has imported."""
LIMIT = 280


@dataclass(frozen=True)
class Snippet:
    """A block of code of a page."""

    page: str
    language: str
    code: str

    @property
    def first_line(self) -> str:
        """The name of a snippet, without a comment."""
        return re.sub(r"\s+# .*", "", self.code.split("\n", 1)[0]).strip()


def snippets() -> list[Snippet]:
    pages = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
    return [
        Snippet(path.relative_to(DOCS if DOCS in path.parents else ROOT).as_posix(), *found)
        for path in pages
        for found in FENCED.findall(path.read_text())
    ]


NOT_RUN: dict[str, dict[str, str]] = yaml.safe_load((DOCS / "snippets.yaml").read_text())
SNIPPETS = snippets()
RUN: dict[str, list[Snippet]] = defaultdict(list)
for _one in SNIPPETS:
    if _one.first_line not in NOT_RUN.get(_one.page, {}):
        RUN[_one.page].append(_one)
PARTS_OF_EXAMPLES = [
    one
    for one in SNIPPETS
    if NOT_RUN.get(one.page, {}).get(one.first_line, "").startswith("part of examples/")
]
PROGRAMS = {
    page: found for page, found in RUN.items() if any(x.language != "python" for x in found)
}
PARTS = {page: found for page, found in RUN.items() if page not in PROGRAMS}


def test_every_snippet_runs_or_has_a_reason_not_to() -> None:
    listed = {(page, line) for page, lines in NOT_RUN.items() for line in lines}
    known = {(one.page, one.first_line) for one in SNIPPETS}
    assert listed <= known, "docs/snippets.yaml lists snippets that are no more"
    assert all(len(reason.split()) > 1 for lines in NOT_RUN.values() for reason in lines.values())
    assert sum(map(len, RUN.values())) > 25
    assert len(PROGRAMS) >= 1
    assert len(PARTS) >= 8


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page, marks=[pytest.mark.nightly] * (page == "install.md")
        )  # as the quickstart's
        for page in PROGRAMS
    ],
)
def test_programs_and_commands_run(page: str, tmp_path: Path) -> None:
    """In the page's order, in one folder."""
    for index, one in enumerate(PROGRAMS[page]):
        if one.language == "python":
            file = tmp_path / f"program_{index}.py"
            file.write_text(one.code)
            command = [sys.executable, str(file)]
        else:
            command = ["bash", "-e", "-c", one.code]
        require_success(one, command, tmp_path)


def test_parts_of_programs_run(tmp_path: Path) -> None:
    """Each with names of its own, all in one process: imports take seconds."""
    lines = [PRELUDE, "_names = dict(globals())"]
    every = [one for found in PARTS.values() for one in found]
    lines += [f"exec({one.code!r}, {{**_names, '__name__': 'snippet'}})" for one in every]
    (tmp_path / "parts.py").write_text("\n".join(lines))
    done = run([sys.executable, "parts.py"], tmp_path)
    assert done.returncode == 0, (
        f"{every[failed(done.stderr, len(lines) - len(every))]}: {done.stderr}"
    )


def failed(traceback: str, before: int) -> int:
    line = re.search(r'parts\.py", line (\d+)', traceback)
    return int(line[1]) - PRELUDE.count("\n") - before - 1 if line else 0


def require_success(one: Snippet, command: list[str], folder: Path) -> None:
    done = run(command, folder)
    assert done.returncode == 0, f"{one.page}: {one.first_line}\n{done.stdout}\n{done.stderr}"


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{environment()['PATH']}"
    return subprocess.run(
        command,
        cwd=folder,
        env=environment(PATH=path, CUDA_VISIBLE_DEVICES=""),
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


def commands() -> list[tuple[str, str, tuple[str, ...]]]:
    """Page, program and overrides of every command; ``<date>`` and the like are values."""
    found: list[tuple[str, str, tuple[str, ...]]] = []
    for one in SNIPPETS:
        for program, rest in COMMAND.findall(PLACEHOLDER.sub(r"\1", one.code.replace("\\\n", " "))):
            words = [word for word in shlex.split(rest) if not word.startswith("-")]
            if not any(word.startswith("[") for word in words) and "--config-dir" not in rest:
                # not a pattern, nor with configs that an earlier command writes
                found.append((one.page, program, tuple(words)))
    return found


@pytest.mark.parametrize(("page", "program", "words"), commands())
def test_settings_of_commands_exist(page: str, program: str, words: tuple[str, ...]) -> None:
    assert plan_program is not None  # registers what its config resolves
    overrides = [word for word in words if not word.lstrip("+").startswith("hydra")]
    with initialize_config_dir(str(config_dir() / FOLDERS.get(program, "")), version_base="1.3"):
        compose(CONFIGS.get(program, program), overrides=[first_of(one) for one in overrides])


@pytest.mark.parametrize("one", PARTS_OF_EXAMPLES, ids=lambda one: f"{one.page} {one.first_line}")
def test_parts_of_examples_are_in_them(one: Snippet) -> None:
    file = NOT_RUN[one.page][one.first_line].removeprefix("part of ")
    lines, whole = (
        "\n".join(line.strip() for line in text.splitlines())
        for text in (one.code, (ROOT / file).read_text())
    )
    assert f"\n{lines}\n" in f"{whole}\n"


def first_of(override: str) -> str:
    """Return an override with the first value of a sweep."""
    parsed: Any = OverridesParser.create().parse_override(override)
    if isinstance(parsed.value(), ChoiceSweep):
        return f"{override.partition('=')[0]}={parsed.value().list[0]}"
    return override

"""Snippets of the docs run: programs and commands as a reader starts them, other code in its scene.

``docs/snippets.yaml`` names the scenes, and lists what does not run, each with a reason. Commands that do not
run still have to name settings that exist.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep

from lightning_cp.apps.plan.__main__ import main as plan_program
from lightning_cp.utils.run_folder import config_dir
from tests.helpers.docs.pages import ENTRIES, ROOT, Snippet, snippets
from tests.helpers.docs.scenes import RANKS, SCENES, play
from tests.helpers.launch.start import all_succeeded, environment, ranks, torchrun_variables
from tests.helpers.pool import run_ranks

COMMAND = re.compile(r"-m lightning_cp\.(train|doctor|plan|compare|bench)(?![.\w])([^#\n]*)")
PLACEHOLDER = re.compile(r"<(\w+)>")
FOLDERS = {"compare": "compare", "bench": "bench"}
CONFIGS = {"doctor": "train"}
LIMIT = 280
SHORT = "shortened"
"""The scene of commands that train for a few steps, on two ranks that start as torchrun would start them."""
SMALL = (
    *(
        "trainer.max_steps=3",
        "trainer.devices=2",
        "trainer.val_check_interval=3",
        "data.seq_len=64",
    ),
    *(
        "data.validation_sequences=1",
        "model.warmup_steps=1",
        "model.network.config.num_hidden_layers=1",
    ),
)
TRAIN = """
import lightning as L
from tests.helpers.docs.reader import Module, loader

trainer = L.Trainer(strategy="ulysses_ring", accelerator="cpu", devices=2, max_steps=2, logger=False)
trainer.fit(module := Module(), loader())
print(f"trained {module.trained} steps")
"""
"""The program of a reader."""
SNIPPETS = list(snippets())
RUN = [one for one in SNIPPETS if one.runs]
SHORTENED = [one for one in RUN if one.scene == SHORT]
PROGRAM_PAGES = {one.page for one in RUN if one.language != "python" and not one.scene}
PROGRAMS: dict[str, list[Snippet]] = defaultdict(list)
PARTS: dict[str, list[Snippet]] = defaultdict(list)
for _one in RUN:
    if _one in SHORTENED:
        continue
    _is_program = _one.page in PROGRAM_PAGES and not _one.scene
    (PROGRAMS if _is_program else PARTS)[_one.page].append(_one)
PARTS_OF_EXAMPLES = [one for one in SNIPPETS if one.entry.startswith("part of examples/")]


def test_every_snippet_runs_or_has_a_reason_not_to() -> None:
    listed = {(page, line) for page, lines in ENTRIES.items() for line in lines}
    known = {(one.page, one.first_line) for one in SNIPPETS}
    assert listed <= known, "docs/snippets.yaml lists snippets that are no more"
    assert all(len(entry.split()) > 1 for lines in ENTRIES.values() for entry in lines.values())
    assert {one.scene for one in RUN} <= {*SCENES, SHORT}
    assert len(RUN) >= 77


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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", PARTS)
def test_parts_of_programs_run(page: str) -> None:
    """On ranks that stand, each with names of its own and what its scene gives it."""
    for one in PARTS[page]:
        run_ranks(RANKS.get(one.scene, 2), play, one)


@pytest.mark.parametrize("one", SHORTENED, ids=str)
def test_commands_train_in_short(one: Snippet, tmp_path: Path) -> None:
    """One of a block: others differ in settings, which are all looked up."""
    (tmp_path / "train.py").write_text(TRAIN)
    words = shlex.split(one.code.splitlines()[0], comments=True)
    at = words.index("train.py") if "train.py" in words else words.index("-m")
    small: tuple[str, ...] = () if "train.py" in words else SMALL
    if small and not any(word.startswith("strategy=") for word in words):
        small = (*small, "strategy=ulysses")  # the default needs four ranks
    done = all_succeeded(ranks(tmp_path, torchrun_variables(2), *words[at:], *small))
    assert re.search(r"^ *trained +[23] steps", done[0].output, re.MULTILINE)
    assert ("strategy.profile=3" in words) == ("Training step 3, milli" in done[0].output)


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
    file = one.entry.split(";")[0].removeprefix("part of ")
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

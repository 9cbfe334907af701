"""``--help`` of every program explains every key, and says its default."""

from __future__ import annotations

import argparse
import ast
import importlib
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import lightning_cp
from lightning_cp.apps.doctor.__main__ import HELP
from lightning_cp.strategies.base import ContextParallelStrategy
from lightning_cp.utils.command_help import (
    ConfigFiles,
    argument_parser,
    explanations,
    help_text,
    leaves,
)
from lightning_cp.utils.run_folder import config_dir
from tests.helpers.launch.start import environment

PROGRAMS = {"train": "", "plan": "", "compare": "compare", "bench": "bench"}
PACKAGE = Path(lightning_cp.__file__).parent


def configs(name: str) -> Iterator[tuple[dict[str, Any], ConfigFiles]]:
    """A program's config, and with every choice of every group."""
    folder = config_dir() / PROGRAMS[name]
    _, files = composed(folder, name)
    overrides = [f"{files.group(path)}={path.stem}" for path in files.of_groups]
    for override in ["", *overrides]:
        of_planner = override.startswith("experiment=plan_")
        if "experiment=" not in override or of_planner == (name == "plan"):
            yield composed(folder, name, *filter(None, [override]))


def composed(folder: Path, name: str, *overrides: str) -> tuple[dict[str, Any], ConfigFiles]:
    with initialize_config_dir(str(folder), version_base="1.3"):
        whole = compose(name, overrides=list(overrides), return_hydra_config=True)
    own = OmegaConf.masked_copy(whole, [str(key) for key in whole if key != "hydra"])
    plain: Any = OmegaConf.to_container(own)
    return plain, ConfigFiles(folder, name, dict(whole.hydra.runtime.choices))


@pytest.mark.quick("bench")
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_key_of_a_config_is_explained(name: str) -> None:
    seen: set[str] = set()
    for config, files in configs(name):
        known = explanations(config, files)
        keys = {key for key, _ in leaves(config)}
        assert keys
        assert not keys - set(known), "a comment behind the key, or an entry in a docstring"
        seen |= keys
    assert len(seen) > 5


def test_the_strategy_s_keys_have_the_words_of_its_docstring() -> None:
    config, files = composed(config_dir(), "train", "strategy=fsdp", "optim=muon")
    known = explanations(config, files)
    assert known["strategy.ring_size"] == "ranks that K/V travel around"
    assert known["strategy.ring_size"] in (ContextParallelStrategy.__doc__ or "")
    assert known["data.seq_len"] == "tokens in a sequence"  # of what its docstring refers to
    assert known["trainer.log_every_n_steps"] == "How often to log within steps"  # Lightning's
    assert known["model.optimizer.ns_steps"] == "steps of Newton-Schulz"  # a comment's


ABOUT: dict[str, dict[str, Any]] = {"doctor": HELP}
"""Of a program that reads the main job's config."""


@pytest.mark.parametrize("name", [*PROGRAMS, *ABOUT])
def test_help_begins_with_what_a_program_does(name: str) -> None:
    """Then come an example, and what its exit status says; keys after that."""
    first = "train" if name in ABOUT else name
    config, files = composed(config_dir() / PROGRAMS[first], first)
    text = help_text(config, files, **ABOUT.get(name, {}))
    does, usage, *_ = text.split("\n\n")
    assert re.fullmatch(r"[A-Z][a-z]+ .*[.?]", does, re.DOTALL)
    assert usage.startswith(f"Usage: python -m lightning_cp.{name} ")
    assert f"\n  python -m lightning_cp.{name}" in usage
    assert "\n\nExit status: 0: " in text.partition("Choices (")[0].partition("Keys, with")[0]


def test_the_doctor_s_help_has_no_keys_that_it_does_not_read() -> None:
    config, files = composed(config_dir(), "train", "throughput=mfu")
    whole, own = help_text(config, files), help_text(config, files, **HELP)
    for name in ("resume", "throughput", "throughput.every_n_steps", "strategy.parity_check"):
        assert f"\n  {name}=" in whole
        assert f"\n  {name}=" not in own
    assert "\n  strategy.parity_tokens=" in own


@pytest.mark.quick("train", "plan", "compare")
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_explains_a_choice_is_whole(name: str) -> None:
    """One line of its file, which does not lead to the next one."""
    _, files = composed(config_dir() / PROGRAMS[name], name)
    for path in files.of_groups:
        first = re.sub("^# @package.*\n", "", path.read_text()).partition("\n")[0]
        assert re.fullmatch(r"# \S.*[^\s:,]", first), path
        assert "python -m" not in first, path


def test_what_nothing_explains_has_no_words(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(
        "# A program.\na: 1 # the first\nb: '#2'\nc:\n  d: [1] # a list\n"
    )
    config = {"a": 1, "b": "#2", "c": {"d": [1], "_target_": "nowhere.at_all"}}
    files = ConfigFiles(tmp_path, "own", {})
    assert explanations(config, files) == {"a": "the first", "c.d": "a list"}
    text = help_text(config, files)
    assert text.startswith("A program.\n")
    assert "  a=1\n      the first\n  b=#2\n  c.d=[1]\n      a list\n" in text


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("program", "override"),
    [
        ("bench", "warm_up=7"),
        pytest.param("train", "strategy=fsdp", marks=pytest.mark.nightly),
        pytest.param("doctor", "strategy=fsdp", marks=pytest.mark.nightly),
        pytest.param("plan", "devices=3", marks=pytest.mark.nightly),
        pytest.param("compare", "experiment=optimizers", marks=pytest.mark.nightly),
    ],
)
def test_a_program_prints_it(program: str, override: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", f"lightning_cp.{program}", "--help", override]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    values = re.findall(r"^  [\w.]+=.*\n      \S", done.stdout, re.MULTILINE)
    assert len(values) == len(re.findall(r"^  [\w.]+=", done.stdout, re.MULTILINE)) > 5
    shown = {
        "strategy=fsdp": "strategy.data_parallel=fsdp",
        "experiment=optimizers": "train.seeds=",
    }
    assert f"  {shown.get(override, override)}" in done.stdout
    assert not list(tmp_path.iterdir())


def modules_with_arguments() -> list[str]:
    """Modules of the package that make a parser of arguments."""
    found = [one.name for one in pkgutil.walk_packages([str(PACKAGE)], "lightning_cp.")]
    sources = {name: PACKAGE.parent.joinpath(*name.split(".")).with_suffix(".py") for name in found}
    return sorted(
        n for n, x in sources.items() if x.exists() and "argument_parser(" in x.read_text()
    )


class _Parsed(Exception):  # noqa: N818 - no error
    """The arguments were to be read."""


@pytest.mark.parametrize(
    "module", [x for x in modules_with_arguments() if x != "lightning_cp.utils.command_help"]
)
def test_every_argument_is_explained(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parsers: list[argparse.ArgumentParser] = []

    def parse(self: argparse.ArgumentParser, *_: object) -> None:
        parsers.append(self)
        raise _Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    with pytest.raises(_Parsed):
        importlib.import_module(module).main()
    assert parsers[0].description
    assert [one.dest for one in parsers[0]._actions if not one.help] == []
    text = parsers[0].format_help()
    for one in parsers[0]._actions:
        if one.default not in (None, False, argparse.SUPPRESS) and one.help != argparse.SUPPRESS:
            assert f"(default: {one.default})" in " ".join(text.split()), one.dest


@pytest.mark.nightly
def test_no_parser_is_made_in_another_way() -> None:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())) if path.stem != "command_help" else ():
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) != "argparse.ArgumentParser", path


def test_defaults_are_shown() -> None:
    parser = argument_parser("Counts.\n\n    python -m counts --cold\n\nMore.")
    parser.add_argument("--tokens", default=[1, 2], help="of a row")
    parser.add_argument("--cold", action="store_true", help="from the disk")
    text = parser.format_help()
    assert text.startswith("Counts.\n\nusage: ")
    assert "\n  python -m counts --cold\n\noptions:" in text
    assert "More" not in text
    assert "of a row (default: [1, 2])" in text
    assert text.rstrip().endswith("from the disk")

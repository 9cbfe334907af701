"""SECURITY.md: what it says of the whole package, and that the tests which it names are there."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from packaging.requirements import Requirement

from lightning_cp.checkpoint.read import open_checkpoint
from lightning_cp.checkpoint.save import save_checkpoint

ROOT = Path(__file__).resolve().parents[2]
SUSPICIOUS = re.compile(r"pickle|dill|shelve|marshal|torch\.load|eval\(|exec\(")
TRACE: list[str] = []


def sources() -> Iterator[tuple[str, ast.Module]]:
    """Files of the package that could unpickle, by their paths."""
    for room in ("lightning_cp", "hydra_plugins"):
        for path in sorted((ROOT / room).rglob("*.py")):
            if SUSPICIOUS.search(text := path.read_text()):
                yield str(path.relative_to(ROOT)), ast.parse(text)


def test_every_test_that_is_named_is_there() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)
    assert len(named) > 20
    for path, function in named:
        made = ast.parse((ROOT / path).read_text())
        tests = {node.name for node in made.body if isinstance(node, ast.FunctionDef)}
        assert not function or function in tests, f"{path}::{function}"
        assert any(name.startswith("test_") for name in tests), path


def unpickles(node: ast.AST) -> bool:
    """Imports a module that runs code of what it reads, or has PyTorch do so."""
    if isinstance(node, ast.Import):
        return any(alias.name in ("pickle", "dill", "shelve", "marshal") for alias in node.names)
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        return given.get("weights_only") != "True"
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("eval", "exec")


def test_pickles_stay_within_a_run() -> None:
    """Between ranks, and between a program and the processes that it has started itself."""
    found = {path for path, made in sources() if any(map(unpickles, ast.walk(made)))}
    assert found == {
        "lightning_cp/comm/consensus.py",
        "lightning_cp/bench/processes.py",
        "lightning_cp/checkpoint/full.py",  # where a user says weights_only=False
        "lightning_cp/checkpoint/objects.py",  # likewise
        "lightning_cp/launch/worker_results.py",
        "hydra_plugins/lightning_cp/launcher.py",
        "hydra_plugins/lightning_cp/result.py",
    }


def test_a_folder_of_shards_holds_json_and_safetensors(tmp_path: Path) -> None:
    import json

    from safetensors.torch import load_file

    save_checkpoint({"w": torch.ones(3), "step": 1}, tmp_path / "a", form="sharded")
    for path in (tmp_path / "a").iterdir():
        load_file(path) if path.suffix == ".safetensors" else json.loads(path.read_text())


def run_me(text: str) -> str:
    """What a configuration could name."""
    TRACE.append(text)
    return text


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_a_configuration_in_a_checkpoint_is_not_instantiated(form: str, tmp_path: Path) -> None:
    config = OmegaConf.create({"_target_": "tests.unit.test_security.run_me", "text": "run"})
    save_checkpoint({"hyper_parameters": {"model": config}}, tmp_path / "a", form=form)
    found: Any = open_checkpoint(tmp_path / "a").read()["hyper_parameters"]["model"]
    assert isinstance(found, DictConfig)
    assert found == config
    assert TRACE == []


def test_versions_with_known_holes_are_excluded() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {
        (made := Requirement(text)).name: made.specifier for text in project["dependencies"]
    }
    for name, version in (
        ("torch", "2.9.1"),
        ("lightning", "2.6.2"),
        ("lightning", "2.6.3"),
        ("hydra-core", "1.3.7"),
    ):
        assert version not in required[name], (name, version)

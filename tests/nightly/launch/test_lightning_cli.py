"""LightningCLI: the strategy by name, or by its class with every setting as an argument."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from lightning_cp.config import StrategyConfig
from tests.helpers.installed import installed_path
from tests.helpers.launch.expected import came_to_the_same
from tests.helpers.launch.start import (
    SCRIPTS,
    Done,
    all_succeeded,
    finish,
    program,
    ranks,
    torchrun_variables,
)

pytest.importorskip("jsonargparse")

CONFIG = """
trainer:
  devices: 2
  strategy:
    class_path: lightning_cp.UlyssesRingStrategy
    init_args:
      context_parallel_size: 2
      mode: ring
      sequence_dims:
        input_ids: 1
        labels: 1
      process_group_backend: gloo
      timeout: 0:10:00
      gradient_as_bucket_view: true
"""


def fit(folder: Path, *arguments: str | Path) -> list[Done]:
    """``cli.py fit <arguments>`` on two ranks."""
    folder.mkdir()
    own = [{**one, "OUT": str(folder)} for one in torchrun_variables(2)]
    return ranks(folder, own, SCRIPTS / "cli.py", "fit", *arguments)


@pytest.mark.parametrize("name", ["ulysses_ring", "UlyssesRingStrategy"])
def test_by_name(name: str, tmp_path: Path) -> None:
    by_name = fit(tmp_path / "run", f"--trainer.strategy={name}", "--trainer.devices=2")
    all_succeeded(by_name)
    came_to_the_same(tmp_path / "run")


def test_by_name_with_lightning_s_own_launcher(tmp_path: Path) -> None:
    own = {"OUT": str(tmp_path), "PYTHONPATH": installed_path(tmp_path)}
    arguments = ("fit", "--trainer.strategy=ulysses_ring", "--trainer.devices=2")
    with program(tmp_path, SCRIPTS / "cli.py", *arguments, **own) as started:
        finish(started)
    came_to_the_same(tmp_path)


def test_by_class_in_a_config_and_again_by_the_config_that_was_saved(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    all_succeeded(fit(tmp_path / "run", "--config", tmp_path / "config.yaml"))
    came_to_the_same(tmp_path / "run", mode="ring")

    saved = tmp_path / "run" / "config.yaml"
    strategy = yaml.safe_load(saved.read_text())["trainer"]["strategy"]["init_args"]
    assert {field.name for field in dataclasses.fields(StrategyConfig)} < set(strategy)
    assert (strategy["mode"], strategy["sequence_dims"]) == ("ring", {"input_ids": 1, "labels": 1})
    assert strategy["gradient_as_bucket_view"] is True
    all_succeeded(fit(tmp_path / "again", "--config", saved))
    came_to_the_same(tmp_path / "again", mode="ring")


def test_a_bad_setting_is_named_by_the_strategy(tmp_path: Path) -> None:
    chosen = ("--trainer.strategy=lightning_cp.UlyssesRingStrategy", "--trainer.devices=2")
    done = fit(tmp_path / "run", *chosen, "--trainer.strategy.mode=rings")
    assert all(one.status == 1 for one in done)
    says = "mode must be one of auto, ulysses, ring, hybrid, zigzag_llama3, got 'rings'"
    assert all(says in one.output for one in done)  # jsonargparse makes it an error of its own


def test_an_unknown_setting_is_named_by_lightning_cli(tmp_path: Path) -> None:
    chosen = ("--trainer.strategy=lightning_cp.UlyssesRingStrategy", "--trainer.devices=2")
    done = fit(tmp_path / "run", *chosen, "--trainer.strategy.rings=2")
    assert all(one.status == 2 and "'rings'" in one.output for one in done)

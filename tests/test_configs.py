"""Every config file composes and instantiates, and the configured model keeps documents apart."""

from __future__ import annotations

import json
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import InstantiationException, MissingConfigException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from lightning_cp import ThroughputCallback, UlyssesRingStrategy
from lightning_cp.bench.settings import Settings
from lightning_cp.config_files import config_dir
from lightning_cp.data import ByteDataModule
from lightning_cp.errors import ConfigError
from lightning_cp.strategies.arguments.settings import Settings as StrategySettings
from lightning_cp.train.module import LanguageModel

CONFIGS = config_dir()
GROUPS = ("model", "data", "trainer", "strategy", "throughput", "experiment")
CHOICES = [
    (group, path.stem)
    for group in GROUPS
    for path in sorted((CONFIGS / group).glob("*.yaml"))
    if not path.stem.startswith("plan_")  # experiments of the planner
]


def composed(*overrides: str) -> DictConfig:
    """The config of a command line, as the entry point sees it."""
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("train", overrides=list(overrides))


OTHERS = {
    "train.yaml",
    "for_any_app/strategy/ulysses_ring.yaml",
    "hydra/launcher/slurm.yaml",
    "compare/compare.yaml",
    "compare/experiment/mode_matrix.yaml",
    "bench/bench.yaml",
    "plan.yaml",
    "experiment/plan_405b_1m.yaml",
}
"""Files with a test of their own: below, and of the planner in ``tests/plan/test_settings.py``."""


def hydra_config(*overrides: str) -> DictConfig:
    """Hydra's own part of a sweep's config."""
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        every = ["hydra.sweep.dir=tree", "hydra.job.name=train", *overrides]
        return compose("train", overrides=every, return_hydra_config=True).hydra


def test_every_file_is_covered() -> None:
    covered = {CONFIGS / group / f"{choice}.yaml" for group, choice in CHOICES}
    assert set(CONFIGS.rglob("*.yaml")) == covered | {CONFIGS / other for other in OTHERS}
    assert {group for group, _ in CHOICES} == set(GROUPS)


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_choice_composes_and_instantiates(group: str, choice: str, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text(f"{name} is a text. " * 1000)
    paths = [f"data.paths=[{tmp_path}]"] if choice == "text_files" else []
    if choice == "config_json":
        small = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 8}
        (tmp_path / "config.json").write_text(json.dumps({**small, "num_hidden_layers": 1}))
        paths = [f"model.network.config={tmp_path}"]
    config = composed(f"{group}={choice}", *paths)

    assert isinstance(instantiate(config.model), LanguageModel)
    assert isinstance(instantiate(config.data), ByteDataModule)
    trainer = instantiate(config.trainer, logger=False, enable_checkpointing=False)
    assert isinstance(trainer, L.Trainer)
    assert trainer.max_steps == config.trainer.max_steps
    assert trainer.num_devices == config.trainer.devices


def test_the_strategy_of_any_app_composes_and_instantiates() -> None:
    strategy = instantiate(composed("strategy=ulysses_ring").strategy)
    assert isinstance(strategy, UlyssesRingStrategy)


@pytest.mark.parametrize("choice", ["ulysses_ring", "auto"])
def test_every_setting_is_in_the_config_at_its_default(choice: str) -> None:
    settings = {item.name: item for item in fields(StrategySettings)}
    given: Any = OmegaConf.to_container(composed(f"strategy={choice}").strategy)
    assert given.pop("_target_") == "lightning_cp.UlyssesRingStrategy"
    assert set(given) == set(settings)
    defaults = vars(StrategySettings())
    for name, value in given.items():
        assert (value or {} if name == "sequence_dims" else value) == defaults[name], name


def test_sweeps_use_our_launcher_unless_told_otherwise() -> None:
    ours = instantiate(hydra_config().launcher)
    assert type(ours).__name__ == "FreshProcessLauncher"
    assert hydra_config("hydra/launcher=basic").launcher._target_.endswith("BasicLauncher")


def test_slurm_starts_as_many_ranks_as_are_configured() -> None:
    launcher = hydra_config(
        "hydra/launcher=slurm", "trainer.devices=8", "+trainer.num_nodes=2"
    ).launcher
    assert (launcher.nodes, launcher.tasks_per_node, launcher.gpus_per_node) == (2, 8, 8)
    assert launcher.submitit_folder.endswith("/.submitit/%j")
    alone = hydra_config("hydra/launcher=slurm").launcher
    assert (alone.nodes, alone.tasks_per_node) == (1, 4)
    package = alone._target_.split(".")[1]
    assert package == "hydra_submitit_launcher"
    with pytest.raises(InstantiationException, match=package):  # it is not a dependency
        instantiate(alone)


def test_the_mode_matrix_is_made_of_runs_that_compose_and_instantiate() -> None:
    with initialize_config_dir(str(CONFIGS / "compare"), version_base="1.3"):
        assert compose("compare").train is None
        matrix = compose("compare", overrides=["experiment=mode_matrix"]).train
    sizes = {}
    for name, own in matrix.runs.items():
        config = composed(*matrix.overrides, *own)
        instantiate(config.model)
        instantiate(config.trainer, logger=False, enable_checkpointing=False)
        heads = config.model.network.config.num_attention_heads
        sizes[name] = (config.trainer.devices, heads)
        if not name.startswith("baseline"):
            ulysses, ring = config.strategy.ulysses_size, config.strategy.ring_size
            shape = name.removeprefix("gather_")
            assert (shape, ulysses * ring) == (f"{ulysses}x{ring}", config.trainer.devices)
            assert heads % ulysses == 0
    assert sizes.pop("baseline") == (1, 8)
    assert sizes.pop("baseline_9_heads") == (1, 9)
    gathers = {"gather_1x4", "gather_2x2"}
    assert set(sizes) == {"3x1", "1x4", "3x2", "4x2", "2x4", "8x1", "1x8"} | gathers


def test_the_measurements_compose_and_leave_everything_open() -> None:
    with initialize_config_dir(str(CONFIGS / "bench"), version_base="1.3"):
        config = OmegaConf.to_container(compose("bench"))
    assert isinstance(config, dict)
    settings = Settings.of({str(name): value for name, value in config.items()})
    assert settings.devices >= 1
    assert settings.modes == ()


def test_strategies_that_run_one_process_or_several() -> None:
    assert composed("strategy=single").trainer.devices == 1
    for choice in ("ddp", "hybrid", "ulysses", "ring", "auto"):
        assert composed(f"strategy={choice}").trainer.devices == 4


def test_experiments_go_over_every_other_choice_and_the_command_line_over_them() -> None:
    assert composed("experiment=smoke").trainer.max_steps == 4
    assert composed("experiment=smoke", "trainer.max_steps=7").trainer.max_steps == 7


def test_text_files_needs_paths() -> None:
    with pytest.raises(
        InstantiationException, match=r"data\.paths must be a list.*Example: data"
    ) as e:
        instantiate(composed("data=text_files").data)
    assert isinstance(e.value.__cause__, ConfigError)


def test_unknown_choice_lists_the_known_ones() -> None:
    with pytest.raises(MissingConfigException, match=r"(?s)ring_around.*single"):
        composed("strategy=ring_around")


def test_bytes_of_one_document_do_not_reach_the_next() -> None:
    model: LanguageModel = instantiate(composed("experiment=smoke").model)
    first, second, shared = (torch.randint(256, (1, length)) for length in (20, 20, 12))
    positions = torch.cat([torch.arange(20), torch.arange(12)]).unsqueeze(0)
    with torch.no_grad():
        outputs = [
            model.network(input_ids=torch.cat([before, shared], 1), position_ids=positions).logits
            for before in (first, second)
        ]
    torch.testing.assert_close(outputs[0][:, 20:], outputs[1][:, 20:])
    assert not torch.allclose(outputs[0][:, :20], outputs[1][:, :20])


def test_learning_rate_warms_up_and_falls_to_its_end() -> None:
    model: LanguageModel = instantiate(composed("model.warmup_steps=10").model)
    rates = [model.rate(step, 100) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1.0
    assert rates[55] == pytest.approx((1 + model.final_rate) / 2)
    assert rates[100] == pytest.approx(model.final_rate)
    assert model.rate(500, 100) == pytest.approx(model.final_rate)


def test_throughput_is_counted_where_it_is_asked_for() -> None:
    assert composed().throughput is None
    callback = instantiate(composed("throughput=mfu", "throughput.peak_flops=989e12").throughput)
    assert isinstance(callback, ThroughputCallback)
    defaults = {name: p.default for name, p in signature(ThroughputCallback).parameters.items()}
    settings = composed("throughput=mfu").throughput
    assert set(settings) - {"_target_"} == set(defaults)
    assert {name: settings[name] for name in defaults} == {**defaults, "every_n_steps": 10}

"""Every config file composes and instantiates, and the configured model keeps documents apart."""

from __future__ import annotations

import json
from dataclasses import fields
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import lightning as L
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import InstantiationException, MissingConfigException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from lightning_cp import ThroughputCallback, UlyssesRingStrategy
from lightning_cp.apps.data import ByteDataModule
from lightning_cp.apps.train.model import LanguageModel
from lightning_cp.bench.settings import BenchSettings
from lightning_cp.config import StrategyConfig as StrategySettings
from lightning_cp.errors import ConfigError
from lightning_cp.optim import Muon
from lightning_cp.utils.run_folder import config_dir

CONFIGS = config_dir()
GROUPS = ("model", "optim", "data", "trainer", "strategy", "throughput", "experiment")
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
    "search_path/strategy/ulysses_ring.yaml",
    "hydra/launcher/slurm.yaml",
    "compare/compare.yaml",
    "compare/experiment/mode_matrix.yaml",
    "compare/experiment/optimizers.yaml",
    "bench/bench.yaml",
    "plan.yaml",
    "experiment/plan_405b_1m.yaml",
}
"""Files with a test of their own: below, and of the planner in ``tests/unit/planner/test_settings.py``."""


def hydra_config(*overrides: str) -> DictConfig:
    """Hydra's own part of a sweep's config."""
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        every = ["hydra.sweep.dir=tree", "hydra.job.name=train", *overrides]
        return compose("train", overrides=every, return_hydra_config=True).hydra


def test_every_file_is_covered() -> None:
    covered = {CONFIGS / group / f"{choice}.yaml" for group, choice in CHOICES}
    assert set(CONFIGS.rglob("*.yaml")) == covered | {CONFIGS / other for other in OTHERS}
    assert {group for group, _ in CHOICES} == set(GROUPS)


@pytest.mark.quick("data-text_files")
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


@pytest.mark.nightly
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


@pytest.mark.nightly
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


def made_optimizer(model: LanguageModel, steps: int = 100) -> tuple[Any, Any]:
    """The optimizer and its schedule, as the Trainer would have them made."""
    model.trainer = cast(Any, SimpleNamespace(estimated_stepping_batches=steps))
    made: Any = model.configure_optimizers()
    return made["optimizer"], made["lr_scheduler"]["scheduler"]


RATES = {"llama_small": 3e-3}
"""Of models that have one of their own; all others have that of ``optim``."""


@pytest.mark.quick("muon-gemma2", "muonclip-llama3_405b")
@pytest.mark.parametrize("choice", [name for group, name in CHOICES if group == "model"])
@pytest.mark.parametrize("optim", ["adamw", "muon", "muonclip"])
def test_every_model_takes_every_optimizer_and_keeps_its_rate(choice: str, optim: str) -> None:
    given = composed(f"model={choice}", f"optim={optim}").model.optimizer
    assert given.lr == RATES.get(choice, 3e-4)
    assert given._target_.endswith("AdamW" if optim == "adamw" else "Muon")
    assert (given.betas, given.weight_decay) == ([0.9, 0.95], 0.1)
    assert (
        composed(f"model={choice}", f"optim={optim}", "model.optimizer.lr=1").model.optimizer.lr
        == 1
    )


def test_adamw_is_the_default_and_knows_names() -> None:
    optimizer, _ = made_optimizer(instantiate(composed().model))
    assert type(optimizer) is torch.optim.AdamW
    (group,) = optimizer.param_groups
    assert "model.embed_tokens.weight" in group["param_names"]
    assert (tuple(group["betas"]), group["weight_decay"]) == ((0.9, 0.95), 0.1)


PROJECTIONS = {
    f"model.layers.{layer}.{part}.{kind}_proj.weight"
    for layer in (0, 1)
    for part, kinds in {"self_attn": "qkvo", "mlp": ("gate", "up", "down")}.items()
    for kind in kinds
}
"""Matrices of the byte model."""


def names_by_kind(optimizer: Muon) -> dict[str, set[str]]:
    return {group["kind"]: set(group["param_names"]) for group in optimizer.param_groups}


@pytest.mark.parametrize("choice", ["muon", "muonclip"])
def test_muon_steps_the_matrices_of_the_model_and_adamw_the_rest(choice: str) -> None:
    config = composed(f"optim={choice}", "model.network.config.hidden_size=128")
    optimizer, _ = made_optimizer(instantiate(config.model))
    assert isinstance(optimizer, Muon)
    names = names_by_kind(optimizer)
    assert names["muon"] == PROJECTIONS
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} < names["adamw"]
    tau = None if optimizer.qk_clip is None else optimizer.qk_clip.tau
    assert tau == (100.0 if choice == "muonclip" else None)


def test_the_schedule_holds_for_both_groups_of_muon() -> None:
    config = composed("optim=muon", "model.optimizer.adamw_lr=1e-3", "model.warmup_steps=4")
    optimizer, schedule = made_optimizer(instantiate(config.model), steps=10)
    for step in range(11):
        rate = schedule.lr_lambdas[0](step)
        rates = {group["kind"]: group["lr"] for group in optimizer.param_groups}
        assert rates == pytest.approx({"muon": 3e-3 * rate, "adamw": 1e-3 * rate})
        optimizer.step()
        schedule.step()


def test_muons_settings_are_its_defaults_but_for_the_rate() -> None:
    given: Any = OmegaConf.to_container(composed("optim=muon", "model=qwen3").model.optimizer)
    assert (given.pop("_partial_"), given.pop("_convert_"), given.pop("lr")) == (True, "all", 3e-4)
    given.pop("_target_")
    defaults = {name: p.default for name, p in signature(Muon).parameters.items()}
    told = {name: list(x) if isinstance(x, tuple) else x for name, x in defaults.items()}
    assert given == {name: told[name] for name in given}


@pytest.mark.nightly
def test_qk_clip_is_muon_with_one_setting_more() -> None:
    muon, clipped = (
        OmegaConf.to_container(composed(f"optim={choice}").model.optimizer)
        for choice in ("muon", "muonclip")
    )
    assert isinstance(muon, dict)
    clip = {"_target_": "lightning_cp.optim.QKClip", "tau": 100.0}
    assert clipped == {**muon, "qk_clip": clip}


@pytest.mark.nightly
def test_the_optimizers_are_compared_over_one_sweep_and_nothing_else_differs() -> None:
    with initialize_config_dir(str(CONFIGS / "compare"), version_base="1.3"):
        asked = compose("compare", overrides=["experiment=optimizers"])
    assert asked.by == "model.optimizer._target_"
    rates: dict[str, list[float]] = {}
    others = []
    for name, own in asked.train.runs.items():
        plain = composed(*asked.train.overrides, *own)
        made, _ = made_optimizer(instantiate(plain.model))
        assert not isinstance(made, Muon) or names_by_kind(made)["muon"] == PROJECTIONS
        config: Any = OmegaConf.to_container(plain)
        optimizer = config["model"].pop("optimizer")
        rates.setdefault(optimizer["_target_"], []).append(optimizer["lr"])
        kind = optimizer["_target_"].rsplit(".", 1)[-1].lower()
        assert name == f"{kind}_{optimizer['lr']}"
        assert (optimizer["weight_decay"], optimizer["betas"]) == (0.1, [0.9, 0.95])
        others.append(config)
    assert set(rates) == {"torch.optim.AdamW", "lightning_cp.optim.Muon"}
    assert len({tuple(some) for some in rates.values()}) == 1
    assert all(other == others[0] for other in others)


def test_the_measurements_compose_and_leave_everything_open() -> None:
    with initialize_config_dir(str(CONFIGS / "bench"), version_base="1.3"):
        config = OmegaConf.to_container(compose("bench"))
    assert isinstance(config, dict)
    settings = BenchSettings.of({str(name): value for name, value in config.items()})
    assert settings.devices >= 1
    assert settings.modes == ()


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_throughput_is_counted_where_it_is_asked_for() -> None:
    assert composed().throughput is None
    callback = instantiate(composed("throughput=mfu", "throughput.peak_flops=989e12").throughput)
    assert isinstance(callback, ThroughputCallback)
    defaults = {name: p.default for name, p in signature(ThroughputCallback).parameters.items()}
    settings = composed("throughput=mfu").throughput
    assert set(settings) - {"_target_"} == set(defaults)
    assert {name: settings[name] for name in defaults} == {**defaults, "every_n_steps": 10}

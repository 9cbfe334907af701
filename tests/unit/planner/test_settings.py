"""From a config to a job: every choice of the group ``model``, and what cannot be planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lightning_cp.apps.plan.settings import check, job_of, limits_of
from lightning_cp.errors import ConfigError
from lightning_cp.planner.job import Job
from lightning_cp.planner.machines import GIB, MACHINES
from lightning_cp.planner.search import Limits
from lightning_cp.utils.run_folder import config_dir
from tests.helpers.planner.configs import SMALL

PUBLISHED = {
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "qwen3": 8_190_735_360,
    "mixtral": 46_702_792_704,
    "gemma2": 9_241_705_984,
}
"""Parameters, as their makers' checkpoints have them."""


def config(*overrides: str) -> dict[str, Any]:
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        plain: Any = OmegaConf.to_container(compose("plan", list(overrides)), resolve=True)
    return plain


def planned(asked: dict[str, Any]) -> tuple[Job, Limits]:
    """What the command line makes of a config."""
    check(asked)
    return job_of(asked, "llama3_8b"), limits_of(asked)


@pytest.mark.parametrize("model", PUBLISHED)
def test_models_have_the_parameters_that_are_published(model: str) -> None:
    job = job_of(config(f"model={model}"), model)
    assert (job.model.name, job.model.num_parameters) == (model, PUBLISHED[model])


def test_the_model_of_the_main_job_can_be_planned() -> None:
    job = job_of(config("model=llama_small"), "llama_small")
    layer = 2 * 256 * 256 + 2 * 64 * 256 + 3 * 256 * 704 + 2 * 256
    assert job.model.num_parameters == 2 * layer + 2 * 256 * 256 + 256
    assert job.model.family == "llama"


def test_any_config_json(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SMALL))
    for given in (file, tmp_path):
        asked = config("model=config_json", f"model.network.config={given}")
        assert job_of(asked, "config_json").model.features == 64


@pytest.mark.parametrize("hardware", MACHINES)
def test_every_hardware(hardware: str) -> None:
    job = job_of(config(f"hardware={hardware}", "reserve_gib=1.5"), "llama3_8b")
    assert job.machine.memory == MACHINES[hardware].memory
    assert job.machine.reserve == 1.5 * GIB


def test_network_cards_of_a_node() -> None:
    machine = job_of(config("network_cards=2"), "llama3_8b").machine
    assert [machine.cards(devices) for devices in (8, 2, 1)] == [2, 2, 1]
    machine = job_of(config(), "llama3_8b").machine
    assert [machine.cards(devices) for devices in (8, 1)] == [8, 1], "one for each device"


def test_the_experiment_of_a_million_tokens() -> None:
    job = job_of(config("experiment=plan_405b_1m"), "llama3_405b")
    assert (job.devices, job.seq_len, job.global_batch) == (1024, 1 << 20, 16)
    assert job.model.num_parameters == PUBLISHED["llama3_405b"]


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (["hardware=h1000"], r"hardware must be one of h100, .*got 'h1000', which is not a file"),
        (["reserve_gib=-1"], "reserve_gib must be a number of at least 0"),
        (["network_cards=0"], "network_cards must be an integer of at least 1, or null, got 0"),
        (["network_cards=1.5"], "network_cards must be an integer of at least 1, or null"),
        (["devices=0"], "devices must be an integer of at least 1, got 0"),
        (["precision=fp8"], "precision must be one of bf16-mixed"),
        (["model=config_json", "model.network.config=/nowhere"], "cannot be read"),
        (["engine=deepspeed"], "engine must be one of ddp, fsdp"),
        (["checkpointing=half"], "checkpointing must be one of none"),
        (["mesh.ring=0"], r"mesh\.ring must be an integer of at least 1"),
        (["+mesh.pp=2"], "mesh has the axes .*got pp"),
        (["mesh=8"], "mesh maps axes .*got 8"),
        (["reserve_gib=nan"], "reserve_gib must be a number of at least 0"),
        (["reserve_gib=inf"], "reserve_gib must be a number of at least 0"),
        (["show=0"], "show must be an integer of at least 1, got 0"),
        (["show=-1"], "show must be an integer of at least 1"),
        (["verify=everything"], "verify must be one of"),
        (["model=config_json"], "model.network.config=<file>"),
        (["model=config_json", "model.network.config=5"], "model.network.config=<file>"),
        (["offload=1"], "offload must be one of True, False"),
        (["+foo=1"], "foo is not a setting of the planner"),
        (["data.seq_len=5"], r"data\.seq_len is seq_len, 131072, got 5"),
    ],
)
def test_what_cannot_be_planned(overrides: list[str], match: str) -> None:
    asked = config(*overrides)
    with pytest.raises(ConfigError, match=match):
        planned(asked)

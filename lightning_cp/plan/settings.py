"""From a Hydra config to a job and what of its plan is set."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lightning_cp.axes import Axis
from lightning_cp.config_files import config_dir
from lightning_cp.errors import ConfigError
from lightning_cp.planner.families import is_known, model_of, read_config
from lightning_cp.planner.job import Job
from lightning_cp.planner.machines import GIB, MACHINES, Machine
from lightning_cp.planner.measured_machine import machine_of_measured
from lightning_cp.planner.model import Model
from lightning_cp.planner.ways import CHECKPOINTING, ENGINES, Limits

CONFIG_CLASSES = {
    "LlamaConfig": "llama",
    "MistralConfig": "mistral",
    "Qwen2Config": "qwen2",
    "Qwen3Config": "qwen3",
    "GemmaConfig": "gemma",
    "Gemma2Config": "gemma2",
    "MixtralConfig": "mixtral",
}
"""Of transformers, by what a model's config may name instead of ``model_type``."""


def check(config: Mapping[str, Any]) -> None:
    """Refuse what is neither of the job nor of its limits.

    Raises:
        ConfigError: naming the setting.
    """
    strange = sorted(set(config) - _known())
    if strange:
        raise ConfigError(f"{strange[0]} is no setting of the planner's: see configs/plan.yaml.")
    length = (config.get("data") or {}).get("seq_len")
    if length != config["seq_len"]:
        raise ConfigError(
            f"data.seq_len is seq_len, {config['seq_len']}, got {length}. Set seq_len instead."
        )
    if type(config["show"]) is not int or config["show"] < 1:
        raise ConfigError(
            f"show must be an integer of at least 1, got {config['show']!r}. "
            "It is how many plans are printed."
        )
    if config["verify"] not in (False, True, "all"):
        raise ConfigError(
            f"verify must be one of false, true (--verify), all, got {config['verify']!r}. "
            "Choose one of these."
        )


def _known() -> set[str]:
    """The settings that there are: those of the file, and the group of models."""
    own = set(map(str, OmegaConf.load(config_dir() / "plan.yaml")))
    return (own | {"model"}) - {"defaults", "hydra"}


def job_of(config: Mapping[str, Any], name: str) -> Job:
    """What is asked for.

    Args:
        config: see ``configs/plan.yaml``, as plain dictionaries.
        name: of the model's choice.

    Raises:
        ConfigError: naming the setting.
    """
    wanted = hf_config(config.get("model") or {})
    shown = str(wanted.get("model_type")) if name == "config_json" else name
    numbers = (config["devices"], config["seq_len"], config["global_batch"])
    machine = machine_of(config["hardware"], config.get("reserve_gib"), config["precision"])
    return Job(
        model_from(wanted, shown), machine, *numbers, config["precision"], config["optimizer"]
    )


def hf_config(model: Mapping[str, Any]) -> dict[str, Any]:
    """What a ``config.json`` would hold of a model of the ``model`` group.

    Raises:
        ConfigError: it has none, or one of a class that is not known.
    """
    given = (model.get("network") or {}).get("config")
    if isinstance(given, str) and given != "???":
        return read_config(given)
    if not isinstance(given, Mapping):
        raise ConfigError(
            "model: there is no model.network.config, which says how large it is. Choose one of the group "
            "model, or model=config_json model.network.config=<file>."
        )
    content = {key: value for key, value in given.items() if not key.startswith("_")}
    target = str(given.get("_target_", "")).rpartition(".")[2]
    if "model_type" not in content:
        if target not in CONFIG_CLASSES:
            raise ConfigError(
                f"model.network.config is a {target or 'mapping without model_type'}, of which the planner "
                f"does not know the family. It knows {', '.join(CONFIG_CLASSES)}; or give model_type."
            )
        content["model_type"] = CONFIG_CLASSES[target]
    return content


def model_from(config: Mapping[str, Any], name: str) -> Model:
    """In closed form where the family is known, else from transformers' own modules without values."""
    if is_known(config):
        return model_of(config, name)
    from lightning_cp.plan.other_families import model_of_modules

    return model_of_modules(config, name)


def machine_of(given: object, reserve_gib: object = None, precision: object = None) -> Machine:
    """A published one, or what a ``hardware.json`` says.

    Raises:
        ConfigError: neither.
    """
    name = str(given)
    if name in MACHINES:
        machine = MACHINES[name]
    elif Path(name).is_file():
        wanted = "float32" if precision == "fp32" else "bfloat16"
        machine = machine_of_measured(name, wanted=wanted)
    else:
        raise ConfigError(
            f"hardware must be one of {', '.join(MACHINES)}, or a hardware.json that python -m "
            f"lightning_cp.bench wrote, got {name!r}, which is no file. "
            "Choose one of these, or run that command on your machine."
        )
    if reserve_gib is None:
        return machine
    if not isinstance(reserve_gib, int | float) or not 0 <= reserve_gib < math.inf:
        raise ConfigError(
            f"reserve_gib must be a number of at least 0, got {reserve_gib!r}. "
            "It is the memory of a device that is left free."
        )
    return replace(machine, reserve=round(reserve_gib * GIB))


def limits_of(config: Mapping[str, Any]) -> Limits:
    """What is set of the plan.

    Raises:
        ConfigError: naming a setting that cannot be.
    """
    mesh = config.get("mesh") or {}
    if not isinstance(mesh, Mapping):
        raise ConfigError(
            f"mesh maps axes to sizes (mesh.ring=8), got {mesh!r}. "
            "Write each axis as mesh.<axis>=<size>."
        )
    strange = sorted(set(mesh) - {axis.value for axis in Axis})
    if strange:
        raise ConfigError(
            f"mesh has the axes {', '.join(Axis)}, got {', '.join(strange)}. Use these names."
        )
    for axis, size in mesh.items():
        if size is not None and (type(size) is not int or size < 1):
            raise ConfigError(
                f"mesh.{axis} must be an integer of at least 1, or null, got {size!r}."
            )
    names: dict[str, tuple[object, ...]] = {
        "engine": ENGINES,
        "exchange": ("ring", "all_gather"),
        "checkpointing": CHECKPOINTING,
        "offload": (True, False),
        "chunked_loss": (True, False),
        "tiled_mlp": (True, False),
    }
    for name, known in names.items():
        value = config.get(name)
        if value is not None and (value not in known or type(value) is not type(known[0])):
            raise ConfigError(
                f"{name} must be one of {', '.join(map(str, known))}, or null, got {value!r}. "
                "null tries all of them."
            )
    return Limits(
        {axis: mesh.get(axis.value) for axis in Axis}, **{name: config.get(name) for name in names}
    )

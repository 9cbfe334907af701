"""The planner's input from a Hydra config: the job, with its model and machine, and the limits of the search.

A model that the planner does not know in closed form is read off its modules, without values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from torch import nn

from lightning_cp.errors import ConfigError
from lightning_cp.layout.axes import Axis
from lightning_cp.models.blocks import blocks_of
from lightning_cp.models.structure import head_dims
from lightning_cp.planner.job import Job
from lightning_cp.planner.machines import GIB, MACHINES, Machine, machine_of_measured
from lightning_cp.planner.model import (
    BlockSpec,
    Model,
    Parameter,
    is_known_family,
    model_from_config,
    read_config,
)
from lightning_cp.planner.search import CHECKPOINTING, ENGINES, Limits
from lightning_cp.utils.run_folder import config_dir

CONFIG_CLASSES = {
    "LlamaConfig": "llama",
    "MistralConfig": "mistral",
    "Qwen2Config": "qwen2",
    "Qwen3Config": "qwen3",
    "GemmaConfig": "gemma",
    "Gemma2Config": "gemma2",
    "MixtralConfig": "mixtral",
}
"""The ``model_type`` of the transformers classes that a model's config may name instead."""


def check(config: Mapping[str, Any]) -> None:
    """Check the settings that belong to neither the job nor its limits.

    Raises:
        ConfigError: an unknown or invalid setting, by name.
    """
    strange = sorted(set(config) - _known())
    if strange:
        raise ConfigError(f"{strange[0]} is not a setting of the planner: see configs/plan.yaml.")
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
    """Return the known settings: those of the file, and the group of models."""
    own = set(map(str, OmegaConf.load(config_dir() / "plan.yaml")))
    return (own | {"model"}) - {"defaults", "hydra"}


def job_of(config: Mapping[str, Any], name: str) -> Job:
    """Return the job that a config asks for.

    Args:
        config: see ``configs/plan.yaml``, as plain dictionaries.
        name: the chosen model's name.

    Raises:
        ConfigError: an invalid setting, by name.
    """
    wanted = hf_config(config.get("model") or {})
    shown = str(wanted.get("model_type")) if name == "config_json" else name
    numbers = (config["devices"], config["seq_len"], config["global_batch"])
    machine = machine_of(config["hardware"], config.get("reserve_gib"), config["precision"])
    machine = _with_cards(machine, config.get("network_cards"))
    return Job(
        model_from(wanted, shown), machine, *numbers, config["precision"], config["optimizer"]
    )


def hf_config(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a ``config.json`` for a model of the ``model`` group.

    Raises:
        ConfigError: the model has no config, or one of an unknown class.
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
    """Return the model in closed form if its family is known, else from transformers' own modules."""
    if is_known_family(config):
        return model_from_config(config, name)

    return model_of_modules(config, name)


def machine_of(given: object, reserve_gib: object = None, precision: object = None) -> Machine:
    """Return a published machine, or the one of a ``hardware.json``.

    Raises:
        ConfigError: the name is neither.
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
            f"lightning_cp.bench wrote, got {name!r}, which is not a file. "
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


def _with_cards(machine: Machine, cards: object) -> Machine:
    if cards is None:
        return machine
    if type(cards) is not int or cards < 1:
        raise ConfigError(
            f"network_cards must be an integer of at least 1, or null, got {cards!r}. "
            "It is the number of network cards of a node."
        )
    return replace(machine, network_cards=cards)


def limits_of(config: Mapping[str, Any]) -> Limits:
    """Return the settings that the plan must have.

    Raises:
        ConfigError: an invalid setting, by name.
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
        "exchange": ("ring", "rotation", "all_gather"),
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


SIZES: dict[str, tuple[str, ...]] = {
    "features": ("hidden_size", "n_embd", "d_model"),
    "inner": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "num_attention_heads", "n_head", "n_heads"),
    "vocabulary": ("vocab_size",),
}
"""The names of each size in configs."""


def model_of_modules(config: Mapping[str, Any], name: str) -> Model:
    """Return the model of any transformers config; its layers are assumed to be as wide as a Llama's.

    Raises:
        ConfigError: transformers has no such model, it has no attention blocks, or a size is unknown.
    """
    from lightning_cp.apps.train.model import model_on_meta  # Lightning, which takes seconds

    module = model_on_meta(config)
    blocks = blocks_of(module)
    if not blocks:
        raise ConfigError(
            f"model: no blocks with attention were found in {type(module).__name__}; a plan is made of them. "
            "Plan with a model that has attention layers."
        )
    read: Any = module.config
    sizes = {size: _size(read, size, name) for size in SIZES}
    inside = {id(p) for block in blocks for p in block.parameters()}
    outer = [(key, p) for key, p in module.named_parameters() if id(p) not in inside]
    before = tuple(Parameter(key, tuple(p.shape)) for key, p in outer if _is_embedding(key))
    after = tuple(Parameter(key, tuple(p.shape)) for key, p in outer if not _is_embedding(key))
    head_dim, value_dim = head_dims(read, sizes["features"] // sizes["heads"])
    return Model(
        name,
        str(config.get("model_type")),
        sizes["features"],
        sizes["inner"],
        sizes["heads"],
        sizes["kv_heads"],
        head_dim,
        sizes["vocabulary"],
        before,
        tuple(_layer(block) for block in blocks),
        after,
        tied=bool(getattr(read, "tie_word_embeddings", False)),
        shares_layers=False,
        positions=getattr(read, "max_position_embeddings", None),
        assumed=(
            f"{config.get('model_type')} is not known in closed form: shapes are its modules', layers are "
            "taken to be like the first one, their activations a Llama's of the same sizes, attention "
            "causal and without windows; tensor parallelism is left out"
        )
        + _no_decoder(config),
        other_value_dim=value_dim,
    )


def _no_decoder(config: Mapping[str, Any]) -> str:
    """Return a note if the config belongs to another kind of model."""
    named = config.get("architectures") or []
    if not named or any("CausalLM" in one or "LMHead" in one for one in named):
        return ""
    return f". Its config names {', '.join(named)}, no causal language model: it is planned as a decoder"


def _size(config: Any, size: str, name: str) -> int:
    for key in SIZES[size]:
        value = getattr(config, key, None)
        if type(value) is int and value > 0:
            return value
    if size == "inner":
        return 4 * _size(config, "features", name)
    raise ConfigError(
        f"model: the config of {name} has none of {', '.join(SIZES[size])}, which the planner needs. "
        "Name a model whose config has one of these."
    )


def _layer(block: nn.Module) -> BlockSpec:
    return BlockSpec(tuple(Parameter(key, tuple(p.shape)) for key, p in block.named_parameters()))


def _is_embedding(key: str) -> bool:
    """True if the parameter is used before the layers."""
    return "emb" in key or "wte" in key or "wpe" in key

"""From a Hugging Face ``config.json`` to parameters: closed forms, so that nothing is imported or built.

Names and shapes are those of transformers 5; a test compares them with its models on the meta device.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_cp.errors import ConfigError
from lightning_cp.planner.model import Layer, Model, Parameter

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "mixtral")
"""``model_type``s whose parameters are known in closed form."""
TIED = ("gemma", "gemma2")
"""Families whose head is the embedding where their config does not say."""
UNSHARED = ("mixtral",)
"""Families that the automatic tensor-parallel plan refuses."""
_NEEDED = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    "vocab_size",
)


def read_config(file: Path | str) -> dict[str, Any]:
    """The object in a ``config.json``; of a folder, in the file of that name.

    Raises:
        ConfigError: no such file, or no JSON object in it.
    """
    path = Path(file)
    path = path / "config.json" if path.is_dir() else path
    try:
        given = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(
            f"model: {path} cannot be read ({error.strerror}). "
            "Give the path of a config.json that this process may read."
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"model: {path} is no JSON ({error}). Give the config.json of a model."
        ) from error
    if not isinstance(given, dict):
        raise ConfigError(
            f"model: {path} holds a JSON {type(given).__name__}, not an object. "
            "Give the config.json of a model."
        )
    return given


def is_known(config: Mapping[str, Any]) -> bool:
    """True if its parameters are known in closed form."""
    return config.get("model_type") in FAMILIES


def model_of(config: Mapping[str, Any], name: str) -> Model:
    """The model of a config.

    Args:
        config: what a ``config.json`` holds.
        name: for people.

    Raises:
        ConfigError: a family that is not known, or a number that is missing or cannot be.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(
            f"model: {name} has model_type={family!r}, whose parameters are not known in closed form. Known "
            f"are {', '.join(FAMILIES)}."
        )
    sizes = {key: _number(config, key, name) for key in _NEEDED}
    heads = sizes["num_attention_heads"]
    kv_heads = _number(config, "num_key_value_heads", name, heads)
    if heads % kv_heads:
        raise ConfigError(
            f"model: {name} has num_attention_heads={heads}, which num_key_value_heads={kv_heads} does not "
            "divide. "
            "Correct the two numbers in the config."
        )
    features = sizes["hidden_size"]
    head_dim = _number(config, "head_dim", name, features // heads)
    tied = bool(config.get("tie_word_embeddings", family in TIED))
    experts, routed = 0, 0
    if family == "mixtral":
        experts = _number(config, "num_local_experts", name, 8)
        routed = _number(config, "num_experts_per_tok", name, 2)
    shape = (features, sizes["intermediate_size"], heads, kv_heads, head_dim)
    parameters = tuple(_layer(family, config, *shape, experts))
    windows = _windows(family, config, sizes["num_hidden_layers"], name)
    embedding = Parameter("model.embed_tokens.weight", (sizes["vocab_size"], features), 0)
    after = [Parameter("model.norm.weight", (features,))]
    if not tied:
        after.append(Parameter("lm_head.weight", (sizes["vocab_size"], features), 0))
    return Model(
        name,
        str(family),
        *shape,
        sizes["vocab_size"],
        (embedding,),
        tuple(Layer(parameters, window) for window in windows),
        tuple(after),
        tied,
        experts,
        routed,
        family not in UNSHARED,
        config.get("max_position_embeddings"),
    )


def _number(config: Mapping[str, Any], key: str, name: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise ConfigError(
            f"model: {name} needs {key}, an integer of at least 1, got {value!r}. "
            "Add it to the config."
        )
    return value


def _layer(
    family: str,
    config: Mapping[str, Any],
    features: int,
    inner: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    experts: int,
) -> Iterator[Parameter]:
    biased = bool(config.get("attention_bias", False))
    projections = (
        ("q_proj", heads * head_dim, features, 0, biased or family == "qwen2"),
        ("k_proj", kv_heads * head_dim, features, 0, biased or family == "qwen2"),
        ("v_proj", kv_heads * head_dim, features, 0, biased or family == "qwen2"),
        ("o_proj", features, heads * head_dim, 1, biased),
    )
    for projection in projections:
        yield from _linear("self_attn", *projection)
    if family == "qwen3":
        for norm in ("q_norm", "k_norm"):
            yield Parameter(f"self_attn.{norm}.weight", (head_dim,))
    if experts:
        yield Parameter("mlp.gate.weight", (experts, features))
        yield Parameter("mlp.experts.gate_up_proj", (experts, 2 * inner, features))
        yield Parameter("mlp.experts.down_proj", (experts, features, inner))
    else:
        biased = bool(config.get("mlp_bias", False)) and family == "llama"
        for way_in in ("gate_proj", "up_proj"):
            yield from _linear("mlp", way_in, inner, features, 0, biased)
        yield from _linear("mlp", "down_proj", features, inner, 1, biased)
    for norm in _norms(family):
        yield Parameter(f"{norm}.weight", (features,))


def _linear(
    module: str, name: str, out: int, features: int, tp_dim: int, biased: bool
) -> Iterator[Parameter]:
    yield Parameter(f"{module}.{name}.weight", (out, features), tp_dim)
    if biased:  # behind rows every rank adds all of it
        yield Parameter(f"{module}.{name}.bias", (out,), None if tp_dim else 0)


def _norms(family: str) -> Sequence[str]:
    around = ("input_layernorm", "post_attention_layernorm")
    if family == "gemma2":
        return (*around, "pre_feedforward_layernorm", "post_feedforward_layernorm")
    return around


def _windows(
    family: str, config: Mapping[str, Any], layers: int, name: str
) -> Sequence[int | None]:
    """The window of each layer."""
    if family.startswith("qwen") and not config.get("use_sliding_window"):
        return (None,) * layers
    window = config.get("sliding_window", 4096 if family == "gemma2" else None)
    if window is None or family in ("llama", "gemma"):
        return (None,) * layers
    window = _number({"sliding_window": window}, "sliding_window", name)
    kinds = config.get("layer_types")
    if kinds is not None:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if family == "gemma2":
        return tuple(None if at % 2 else window for at in range(layers))
    if family.startswith("qwen"):
        first = _number(config, "max_window_layers", name, layers)
        return tuple(window if at >= first else None for at in range(layers))
    return (window,) * layers

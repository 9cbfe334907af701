"""A decoder for the planner: names, shapes and products of parameters, from Hugging Face's ``config.json``.

Parameters are closed forms of the config, so nothing is imported or built. Names and shapes are those of
transformers 5; a test compares them with its models on the meta device.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning_cp.errors import ConfigError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Parameter:
    """One parameter of a module."""

    name: str
    """Name in a checkpoint; for a layer's parameter, relative to the layer."""
    shape: Shape
    tp_dim: int | None = None
    """The dimension that tensor-parallel ranks split; ``None``: each has the whole parameter."""

    @property
    def numel(self) -> int:
        """Entries."""
        return math.prod(self.shape)

    def is_shared(self, tp_size: int) -> bool:
        """Return True if tensor-parallel ranks split it, which needs equal parts."""
        return tp_size > 1 and self.tp_dim is not None and self.shape[self.tp_dim] % tp_size == 0

    def local_shape(self, tp_size: int) -> Shape:
        """Return the shape of a tensor-parallel rank's part."""
        if not self.is_shared(tp_size):
            return self.shape
        return tuple(n // tp_size if dim == self.tp_dim else n for dim, n in enumerate(self.shape))


@dataclass(frozen=True)
class BlockSpec:
    """A block: attention, and an MLP or experts."""

    parameters: tuple[Parameter, ...]
    window: int | None = None
    """Keys that a query sees, itself included; ``None``: all before it."""


@dataclass(frozen=True, eq=False)
class Model:
    """A decoder whose layers differ only in their windows. Compared by identity, for fast hashing."""

    name: str
    family: str
    """``model_type`` of Hugging Face."""
    features: int
    inner: int
    """Inner features of an MLP, or of an expert."""
    heads: int
    kv_heads: int
    head_dim: int
    """Head dim of queries and keys."""
    vocabulary: int
    before: tuple[Parameter, ...]
    layers: tuple[BlockSpec, ...]
    after: tuple[Parameter, ...]
    tied: bool = False
    """The embedding is also the head."""
    experts: int = 0
    experts_per_token: int = 0
    shares_layers: bool = True
    """The automatic tensor-parallel plan supports its layers."""
    positions: int | None = None
    """Positions in its config; ``None``: not set."""
    assumed: str = ""
    """Assumptions about the family, in words; empty: none."""
    other_value_dim: int | None = None
    """Head dim of values if it differs from that of keys."""

    @property
    def value_dim(self) -> int:
        """Head dim of values."""
        return self.head_dim if self.other_value_dim is None else self.other_value_dim

    @property
    def flops_per_pair(self) -> int:
        """FLOPs per visible pair and head, forward and backward: six per entry of a key, and of a value."""
        return 6 * (self.head_dim + self.value_dim)

    @property
    def parameters(self) -> Iterator[Parameter]:
        """All parameters with full names, in order of use."""
        yield from self.before
        for at, layer in enumerate(self.layers):
            for one in layer.parameters:
                yield Parameter(f"model.layers.{at}.{one.name}", one.shape, one.tp_dim)
        yield from self.after

    @cached_property
    def num_parameters(self) -> int:
        """Entries of all parameters, each counted once."""
        return sum(one.numel for one in self.parameters)

    @cached_property
    def windows(self) -> dict[int | None, int]:
        """Number of layers with each window."""
        return dict(Counter(layer.window for layer in self.layers))

    @property
    def tp_sizes(self) -> tuple[int, ...]:
        """Tensor-parallel sizes that its heads allow."""
        if not self.shares_layers:
            return (1,)
        common = math.gcd(self.heads, self.kv_heads)
        return tuple(n for n in range(1, common + 1) if common % n == 0)

    @property
    def layer_products(self) -> int:
        """Parameters of a layer that multiply each token; of experts, those of a token's experts."""
        total = 0
        for one in self.layers[0].parameters:
            if len(one.shape) == 2:
                total += one.numel
            elif len(one.shape) == 3:  # experts: [E, out, in]
                total += one.numel // self.experts * self.experts_per_token
        return total

    @property
    def head_products(self) -> int:
        """Parameters of the head."""
        return self.vocabulary * self.features

    @property
    def flops_per_token(self) -> int:
        """FLOPs per token outside of attention, forward and backward: 6 per parameter that multiplies it."""
        return 6 * (len(self.layers) * self.layer_products + self.head_products)


FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "mixtral")
"""``model_type``s whose parameters are known in closed form."""
TIED_FAMILIES = ("gemma", "gemma2")
"""Families whose head is the embedding unless their config disagrees."""
UNSHARED_FAMILIES = ("mixtral",)
"""Families that the automatic tensor-parallel plan refuses."""
_REQUIRED_KEYS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    "vocab_size",
)


def read_config(file: Path | str) -> dict[str, Any]:
    """Read a ``config.json``, given as a file or its folder.

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
            f"model: {path} is not valid JSON ({error}). Give the config.json of a model."
        ) from error
    if not isinstance(given, dict):
        raise ConfigError(
            f"model: {path} holds a JSON {type(given).__name__}, not an object. "
            "Give the config.json of a model."
        )
    return given


def is_known_family(config: Mapping[str, Any]) -> bool:
    """Return True if the family's parameters are known in closed form."""
    return config.get("model_type") in FAMILIES


def model_from_config(config: Mapping[str, Any], name: str) -> Model:
    """Make the model of a config.

    Args:
        config: content of a ``config.json``.
        name: display name.

    Raises:
        ConfigError: an unknown family, or a missing or invalid number.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(
            f"model: {name} has model_type={family!r}, whose parameters are not known in closed form. Known "
            f"are {', '.join(FAMILIES)}."
        )
    sizes = {key: _number(config, key, name) for key in _REQUIRED_KEYS}
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
    tied = bool(config.get("tie_word_embeddings", family in TIED_FAMILIES))
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
        tuple(BlockSpec(parameters, window) for window in windows),
        tuple(after),
        tied,
        experts,
        routed,
        family not in UNSHARED_FAMILIES,
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
    if biased:  # a row-parallel layer adds the whole bias on every rank
        yield Parameter(f"{module}.{name}.bias", (out,), None if tp_dim else 0)


def _norms(family: str) -> Sequence[str]:
    around = ("input_layernorm", "post_attention_layernorm")
    if family == "gemma2":
        return (*around, "pre_feedforward_layernorm", "post_feedforward_layernorm")
    return around


def _windows(
    family: str, config: Mapping[str, Any], layers: int, name: str
) -> Sequence[int | None]:
    """Return the window of each layer."""
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

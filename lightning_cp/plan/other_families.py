"""A model whose parameters the planner does not know in closed form: read off its modules, without values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_cp.errors import ConfigError
from lightning_cp.models.blocks import blocks_of
from lightning_cp.models.expected import head_dims
from lightning_cp.planner.model import Layer, Model, Parameter
from lightning_cp.train.networks import model_on_meta

SIZES: dict[str, tuple[str, ...]] = {
    "features": ("hidden_size", "n_embd", "d_model"),
    "inner": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "num_attention_heads", "n_head", "n_heads"),
    "vocabulary": ("vocab_size",),
}
"""What a config may call a number."""


def model_of_modules(config: Mapping[str, Any], name: str) -> Model:
    """The model of any config of transformers; its layers are taken to be as wide as a Llama's.

    Raises:
        ConfigError: transformers has no such model, no blocks are found in it, or a size is not known.
    """
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
    """What to know of a config of another kind of model."""
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


def _layer(block: nn.Module) -> Layer:
    return Layer(tuple(Parameter(key, tuple(p.shape)) for key, p in block.named_parameters()))


def _is_embedding(key: str) -> bool:
    """True if it is used before the layers."""
    return "emb" in key or "wte" in key or "wpe" in key

"""The automatic plan: queries, keys, values, gates and ups by columns, the layers behind them by rows."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from lightning_cp.engines.tensor_parallel.styles import (
    ColwiseLinear,
    FusedColwiseLinear,
    HeadNorm,
    RowwiseLinear,
    VocabularyEmbedding,
    VocabularyHead,
)
from lightning_cp.errors import ConfigError
from lightning_cp.layout.axes import divisors, join_with_or
from lightning_cp.models.swap import hf_models

# Names of the layers of llama-like models, and Hugging Face families that are known to be exact.


ATTENTION = (
    ("q_proj", "k_proj", "v_proj", "o_proj"),
    ("q_proj", "k_proj", "v_proj", "out_proj"),
    ("q", "k", "v", "o"),
    ("wq", "wk", "wv", "wo"),
    ("query", "key", "value", "out"),
)
"""Linear layers for queries, keys and values, and the one behind attention."""

FUSED_ATTENTION = (("qkv_proj", "o_proj"),)
"""The first makes queries, then keys, then values; used only for families where this order is known."""

GATED_MLP = (
    ("gate_proj", "up_proj", "down_proj"),
    ("gate", "up", "down"),
    ("w1", "w3", "w2"),
)
"""Two layers that make the hidden features, and the one behind."""

PLAIN_MLP = (("up_proj", "down_proj"), ("up", "down"), ("c_fc", "c_proj"), ("fc1", "fc2"))

FUSED_MLP = (("gate_up_proj", "down_proj"),)
"""The first makes gates, then ups; used only for families where this order is known."""

HEAD_NORMS = ("q_norm", "k_norm", "query_layernorm", "key_layernorm")
"""Norms of queries and keys; sharded if each head is normalised by itself."""

EMBEDDINGS = ("embed_tokens", "embed", "tok_embeddings", "token_embedding", "wte")
HEADS = ("lm_head", "head", "output", "unembed")

QUERY_HEADS = (
    "num_attention_heads",
    "num_heads",
    "n_heads",
    "n_head",
    "nhead",
    "num_q_heads",
    "heads",
)
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")
"""Attributes with an attention module's counts of heads."""

KNOWN_TYPES = (
    "arcee",
    "cohere",
    "exaone4",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm",
    "glm4",
    "granite",
    "helium",
    "hunyuan_v1_dense",
    "llama",
    "ministral",
    "mistral",
    "nemotron",
    "olmo",
    "phi3",
    "qwen2",
    "qwen3",
    "seed_oss",
    "smollm3",
    "starcoder2",
)
"""``config.model_type`` of Hugging Face families that were compared with one process."""


# Modules that can be shared: attention and MLPs by the names of their layers, and their heads by shape.


@dataclass(frozen=True)
class Attention:
    """One attention module."""

    name: str
    module: nn.Module
    input_layers: tuple[str, ...]
    """Its layers for queries, keys and values: three, or one fused layer."""
    output_layer: str
    query_heads: int
    kv_heads: int
    head_dim: int
    norms: tuple[str, ...] = ()
    """Its norms within heads."""


@dataclass(frozen=True)
class MLP:
    """One MLP outside of a mixture of experts."""

    name: str
    module: nn.Module
    input_layers: tuple[str, ...]
    output_layer: str
    fused: bool = False


@dataclass(frozen=True)
class ReplicatedModule:
    """A module that looks like attention or an MLP, but stays whole on every rank."""

    name: str
    why: str


def attention_in(
    model: nn.Module, *, fused: bool, among: Container[str] | None = None
) -> Iterator[Attention | ReplicatedModule]:
    """The attention modules whose layers have known names.

    Args:
        model: the model or a part of it.
        fused: the order of queries, keys and values in fused layers is known.
        among: names of layers; attention without any of them is skipped.
    """
    for name, module in model.named_modules():
        layers = _linears(module, ATTENTION)
        together = _linears(module, FUSED_ATTENTION) if layers is None else None
        if among is not None and all(
            dotted(name, layer) not in among for layer in layers or together or ()
        ):
            continue
        if layers is not None:
            yield _read_attention(name, module, layers[:-1], layers[-1])
        elif together is not None and fused:
            yield _read_attention(name, module, together[:1], together[1])
        elif together is not None:
            yield ReplicatedModule(
                f"{name}.{together[0]}", "in which order it makes q, k and v is not known"
            )


def mlps_in(model: nn.Module, *, fused: bool) -> Iterator[MLP | ReplicatedModule]:
    """The MLPs whose layers have known names, outside of mixtures of experts."""
    for name, module in model.named_modules():
        layers = _linears(module, (*GATED_MLP, *PLAIN_MLP))
        together = _linears(module, FUSED_MLP)
        if layers is None and together is None:
            continue
        if "experts" in name.split("."):
            yield ReplicatedModule(name, "it is one of several experts")
        elif together is not None and fused:
            yield MLP(name, module, together[:1], together[1], fused=True)
        elif together is not None:
            yield ReplicatedModule(
                f"{name}.{together[0]}", "in which order it makes gates and ups is not known"
            )
        elif layers is not None:
            yield MLP(name, module, layers[:-1], layers[-1])


def _linears(module: nn.Module, table: Sequence[tuple[str, ...]]) -> tuple[str, ...] | None:
    """The first row of names that are all ordinary linear layers of this module."""
    children = dict(module.named_children())
    for row in table:
        if all(type(children.get(name)) is nn.Linear for name in row):
            return row
    return None


def _read_attention(
    name: str, module: nn.Module, input_layers: tuple[str, ...], output_layer: str
) -> Attention | ReplicatedModule:
    layers: list[Any] = [getattr(module, layer) for layer in input_layers]
    features = getattr(module, output_layer).in_features
    dim, heads = _head_dim(module, features), None
    if dim is not None and features % dim == 0:
        heads = features // dim
    if dim is None or heads is None:
        raise ConfigError(
            f"{name or type(module).__name__} does not tell its number of heads: the automatic "
            f"tensor-parallel plan looks for attributes {', '.join(QUERY_HEADS)} or head_dim. "
            "Name one so, or pass tensor_parallel_plan= (see the documentation of tensor parallelism)."
        )
    rest = (
        layers[0].out_features - features if len(input_layers) == 1 else 2 * layers[1].out_features
    )
    norms = _head_norms(module, dim)
    strange = _head_parameter(module, layers[0].in_features, norms)
    if strange is not None:
        return ReplicatedModule(name, f"of {strange} it is not known whether heads share it")
    return Attention(name, module, input_layers, output_layer, heads, rest // (2 * dim), dim, norms)


def _head_dim(module: Any, features: int) -> int | None:
    """The head dimension, from the module's attributes or its config."""
    for holder in (module, getattr(module, "config", None)):
        dim = getattr(holder, "head_dim", None)
        if type(dim) is int and dim > 0:
            return dim
        for attribute in QUERY_HEADS:
            heads = getattr(holder, attribute, None)
            if type(heads) is int and heads > 0 and features % heads == 0:
                return features // heads
    return None


def _head_norms(module: nn.Module, dim: int) -> tuple[str, ...]:
    found = [name for name, _ in module.named_children() if name in HEAD_NORMS]
    sizes = {name: [p.numel() for p in getattr(module, name).parameters()] for name in found}
    return tuple(name for name in found if sizes[name] and set(sizes[name]) == {dim})


def _head_parameter(module: nn.Module, hidden: int, norms: tuple[str, ...]) -> str | None:
    """The name of another parameter that may act within heads: its gradient would have to be summed."""
    for name, parameter in module.named_parameters():
        owner = module.get_submodule(name.rpartition(".")[0])
        linear = isinstance(owner, (nn.Linear, nn.Embedding))
        if linear or name.partition(".")[0] in norms or parameter.numel() == hidden:
            continue
        return name
    return None


def dotted(*names: str) -> str:
    """Join names by dots, without the empty ones."""
    return ".".join(filter(None, names))


@dataclass
class TensorParallelPlan:
    """The style of each module."""

    styles: dict[str, ParallelStyle] = field(default_factory=dict)
    attention: list[Attention] = field(default_factory=list)
    """The attention modules whose heads are shared."""
    replicated: list[ReplicatedModule] = field(default_factory=list)
    """The modules that stay whole on every rank, though they look shareable."""


def automatic_plan(model: nn.Module, size: int) -> TensorParallelPlan:
    """The plan that shares the layers of a llama-like model over ``size`` ranks.

    Raises:
        ConfigError: heads that do not divide, a Hugging Face family that was never compared with one
            process, or nothing to share.
    """
    fused = _has_known_order(model)
    plan = TensorParallelPlan()
    for found in attention_in(model, fused=fused):
        if isinstance(found, ReplicatedModule):
            plan.replicated.append(found)
        else:
            check_heads(found, size)
            plan.attention.append(found)
            plan.styles.update(attention_styles(found))
    for found in mlps_in(model, fused=fused):
        if isinstance(found, MLP) and _features(found) % size == 0:
            plan.styles.update(mlp_styles(found))
        else:
            why = (
                f"its {_features(found)} features do not divide by {size}"
                if isinstance(found, MLP)
                else ""
            )
            plan.replicated.append(
                ReplicatedModule(found.name, why) if isinstance(found, MLP) else found
            )
    if not plan.styles:
        raise ConfigError(
            f"the automatic tensor-parallel plan finds nothing to share in {type(model).__name__}: it looks "
            f"for linear layers named {', '.join(ATTENTION[0])} (or q, k, v, o), "
            f"{', '.join(GATED_MLP[0])} and the like. Pass tensor_parallel_plan=, or "
            "tensor_parallel_size=1."
        )
    for name, style, rows in _vocabulary(model):
        if rows % size:
            plan.replicated.append(
                ReplicatedModule(name, f"its {rows} tokens do not divide by {size}")
            )
        else:
            plan.styles[name] = style
    return plan


def check_heads(attention: Attention, size: int) -> None:
    """Check that the ranks can divide the heads.

    Raises:
        ConfigError: naming sizes that work.
    """
    query, kv = attention.query_heads, attention.kv_heads
    if query % size or kv % size:
        raise ConfigError(
            f"tensor_parallel_size={size} does not divide the {query} attention heads and {kv} key/value "
            f"heads of {attention.name or type(attention.module).__name__}. With them, "
            f"tensor_parallel_size can be {join_with_or(divisors(gcd(query, kv)))}."
        )


def _has_known_order(model: nn.Module) -> bool:
    """True if the order in fused layers is known; raises for Hugging Face families that were not compared."""
    types = {str(getattr(root.config, "model_type", "")) for root in hf_models(model)}
    strange = sorted(types - set(KNOWN_TYPES))
    if strange:
        raise ConfigError(
            f"the automatic tensor-parallel plan was never compared with one process for Hugging Face's "
            f"{', '.join(strange)}, and a wrong one could be silent. It knows "
            f"{', '.join(KNOWN_TYPES)}. Pass tensor_parallel_plan= with styles for its layers."
        )
    return bool(types)


def attention_styles(found: Attention) -> Iterator[tuple[str, ParallelStyle]]:
    """The styles of an attention module's layers and norms, by name."""
    query, kv = found.query_heads * found.head_dim, found.kv_heads * found.head_dim
    for layer in found.input_layers:
        fused = len(found.input_layers) == 1
        yield (
            dotted(found.name, layer),
            FusedColwiseLinear((query, kv, kv)) if fused else ColwiseLinear(),
        )
    for norm in found.norms:
        yield dotted(found.name, norm), HeadNorm()
    yield dotted(found.name, found.output_layer), RowwiseLinear()


def mlp_styles(found: MLP) -> Iterator[tuple[str, ParallelStyle]]:
    """The styles of an MLP's layers, by name."""
    for layer in found.input_layers:
        half = _features(found)
        style = FusedColwiseLinear((half, half)) if found.fused else ColwiseLinear()
        yield dotted(found.name, layer), style
    yield dotted(found.name, found.output_layer), RowwiseLinear()


def _features(found: MLP) -> int:
    return getattr(found.module, found.output_layer).in_features


def _vocabulary(model: nn.Module) -> Iterator[tuple[str, ParallelStyle, int]]:
    """The token embedding and the layer that makes logits, each with the size of the vocabulary."""
    names: Mapping[nn.Module, str] = {module: name for name, module in model.named_modules()}
    sizes: set[int] = set()
    for module, name in names.items():
        named = name.rpartition(".")[2] in EMBEDDINGS
        if named and isinstance(module, nn.Embedding) and _looks_up_only(module):
            sizes.add(module.num_embeddings)
            yield name, VocabularyEmbedding(), module.num_embeddings
    for module, name in names.items():
        plain = type(module) is nn.Linear and name.rpartition(".")[2] in HEADS
        if plain and _as_linear(module).out_features in sizes:
            yield name, VocabularyHead(), _as_linear(module).out_features


def heads_in(model: nn.Module) -> list[str]:
    """Names of the layers that make logits."""
    return [name for name, style, _ in _vocabulary(model) if isinstance(style, VocabularyHead)]


def _looks_up_only(module: nn.Embedding) -> bool:
    return module.max_norm is None and not module.sparse and not module.scale_grad_by_freq


def _as_linear(module: Any) -> nn.Linear:
    return module

"""The automatic plan: queries, keys, values, gates and ups by columns, what is behind them by rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import gcd
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from lightning_cp.errors import ConfigError
from lightning_cp.models.swap import hf_models
from lightning_cp.strategies.arguments.sizes import divisors, listed
from lightning_cp.strategies.engines.tensor_parallel import names as known
from lightning_cp.strategies.engines.tensor_parallel.blocks import (
    MLP,
    Attention,
    Whole,
    attention_in,
    joined,
    mlps_in,
)
from lightning_cp.strategies.engines.tensor_parallel.styles import (
    ColwiseLinear,
    FusedColwiseLinear,
    HeadNorm,
    RowwiseLinear,
    VocabularyEmbedding,
    VocabularyHead,
)


@dataclass
class Plan:
    """The style of each module."""

    styles: dict[str, ParallelStyle] = field(default_factory=dict)
    attention: list[Attention] = field(default_factory=list)
    """Whose heads are shared."""
    whole: list[Whole] = field(default_factory=list)
    """What stays whole on every rank, though it looks as if it could be shared."""


def automatic_plan(model: nn.Module, size: int) -> Plan:
    """The layers of a llama-like model that ``size`` ranks can share.

    Raises:
        ConfigError: heads that do not divide, a Hugging Face family that was never compared with one
            process, or nothing that could be shared.
    """
    fused = _refuse_unknown_families(model)
    plan = Plan()
    for found in attention_in(model, fused=fused):
        if isinstance(found, Whole):
            plan.whole.append(found)
        else:
            require_heads(found, size)
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
            plan.whole.append(Whole(found.name, why) if isinstance(found, MLP) else found)
    if not plan.styles:
        raise ConfigError(
            f"the automatic tensor-parallel plan finds nothing to share in {type(model).__name__}: it looks "
            f"for linear layers named {', '.join(known.ATTENTION[0])} (or q, k, v, o), "
            f"{', '.join(known.GATED_MLP[0])} and the like. Pass tensor_parallel_plan=, or "
            "tensor_parallel_size=1."
        )
    for name, style, rows in _vocabulary(model):
        if rows % size:
            plan.whole.append(Whole(name, f"its {rows} tokens do not divide by {size}"))
        else:
            plan.styles[name] = style
    return plan


def require_heads(attention: Attention, size: int) -> None:
    """Refuse heads that the ranks cannot share.

    Raises:
        ConfigError: naming sizes that work.
    """
    query, kv = attention.query_heads, attention.kv_heads
    if query % size or kv % size:
        raise ConfigError(
            f"tensor_parallel_size={size} does not divide the {query} attention heads and {kv} key/value "
            f"heads of {attention.name or type(attention.module).__name__}. With them, "
            f"tensor_parallel_size can be {listed(divisors(gcd(query, kv)))}."
        )


def _refuse_unknown_families(model: nn.Module) -> bool:
    """True if fused layers are in a known order: in the families of Hugging Face that were tried."""
    types = {str(getattr(root.config, "model_type", "")) for root in hf_models(model)}
    strange = sorted(types - set(known.KNOWN_TYPES))
    if strange:
        raise ConfigError(
            f"the automatic tensor-parallel plan was never compared with one process for Hugging Face's "
            f"{', '.join(strange)}, and a wrong one could be silent. It knows "
            f"{', '.join(known.KNOWN_TYPES)}. Pass tensor_parallel_plan= with styles for its layers."
        )
    return bool(types)


def attention_styles(found: Attention) -> Iterator[tuple[str, ParallelStyle]]:
    """Of each of its layers, and of its norms."""
    query, kv = found.query_heads * found.head_dim, found.kv_heads * found.head_dim
    for layer in found.ways_in:
        fused = len(found.ways_in) == 1
        yield (
            joined(found.name, layer),
            FusedColwiseLinear((query, kv, kv)) if fused else ColwiseLinear(),
        )
    for norm in found.norms:
        yield joined(found.name, norm), HeadNorm()
    yield joined(found.name, found.way_out), RowwiseLinear()


def mlp_styles(found: MLP) -> Iterator[tuple[str, ParallelStyle]]:
    """Of each of its layers."""
    for layer in found.ways_in:
        half = _features(found)
        style = FusedColwiseLinear((half, half)) if found.fused else ColwiseLinear()
        yield joined(found.name, layer), style
    yield joined(found.name, found.way_out), RowwiseLinear()


def _features(found: MLP) -> int:
    return getattr(found.module, found.way_out).in_features


def _vocabulary(model: nn.Module) -> Iterator[tuple[str, ParallelStyle, int]]:
    """The embedding of tokens and the layer that makes logits, with the size of the vocabulary."""
    names: Mapping[nn.Module, str] = {module: name for name, module in model.named_modules()}
    sizes: set[int] = set()
    for module, name in names.items():
        named = name.rpartition(".")[2] in known.EMBEDDINGS
        if named and isinstance(module, nn.Embedding) and _looks_up_only(module):
            sizes.add(module.num_embeddings)
            yield name, VocabularyEmbedding(), module.num_embeddings
    for module, name in names.items():
        plain = type(module) is nn.Linear and name.rpartition(".")[2] in known.HEADS
        if plain and _as_linear(module).out_features in sizes:
            yield name, VocabularyHead(), _as_linear(module).out_features


def heads_in(model: nn.Module) -> list[str]:
    """Names of the layers that make logits."""
    return [name for name, style, _ in _vocabulary(model) if isinstance(style, VocabularyHead)]


def _looks_up_only(module: nn.Embedding) -> bool:
    return module.max_norm is None and not module.sparse and not module.scale_grad_by_freq


def _as_linear(module: Any) -> nn.Linear:
    return module

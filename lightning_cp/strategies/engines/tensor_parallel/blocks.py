"""Finding what can be shared: attention and MLPs by the names of their layers, and their heads by shape."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_cp.errors import ConfigError
from lightning_cp.strategies.engines.tensor_parallel import names as known


@dataclass(frozen=True)
class Attention:
    """One attention module."""

    name: str
    module: nn.Module
    ways_in: tuple[str, ...]
    """Its layers that make queries, keys and values: three, or one for all."""
    way_out: str
    query_heads: int
    kv_heads: int
    head_dim: int
    norms: tuple[str, ...] = ()
    """Its norms within heads."""


@dataclass(frozen=True)
class MLP:
    """One MLP; experts of a mixture are not among them."""

    name: str
    module: nn.Module
    ways_in: tuple[str, ...]
    way_out: str
    fused: bool = False


@dataclass(frozen=True)
class Whole:
    """Modules that look like attention or an MLP, and stay whole on every rank."""

    name: str
    why: str


def attention_in(
    model: nn.Module, *, fused: bool, among: Container[str] | None = None
) -> Iterator[Attention | Whole]:
    """The attention modules whose layers have known names.

    Args:
        model: a module.
        fused: it is known in which order fused layers make queries, keys and values.
        among: names of layers; attention that has none of them is passed over.
    """
    for name, module in model.named_modules():
        layers = _linears(module, known.ATTENTION)
        together = _linears(module, known.FUSED_ATTENTION) if layers is None else None
        if among is not None and all(
            joined(name, layer) not in among for layer in layers or together or ()
        ):
            continue
        if layers is not None:
            yield _read_attention(name, module, layers[:-1], layers[-1])
        elif together is not None and fused:
            yield _read_attention(name, module, together[:1], together[1])
        elif together is not None:
            yield Whole(f"{name}.{together[0]}", "in which order it makes q, k and v is not known")


def mlps_in(model: nn.Module, *, fused: bool) -> Iterator[MLP | Whole]:
    """The MLPs whose layers have known names, outside of mixtures of experts."""
    for name, module in model.named_modules():
        layers = _linears(module, (*known.GATED_MLP, *known.PLAIN_MLP))
        together = _linears(module, known.FUSED_MLP)
        if layers is None and together is None:
            continue
        if "experts" in name.split("."):
            yield Whole(name, "it is one of several experts")
        elif together is not None and fused:
            yield MLP(name, module, together[:1], together[1], fused=True)
        elif together is not None:
            yield Whole(
                f"{name}.{together[0]}", "in which order it makes gates and ups is not known"
            )
        elif layers is not None:
            yield MLP(name, module, layers[:-1], layers[-1])


def _linears(module: nn.Module, table: Sequence[tuple[str, ...]]) -> tuple[str, ...] | None:
    """The first row of names that are all linear layers of this module, and ordinary ones."""
    children = dict(module.named_children())
    for row in table:
        if all(type(children.get(name)) is nn.Linear for name in row):
            return row
    return None


def _read_attention(
    name: str, module: nn.Module, ways_in: tuple[str, ...], way_out: str
) -> Attention | Whole:
    layers: list[Any] = [getattr(module, layer) for layer in ways_in]
    features = getattr(module, way_out).in_features
    dim, heads = _head_dim(module, features), None
    if dim is not None and features % dim == 0:
        heads = features // dim
    if dim is None or heads is None:
        raise ConfigError(
            f"{name or type(module).__name__} does not tell its number of heads: the automatic "
            f"tensor-parallel plan looks for attributes {', '.join(known.QUERY_HEADS)} or head_dim. "
            "Name one so, or pass tensor_parallel_plan= (see the documentation of tensor parallelism)."
        )
    rest = layers[0].out_features - features if len(ways_in) == 1 else 2 * layers[1].out_features
    norms = _head_norms(module, dim)
    strange = _others(module, layers[0].in_features, norms)
    if strange is not None:
        return Whole(name, f"of {strange} it is not known whether heads share it")
    return Attention(name, module, ways_in, way_out, heads, rest // (2 * dim), dim, norms)


def _head_dim(module: Any, features: int) -> int | None:
    """From the module's attributes, or from its config."""
    for holder in (module, getattr(module, "config", None)):
        dim = getattr(holder, "head_dim", None)
        if type(dim) is int and dim > 0:
            return dim
        for attribute in known.QUERY_HEADS:
            heads = getattr(holder, attribute, None)
            if type(heads) is int and heads > 0 and features % heads == 0:
                return features // heads
    return None


def _head_norms(module: nn.Module, dim: int) -> tuple[str, ...]:
    found = [name for name, _ in module.named_children() if name in known.HEAD_NORMS]
    sizes = {name: [p.numel() for p in getattr(module, name).parameters()] for name in found}
    return tuple(name for name in found if sizes[name] and set(sizes[name]) == {dim})


def _others(module: nn.Module, hidden: int, norms: tuple[str, ...]) -> str | None:
    """A parameter here that may work within heads, where its gradient would have to be summed."""
    for name, parameter in module.named_parameters():
        owner = module.get_submodule(name.rpartition(".")[0])
        linear = isinstance(owner, (nn.Linear, nn.Embedding))
        if linear or name.partition(".")[0] in norms or parameter.numel() == hidden:
            continue
        return name
    return None


def joined(*names: str) -> str:
    """Dotted, without the parts that are empty."""
    return ".".join(filter(None, names))

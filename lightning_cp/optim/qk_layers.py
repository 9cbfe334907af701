"""Positions of a model's query and key projections, and the head of each of their rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist

from lightning_cp.comm.consensus import World
from lightning_cp.comm.reduce import all_max
from lightning_cp.errors import ConfigError, NonFiniteError

NORMS = (
    *("q_norm", "k_norm", "qk_norm", "q_layernorm", "k_layernorm", "query_norm", "key_norm"),
    *("norm_q", "norm_k", "query_layernorm", "key_layernorm", "q_ln", "k_ln", "qk_layernorm"),
)
"""Names of norms between a projection and its scores, which undo any scale of the projection."""

FUSED = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class ProjectionRows:
    """Outputs of a projection: rows of its weight (columns of a transposed one), entries of its bias."""

    parameter: str
    dim: int
    first: int
    size: int


@dataclass(frozen=True)
class QKLayer:
    """An attention layer: for each projection the weight, then the bias if there is one."""

    name: str
    query: tuple[ProjectionRows, ...]
    key: tuple[ProjectionRows, ...]

    def kv_heads(self, heads: int) -> int:
        """The number of key heads for this number of query heads.

        Raises:
            ConfigError: rows that do not divide so.
        """
        queries, keys = self.query[0].size, self.key[0].size
        dim = queries // heads if heads and queries % heads == 0 else 0
        if not dim or keys % dim or heads % (keys // dim):
            raise ConfigError(
                f"{self.name}: {queries} rows of queries and {keys} of keys are not those of {heads} query "
                "heads. QK-clip scales projections whose heads lie one after the other, all of one size."
            )
        return keys // dim


def find_layers(
    shapes: Mapping[str, tuple[int, ...]],
    query: str,
    key: str,
    fused: FUSED,
    wanted: Sequence[str],
) -> dict[str, QKLayer]:
    """The attention layers among parameters, by the name of the module that has the projections.

    Args:
        shapes: of parameters, by name.
        query: the name of the query projection within its module.
        key: the name of the key projection within it.
        fused: pattern of names of projections in one parameter -> its rows of q, k and v.
        wanted: patterns of names of layers.

    Raises:
        ConfigError: there are none, a pattern of ``fused`` matches nothing, only one of two projections
            exists, or they are normalised.
    """
    found: dict[str, QKLayer] = {}
    for name, shape in shapes.items():
        layer = _separate_layer(name, shapes, query, key) or _fused_layer(
            name, shape, shapes, fused
        )
        if layer is not None and any(fnmatchcase(layer.name, pattern) for pattern in wanted):
            found[layer.name] = layer
    for pattern in fused:
        if not any(fnmatchcase(name, pattern) for name in shapes):
            raise ConfigError(f"fused= has {pattern!r}, which fits no parameter. {_listed(shapes)}")
    if not found:
        raise ConfigError(
            f"QK-clip has found no layer with {query}.weight and {key}.weight"
            f"{'' if tuple(wanted) == ('*',) else f' among layers {list(wanted)}'}. Say how they are called "
            'with query= and key=, or fused={"*.qkv_proj.weight": (rows of q, of k, of v)}. '
            f"{_listed(shapes)}"
        )
    for name in found:
        inside = (each.removeprefix(f"{name}.") for each in shapes if each.startswith(f"{name}."))
        check_no_norms(name, (each.split(".")[0] for each in inside))
    return found


def check_no_norms(layer: str, children: Iterable[str]) -> None:
    """Check by the names of a layer's children that it does not normalise queries or keys.

    Raises:
        ConfigError: one of them normalises queries or keys.
    """
    norms = sorted(set(children) & set(NORMS))
    if norms:
        raise ConfigError(
            f"{layer} normalises queries or keys after their projections ({', '.join(norms)}), so scaling "
            "those does nothing to the scores. Train without QK-clip (the norm bounds the scores already), "
            "or leave such layers out with layers=."
        )


def row_factors(
    layer: QKLayer,
    gammas: torch.Tensor,
    *,
    alpha: float,
    keys: str,
    plain: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The factor of each row of the query and of the key projection: float64 [rows].

    Args:
        layer: the attention layer.
        gammas: float64 [H]: one factor for each query head's scores.
        alpha: the share of the queries.
        keys: ``group`` or ``query``: see ``QKClip``.
        plain: rows (start, stop) of each head that only the queries scale; no rows for (0, 0).
    """
    heads = len(gammas)
    kv_heads = layer.kv_heads(heads)
    dim = layer.query[0].size // heads
    if keys == "query":
        return gammas.repeat_interleave(dim), torch.ones(layer.key[0].size, dtype=torch.float64)
    of_group = gammas.view(kv_heads, -1).amin(1)
    share = torch.full((dim,), alpha, dtype=torch.float64)
    share[slice(*plain)] = 1.0
    of_key = of_group[:, None] ** (1.0 - share)
    of_query = of_group[:, None] ** share
    return of_query.repeat_interleave(heads // kv_heads, 0).flatten(), of_key.flatten()


def _separate_layer(
    name: str, shapes: Mapping[str, tuple[int, ...]], query: str, key: str
) -> QKLayer | None:
    """The layer whose query projection is this parameter."""
    if name != f"{query}.weight" and not name.endswith(f".{query}.weight"):
        return None
    before = name.removesuffix(f"{query}.weight")
    other = f"{before}{key}.weight"
    if other not in shapes:
        raise ConfigError(
            f"{name} is there, and {other} is not. QK-clip scales both: hand it all parameters, and say how "
            "projections are called with query= and key=."
        )
    return QKLayer(
        before.removesuffix(".") or query,
        tuple(_whole(name, shapes)),
        tuple(_whole(other, shapes)),
    )


def _whole(name: str, shapes: Mapping[str, tuple[int, ...]]) -> Iterable[ProjectionRows]:
    yield ProjectionRows(name, 0, 0, shapes[name][0])
    bias = f"{name.removesuffix('weight')}bias"
    if bias in shapes:
        yield ProjectionRows(bias, 0, 0, shapes[bias][0])


def _fused_layer(
    name: str, shape: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]], fused: FUSED
) -> QKLayer | None:
    """The layer whose projections are all in this parameter."""
    pattern = next((each for each in fused if fnmatchcase(name, each)), None)
    if pattern is None:
        return None
    sizes = tuple(fused[pattern])
    dims = [dim for dim, size in enumerate(shape) if size == sum(sizes)]
    if len(sizes) != 3 or min(sizes) < 1 or not dims:
        raise ConfigError(
            f"fused={{{pattern!r}: {list(sizes)}}} does not fit {name} {list(shape)}: it has the rows of q, "
            "of k and of v, which add up to all rows (or all columns)."
        )
    bias = f"{name.removesuffix('weight')}bias"
    parts = [(name, dims[0])] + [(bias, 0)] * (bias != name and bias in shapes)
    q, k = sizes[:2]
    module = name.rpartition(".")[0] if name.endswith(".weight") else name
    return QKLayer(
        module.rpartition(".")[0] or module,
        tuple(ProjectionRows(each, dim, 0, q) for each, dim in parts),
        tuple(ProjectionRows(each, dim, q, k) for each, dim in parts),
    )


def _listed(shapes: Mapping[str, tuple[int, ...]]) -> str:
    names = list(shapes)
    return f"There are: {', '.join(names[:12])}{', ...' * (len(names) > 12)}."


# The largest scores of each layer since the last step: of this rank, then of all ranks.


SHOWN = 6
"""The number of names in a message."""


class ScoreMaxima:
    """The largest scores of query heads, by layer; every rank has the same layers."""

    def __init__(self, layers: Mapping[str, QKLayer]) -> None:
        self._layers = layers
        self._noted: dict[str, torch.Tensor] = {}
        self.heads: dict[str, int] = {}
        """The number of query heads of each layer over all tensor-parallel ranks, from calls."""
        self._settled = False

    def note(
        self, layer: str, maxima: torch.Tensor, head_dim: int | None, tp_rank: int, tp_size: int
    ) -> None:
        """Record scores; see ``QKClip.note``."""
        known = self._layers.get(layer)
        if known is None:
            raise ConfigError(f"QK-clip knows no layer {layer!r}. It has: {_names(self._layers)}.")
        if maxima.dim() != 1 or not len(maxima):
            raise ConfigError(
                f"largest scores of {layer} are [heads], got a tensor of shape {list(maxima.shape)}: take "
                "the maximum over the batch and over tokens."
            )
        heads, first = _head_range(known, len(maxima), head_dim, tp_rank, tp_size)
        known.kv_heads(heads)  # check that they divide
        before = self.heads.setdefault(layer, heads)
        if before != heads:
            raise ConfigError(
                f"{layer} had {before} query heads in one call, and {heads} in another. "
                "Use one module for each number of heads."
            )
        found = self._noted.get(layer)
        if found is None:
            found = maxima.new_full((heads,), -torch.inf, dtype=torch.float32)
            self._noted[layer] = found
        own = found[first : first + len(maxima)]
        own.copy_(torch.maximum(own, maxima.detach().to(found)))

    def forget(self) -> None:
        """Drop all scores at the end of a step."""
        self._noted.clear()

    def gather(self) -> dict[str, list[float]]:
        """The largest scores over all ranks, in one message; afterwards none are recorded.

        Raises:
            ConfigError: no rank has recorded scores of some layer.
            NonFiniteError: a score is NaN or infinite.
        """
        noted, self._noted = self._noted, {}
        self._exchange_head_counts()
        parts = [self._layer_maxima(noted, name) for name in self._layers]
        packed = torch.cat([x.to(_device(parts)) for x in parts])
        packed = torch.where(packed.isnan(), torch.inf, packed)  # max may drop NaN
        world = dist.group.WORLD if World().size > 1 else None
        if world is not None:
            packed = all_max(packed, world)
        values, sizes = packed.tolist(), [len(x) for x in parts]
        found: dict[str, list[float]] = {}
        for name, size in zip(self._layers, sizes, strict=True):
            found[name], values = values[:size], values[size:]
        self._check_complete(found)
        return found

    def _layer_maxima(self, noted: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
        found = noted.get(name)
        return torch.full((self.heads[name],), -torch.inf) if found is None else found

    def _exchange_head_counts(self) -> None:
        """Exchange once the number of heads of each layer, for ranks that have not called it."""
        if self._settled:
            return
        every = World().gather(self.heads)
        for told in every:
            for name, heads in told.items():
                if self.heads.setdefault(name, heads) != heads:
                    counts = sorted({of[name] for of in every if name in of})
                    raise ConfigError(
                        f"ranks have different numbers of heads in {name}: {counts}. "
                        "Build the same model on all ranks."
                    )
        missing = [name for name in self._layers if name not in self.heads]
        if missing:
            raise _missing_scores_error(missing)
        self._settled = True

    def _check_complete(self, found: Mapping[str, list[float]]) -> None:
        missing = [name for name, values in found.items() if max(values) == -math.inf]
        if missing:
            raise _missing_scores_error(missing)
        bad = {
            name: [head for head, x in enumerate(values) if x == math.inf]
            for name, values in found.items()
        }
        told = [
            f"{name}: heads {', '.join(map(str, heads))}" for name, heads in bad.items() if heads
        ]
        if told:
            raise NonFiniteError(
                f"the largest attention scores are NaN or infinite ({_names(told, '; ')}). Nothing was "
                "changed. Look for the first loss that is not finite; lower the learning rate, or tau."
            )


def _head_range(
    layer: QKLayer, count: int, head_dim: int | None, tp_rank: int, tp_size: int
) -> tuple[int, int]:
    """The number of query heads of a layer, and the first head of a call."""
    rows = layer.query[0].size
    heads = count if head_dim is None else rows // head_dim
    if head_dim is not None and rows % head_dim:
        heads = 0
    if heads and count * tp_size == heads:
        return heads, tp_rank * count
    if heads and count == heads:
        return heads, 0
    shared = f" of tensor-parallel rank {tp_rank} of {tp_size}" if tp_size > 1 else ""
    raise ConfigError(
        f"{layer.name}: a call{shared} had {count} query heads of {head_dim or 'unknown'} rows, and the "
        f"query projection has {rows} rows. QK-clip scales projections whose output is the queries of all "
        "heads, one after the other."
    )


def _missing_scores_error(layers: list[str]) -> ConfigError:
    return ConfigError(
        f"QK-clip has no largest scores of {_names(layers)} since the last step ({len(layers)} layers), "
        "nothing was changed. They come from attention under one of this package's strategies, to which the "
        "optimizer was given (Trainer, or fabric.setup); report those of your own attention with "
        "QKClip.note(layer, maxima) (context_parallel_attention(..., return_max_logits=True) gives them); "
        "leave layers that take no part out with layers=."
    )


def _device(parts: list[torch.Tensor]) -> torch.device:
    """The device of messages of the world, or of all tensors."""
    if World().size > 1 and dist.get_backend() == "gloo":
        return torch.device("cpu")
    found = next((x.device for x in parts if x.device.type != "cpu"), None)
    if found is None and World().size > 1 and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return found or torch.device("cpu")


def _names(names: Iterable[str], between: str = ", ") -> str:
    every = list(names)
    return between.join(every[:SHOWN]) + f"{between}..." * (len(every) > SHOWN)

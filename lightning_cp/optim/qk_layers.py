"""Where a model's query and key projections are, and which of their rows are whose head's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from lightning_cp.errors import ConfigError

NORMS = (
    *("q_norm", "k_norm", "qk_norm", "q_layernorm", "k_layernorm", "query_norm", "key_norm"),
    *("norm_q", "norm_k", "query_layernorm", "key_layernorm", "q_ln", "k_ln", "qk_layernorm"),
)
"""Names of what stands between a projection and its scores, and undoes any scale of the projection."""

FUSED = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Rows:
    """Outputs of a projection: rows of its weight (columns of a transposed one), entries of its bias."""

    parameter: str
    dim: int
    first: int
    size: int


@dataclass(frozen=True)
class Layer:
    """An attention layer: of each projection the weight, then the bias if there is one."""

    name: str
    query: tuple[Rows, ...]
    key: tuple[Rows, ...]

    def kv_heads(self, heads: int) -> int:
        """Key heads, where there are so many query heads.

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
) -> dict[str, Layer]:
    """The attention layers among parameters, by the name of the module that has the projections.

    Args:
        shapes: of parameters, by name.
        query: the name of the query projection within its module.
        key: likewise.
        fused: pattern of names of projections that are one parameter -> its rows of q, k and v.
        wanted: patterns of names of layers.

    Raises:
        ConfigError: there are none, a pattern of ``fused`` fits nothing, only one of two projections is
            there, or they are normalised.
    """
    found: dict[str, Layer] = {}
    for name, shape in shapes.items():
        layer = _apart(name, shapes, query, key) or _fused(name, shape, shapes, fused)
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
        refuse_norms(name, (each.split(".")[0] for each in inside))
    return found


def refuse_norms(layer: str, children: Iterable[str]) -> None:
    """Refuse an attention layer by the names of what is in it.

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
    layer: Layer,
    gammas: torch.Tensor,
    *,
    alpha: float,
    keys: str,
    plain: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """What each row of the query and of the key projection is multiplied with: float64 [rows].

    Args:
        layer: whose.
        gammas: float64 [H]: of each query head's scores.
        alpha: the share of the queries.
        keys: ``group``, or ``query``: see ``QKClip``.
        plain: rows (start, stop) of each head of which the queries take all; no rows for (0, 0).
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


def _apart(name: str, shapes: Mapping[str, tuple[int, ...]], query: str, key: str) -> Layer | None:
    """The layer whose query projection a parameter is."""
    if name != f"{query}.weight" and not name.endswith(f".{query}.weight"):
        return None
    before = name.removesuffix(f"{query}.weight")
    other = f"{before}{key}.weight"
    if other not in shapes:
        raise ConfigError(
            f"{name} is there, and {other} is not. QK-clip scales both: hand it all parameters, and say how "
            "projections are called with query= and key=."
        )
    return Layer(
        before.removesuffix(".") or query,
        tuple(_whole(name, shapes)),
        tuple(_whole(other, shapes)),
    )


def _whole(name: str, shapes: Mapping[str, tuple[int, ...]]) -> Iterable[Rows]:
    yield Rows(name, 0, 0, shapes[name][0])
    bias = f"{name.removesuffix('weight')}bias"
    if bias in shapes:
        yield Rows(bias, 0, 0, shapes[bias][0])


def _fused(
    name: str, shape: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]], fused: FUSED
) -> Layer | None:
    """The layer of which a parameter is all projections."""
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
    return Layer(
        module.rpartition(".")[0] or module,
        tuple(Rows(each, dim, 0, q) for each, dim in parts),
        tuple(Rows(each, dim, q, k) for each, dim in parts),
    )


def _listed(shapes: Mapping[str, tuple[int, ...]]) -> str:
    names = list(shapes)
    return f"There are: {', '.join(names[:12])}{', ...' * (len(names) > 12)}."

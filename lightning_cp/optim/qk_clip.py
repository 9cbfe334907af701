"""QK-clip: scales query and key projections down where attention scores have grown too large."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from lightning_cp.comm.consensus import World
from lightning_cp.errors import ConfigError
from lightning_cp.optim.parameters import check_known, check_numbers
from lightning_cp.optim.placement import held_indices
from lightning_cp.optim.qk_layers import (
    ProjectionRows,
    QKLayer,
    ScoreMaxima,
    find_layers,
    row_factors,
)
from lightning_cp.utils.dtensor import local_part

_log = logging.getLogger("lightning_cp")
SHOWN = 8
"""The number of layers in a line of the log, and of heads of a layer."""


@dataclass(eq=False)
class QKClip:
    """Scales heads whose largest score has passed ``tau`` back to it, after a step (Kimi K2's MuonClip).

    With gamma = min(1, tau / largest score) of a head, its rows of the query projection are multiplied by
    ``gamma ** alpha``, those of the key projection by ``gamma ** (1 - alpha)``, and both biases too.

    An optimizer calls ``bind`` once, and in each step ``check_ready`` before it changes anything (after its
    closure), and ``apply`` at its end; all ranks together. ``Muon(qk_clip=QKClip())`` does so, and strategies
    collect the scores of every optimizer that has such an attribute ``qk_clip``.

    Args:
        tau: the largest score that is not scaled.
        alpha: the queries' share; the keys have the rest.
        keys: with grouped heads: ``group``: the largest score of all query heads of a key head sets the
            scale of all of them and of the keys; ``query``: only queries are scaled, each head by its own
            gamma.
        rope: ``uniform``: all rows of a head alike, which commutes with rotary embeddings; ``query``: for
            ``rope_rows`` the queries are scaled by gamma, and the keys, which heads share (MLA), are not.
        rope_rows: (start, stop) within each head.
        query: the name of the query projection within its attention layer.
        key: the name of the key projection within it.
        fused: pattern of a parameter with all three projections -> its rows of q, of k and of v.
        layers: patterns of names of attention layers that are scaled.
        extra_pass: run a second forward pass for kernels that return no largest scores.

    Raises:
        ConfigError: a setting that is out of range.
    """

    tau: float = 100.0
    alpha: float = 0.5
    keys: str = "group"
    rope: str = "uniform"
    rope_rows: Sequence[int] | None = None
    query: str = "q_proj"
    key: str = "k_proj"
    fused: Mapping[str, Sequence[int]] | None = None
    layers: Sequence[str] = ("*",)
    extra_pass: bool = False
    clipped: dict[str, list[int]] = field(default_factory=dict, init=False, repr=False)
    """Query heads that the last step scaled, by layer."""
    largest: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    """Each layer's largest score in the last step, before scaling."""

    def __post_init__(self) -> None:
        """Check the settings."""
        check_numbers({"tau": self.tau}, lambda x: x > 0, "above 0")
        check_numbers({"alpha": self.alpha}, lambda x: 0 <= x <= 1, "from 0 to 1")
        check_known("keys", self.keys, ("group", "query"))
        check_known("rope", self.rope, ("uniform", "query"))
        self._plain = self._checked_rows()
        for name in ("query", "key"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ConfigError(
                    f"{name} is the name of a projection, got {getattr(self, name)!r}. "
                    "Give the name of the attribute, such as 'q_proj'."
                )
        if not isinstance(self.extra_pass, bool):
            raise ConfigError(
                f"extra_pass is True or False, got {self.extra_pass!r}. "
                "True computes the scores in a forward pass by itself."
            )
        if isinstance(self.layers, str):
            raise ConfigError(
                f"layers= is a list of patterns, got {self.layers!r}. "
                "Put the pattern into a list, even if it is the only one."
            )
        self._parameters: dict[str, torch.Tensor] = {}
        self._held: dict[tuple[str, int], torch.Tensor] = {}
        self._found: dict[str, QKLayer] = {}
        self._maxima = ScoreMaxima({})
        self._ready: dict[str, list[float]] | None = None

    def bind(self, named_parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Find the projections among a model's parameters.

        Raises:
            ConfigError: there are none, scaling them would not scale the scores, or another model is
                bound.
        """
        given = dict(named_parameters)
        if self._parameters and self._parameters.keys() != given.keys():
            raise ConfigError(
                "this QKClip has the parameters of another optimizer. Make one for each."
            )
        self._parameters = given
        shapes = {name: tuple(p.shape) for name, p in self._parameters.items()}
        self._found = find_layers(shapes, self.query, self.key, self.fused or {}, self.layers)
        self._maxima = ScoreMaxima(self._found)
        self._held.clear()

    def follow(self, successors: Mapping[int, torch.Tensor]) -> None:
        """Replace parameters that were sharded: by id of each, its sharded version.

        Raises:
            ConfigError: some projections are missing.
        """
        moved = any(successors.get(id(p), p) is not p for p in self._parameters.values())
        for layer in self._found.values() if moved else ():
            for rows in (*layer.query, *layer.key):
                if id(self._parameters[rows.parameter]) not in successors:
                    raise ConfigError(
                        f"QK-clip scales {rows.parameter}, which its optimizer does not step, so the part "
                        "that each rank holds after sharding is unknown. Bind what the optimizer is "
                        "given, and leave such layers out with layers=."
                    )
        self._parameters = {n: successors.get(id(p), p) for n, p in self._parameters.items()}
        self._held.clear()

    def weights(self) -> dict[str, tuple[str, torch.Tensor]]:
        """By layer, the name and the weight of its query projection."""
        names = {name: layer.query[0].parameter for name, layer in self._found.items()}
        return {layer: (name, self._parameters[name]) for layer, name in names.items()}

    def note(
        self,
        layer: str,
        maxima: torch.Tensor,
        *,
        head_dim: int | None = None,
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> None:
        """Record the largest scores of a call of attention over this rank's queries; called any number of
        times.

        Args:
            layer: the name of the module that has the projections.
            maxima: [heads]: of all query heads, or of those of one tensor-parallel rank; -inf for
                unknown.
            head_dim: of queries and keys; optional if ``maxima`` has all heads.
            tp_rank: the tensor-parallel rank of these heads.
            tp_size: ranks that share the layer.

        Raises:
            ConfigError: an unknown layer, or another number of heads than its projections have.
        """
        self._maxima.note(layer, maxima, head_dim, tp_rank, tp_size)

    def forget(self) -> None:
        """Drop the scores recorded since the last step, because that step was skipped."""
        self._maxima.forget()
        self._ready = None

    def check_ready(self) -> None:
        """Gather the largest scores of all ranks before a step, and check that every layer has some.

        Raises:
            ConfigError: on every rank, naming the layers without scores on any rank since the last step.
            NonFiniteError: on every rank, naming the heads whose largest score is NaN or infinite.
        """
        if not self._found:
            raise ConfigError(
                "QK-clip knows no parameters. Call bind(model.named_parameters()) first; "
                "Muon(..., qk_clip=...) does so."
            )
        self._ready = None
        found = self._maxima.gather()
        self._check_rows_of_heads()
        self._ready = found

    @torch.no_grad()
    def apply(self) -> dict[str, list[int]]:
        """Scale heads with too large scores after a step; return the scaled heads by layer."""
        if self._ready is None:
            self.check_ready()
        ready, self._ready = self._ready or {}, None
        self.largest = {name: max(values) for name, values in ready.items()}
        self.clipped = {}
        for name, values in ready.items():
            if self.largest[name] > self.tau and self._is_trained(self._found[name]):
                self.clipped[name] = self._scale(self._found[name], values)
        self._log_clipped()
        return self.clipped

    def _is_trained(self, layer: QKLayer) -> bool:
        """True if the layer's parameters are trained; frozen ones and their counterparts are not scaled."""
        every = {rows.parameter for rows in (*layer.query, *layer.key)}
        return all(self._parameters[name].requires_grad for name in every)

    def _scale(self, layer: QKLayer, values: Sequence[float]) -> list[int]:
        """Scale a layer's heads; return the scaled heads."""
        over = [self.tau / x if x > self.tau else 1.0 for x in values]
        gammas = torch.tensor(over, dtype=torch.float64)
        factors = row_factors(layer, gammas, alpha=self.alpha, keys=self.keys, plain=self._plain)
        for some, factor in zip((layer.query, layer.key), factors, strict=True):
            for rows in some:
                self._multiply(rows, factor)
        of_head = factors[0].view(len(values), -1).amin(1)
        of_keys = factors[1].view(layer.kv_heads(len(values)), -1).amin(1)
        touched = torch.minimum(of_head, of_keys.repeat_interleave(len(values) // len(of_keys)))
        return [head for head, factor in enumerate(touched.tolist()) if factor < 1]

    def _multiply(self, rows: ProjectionRows, factor: torch.Tensor) -> None:
        """Multiply each row of this rank by its factor, with one rounding."""
        p = self._parameters[rows.parameter]
        whole = torch.ones(p.shape[rows.dim], dtype=torch.float64)
        whole[rows.first : rows.first + rows.size] = factor
        key = rows.parameter, rows.dim
        if key not in self._held:
            self._held[key] = held_indices(p, rows.dim)
        own = whole[self._held[key]]
        local = local_part(p)
        if local.numel() and bool((own != 1).any()):
            wide = torch.float64 if p.dtype == torch.float64 else torch.float32
            shape = [-1 if dim == rows.dim else 1 for dim in range(p.dim())]
            local.copy_(local.to(wide) * own.to(local.device, wide).view(shape))

    def _log_clipped(self) -> None:
        if not self.clipped or World().rank:
            return
        told = [
            f"{name}: heads {_shown(heads)}, largest score {self.largest[name]:.4g}"
            for name, heads in list(self.clipped.items())[:SHOWN]
        ]
        more = len(self.clipped) - SHOWN
        rest = f"; and {more} more layers" if more > 0 else ""
        _log.info("QK-clip at tau=%g: %s%s", self.tau, "; ".join(told), rest)

    def _checked_rows(self) -> tuple[int, int]:
        rows = self.rope_rows
        if self.rope == "uniform":
            if rows is not None:
                raise ConfigError(
                    f"rope_rows={rows!r} says which rows rope='query' is of, got rope='uniform'. "
                    "Leave one of them out."
                )
            return 0, 0
        ends = tuple(rows) if isinstance(rows, Sequence) and not isinstance(rows, str) else ()
        if len(ends) != 2 or any(type(x) is not int for x in ends) or not 0 <= ends[0] < ends[1]:
            raise ConfigError(
                "rope='query' needs rope_rows=(start, stop): the rotary rows within each head, got "
                f"{rows!r}."
            )
        return ends[0], ends[1]

    def _check_rows_of_heads(self) -> None:
        for name, heads in self._maxima.heads.items():
            dim = self._found[name].query[0].size // heads
            if self._plain[1] > dim:
                raise ConfigError(
                    f"rope_rows={self.rope_rows!r} are not within a head of {name}, which has {dim} rows. "
                    "Give (start, stop) within a head."
                )


def _shown(heads: Sequence[int]) -> str:
    return ", ".join(map(str, heads[:SHOWN])) + ", ..." * (len(heads) > SHOWN)

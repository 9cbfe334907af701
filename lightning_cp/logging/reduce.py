"""Logged values, kept until the ranks that share a sample come together, and settled in one exchange.

One collective per call would wait for ever where only one rank logs something, which Lightning allows. So
calls are collected, and at the end of the step, of the batch or of the epoch the ranks compare what each
of them has. What all of them logged is made one value; what some of them logged they show as it is,
except for sums with counts: a rank that did not log them has counted nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from numbers import Integral, Real
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torchmetrics import MeanMetric, Metric

from lightning_cp.batch.loss_calls import Mismatch, find_mismatches, mismatch_warning
from lightning_cp.comm.consensus import gather_vectors
from lightning_cp.comm.reduce import all_sum
from lightning_cp.layout.axes import Flat
from lightning_cp.logging.pending import Losses, StepRanks, agree_on_calls
from lightning_cp.loss.averages import Options, as_logged
from lightning_cp.mesh import ContextParallelMesh

# The values that the ranks of a group have, side by side, and what they make together.


def side_by_side(
    values: Sequence[torch.Tensor], mesh: ContextParallelMesh, flat: Flat = Flat.CP
) -> list[torch.Tensor]:
    """float64 ``[ranks, *shape]`` for each value: every rank's own, in rank order, equal on all ranks.

    One exchange, on the mesh's device: where a value happens to live may differ between ranks. Every rank
    of the group calls it with as many values, of the same shapes.
    """
    if not values:
        return []
    flatly = [value.detach().to(mesh.device_type, torch.float64).reshape(-1) for value in values]
    table = torch.stack(gather_vectors(torch.cat(flatly), mesh.group(flat)))
    parts = table.split([part.numel() for part in flatly], dim=1)
    return [part.reshape(-1, *value.shape) for part, value in zip(parts, values, strict=True)]


def equal(rows: torch.Tensor) -> torch.Tensor:
    """bool ``[*shape]``: whether all ranks have the same; NaN equals NaN."""
    return ((rows == rows[0]) | (rows.isnan() & rows[0].isnan())).all(0)


def weighted_mean(rows: torch.Tensor, shares: Sequence[float]) -> torch.Tensor:
    """float64 ``[*shape]``: the mean over ranks; exactly their value where all have the same.

    Args:
        rows: ``[ranks, *shape]``.
        shares: each rank's weight; they sum to 1. What a rank of weight 0 has is not looked at, NaN or not.
    """
    mean = torch.zeros_like(rows[0])
    for row, share in zip(rows, shares, strict=True):
        if share:
            mean = mean + share * row
    return torch.where(equal(rows), rows[0], mean)


class Kind(Enum):
    """One process's value, where ranks that share its sample have different ones."""

    MEAN = "mean"
    """The mean over targets."""
    LARGEST = "largest"
    """In a batch the mean over targets, as it is the largest over steps that is wanted; else the largest."""
    SMALLEST = "smallest"
    """Likewise."""
    COUNT = "count"
    """The sum: an integer."""
    SUM = "sum"
    """The sum: it is added up over batches, too."""
    FLAG = "flag"
    """Whether any of them is true."""
    METRIC = "metric"
    """A metric's value for this step: nobody knows, the mean over targets is a guess."""
    MEAN_METRIC = "mean metric"
    """The sum in a metric that averages numbers of ranks: it is compared, and not shown."""
    SHOWN = "shown"
    """Nobody knows, and it was logged already."""
    RATIO = "ratio"
    """A sum and a count: sum of sums over sum of counts."""


STEP_LOSS = "the step's loss"
"""In the place of a hook, or what it begins with: the call is what a step returned. Ranks go through
backward together."""


@dataclass
class LogCall:
    """One call of ``log``."""

    name: str
    kind: Kind
    values: Sequence[torch.Tensor]
    emit: Callable[..., None]
    """Shows a value, ``None``: as it was given. Sums of a ratio: the total and the count of all ranks."""
    where: str = ""
    """The hook."""
    options: Options = ()
    """Of a ratio: what a rank that did not call it needs to show it."""
    key: str = ""
    """What it has in common with the same call on other ranks."""


_Seen = tuple[LogCall, list[bool], torch.Tensor]
"""A call that all ranks have, its doubts, and their evidence."""


class StepLog:
    """The calls since ranks last came together.

    Args:
        warn: tells the user.
        join: a ratio that only other ranks have logged, by its hook, its name and its options.
    """

    def __init__(
        self, warn: Callable[[str], None], join: Callable[[str, str, Options], LogCall]
    ) -> None:
        self._warn = warn
        self._join = join
        self._told: set[str] = set()
        self._doubted: set[tuple[Mismatch, str]] = set()
        self.drop()

    def open(self) -> None:
        """From here on calls can wait: ranks will come together."""
        self.is_open = True

    def drop(self) -> None:
        """Forget everything: the step failed."""
        self.is_open = False
        self._calls: list[LogCall] = []
        self._times: Counter[str] = Counter()

    def add(self, call: LogCall) -> None:
        """Keep one call."""
        name = f"{call.where}: {call.name}"
        call.key = f"{name} #{self._times[name]}"
        call.values = [value.detach().clone() for value in call.values]
        self._times[name] += 1
        self._calls.append(call)

    def settle(
        self, ranks: StepRanks, *, of_a_batch: bool, together: bool, to_backward: bool = False
    ) -> None:
        """Show all calls, in order; every rank of the cp group comes here.

        Args:
            ranks: the core.
            of_a_batch: there is a batch, whose targets say what a mean is.
            together: all data ranks come here as well, so that ratios are those of all of them.
            to_backward: all that come here go there next.
        """
        calls, is_open = self._calls, self.is_open
        self.drop()
        self.is_open = is_open
        mesh = ranks.mesh
        flat = Flat.LOSS if together and mesh.data_size > 1 else Flat.CP
        own = sorted(
            (call.key, call.kind.value, call.where, call.name, call.options) for call in calls
        )
        lists = agree_on_calls(own, ranks, flat, to_backward=to_backward)
        if not _losses_fit(lists, mesh.sample_size):
            calls = [call for call in calls if not call.where.startswith(STEP_LOSS)]
        calls = self._joined(calls, lists)
        _settle_ratios(sorted(filter(_is_ratio, calls), key=_key), mesh, flat)
        first = 0 if flat is Flat.CP else mesh.data_rank * mesh.sample_size
        self._settle_rest(
            calls,
            lists[first : first + mesh.sample_size],
            mesh,
            ranks.shares if of_a_batch else None,
            ranks.evidence if of_a_batch and ranks.looks_at_values else None,
            ranks.weights_by_loss if of_a_batch else None,
            # A loss that counts other targets is refused in training, unless it has declared them.
            _doubted(ranks, together=together),
        )
        for call in calls:
            call.emit()

    def _settle_rest(
        self,
        calls: list[LogCall],
        lists: list[list[Any]],
        mesh: ContextParallelMesh,
        shares: list[float] | None,
        evidence_of: Callable[[torch.Tensor], torch.Tensor] | None,
        losses: Losses | None,
        doubted: Sequence[Mismatch],
    ) -> None:
        """Everything but ratios, as far as all ranks of the cp group have it.

        Args:
            calls: this rank's.
            lists: those of each rank of the cp group.
            mesh: the process groups.
            shares: of each rank, what means are weighted by; ``None``: nothing.
            evidence_of: of a float, how it may have come about, which is exchanged along with it and looked
                at; ``None``: it is not.
            losses: of a step that has several counts.
            doubted: the doubts that the user is told of.
        """
        peers = [{key: Kind(kind) for key, kind, *_ in one} for one in lists]
        common = set.intersection(*map(set, peers))
        kinds = {key: {peer[key] for peer in peers} for key in common}
        means_of_all = {key for key in common if kinds[key] <= set(MEANS)}  # all send as much
        shared = [call for call in calls if call.key in common and not _is_ratio(call)]
        shared.sort(key=_key)
        values = [call.values[0] for call in shared]
        means = [
            call for call in shared if evidence_of and _is_mean(call) and call.key in means_of_all
        ]
        values += [evidence_of(call.values[0]) for call in means] if evidence_of else []
        of_losses = [call for call in shared if losses and call.key in means_of_all]
        values += [losses.likeness(call.values[0]) for call in of_losses] if losses else []
        both = side_by_side(values, mesh)
        rows, evidence = both[: len(shared)], both[len(shared) : len(shared) + len(means)]
        alike = {
            call.key: x
            for call, x in zip(of_losses, both[len(values) - len(of_losses) :], strict=True)
        }
        row_of = {call.key: row for call, row in zip(shared, rows, strict=True)}
        of_step = [row_of[call.key] for call in shared if _is_step_loss(call)]
        of_means = [row_of[call.key] for call in means]
        found = [_unlike(row) for row in rows]
        found += [
            _beside(find_mismatches(x), row, of_step)
            for x, row in zip(evidence, of_means, strict=True)
        ]
        sizes = [len(flags) for flags in found]
        told = torch.cat(found).cpu().split(sizes) if found else []  # waits for the device once
        flags = [each.tolist() for each in told]
        apart = {call.key: any(own) for call, own in zip(shared, flags, strict=False)}
        seen = list(zip(means, flags[len(shared) :], evidence, strict=True))
        self._doubt([each for each in seen if apart[each[0].key]], calls, doubted)
        for call, row, (differ, *nan) in zip(shared, rows, flags, strict=False):
            if differ and shares is not None and _is_mean(call):
                self._warn_of_nan(call, [x and y > 0 for x, y in zip(nan, shares, strict=True)])
            kind = call.kind if len(kinds[call.key]) == 1 else Kind.METRIC
            if kind in MEANS and shares is not None:
                own = losses.shares_by(alike[call.key]) if losses and differ else shares
                if own is None:
                    self._warn_of_counts(call)
                call.emit = _given(call.emit, weighted_mean(row, own or shares))
            elif differ:
                self._settle_one(call, kind, row, shares)

    def _doubt(self, shared: list[_Seen], calls: list[LogCall], of: Sequence[Mismatch]) -> None:
        """Warn of values that are weighted by other targets than they were computed from."""
        told = False
        for call, found, evidence in shared:
            for doubt in of:
                if found[doubt.value] and doubt is not Mismatch.STEP:
                    told = True
                    self._warn_once(call, doubt, [call.name], evidence)
        apart = [seen for seen in shared if seen[1][Mismatch.STEP.value]]
        if apart and Mismatch.STEP in of and not told and not any(map(_is_ratio, calls)):
            (call, _, evidence), names = apart[0], [call.name for call, *_ in apart]
            self._warn_once(call, Mismatch.STEP, names, evidence)

    def _warn_of_nan(self, call: LogCall, nan: list[bool]) -> None:
        """Where ranks differ, those with NaN have counted something that they have none of."""
        if any(nan) and call.name not in self._told:
            self._told.add(call.name)
            ranks = ", ".join(str(rank) for rank, held in enumerate(nan) if held)
            self._warn(_NAN.format(name=call.name, where=call.where, ranks=ranks))

    def _warn_of_counts(self, call: LogCall) -> None:
        """Several counts were declared in the step, and the value is of none of its losses."""
        returned = call.where.startswith(STEP_LOSS)
        what = STEP_LOSS if returned else f"self.log({call.name!r}, ...) in {call.where}"
        if what not in self._told:
            self._told.add(what)
            self._warn(_COUNTS.format(what=what))

    def _warn_once(
        self, call: LogCall, doubt: Mismatch, names: list[str], evidence: torch.Tensor
    ) -> None:
        self._told.update(names)
        about = doubt, call.where if doubt is Mismatch.STEP else call.name
        if about not in self._doubted:
            self._doubted.add(about)
            self._warn(mismatch_warning(doubt, call.where, names, evidence))

    def _joined(self, calls: list[LogCall], lists: list[list[Any]]) -> list[LogCall]:
        """This rank's calls with ratios that only others have logged: here nothing was counted, whatever the
        rank has logged in their place."""
        ratios = {key: rest for one in lists for key, kind, *rest in one if kind == "ratio"}
        found = [call for call in calls if _is_ratio(call) or call.key not in ratios]
        for key in sorted(ratios.keys() - {call.key for call in found}):
            call = self._join(*ratios[key])
            call.key = key
            found.append(call)
        return found

    def _settle_one(
        self, call: LogCall, kind: Kind, row: torch.Tensor, shares: list[float] | None
    ) -> None:
        """One value out of the different ones of all ranks of the group."""
        if kind in (Kind.LARGEST, Kind.SMALLEST):
            call.emit = _given(call.emit, row.amax(0) if kind is Kind.LARGEST else row.amin(0))
            return
        if call.kind is not Kind.MEAN_METRIC or shares is None or max(shares) - min(shares) > 1e-9:
            self._tell(call.name, kind)
        if call.kind in (Kind.SHOWN, Kind.MEAN_METRIC):
            return
        if kind in (Kind.COUNT, Kind.SUM):
            nothing = (
                row.new_tensor(shares or [1.0] * len(row)) == 0
            )  # a mean over no targets is NaN
            value = row.masked_fill(nothing & row.isnan(), 0.0).sum(0)
        elif kind is Kind.FLAG:
            value = row.amax(0)
        else:
            value = weighted_mean(row, shares or [1 / len(row)] * len(row))
        call.emit = _given(call.emit, value)

    def _tell(self, name: str, kind: Kind) -> None:
        if name in self._told:
            return
        self._told.add(name)
        if kind is Kind.MEAN_METRIC:
            self._warn(_MEAN_METRIC.format(name=name))
            return
        self._warn(
            f"self.log({name!r}, ...) was given different values by ranks that share a sample, and from "
            f"the values alone it is not known what one process would log. {_TOLD[kind]} "
            f"self.cp_log({name!r}, total, count) of ContextParallelMixin logs a mean over tokens exactly: "
            "total and count are sums over what a rank holds."
        )


MEANS = (Kind.MEAN, Kind.LARGEST, Kind.SMALLEST)

_NAN = (
    "self.log({name!r}, ...) in {where} was given NaN by rank {ranks} of those that share a sample, and a "
    "number by others, so it shows NaN, where one process may have a number. Maybe it is a mean over what "
    "such a rank has none of, as of a row whose labels other ranks have (0 / 0), and maybe values overflow "
    "there. Compute such a mean from self.unshard(values of tokens) of ContextParallelMixin, which all ranks "
    "have whole; log a mean over tokens by self.cp_log({name!r}, total, count)."
)

_MEAN_METRIC = (
    "self.log({name!r}, ...) was given a metric that averages numbers (MeanMetric), and ranks that share a "
    "sample gave it different ones. It counts every rank alike, so a mean over tokens, a loss, is shown with "
    "another value than one process has, unless all ranks hold as many targets. Give it self.average(loss) "
    "of ContextParallelMixin, which is the same on all ranks, or log the loss itself by self.log or "
    "self.cp_log."
)

_COUNTS = (
    "{what} was given a value that is none of the losses which went backward, in a step that called "
    "count_targets for several, so that it is not known which targets it is a mean over, and shown is its "
    "mean weighted by the last ones. Log each loss by itself, as it was given to backward; a sum of losses "
    "as the sum of self.average(loss); other values by self.cp_log(name, total, count) of "
    "ContextParallelMixin."
)

_TOLD = {
    Kind.MEAN: "Shown is the plain mean over these ranks.",
    Kind.COUNT: "It is taken for a count: shown is the sum over these ranks.",
    Kind.SUM: "As it is added up over batches, shown is the sum over these ranks.",
    Kind.FLAG: "Shown is whether it is true on any of these ranks.",
    Kind.METRIC: "Shown at the step is the mean over these ranks, weighted by targets; what the metric "
    "computes for the epoch is not affected.",
    Kind.SHOWN: "Shown is what each rank has itself.",
}


def _doubted(ranks: StepRanks, *, together: bool) -> Sequence[Mismatch]:
    if not together:
        return tuple(Mismatch)
    is_declared = ranks.declares_targets and ranks.weights_by_loss is None
    return (Mismatch.ROWS, Mismatch.MEAN) if is_declared else (Mismatch.ROWS,)


def _key(call: LogCall) -> str:
    return call.key


def _unlike(row: torch.Tensor) -> torch.Tensor:
    """bool [1 + ranks]: whether ranks have different values, and which of them have NaN."""
    nan = row.reshape(len(row), -1).isnan().any(1)
    return torch.cat([~equal(row).all()[None], nan])


def _is_step_loss(call: LogCall) -> bool:
    return call.where.startswith(STEP_LOSS)


def _is_mean(call: LogCall) -> bool:
    """True of a value that is logged, and not the loss that a step returns."""
    return call.kind in MEANS and not _is_step_loss(call)


def _beside(
    found: torch.Tensor, row: torch.Tensor, of_step: Sequence[torch.Tensor]
) -> torch.Tensor:
    """The doubts of a value, but that the step's own loss counts other targets, for which it is refused."""
    for loss in of_step:
        if loss.shape == row.shape:
            found[Mismatch.MEAN.value] &= ~(loss == row).all()
    return found


def _is_ratio(call: LogCall) -> bool:
    return call.kind is Kind.RATIO


def _losses_fit(lists: list[list[Any]], size: int) -> bool:
    """True if all have a loss that is shown, and all or none a graph; the shape is each data rank's own."""
    losses = [
        {key: where for key, _, where, *_ in one if where.startswith(STEP_LOSS)} for one in lists
    ]
    groups = [losses[first : first + size] for first in range(0, len(losses), size)]
    kinds = {where for one in losses for where in one.values()}
    return len(kinds) == 1 and all(set.intersection(*map(set, group)) for group in groups)


def _settle_ratios(calls: list[LogCall], mesh: ContextParallelMesh, flat: Flat) -> None:
    """Sums over ranks; every rank has the same calls by now."""
    if not calls:
        return
    own = torch.stack([torch.stack(list(call.values)) for call in calls])
    for call, (total, count) in zip(calls, all_sum(own, mesh.group(flat)), strict=True):
        call.emit = _given(call.emit, total, count)


def _given(emit: Callable[..., None], *values: torch.Tensor) -> Callable[[], None]:
    return lambda: emit(*values)


# Kinds of values given to ``self.log``, and their form once the ranks have agreed on them.


ARGUMENTS = (
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "reduce_fx",
    "enable_graph",
    "sync_dist",
    "sync_dist_group",
    "add_dataloader_idx",
    "batch_size",
    "metric_attribute",
    "rank_zero_only",
)
"""Of ``LightningModule.log`` after the value, by position."""


def show_metric(
    log: Callable[..., None],
    name: str,
    metric: Metric,
    cache: Any,
    shown: torch.Tensor | None,
    options: dict[str, Any],
) -> None:
    """Log a metric that shows at this step what it had then (``cache``), or what ranks agreed on."""
    now = metric._forward_cache
    metric._forward_cache = cache if shown is None else as_logged(shown)
    try:
        log(name, metric, **options)
    finally:
        metric._forward_cache = now


def numbers_in(metric: MeanMetric) -> torch.Tensor:
    """Their sum; 0 where it was given more than one value at a time, each of which counts."""
    total, weight = (torch.as_tensor(x).detach() for x in (metric.mean_value, metric.weight))
    return torch.where(weight == metric._update_count, total, 0.0).reshape(())


def as_given(shown: torch.Tensor, value: Any) -> torch.Tensor:
    """The value that ranks agreed on, in the type of the given one."""
    if not isinstance(value, torch.Tensor):
        return as_logged(shown)
    shown = shown.to(value)
    if not value.requires_grad:
        return shown
    return shown + torch.nan_to_num(value.reshape(()) - value.detach().reshape(()))  # enable_graph


def whole(value: Any) -> Any:
    """A value that is spread over ranks, as one number on every rank: the norm of sharded gradients."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def kind_of(value: Any, options: dict[str, Any]) -> Kind | None:
    """The way ranks' values become one; ``None``: Lightning says what is wrong with it."""
    if isinstance(value, Metric):
        return Kind.METRIC
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            return None
        flag, integer = value.dtype == torch.bool, not value.is_floating_point()
    elif isinstance(value, Real):  # NumPy's own as well
        flag, integer = isinstance(value, bool), isinstance(value, Integral)
    else:
        return None
    if flag or integer:
        return Kind.FLAG if flag else Kind.COUNT
    reduction = options.get("reduce_fx")
    if isinstance(reduction, str):
        reduction = reduction.lower()
    return next((kind for kind, known in _REDUCTIONS.items() if reduction in known), Kind.MEAN)


_REDUCTIONS: dict[Kind, tuple[Any, ...]] = {
    Kind.SUM: ("sum", torch.sum, sum),
    Kind.LARGEST: ("max", torch.max, max),
    Kind.SMALLEST: ("min", torch.min, min),
}

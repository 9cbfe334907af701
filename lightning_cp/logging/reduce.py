"""Logged values, collected until the ranks that share a sample meet, and reduced in one exchange.

One collective per call would deadlock where only one rank logs a value, which Lightning allows. So calls
are collected. At the end of the step, the batch or the epoch, ranks compare their calls. A value that all
of them logged becomes one value. A value that some of them logged is shown as it is, except sums with
counts: a rank that did not log them counted nothing.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, partial
from itertools import islice, starmap
from operator import attrgetter
from typing import Any, Protocol

import torch
import torch.distributed as dist

from lightning_cp.batch.loss_calls import Mismatch, find_mismatches, mismatch_warning
from lightning_cp.comm.all_gather import all_gather
from lightning_cp.comm.consensus import all_equal_sum, check_gathered, gather_facts, raise_in_group
from lightning_cp.comm.reduce import all_sum
from lightning_cp.layout.axes import Flat
from lightning_cp.logging.nan import NanWarnings
from lightning_cp.loss.averages import Options
from lightning_cp.loss.weighting import Shares, read_shares
from lightning_cp.mesh import ContextParallelMesh
from lightning_cp.utils.tracing import profile_range

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PendingFindings:
    """Findings of checks in a step, to be sent to the other ranks."""

    checks: Sequence[str] = ()
    """Names of the checks that ran."""
    error: Exception | None = None
    """The error of the first check that failed."""
    need_gradients: Sequence[str] = ()
    """For each attention call its kind, if backward will come through it; else an empty text."""
    compared: Callable[[], None] = lambda: None
    """Called if the ranks that share a sample have the same ``need_gradients``."""
    refuse: Callable[[Mapping[int, Sequence[str]]], None] = lambda _: None
    """Called with the different ``need_gradients`` of ranks that share a sample, by rank; raises."""


class Losses(Protocol):
    """Losses of a step that has several counts."""

    def likeness(self, value: torch.Tensor) -> torch.Tensor: ...
    def shares_by(self, alike: torch.Tensor) -> Shares | None: ...


class StepRanks(Protocol):
    """The part of the runtime that this module uses."""

    @cached_property
    def mesh(self) -> ContextParallelMesh: ...
    @property
    def shares(self) -> Shares: ...
    @property
    def weights_by_loss(self) -> Losses | None: ...
    @property
    def looks_at_values(self) -> bool: ...
    @property
    def declares_targets(self) -> bool: ...
    def evidence(self, value: torch.Tensor) -> torch.Tensor: ...
    def pop_refused(self) -> Exception | None: ...
    def pop_findings(self) -> PendingFindings: ...
    def gathering(self) -> AbstractContextManager[None]: ...


def agree_on_calls(
    own: list[Any], ranks: StepRanks, flat: Flat, *, to_backward: bool = False
) -> list[list[Any]]:
    """Exchange lists of calls and findings; return every rank's list.

    Correctness depends on it: after it, all ranks take the same path.

    Args:
        own: this rank's calls.
        ranks: the current step.
        flat: flattened group of the ranks that take part.
        to_backward: all of them run backward next.

    Raises:
        RankFailure: a check failed on another rank; the rank itself raises its own error.
        BatchMismatchError: ranks are at different calls, or have made different checks.
        ConfigError: backward would come through attention on some ranks only.
    """
    mesh, step = ranks.mesh, ranks.pop_findings()
    group, error = mesh.control_group(flat), step.error
    part = 0 if flat is Flat.CP else mesh.data_rank
    size = mesh.sample_size
    of_sample = step.checks, step.need_gradients
    dissents = error is not None
    votes = all_equal_sum(("log", own), group, dissents=dissents, of=(part, size), own=of_sample)
    if votes is not None:
        step.compared()
        return [own] * group.size()
    # Another name than that of checks within the step: a rank may still be there.
    every = gather_facts((own, *of_sample), group, what="logged values", error=error)
    groups = [range(at, at + size) for at in range(0, len(every), size)]
    checks = [{"checks": ", ".join(checks) or "none"} for _, checks, _ in every]
    check_gathered(checks, group, what="step", within=groups, remedy=_CALL_ALL)
    gradients = [list(gradients) for _, _, gradients in every]
    apart = [of for of in groups if any(gradients[rank] != gradients[of[0]] for rank in of)]
    if apart and to_backward:
        step.refuse({dist.get_global_rank(group, rank): gradients[rank] for rank in apart[0]})
    if groups[part] not in apart:
        step.compared()
    return [calls for calls, _, _ in every]


def raise_refused(error: Exception, ranks: StepRanks) -> None:
    """Raise the error that ended the step on all ranks; the others wait for their vote on the step.

    Raises:
        Exception: the error, once all ranks know of it.
    """
    if ranks.mesh.data_size == 1:
        raise error
    _log.error("%s", error)  # a step that exchanges something between samples waits for this rank
    raise_in_group(error, ranks.mesh.control_group(Flat.LOSS), what="refused")


_CALL_ALL = "Models are called by all of them or by none: let no rank's own tokens decide that."


# Values of all ranks of a group, side by side, and their combinations.


def side_by_side(
    values: Sequence[torch.Tensor], mesh: ContextParallelMesh, flat: Flat = Flat.CP
) -> list[torch.Tensor]:
    """Return float64 ``[ranks, *shape]`` for each value: all ranks' values in rank order, equal on all
    ranks.

    One exchange, on the mesh's device, since ranks may hold a value on different devices. Every rank of
    the group must call it with as many values, of the same shapes.
    """
    if not values:
        return []
    flatly = [value.detach().to(mesh.device_type, torch.float64).reshape(-1) for value in values]
    with profile_range("agreement"):
        table = torch.stack(all_gather(torch.cat(flatly), mesh.group(flat)))
    parts = table.split(list(map(torch.numel, flatly)), dim=1)
    return [part.reshape(-1, *value.shape) for part, value in zip(parts, values, strict=True)]


def equal(rows: torch.Tensor) -> torch.Tensor:
    """Return bool ``[*shape]``: True where all ranks have the same value; NaN equals NaN."""
    return ((rows == rows[0]) | (rows.isnan() & rows[0].isnan())).all(0)


def weighted_mean(rows: torch.Tensor, shares: Shares) -> torch.Tensor:
    """Return float64 ``[*shape]``: the mean over ranks; exactly their value where all have the same.

    Args:
        rows: ``[ranks, *shape]``.
        shares: each rank's weight; they sum to 1. Values of ranks with weight 0 are ignored, NaN included.
    """
    mean = torch.zeros_like(rows[0])
    for row, share in zip(rows, shares, strict=True):
        if isinstance(share, torch.Tensor):
            mean = mean + torch.where(share > 0, share * row, 0.0)
        elif share:
            mean = mean + share * row
    return torch.where(equal(rows), rows[0], mean)


class ReductionRule(Enum):
    """Rule by which values that differ between ranks of one sample become one process's value."""

    MEAN = "mean"
    """The mean over targets."""
    LARGEST = "largest"
    """The mean over targets within a batch, as the maximum is taken over steps; elsewhere the largest
    value."""
    SMALLEST = "smallest"
    """Like ``LARGEST``, with the minimum."""
    COUNT = "count"
    """The sum, for integers."""
    SUM = "sum"
    """The sum, for values that are added up over batches."""
    FLAG = "flag"
    """True if it is true on any rank."""
    METRIC = "metric"
    """A metric's value at this step: the mean over targets, which is a guess."""
    MEAN_METRIC = "mean metric"
    """The sum in a metric that averages numbers of ranks: compared, not shown."""
    SHOWN = "shown"
    """A value that was shown when it was logged: compared, not changed."""
    RATIO = "ratio"
    """A total and a count: sum of totals over sum of counts."""


STEP_LOSS = "the step's loss"
"""Stands in for a hook's name, or begins it: the call is a step's returned loss. Ranks run backward
together."""


@dataclass
class LogCall:
    """One call of ``log``."""

    name: str
    rule: ReductionRule
    values: Sequence[torch.Tensor]
    emit: Callable[..., None]
    """Shows the value, by default the one given. For a ratio: takes total and count of all ranks."""
    where: str = ""
    """Name of the hook."""
    options: Options = ()
    """For a ratio: its options, with which a rank that did not call it can show it."""
    key: str = ""
    """Identifies the same call on all ranks."""


@dataclass
class _SharedCall:
    """A call that all ranks have."""

    call: LogCall
    rule: ReductionRule
    """``METRIC`` if ranks have different rules."""
    is_loss: bool
    """It is the loss that a step returned."""
    looks: bool
    """Ranks exchange evidence on how they computed the value."""
    rows: list[torch.Tensor]
    """float64 ``[ranks, *shape]``: the values of all ranks, their evidence, their likeness to losses."""
    differs: bool = False
    nan: Sequence[bool] = ()
    """One flag for each rank."""
    mismatches: Sequence[bool] = ()
    """One flag for each ``Mismatch``, if there is evidence."""

    @cached_property
    def is_plain_mean(self) -> bool:
        """True if ranks computed a mean alike: it is shown without a look at the values."""
        return self.rule in MEANS and not self.looks


class StepLog:
    """The log calls since the last exchange between ranks.

    Args:
        warn: shows a warning to the user.
        join: makes the call of a ratio that only other ranks logged, from its hook, name and options.
    """

    def __init__(
        self, warn: Callable[[str], None], join: Callable[[str, str, Options], LogCall]
    ) -> None:
        self._warn = warn
        self._join = join
        self._warned: set[str] = set()
        self._doubted: set[tuple[Mismatch, str]] = set()
        self._nan = NanWarnings(warn, self._warned)
        self.drop()

    def open(self) -> None:
        """Let calls wait from now on: ranks will exchange them."""
        self.is_open = True

    def drop(self) -> None:
        """Drop all calls: the step failed."""
        self.is_open = False
        self._calls: list[LogCall] = []
        self._times: Counter[str] = Counter()

    def add(self, call: LogCall) -> None:
        """Store one call."""
        name = f"{call.where}: {call.name}"
        call.key = f"{name} #{self._times[name]}"
        call.values = [value.detach().clone() for value in call.values]
        self._times[name] += 1
        self._calls.append(call)

    def settle(
        self, ranks: StepRanks, *, of_a_batch: bool, together: bool, to_backward: bool = False
    ) -> None:
        """Show all calls, in order; collective over the cp group.

        Args:
            ranks: the current step.
            of_a_batch: there is a batch, whose targets weight means.
            together: collective over all data ranks, too, so that ratios are summed over them.
            to_backward: all these ranks run backward next.
        """
        calls, is_open = self._calls, self.is_open
        self.drop()
        self.is_open = is_open
        self._nan.read(wait=not of_a_batch)
        mesh = ranks.mesh
        flat = Flat.LOSS if together and mesh.data_size > 1 else Flat.CP
        own = [(call.key, call.rule.value, call.where, call.name, call.options) for call in calls]
        own.sort()
        lists = agree_on_calls(own, ranks, flat, to_backward=to_backward)
        if not any(lists):
            return  # no rank logged anything
        if not _losses_fit(lists, mesh.sample_size):
            calls = [call for call in calls if not call.where.startswith(STEP_LOSS)]
        calls = self._with_missing_ratios(calls, lists)
        ratios = sorted(
            [call for call in calls if call.rule is ReductionRule.RATIO], key=attrgetter("key")
        )
        if ratios:
            _reduce_ratios(ratios, mesh, flat)
        first = 0 if flat is Flat.CP else mesh.data_rank * mesh.sample_size
        self._reduce_values(
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

    def _reduce_values(
        self,
        calls: list[LogCall],
        lists: list[list[Any]],
        mesh: ContextParallelMesh,
        shares: Shares | None,
        evidence_of: Callable[[torch.Tensor], torch.Tensor] | None,
        losses: Losses | None,
        doubted: Sequence[Mismatch],
    ) -> None:
        """Settle all calls but ratios, if all ranks of the cp group have them.

        Args:
            calls: this rank's calls.
            lists: the calls of each rank of the cp group.
            mesh: the process groups.
            shares: weight of each rank in means; ``None``: no batch.
            evidence_of: returns evidence on how a mean was computed, which is exchanged with it; ``None``: no
                such check.
            losses: the losses of a step that has several counts.
            doubted: the mismatches to warn of.
        """
        shared = _exchange(calls, lists, mesh, evidence_of, losses)
        waits = shares is None or losses is not None
        of_step = [each.rows[0] for each in shared if each.is_loss]
        _compare([each for each in shared if waits or not each.is_plain_mean], of_step)
        if shares is not None and not waits:
            flags = [
                (each.call.name, each.call.where, _differs_and_nan(each.rows[0]))
                for each in shared
                if each.is_plain_mean and not each.is_loss
            ]
            self._nan.start(flags, shares)
        doubtful = [each for each in shared if each.looks and (each.differs or any(each.nan))]
        self._doubt(doubtful, calls, doubted)
        for each in shared:
            call, row, nan = each.call, each.rows[0], each.nan
            if each.differs and shares is not None and call.rule in MEANS and not each.is_loss:
                held = [x and y > 0 for x, y in zip(nan, read_shares(shares), strict=True)]
                self._nan.warn_of(call.name, call.where, held)
            if each.rule in MEANS and shares is not None:
                own = losses.shares_by(each.rows[-1]) if losses and each.differs else shares
                if own is None:
                    self._warn_of_counts(call)
                call.emit = partial(call.emit, weighted_mean(row, shares if own is None else own))
            elif each.differs:
                weights = None if shares is None else read_shares(shares)
                self._reduce_value(call, each.rule, row, weights)

    def _doubt(
        self, shared: list[_SharedCall], calls: list[LogCall], of: Sequence[Mismatch]
    ) -> None:
        """Warn of values that are weighted by other targets than they were computed from."""
        told = False
        for each in shared:
            for doubt in of:
                if each.mismatches[doubt.value] and doubt is not Mismatch.STEP:
                    told = True
                    self._warn_once(each.call, doubt, [each.call.name], each.rows[1])
        apart = [each for each in shared if each.mismatches[Mismatch.STEP.value]]
        if apart and Mismatch.STEP in of and not told and not any(map(_is_ratio, calls)):
            names = [each.call.name for each in apart]
            self._warn_once(apart[0].call, Mismatch.STEP, names, apart[0].rows[1])

    def _warn_of_counts(self, call: LogCall) -> None:
        """Warn of a value that equals none of the losses, in a step that declared several counts."""
        returned = call.where.startswith(STEP_LOSS)
        what = STEP_LOSS if returned else f"self.log({call.name!r}, ...) in {call.where}"
        if what not in self._warned:
            self._warned.add(what)
            self._warn(_COUNTS.format(what=what))

    def _warn_once(
        self, call: LogCall, doubt: Mismatch, names: list[str], evidence: torch.Tensor
    ) -> None:
        self._warned.update(names)
        about = doubt, call.where if doubt is Mismatch.STEP else call.name
        if about not in self._doubted:
            self._doubted.add(about)
            self._warn(mismatch_warning(doubt, call.where, names, evidence))

    def _with_missing_ratios(self, calls: list[LogCall], lists: list[list[Any]]) -> list[LogCall]:
        """Add the ratios that only other ranks logged, with total and count 0 here."""
        ratios = {key: rest for one in lists for key, rule, *rest in one if rule == "ratio"}
        if not ratios:
            return calls
        found = [call for call in calls if _is_ratio(call) or call.key not in ratios]
        for key in sorted(ratios.keys() - {call.key for call in found}):
            call = self._join(*ratios[key])
            call.key = key
            found.append(call)
        return found

    def _reduce_value(
        self, call: LogCall, rule: ReductionRule, row: torch.Tensor, shares: Sequence[float] | None
    ) -> None:
        """Combine the different values of all ranks of the group into one."""
        if rule in (ReductionRule.LARGEST, ReductionRule.SMALLEST):
            call.emit = partial(
                call.emit, row.amax(0) if rule is ReductionRule.LARGEST else row.amin(0)
            )
            return
        if (
            call.rule is not ReductionRule.MEAN_METRIC
            or shares is None
            or max(shares) - min(shares) > 1e-9
        ):
            self._warn_of_difference(call.name, rule)
        if call.rule in (ReductionRule.SHOWN, ReductionRule.MEAN_METRIC):
            return
        if rule in (ReductionRule.COUNT, ReductionRule.SUM):
            nothing = (
                row.new_tensor(shares or [1.0] * len(row)) == 0
            )  # a mean over no targets is NaN
            value = row.masked_fill(nothing & row.isnan(), 0.0).sum(0)
        elif rule is ReductionRule.FLAG:
            value = row.amax(0)
        else:
            value = weighted_mean(row, shares or [1 / len(row)] * len(row))
        call.emit = partial(call.emit, value)

    def _warn_of_difference(self, name: str, rule: ReductionRule) -> None:
        if name in self._warned:
            return
        self._warned.add(name)
        if rule is ReductionRule.MEAN_METRIC:
            self._warn(_MEAN_METRIC.format(name=name))
            return
        self._warn(
            f"self.log({name!r}, ...) got different values from ranks that share a sample, so one process's "
            f"value is unknown. {_SHOWN_VALUES[rule]} To log a mean over tokens exactly, call "
            f"self.cp_log({name!r}, total, count) of ContextParallelMixin with sums over a rank's own tokens."
        )


MEANS = (ReductionRule.MEAN, ReductionRule.LARGEST, ReductionRule.SMALLEST)

_MEAN_METRIC = (
    "self.log({name!r}, ...) got a metric that averages numbers (MeanMetric), with different ones on ranks "
    "that share a sample. It weights all ranks alike, so a mean over tokens (a loss) differs from one "
    "process's. Update the metric with self.average(loss) of ContextParallelMixin, or log the loss itself "
    "with self.log or self.cp_log."
)

_COUNTS = (
    "{what} got a value that equals none of the losses of backward, in a step with several count_targets, so "
    "its targets are unknown: it is averaged by the last counts. Log each loss by itself, as given to "
    "backward; a sum of losses as the sum of self.average(loss); other values with "
    "self.cp_log(name, total, count) of ContextParallelMixin."
)

_SHOWN_VALUES = {
    ReductionRule.MEAN: "The plain mean over these ranks is shown.",
    ReductionRule.COUNT: "It is an integer, so the sum over these ranks is shown.",
    ReductionRule.SUM: "It is added up over batches, so the sum over these ranks is shown.",
    ReductionRule.FLAG: "True is shown if it is true on any of these ranks.",
    ReductionRule.METRIC: "The step shows the mean over these ranks, weighted by targets; the "
    "metric's value for the epoch is not affected.",
    ReductionRule.SHOWN: "Each rank shows its own value.",
}


def _exchange(
    calls: list[LogCall],
    lists: list[list[Any]],
    mesh: ContextParallelMesh,
    evidence_of: Callable[[torch.Tensor], torch.Tensor] | None,
    losses: Losses | None,
) -> list[_SharedCall]:
    """Return all calls but ratios that every rank has; arguments of ``_reduce_values``. Collective."""
    rules: dict[str, list[ReductionRule]] = {}
    for one in lists:
        for key, rule, *_ in one:
            rules.setdefault(key, []).append(ReductionRule(rule))
    shared: list[_SharedCall] = []
    values: list[torch.Tensor] = []
    for call in sorted(calls, key=attrgetter("key")):
        of_ranks = rules.get(call.key, [])
        if len(of_ranks) < len(lists) or call.rule is ReductionRule.RATIO:
            continue
        own, rule = [call.values[0]], call.rule if len({*of_ranks}) == 1 else ReductionRule.METRIC
        is_mean = {*of_ranks} <= {*MEANS}  # on all ranks: they send as much
        is_loss = call.where.startswith(STEP_LOSS)
        looks = evidence_of if is_mean and not is_loss else None
        own += [] if looks is None else [looks(own[0])]
        own += [losses.likeness(own[0])] if losses and is_mean else []
        shared.append(_SharedCall(call, rule, is_loss, looks is not None, own))
        values += own
    both = iter(side_by_side(values, mesh))
    for each in shared:
        each.rows = [*islice(both, len(each.rows))]
    return shared


def _compare(shared: list[_SharedCall], of_step: list[torch.Tensor]) -> None:
    """Set the flags of calls, given the step's own losses; waits for the device once."""
    found: list[torch.Tensor] = []
    for each in shared:
        row = each.rows[0]
        found.append(_differs_and_nan(row))
        if each.looks:
            found.append(_without_step_mismatch(find_mismatches(each.rows[1]), row, of_step))
    flags: Iterator[bool] = iter(torch.cat(found).tolist() if found else ())
    for each in shared:
        each.differs, *each.nan = islice(flags, 1 + len(each.rows[0]))
        each.mismatches = [*islice(flags, len(Mismatch))] if each.looks else []


def _doubted(ranks: StepRanks, *, together: bool) -> Sequence[Mismatch]:
    if not together:
        return tuple(Mismatch)
    is_declared = ranks.declares_targets and ranks.weights_by_loss is None
    return (Mismatch.ROWS, Mismatch.MEAN) if is_declared else (Mismatch.ROWS,)


def _differs_and_nan(row: torch.Tensor) -> torch.Tensor:
    """Return bool [1 + ranks]: whether ranks have different values, and which of them have NaN."""
    nan = row.reshape(len(row), -1).isnan().any(1)
    return torch.cat([~equal(row).all()[None], nan])


def _without_step_mismatch(
    found: torch.Tensor, row: torch.Tensor, of_step: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return the mismatches of a value, without those of the step's own loss, which is refused for
    them."""
    for loss in of_step:
        if loss.shape == row.shape:
            found[Mismatch.MEAN.value] &= ~(loss == row).all()
    return found


def _is_ratio(call: LogCall) -> bool:
    return call.rule is ReductionRule.RATIO


def _losses_fit(lists: list[list[Any]], size: int) -> bool:
    """True if all ranks show a loss, and all or none with a graph; data ranks may differ in its shape."""
    wheres, keys = set[str](), [set[str]() for _ in lists]
    for one, own in zip(lists, keys, strict=True):
        for key, _, where, *_ in one:
            if where.startswith(STEP_LOSS):
                own.add(key)
                wheres.add(where)
    groups = [keys[first : first + size] for first in range(0, len(keys), size)]
    return len(wheres) == 1 and all(starmap(set.intersection, groups))


def _reduce_ratios(calls: list[LogCall], mesh: ContextParallelMesh, flat: Flat) -> None:
    """Sum totals and counts over ranks, which have the same calls by now."""
    own = torch.stack([torch.stack(list(call.values)) for call in calls])
    for call, (total, count) in zip(calls, all_sum(own, mesh.group(flat)), strict=True):
        call.emit = partial(call.emit, total, count)

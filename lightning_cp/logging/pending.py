"""Messages of ranks at the end of a step: logged values, and findings on the way."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from lightning_cp.comm.consensus import check_equal, gather_facts, gather_lists, stable_hash, tally
from lightning_cp.layout.axes import Flat
from lightning_cp.mesh import ContextParallelMesh

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PendingFindings:
    """Findings in a step so far, of which ranks have to be told."""

    checks: Sequence[str] = ()
    """Their names."""
    error: Exception | None = None
    """Why one of them failed."""
    need_gradients: Sequence[bool] = ()
    """Of each attention call: whether backward will come through it."""
    compared: Callable[[], None] = lambda: None
    """Called where the ranks that share a sample have the same ``need_gradients``."""
    refuse: Callable[[Mapping[int, Sequence[bool]]], None] = lambda _: None
    """Called with different ``need_gradients`` of ranks that share a sample, by rank; raises."""


class Losses(Protocol):
    """Those of a step that has several counts."""

    def likeness(self, value: torch.Tensor) -> torch.Tensor: ...
    def shares_by(self, alike: torch.Tensor) -> list[float] | None: ...


class StepRanks(Protocol):
    """The part of the strategy's core that is needed."""

    @property
    def mesh(self) -> ContextParallelMesh: ...
    @property
    def shares(self) -> list[float]: ...
    @property
    def weights_by_loss(self) -> Losses | None: ...
    @property
    def looks_at_values(self) -> bool: ...
    @property
    def declares_targets(self) -> bool: ...
    def evidence(self, value: torch.Tensor) -> torch.Tensor: ...
    def take_refused(self) -> Exception | None: ...
    def take_found(self) -> PendingFindings: ...
    def gathering(self) -> AbstractContextManager[None]: ...


def agree_on_calls(
    own: list[Any], ranks: StepRanks, flat: Flat, *, to_backward: bool = False
) -> list[list[Any]]:
    """Every rank's list of calls; with it they are told what was found in the step.

    Correctness hangs on it: after it ranks go on to what they do together.

    Args:
        own: this rank's calls.
        ranks: the core.
        flat: who takes part.
        to_backward: all of them go there next.

    Raises:
        RankFailure: a check failed on another rank; the rank itself raises its own error.
        BatchMismatchError: ranks are at different calls, or have made different checks.
        ConfigError: backward would come through attention on some ranks only.
    """
    mesh, step = ranks.mesh, ranks.take_found()
    group, error = mesh.control_group(flat), step.error
    part = 0 if flat is Flat.CP else mesh.data_rank
    own_facts = (step.checks, step.need_gradients)
    size = mesh.sample_size
    place = (part, size)
    votes = tally(("log", own), group, dissents=error is not None, of=place, own=own_facts)
    if votes is not None:
        step.compared()
        return [own] * group.size()
    marks = {"calls of log": stable_hash(own), "checks": stable_hash(step.checks)}
    marks["gradients"] = stable_hash(step.need_gradients)
    table = gather_facts(marks, group, what="step", error=error)
    groups = [range(at, at + size) for at in range(0, len(table), size)]
    _require_same_checks(table, groups, group, step)
    apart = [of for of in groups if len({table[rank]["gradients"] for rank in of}) > 1]
    if apart and to_backward:
        every = gather_lists(step.need_gradients, group)
        step.refuse({dist.get_global_rank(group, rank): every[rank] for rank in apart[0]})
    if groups[part] not in apart:
        step.compared()
    if len({row["calls of log"] for row in table}) == 1:
        return [own] * group.size()
    return gather_lists(own, group)


def _require_same_checks(
    table: list[dict[str, int]],
    groups: Sequence[Sequence[int]],
    group: dist.ProcessGroup,
    step: PendingFindings,
) -> None:
    texts = {"checks": ", ".join(step.checks) or "none"}
    rows = [[row["checks"]] for row in table]
    for of in groups:
        check_equal(rows, ["checks"], of, group, what="step", texts=texts, remedy=_CALL_ALL)


def tell_refused(error: Exception, ranks: StepRanks) -> None:
    """Tell what ended the step on all ranks that share a sample; the others wait for their vote on the step.

    Raises:
        Exception: the error, once all ranks know of it.
    """
    mesh = ranks.mesh
    if mesh.data_size == 1:
        raise error
    _log.error(
        "%s", error
    )  # a step that exchanges something between samples waits for this rank now
    group = mesh.control_group(Flat.LOSS)
    tally("refused", group, dissents=True)
    gather_facts({}, group, what="step", error=error)


_CALL_ALL = "Models are called by all of them or by none: let no rank's own tokens decide that."

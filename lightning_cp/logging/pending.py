"""Exchange of ranks at the end of a step: logged values, and findings of checks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist

from lightning_cp.comm.consensus import all_equal_sum, check_gathered, gather_facts, raise_on_all
from lightning_cp.layout.axes import Flat
from lightning_cp.mesh import ContextParallelMesh

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PendingFindings:
    """Findings of checks in a step, to be sent to the other ranks."""

    checks: Sequence[str] = ()
    """Names of the checks that ran."""
    error: Exception | None = None
    """The error of the first check that failed."""
    need_gradients: Sequence[bool] = ()
    """For each attention call: whether backward will come through it."""
    compared: Callable[[], None] = lambda: None
    """Called if the ranks that share a sample have the same ``need_gradients``."""
    refuse: Callable[[Mapping[int, Sequence[bool]]], None] = lambda _: None
    """Called with the different ``need_gradients`` of ranks that share a sample, by rank; raises."""


class Losses(Protocol):
    """Losses of a step that has several counts."""

    def likeness(self, value: torch.Tensor) -> torch.Tensor: ...
    def shares_by(self, alike: torch.Tensor) -> list[float] | None: ...


class StepRanks(Protocol):
    """The part of the strategy's core that this module uses."""

    @cached_property
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
    raise_on_all(error, ranks.mesh.control_group(Flat.LOSS), what="refused")


_CALL_ALL = "Models are called by all of them or by none: let no rank's own tokens decide that."

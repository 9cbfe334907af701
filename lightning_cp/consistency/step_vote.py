"""Stop a run on every rank before NaN or infinity reaches a weight; nothing has changed then.

When gradients have their final size, and before they are clipped (``clamp`` turns an infinite one into a
large number) or used, each rank tests its losses and gradients; then all vote. That is one pass over the
gradients and one sum of two numbers per step. The sum also carries requests of ranks (to stop at this step,
see ``launch.preemption``), so that all receive them at the same step.

The norms of the gradients take one fused pass: a non-finite gradient has no finite norm. The reverse may be
false, as squares of large numbers overflow, so then every gradient is tested.

Clipping makes another pass. It comes after hooks that may write into ``grad.data``, which no version counts;
and it needs float64, in which a pass on the CPU takes four times as long.

With a ``GradScaler`` (``precision="16-mixed"``) gradients may be infinite by design, and the scaler skips
such a step: ranks vote on losses and settings only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.spike import SpikeDetection
from torch import nn
from torch.optim import Optimizer

from lightning_cp.comm.consensus import all_equal_sum, gather_facts, gather_objects
from lightning_cp.consistency.model import ChangedState
from lightning_cp.consistency.settings import numbers_of, raise_setting_mismatch
from lightning_cp.errors import NonFiniteError
from lightning_cp.loss.counts import TargetCounts
from lightning_cp.utils.containers import tensors_of
from lightning_cp.utils.dtensor import local_part
from lightning_cp.utils.tensors import has_infinite_norm

WHAT = "end of a step"


@dataclass(frozen=True)
class OptimizerStep:
    """The optimizer step that comes next."""

    number: int
    """Number of the optimizer step, from 1."""
    optimizer: Optimizer
    model: nn.Module
    batch: Any
    """This rank's part of the last batch, if known."""
    sample: tuple[int, int] = (0, 1)
    """Index of this rank's sample among those trained together, and the number of ranks that share each."""


class StepVote:
    """The vote of all ranks before an optimizer step: on losses, gradients and the wish to stop.

    Args:
        checks: raise for values that are not finite.
        counts: target counts of a step's losses, which are always tested.
    """

    def __init__(self, checks: bool, counts: TargetCounts) -> None:
        self._checks = self._looks = checks
        self._counts = counts
        self._bad_loss: torch.Tensor | None = None
        self._state = ChangedState()
        self._voted: set[int] = set()  # optimizers, since the last backward
        self.look: Callable[[str], None] | None = None
        """Collective check of a loss of no known kind, and its reason."""
        self.wish: Callable[[], int] | None = None
        """Number that this rank adds to every vote."""
        self.wishes = 0
        """Sum of these numbers of all ranks in the last vote."""

    def yield_to(self, callbacks: Iterable[object]) -> None:
        """Leave values that are not finite to Lightning's SpikeDetection, if it is among the callbacks.

        That callback tests losses after each step, skips the batches, and may accept them.
        """
        self._looks = self._checks and not any(isinstance(x, SpikeDetection) for x in callbacks)

    @property
    def has_records(self) -> bool:
        """True if recorded losses are still untested."""
        return self._bad_loss is not None or self._counts.are_asked

    def forget(self) -> None:
        """Drop the record of losses whose gradients were dropped."""
        self._bad_loss = None
        self._counts.take()

    def note_loss(self, loss: torch.Tensor | None) -> None:
        """Record before a backward if this rank's loss is finite, without waiting for the device.

        Args:
            loss: ``None`` on a rank without targets, whose mean is undefined.
        """
        self._voted.clear()
        if self._looks and loss is not None:
            bad = ~loss.detach().isfinite().all()
            self._bad_loss = bad if self._bad_loss is None else self._bad_loss | bad

    def has_tested(self, optimizer: Optimizer) -> bool:
        """Return True if the gradients of the last backward were tested for this optimizer."""
        return id(optimizer) in self._voted

    def before_step(
        self, step: OptimizerStep, group: dist.ProcessGroup | None, scaler: object
    ) -> None:
        """Test gradients of final size before they are clipped and used. Collective.

        Args:
            step: the next step.
            group: all ranks, with a backend that moves CPU tensors; ``None`` for a single one.
            scaler: the precision's ``GradScaler``, which handles infinite gradients itself.

        Raises:
            NonFiniteError: on every rank, if a loss or a gradient of any is not finite.
            ConfigError: on every rank, if optimizers have different settings, such as a learning rate; if
                a loss counted other targets than those of its weight; if ranks that share a sample multiply
                it by different numbers; or for a finding of ``look``.
        """
        self._voted.add(id(step.optimizer))
        looks = self._looks and scaler is None
        bad_loss, self._bad_loss = self._bad_loss, None
        counts = self._counts.take()
        differ = counts.differ
        finite, same = _test_step(step.optimizer if looks else None, bad_loss, differ)
        number = 0 if self.wish is None else self.wish()
        if not self._looks and self.wish is None and not counts.are_asked:
            return
        if group is None:
            total = number if finite and same else None
        else:
            total = self._tally(step, counts, group, finite and same, number)
        if total is not None:
            self.wishes = total
        elif group is None:
            counts.check(step.number, None)
            _raise_findings(step.number, [_findings(step, bad_loss)])
        else:
            found = _findings(step, bad_loss) if not finite else []
            every = gather_objects(found, group)
            if not any(every):
                raise_setting_mismatch(step.number, step.optimizer, group)
            _raise_findings(step.number, every)

    def _tally(
        self,
        step: OptimizerStep,
        counts: TargetCounts,
        group: dist.ProcessGroup,
        agrees: bool,
        number: int,
    ) -> int | None:
        """The sum of all ranks' numbers; ``None`` on all if one does not agree, or has other settings."""
        fact = (WHAT, numbers_of(step.optimizer))
        vote = partial(all_equal_sum, fact, group, number=number)
        size = step.sample[1]
        own = [counts.numbers, state := self._state.numbers(step.model) if size > 1 else []]
        dissents = not agrees or counts.asks or counts.has_doubts()
        total = vote(of=step.sample, own=own, dissents=dissents)
        if total is not None:
            return total
        gather_facts({"step": step.number}, group, what=WHAT)  # raises if calls differ
        counts.check(step.number, group)  # a mean over no target is NaN, too
        counts.check_numbers(step.number, group, size)
        counts.check_values(f"step {step.number}", group, size)
        self._state.warn(state, group, size)
        asks = any(gather_objects(counts.asks, group))
        apart = counts.difference_of_values(group, size)
        total = vote(dissents=not agrees)
        if (asks or apart) and total is not None and self.look is not None:
            self.look(apart or "")
        return total


def _test_step(
    optimizer: Optimizer | None, bad_loss: torch.Tensor | None, differ: torch.Tensor | None
) -> tuple[bool, bool]:
    """Two flags: losses and gradients are finite; counts are the same. Waits for the device at most once.

    Args:
        optimizer: the owner of the gradients; ``None``: nothing has to be finite.
        bad_loss: a flag on the device: some loss is not finite.
        differ: a flag on the device: some count differs.
    """
    flags = [differ]
    if optimizer is not None:
        flags += [has_infinite_norm(_local_gradients(optimizer)), bad_loss]
    given = [flag for flag in flags if flag is not None]
    if not given or not torch.stack([flag.to(given[-1].device) for flag in given]).any():
        return True, True
    same = differ is None or not differ
    if optimizer is None:
        return True, same
    finite = not bad_loss and all(bool(x.isfinite().all()) for x in _local_gradients(optimizer))
    return finite, same


def _local_gradients(optimizer: Optimizer) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is not None:
                is_plain = type(gradient) is torch.Tensor and not gradient.is_sparse
                found.append(gradient.detach() if is_plain else _local(gradient))
    return found


def _local(gradient: torch.Tensor) -> torch.Tensor:
    """This rank's part of a gradient."""
    local = local_part(gradient)
    return local.coalesce().values() if local.is_sparse else local


def _findings(step: OptimizerStep, bad_loss: torch.Tensor | None) -> list[tuple[str, str]]:
    """This rank's values that are not finite, as (kind, name)."""
    found: list[tuple[str, str]] = []
    if bad_loss is not None and bad_loss:
        found.append(("loss", ""))
    names = {id(p): name for name, p in step.model.named_parameters()}
    parameters = (p for group in step.optimizer.param_groups for p in group["params"])
    bad = (p for p in parameters if p.grad is not None and not _local(p.grad).isfinite().all())
    found += [("gradient", names.get(id(p), "a parameter of the optimizer")) for p in bad]
    for name, x in tensors_of(step.batch):
        if x.is_floating_point() and not x.isfinite().all():
            found.append(("batch", name))
    return found


def _raise_findings(number: int, of_ranks: list[list[tuple[str, str]]]) -> None:
    losses, gradients, batch = (
        {rank: [name for its, name in found if its == kind] for rank, found in enumerate(of_ranks)}
        for kind in ("loss", "gradient", "batch")
    )
    said: list[str] = []
    if ranks := _ranks(losses):
        said.append(f"the loss of {_listed(ranks)}")
    if ranks := _ranks(gradients):
        names = gradients[ranks[0]]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        said.append(f"gradients on {_listed(ranks)}, first that of {names[0]}{more}")
    source = ""
    if ranks := _ranks(batch):
        source = f" The batch holds NaN or inf in {batch[ranks[0]][0]!r} on {_listed(ranks)}."
    raise NonFiniteError(
        f"step {number}: NaN or inf in {', and in '.join(said)}.{source} No rank has stepped: parameters and "
        "optimizer state are those of the step before. To find where it begins: "
        "Trainer(detect_anomaly=True), or torch.autograd.set_detect_anomaly(True). A micro-batch without any "
        "target has no mean (0/0): leave such out. check_finite=False steps along whatever there is."
    )


def _ranks(found: dict[int, list[str]]) -> list[int]:
    return [rank for rank, names in found.items() if names]


def _listed(ranks: Iterable[int]) -> str:
    """Format ranks as ``rank 1``, ``ranks 0, 1 and 3``."""
    *others, last = map(str, ranks)
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"

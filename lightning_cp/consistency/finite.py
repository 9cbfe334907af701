"""NaN and infinity stop a run before they reach a weight: every rank raises, and nothing has changed.

Once gradients have their final size, and before they are clipped (``clamp`` makes a large number of an
infinite one) or stepped along, each rank looks at the losses and gradients it has; then all vote. That is one
pass over the gradients and one sum of two numbers a step, which also carries what ranks wish for (to stop at
this step, see ``signals``), so that all learn of it at the same step.

The norm of the gradients tells in one fused pass: what is not finite in it makes it not finite. The opposite
may be false, as squares of large numbers overflow, so then every gradient is looked at by itself.

With a ``GradScaler`` (``precision="16-mixed"``) gradients may be infinite by design, and the scaler skips
such a step: they are left alone, and ranks vote on the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.spike import SpikeDetection
from torch import nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from lightning_cp.comm.consensus import gather_facts, gather_lists, tally
from lightning_cp.consistency.model import MovedState
from lightning_cp.consistency.settings import numbers_of, refuse_settings
from lightning_cp.errors import NonFiniteError
from lightning_cp.loss.counts import TargetCounts
from lightning_cp.utils.containers import tensors_of
from lightning_cp.utils.dtensor import local_part

WHAT = "end of a step"


@dataclass(frozen=True)
class Step:
    """A step that is about to be taken."""

    number: int
    """Of the optimizer step; the first one is 1."""
    optimizer: Optimizer
    model: nn.Module
    batch: Any
    """This rank's part of the last batch, where it is known."""
    sample: tuple[int, int] = (0, 1)
    """Which of the samples that are trained on together, and how many ranks share each."""


class FiniteGuard:
    """Looks at what a step has computed, together with all other ranks.

    Args:
        checks: whether values that are not finite are an error.
        counts: of the losses of a step, which are looked at in any case.
    """

    def __init__(self, checks: bool, counts: TargetCounts) -> None:
        self._checks = self._looks = checks
        self._counts = counts
        self._bad_loss: torch.Tensor | None = None
        self._state = MovedState()
        self._voted: set[int] = set()  # optimizers, since the last backward
        self.look: Callable[[str], None] | None = None
        """How all ranks look at a loss of no known kind together, and why, besides."""
        self.wish: Callable[[], int] | None = None
        """What this rank tells the others with every vote: a number."""
        self.wishes = 0
        """The sum of what all ranks told in the last vote."""

    def yield_to(self, callbacks: Iterable[object]) -> None:
        """Leave values that are not finite to Lightning's SpikeDetection, if it is among the callbacks.

        It looks at losses after each step, leaves out the batches, and may let them pass.
        """
        self._looks = self._checks and not any(isinstance(x, SpikeDetection) for x in callbacks)

    @property
    def has_notes(self) -> bool:
        """Losses were noted that no step has looked at."""
        return self._bad_loss is not None or self._counts.are_asked

    def forget(self) -> None:
        """Drop what was noted of losses whose gradients are gone: no step will be taken along them."""
        self._bad_loss = None
        self._counts.take()

    def note_loss(self, loss: torch.Tensor | None) -> None:
        """Before a backward: remember whether this rank's loss is finite, without waiting for it.

        Args:
            loss: ``None`` on a rank without targets: the mean of nothing says nothing.
        """
        self._voted.clear()
        if self._looks and loss is not None:
            bad = ~loss.detach().isfinite().all()
            self._bad_loss = bad if self._bad_loss is None else self._bad_loss | bad

    def before_step(self, step: Step, group: dist.ProcessGroup | None, scaler: object) -> None:
        """Gradients have their final size; called by all ranks, before they are clipped and stepped along.

        Args:
            step: what is looked at, once after each backward.
            group: all ranks, with a backend that moves CPU tensors; ``None`` for a single one.
            scaler: the precision's ``GradScaler``, which has a way of its own.

        Raises:
            NonFiniteError: on every rank, if there is a loss or a gradient on any that is not finite.
            ConfigError: on every rank, if optimizers have other settings on some, such as a learning rate;
                if a loss on any counted other targets than it is weighted by; or if ranks that share a
                sample multiply it by other numbers; or what ``look`` finds.
        """
        if id(step.optimizer) in self._voted:
            return
        self._voted.add(id(step.optimizer))
        looks = self._looks and scaler is None
        bad_loss, self._bad_loss = self._bad_loss, None
        counts = self._counts.take()
        differ = counts.differ
        finite, same = _look(step.optimizer if looks else None, bad_loss, differ)
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
            _refuse(step.number, [_findings(step, bad_loss)])
        else:
            found = _findings(step, bad_loss) if not finite else []
            every = gather_lists(found, group)
            if not any(every):
                refuse_settings(step.number, step.optimizer, group)
            _refuse(step.number, every)

    def _tally(
        self,
        step: Step,
        counts: TargetCounts,
        group: dist.ProcessGroup,
        agrees: bool,
        number: int,
    ) -> int | None:
        """The sum of what ranks wish; ``None`` on all if one does not agree, or has other settings."""
        fact = (WHAT, numbers_of(step.optimizer))
        vote = partial(tally, fact, group, number=number)
        dissents, size = not agrees or counts.asks, step.sample[1]
        state = self._state.numbers(step.model) if size > 1 else []
        total = vote(of=step.sample, own=[counts.numbers, state], dissents=dissents)
        if total is not None:
            return total
        gather_facts(
            {"step": step.number}, group, what=WHAT
        )  # ranks at different calls hear of that
        counts.check(step.number, group)  # a mean over no target is NaN, too
        counts.check_numbers(step.number, group, size)
        self._state.warn(state, group, size)
        asks = any(flag for flags in gather_lists([counts.asks], group) for flag in flags)
        apart = counts.shared_difference(group, size) or counts.factor_difference(group, size)
        total = vote(dissents=not agrees)
        if (asks or apart) and total is not None and self.look is not None:
            self.look(apart or "")
        return total


def _look(
    optimizer: Optimizer | None, bad_loss: torch.Tensor | None, differ: torch.Tensor | None
) -> tuple[bool, bool]:
    """Two flags: losses and gradients are finite, counts are the same. Waits for the device once if so.

    Args:
        optimizer: whose gradients are looked at; ``None``: nothing has to be finite.
        bad_loss: whether some loss is not finite.
        differ: whether some count differs.
    """
    flags = [differ]
    if optimizer is not None:
        flags += [~get_total_norm(list(_local_gradients(optimizer))).isfinite(), bad_loss]
    given = [flag for flag in flags if flag is not None]
    if not given or not torch.stack([flag.to(given[-1].device) for flag in given]).any():
        return True, True
    same = differ is None or not differ
    if optimizer is None:
        return True, same
    finite = not bad_loss and all(bool(x.isfinite().all()) for x in _local_gradients(optimizer))
    return finite, same


def _local_gradients(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield _local(parameter.grad)


def _local(gradient: torch.Tensor) -> torch.Tensor:
    """This rank's part of a gradient."""
    local = local_part(gradient)
    return local.coalesce().values() if local.is_sparse else local


def _findings(step: Step, bad_loss: torch.Tensor | None) -> list[tuple[str, str]]:
    """The values of this rank that are not finite, as (kind, name)."""
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


def _refuse(number: int, of_ranks: list[list[tuple[str, str]]]) -> None:
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
    """``rank 1``, ``ranks 0, 1 and 3``."""
    *others, last = map(str, ranks)
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"

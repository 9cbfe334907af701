"""Equal weight for every target of an accumulation window: ``token_weighting="global"``.

A batch m has n_m targets over all data ranks and the mean loss_m. A window of M batches should step along

    M / sum(n) * sum_m n_m grad loss_m        (divided by M, as Lightning does: the mean over its targets),

but n of the later batches is not known when the first runs backward. So each batch is weighted by n_m / u,
where the unit u is the count of the window's first batch, and gradients are multiplied by u M / sum(n) once,
when the window ends. A window of one batch needs no correction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from lightning_cp.comm.reduce import all_sum
from lightning_cp.errors import ConfigError
from lightning_cp.utils.dtensor import local_part
from lightning_cp.utils.tensors import optimizer_parameters, to_list

Unreduced = Iterable[tuple[torch.nn.Parameter, torch.Tensor]]
"""Parameters with local gradients that are not in their ``grad`` yet."""


@dataclass
class _Accumulation:
    """Batches in the gradients of one optimizer."""

    batches: int = 0
    targets: float = 0
    last: object | None = None

    def include(self, batch: object, targets: float) -> None:
        """Count a batch once, however many backward passes it has."""
        if self.last is not batch:
            self.batches, self.targets, self.last = self.batches + 1, self.targets + targets, batch


class AccumulatedTokens:
    """Accumulated batches and targets of each optimizer: several may step at different times."""

    def __init__(self) -> None:
        self._unit = 1.0
        self._accumulated: WeakKeyDictionary[Optimizer, _Accumulation] = WeakKeyDictionary()
        self.unreduced: Callable[[], Unreduced] = tuple
        """Returns gradients that an engine keeps outside of ``grad`` until a later backward."""

    def weight(
        self,
        batch: object,
        targets: float,
        optimizers: Iterable[Optimizer],
        group: dist.ProcessGroup | None,
    ) -> float:
        """Return the factor on the mean loss of a batch, before its backward.

        Args:
            batch: identity of the batch.
            targets: of the whole batch, on all data ranks.
            optimizers: those of the run.
            group: all ranks whose gradients are averaged, with a backend that moves CPU tensors; ``None``
                where gradients are zeroed after steps only.

        Raises:
            ConfigError: optimizers share a parameter, whose gradient would need two sizes.
        """
        training = [
            each for each in optimizers if any(p.requires_grad for p in optimizer_parameters(each))
        ]
        _check_no_shared_parameters(training)
        if group is not None:
            self._forget_zeroed(training, group)
        if not any(window.targets for window in self._accumulated.values()):
            self._unit = max(targets, 1)  # all gradients are empty
        for optimizer in training:
            self._accumulated.setdefault(optimizer, _Accumulation()).include(batch, targets)
        return targets / self._unit

    def __reduce__(self) -> Any:
        return AccumulatedTokens, (), {"unreduced": self.unreduced}  # workers start without windows

    def _forget_zeroed(self, optimizers: Sequence[Optimizer], group: dist.ProcessGroup) -> None:
        """Restart the window of an optimizer whose gradients were zeroed without a step, on all ranks."""
        if not any(each in self._accumulated for each in optimizers):
            return
        kept = {id(p): gradient for p, gradient in self.unreduced()}
        filled = torch.tensor([_has_gradient(x, kept) for x in optimizers], dtype=torch.int64)
        for optimizer, count in zip(optimizers, to_list(all_sum(filled, group)), strict=True):
            if not count:
                self._accumulated.pop(optimizer, None)

    def end(self, optimizer: Optimizer, batches: int | None) -> None:
        """Scale gradients to their final size; do nothing if the window has ended already.

        Args:
            optimizer: steps next, or has its gradients clipped.
            batches: divisor that each loss already has; ``None``: the batches of the window, as in a loop
                that divides by them.
        """
        window = self._accumulated.pop(optimizer, None)
        if window is None or not window.targets:
            return
        factor = self._unit * (batches or window.batches) / window.targets
        if factor == 1.0:
            return
        with torch.no_grad():
            for parameter in optimizer_parameters(optimizer):
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)


def _check_no_shared_parameters(optimizers: Sequence[Optimizer]) -> None:
    counts = Counter(id(p) for each in optimizers for p in set(optimizer_parameters(each)))
    if counts and max(counts.values()) > 1:
        raise ConfigError(
            "token_weighting='global' gives gradients their final size once for each optimizer, but two "
            "optimizers of this run share parameters. Give each its own, or use "
            "token_weighting='micro_batch'."
        )


def _has_gradient(optimizer: Optimizer, kept: Mapping[int, torch.Tensor]) -> bool:
    """True if any gradient on this rank is nonzero: in ``grad``, or ``kept`` elsewhere, by parameter's id.

    Ends at the first one, because the host waits for the device at each.
    """
    gradients = (x for p in optimizer_parameters(optimizer) for x in (p.grad, kept.get(id(p))))
    return any(_is_nonzero(x) for x in gradients if x is not None)


def _is_nonzero(gradient: torch.Tensor) -> bool:
    """True if this rank's part is nonzero; without communication, as ranks test different tensors."""
    return bool(local_part(gradient).any())

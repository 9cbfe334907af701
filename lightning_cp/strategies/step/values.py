"""Values of a step over the ranks that share a sample: averages, positions, whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from numbers import Real
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer

from lightning_cp.batch import ShardedBatch, unshard_output
from lightning_cp.comm.reduce import all_sum
from lightning_cp.errors import ConfigError
from lightning_cp.logs.found import Found
from lightning_cp.logs.ranks import equal, side_by_side, weighted_mean
from lightning_cp.logs.token_mean import as_logged, where_counted
from lightning_cp.mesh import Flat
from lightning_cp.models.handle import refuse_gradients
from lightning_cp.models.swap import SwapHandle
from lightning_cp.models.token_draws import TokenDraws
from lightning_cp.optim.qk_clip import QKClip
from lightning_cp.strategies.arguments.settings import Settings
from lightning_cp.strategies.step.accumulation import AccumulatedTokens
from lightning_cp.strategies.step.counts import LossAside, TargetCounts
from lightning_cp.strategies.step.run_mesh import RunMesh
from lightning_cp.strategies.step.weighting import StepLoss


class StepValues(RunMesh):
    """The current step's batch and weights, and what can be asked of them."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._handle: SwapHandle | None = None
        self._draws: TokenDraws | None = None
        self._part: ShardedBatch | None = None
        self._loss: StepLoss | None = None
        self._accumulated = AccumulatedTokens() if settings.weights_globally else None
        self.batches = 0
        """That were begun so far."""
        self._positions_taken = False
        self._is_alone = False
        self._is_aside = False
        self._clips: list[QKClip] = []
        self.counts = TargetCounts()
        self.loss_aside = LossAside(TargetCounts())
        self.ask_for_counts: str | None = None
        """What to say of a loss of no known kind; ``None``: a parity check looks at the first one."""
        self.cleared: set[tuple[bool, ...]] = set()
        """Of each loss of no known kind that was compared with one process, which factors were 0: others
        pass of which the same ones are."""
        self.follows_factors = True
        """Ranks compare factors of losses by hand; a check has not found that they may differ."""

    @contextmanager
    def as_one_process(self) -> Iterator[None]:
        """Within, nothing is shared: what a step asks for is what one process has."""
        kept, self._part, self._loss = (self._part, self._loss), None, None
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False
            self._part, self._loss = kept

    @property
    def enabled(self) -> bool:
        """True if there is anything to do: ranks that share a sample, or targets to be counted, or scores."""
        if self._is_alone:
            return False
        return self.mesh.sample_size > 1 or self._accumulated is not None or bool(self._clips)

    @property
    def in_step(self) -> bool:
        """True if a context-parallel step is under way."""
        return self._handle is not None and self._handle.active

    @property
    def batch(self) -> Any:
        """This rank's part of the current batch, if it was sharded here."""
        return None if self._part is None else self._part.batch

    @property
    def part(self) -> ShardedBatch | None:
        """This rank's part of the current batch, and what is known of the whole."""
        return self._part

    def own_loss(self, loss: torch.Tensor) -> torch.Tensor | None:
        """This rank's own, where callbacks are shown the group's; ``None`` if it is the mean of nothing."""
        return loss if self._loss is None else self._loss.own(loss)

    @property
    def shares(self) -> list[float]:
        """Each cp rank's share of the current batch's targets."""
        return self._loss.shares if self._loss else [1 / self.mesh.cp_size] * self.mesh.cp_size

    @property
    def weights_by_loss(self) -> StepLoss | None:
        """The losses of a step that has several counts; ``None``: one weight of a rank fits all values."""
        return self._loss if self._loss is not None and self._loss.has_several_counts else None

    @property
    def looks_at_values(self) -> bool:
        """True in a step whose logged values are compared with its loss functions; on all ranks alike."""
        state = self._handle.state if self._handle is not None else None
        return state is not None and state.losses is not None and self._loss is not None

    @property
    def declares_targets(self) -> bool:
        """True in a step that called ``count_targets``; on all ranks alike."""
        return self._loss is not None and self._loss.is_declared

    def evidence(self, value: torch.Tensor) -> torch.Tensor:
        """How a value may have come about that is going to be weighted by ``shares``."""
        state = self._handle.state if self._handle is not None else None
        assert state is not None
        assert state.losses is not None
        assert self._loss is not None
        return state.losses.evidence(value, self._loss.targets)

    def gathering(self) -> AbstractContextManager[None]:
        """A block at whose end ranks agree, also on what ``take_found`` gives."""
        return nullcontext() if self._handle is None else self._handle.checks.gathering()

    def take_found(self) -> Found:
        """The findings that ranks were not told yet."""
        state = self._handle.state if self._handle is not None else None
        if self._handle is None or state is None:
            return Found()
        waiting, needs = self._handle.checks.take(), list(state.need_gradients)

        def compared() -> None:
            state.compared = len(needs)

        return Found(waiting.names, waiting.error, needs, compared, refuse_gradients)

    def take_refused(self) -> Exception | None:
        """The error of this rank when all ranks that share a sample knew that the step had failed."""
        return None if self._handle is None else self._handle.checks.take_refused()

    def before_data(self) -> None:
        """Ranks are about to exchange something, maybe between a model's call and the one inside it."""
        if self._handle is not None:
            self._handle.checks.before_data()

    def average(self, value: torch.Tensor) -> torch.Tensor:
        """The mean over the cp group, weighted by targets: what one process would have computed.

        Where losses of several counts went backward in the step, by those of the loss that it is; another
        value between ``count_targets`` and the backward of its loss by that count.

        Raises:
            ConfigError: it is none of these.
        """
        mean, is_known = self._averaged(value)
        if not is_known:
            raise ConfigError(_NO_LOSS)
        return mean

    def _averaged(self, value: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """The mean, and whether it is known which targets it is of."""
        if self._loss is None:
            return value, True
        self.before_data()
        if not self._loss.has_several_counts:
            (rows,) = side_by_side([value], self.mesh)
            return weighted_mean(rows, self.shares).to(value), True
        rows, alike = side_by_side([value, self._loss.likeness(value)], self.mesh)
        shares = self._loss.shares_by(alike)
        is_known = shares is not None or self._loss.awaits_loss or bool(equal(rows).all())
        return weighted_mean(rows, shares or self.shares).to(value), is_known

    def closure_value(self, closure: Callable[[], Any], optimizer: Optimizer) -> Any:
        """What an optimizer is given of a closure: the loss that gradients are of, the same on all ranks.

        One that searches along it would go another way on each rank, and other ranks would wait for it.

        Args:
            closure: whose value is this rank's.
            optimizer: that called it.

        Raises:
            ConfigError: it searches along the value, of which it is not known what it is a mean over: of
                several batches, or none of a step's losses.
        """
        begun = self.batches
        value = closure()
        one_batch = self.batches - begun <= 1
        is_number = isinstance(value, Real)
        own = torch.tensor(float(value), dtype=torch.float64) if is_number else value
        if not isinstance(own, torch.Tensor) or own.numel() != 1 or self._loss is None:
            return value
        mean, is_known = self._averaged(own) if one_batch else self._alike(own)
        if not is_known:
            if isinstance(optimizer, LBFGS):
                raise ConfigError(
                    _NO_LOSS if one_batch else _BATCHES.format(type(optimizer).__name__)
                )
            return value
        if self.mesh.data_size > 1:
            every = side_by_side([mean * self._loss.data_weight], self.mesh, Flat.LOSS)[0]
            mean = (every.sum(0) / every.shape[0]).to(mean)
        return mean.item() if is_number else mean

    def _alike(self, value: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """A value of several batches, and whether it is that of all ranks that share them already."""
        self.before_data()
        (rows,) = side_by_side([value], self.mesh)
        weighs_alike = self._accumulated is None or self.mesh.data_size == 1
        return value, weighs_alike and bool(equal(rows).all())

    def token_mean(self, total: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """(sum of totals) / (sum of counts) over the ranks that share a sample."""
        self.before_data()
        sums = torch.stack([where_counted(total.double(), count), count.double()])
        if self.enabled:
            sums = all_sum(sums.to(self.mesh.device_type), self.mesh.group(Flat.CP))
        return as_logged(sums[0] / sums[1])

    def unshard(self, output: Any, dims: Mapping[str, int | None]) -> Any:
        """An output of the current step in original order and length, on every rank.

        Raises:
            ConfigError: a tensor that is neither along the sequence nor the same on all ranks.
        """
        if self._part is None:
            return output
        return unshard_output(output, self.mesh, self._part.layout, dims)

    def unshard_tensor(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """A local tensor of the current step, whole, in original order and length; differentiable."""
        self.before_data()
        return x if self._part is None else self.mesh.unshard(x, self._part.layout, dim=dim)

    def token_positions(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """int64 [B or 1, L]: the global positions of a step's tokens; 0, 1, ... of ``x`` outside."""
        self._positions_taken = True
        if not self.in_step or self._part is None:
            return torch.arange(x.size(dim), device=x.device)[None]
        return self._part.position_ids

    def token_mask(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """bool [1, L]: which of a step's tokens are of the sequence, and no padding; all of ``x`` outside."""
        size, real = x.size(dim), x.size(dim)
        if self._part is not None and self._handle is not None and self._handle.state is not None:
            self._handle.state.padding_asked = True
            size = self._part.layout.local_len
            real = self._part.layout.real_len(self.mesh.cp_rank)
        return (torch.arange(size, device=x.device) < real)[None]


_NO_LOSS = (
    "average was given a value that is none of the losses which went backward, in a step that declared "
    "several counts, so that it is not known which targets it is a mean over. Average each loss by itself, "
    "between its count_targets and its backward, or after that as it was given to it, and add up the "
    "averages; average other values before the next count_targets."
)

_BATCHES = (
    "The closure of {} goes over several batches, and ranks that share a sample return other sums of their "
    "losses, so that it is not known what it should search along. Return the sum of self.average(loss), or "
    "of fabric.strategy.average(loss), of each batch; with token_weighting='global' take one batch a step."
)

"""The loss of one step: its share of the group's targets, and ranks that have none."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_cp.comm.agreement import agree
from lightning_cp.comm.reduce import all_sum
from lightning_cp.errors import ConfigError, NonFiniteError
from lightning_cp.loss import (
    average_weight,
    declared_scale,
    loss_scale,
    mute,
    require_connected,
    require_muted,
)
from lightning_cp.loss_terms import declared_count
from lightning_cp.mesh import ContextParallelMesh, Flat
from lightning_cp.models.swap import StepState
from lightning_cp.models.token_draws import place_of
from lightning_cp.strategies.step.accumulation import AccumulatedTokens
from lightning_cp.strategies.step.counts import COUNTS, MORE_TOKENS, NUMBER
from lightning_cp.strategies.step.sharding import Sharding

_Gone = tuple[Sequence[float] | torch.Tensor, torch.Tensor]
"""What ranks counted in a loss, and its value."""


class StepLoss:
    """Weights the losses of one batch; see ``lightning_cp.loss`` for the formula.

    With ``windows`` targets weigh the same in all data ranks and in a whole accumulation window.
    """

    def __init__(
        self, sharding: Sharding, mesh: ContextParallelMesh, windows: AccumulatedTokens | None
    ) -> None:
        self._mesh = mesh
        self._accumulated = windows
        self._trains = sharding.trains
        self._targets: float = sharding.targets
        self._valid = sharding.part.valid
        self._some_rank_empty = sharding.some_rank_empty
        self._muted: torch.Tensor | None = None
        self._own: torch.Tensor | None = None
        self._declared: torch.Tensor | None = None
        self._layout, self._rows = sharding.part.layout, sharding.part.rows
        self._padding: torch.Tensor | None = None
        self._is_used = self._is_number = False
        self._gone: deque[_Gone] = deque(maxlen=16)
        """Of the last losses that went backward, what ranks counted, and the value."""
        self._weigh_alike: torch.Tensor | None = None
        """Whether all losses that went backward, and what comes next, weigh ranks alike; ``None`` as long as
        there is one count."""

    @property
    def shares(self) -> list[float]:
        """Each cp rank's share of the group's targets: what averages over ranks are weighted by.

        It waits for the device where targets were declared.
        """
        return _shares(self._counts)

    @property
    def _counts(self) -> Sequence[float] | torch.Tensor:
        return self._valid if self._declared is None else self._declared

    @property
    def has_several_counts(self) -> bool:
        """True if losses of other counts than the current ones went backward; on all ranks alike."""
        return self._weigh_alike is not None

    @property
    def awaits_loss(self) -> bool:
        """True from where a count is declared until its loss goes backward; on all ranks alike."""
        return self._declared is not None and not self._is_used

    def likeness(self, value: torch.Tensor) -> torch.Tensor:
        """float64 [losses]: 1 for each loss that went backward and is this value, on this rank."""
        found = [_is_same(value, loss).to(value.device, torch.float64) for _, loss in self._gone]
        return torch.stack(found)

    def shares_by(self, alike: torch.Tensor) -> list[float] | None:
        """What averages of a value are weighted by that is one of the losses on all ranks with targets of it.

        It waits for the device.

        Args:
            alike: [ranks, losses], their ``likeness``.

        Returns:
            ``None`` if it is none of them, and they do not weigh ranks alike.
        """
        for (counts, _), of_ranks in reversed(list(zip(self._gone, alike.T.tolist(), strict=True))):
            shares = _shares(counts)
            if all(same or not share for same, share in zip(of_ranks, shares, strict=True)):
                return shares
        return self.shares if self._weigh_alike is not None and self._weigh_alike else None

    @property
    def targets(self) -> torch.Tensor | int:
        """Of this rank: what its loss should be a mean over."""
        counts = self._valid if self._declared is None else self._declared
        return counts[self._mesh.cp_rank]

    @property
    def tokens(self) -> int:
        """Of this rank, all rows together, padding too."""
        return self._rows * self._layout.local_len

    @property
    def is_declared(self) -> bool:
        """True if the step has said what its loss counts."""
        return self._declared is not None

    @property
    def is_muted(self) -> bool:
        """True if this rank has no targets, so that its loss adds nothing."""
        return self._declared is None and not self._valid[self._mesh.cp_rank]

    @property
    def depends_on_counts(self) -> bool:
        """True if other counts would give other gradients."""
        return self._mesh.cp_size > 1 or self._accumulated is not None

    @property
    def _of_window(self) -> bool:
        return self._accumulated is not None and self._trains

    def checked_count(self, counted: torch.Tensor | float) -> torch.Tensor:
        """The count that this rank declares, checked.

        Raises:
            ConfigError: no count, or a second one before the loss of the first went backward; or in one
                batch where windows of accumulation are weighted; or, where nothing is trained, of padding.
        """
        if self.awaits_loss or (self._of_window and self._declared is not None):
            raise ConfigError(_TWICE)
        self._note_padding(counted)
        if not self._trains and self._padding is not None and self._padding:
            raise ConfigError(COUNTS + MORE_TOKENS)
        return declared_count(counted)

    def _note_padding(self, counted: torch.Tensor | float) -> None:
        """Look at what was declared for padding of this rank's; the outcome stays on the device."""
        self._padding, self._is_number = None, False
        real, local = self._layout.real_len(self._mesh.cp_rank), self._layout.local_len
        if real == local:
            return
        shape = counted.shape if isinstance(counted, torch.Tensor) else ()
        place = place_of(shape, self._rows, local)
        if not isinstance(counted, torch.Tensor) or place is None:
            self._is_number = True
        elif place.token is None:
            self._padding = (counted.detach().unflatten(0, (-1, local))[:, real:] != 0).any()
        else:
            self._padding = (counted.detach().narrow(place.token, real, local - real) != 0).any()

    def padding(self, *, by_hand: bool, asked: bool) -> tuple[str, torch.Tensor | None]:
        """How padding counts in the loss, and whether it does; ``None``: as far as is known it does not.

        Args:
            by_hand: a loss whose own count is not known, so that a number cannot be compared with it.
            asked: the step knows which tokens are padding.
        """
        if self._is_number and by_hand and not asked:
            return NUMBER, torch.tensor(True)
        return COUNTS, self._padding

    def declare(self, count: torch.Tensor) -> None:
        """From here on the loss of this rank counts so many targets, and not the batch's labels. Collective.

        One sum over the group on its device, of a number per rank, which nothing waits for on the host; with
        ``token_weighting="global"`` over all ranks, and the host waits for it.
        """
        of_window = self._of_window
        mesh, self._is_used = self._mesh, False
        ranks = mesh.cp_size * (mesh.data_size if of_window else 1)
        first = mesh.data_rank * mesh.cp_size if of_window else 0
        counts = torch.zeros(ranks, dtype=torch.float64, device=mesh.device_type)
        counts[first + mesh.cp_rank] = count.to(counts)
        if ranks > 1:
            counts = all_sum(counts, mesh.group(Flat.LOSS if of_window else Flat.CP))
        declared = counts[first : first + mesh.cp_size]
        if self._gone:
            same = (_weights(declared) == _weights(self._counts).to(declared.device)).all()
            self._weigh_alike = same if self._weigh_alike is None else self._weigh_alike & same
        self._declared = declared
        if of_window:
            self._targets = float(counts.sum())

    def own(self, loss: torch.Tensor) -> torch.Tensor | None:
        """The mean over this rank's targets, of which ``loss`` may be the group's; ``None`` without any."""
        own = loss if self._own is None else self._own
        if self._declared is not None:
            return torch.where(self._declared[self._mesh.cp_rank] > 0, own.detach(), 0.0)
        return own if self._valid[self._mesh.cp_rank] else None

    def require_known(self, error: ConfigError | None) -> None:
        """Raise what is wrong with this rank's loss; where a rank has no targets, all ranks ask for that.

        Such a rank often has another loss than the others, ``0 * logits.sum()``. Weighted by 0, it is right.

        Raises:
            ConfigError: it was given, and the rank has targets.
            RankFailure: that happened on another rank.
        """
        if not self._some_rank_empty:
            if error is not None:
                raise error
            return
        told = None if self.is_muted else error
        agree({}, self._mesh.control_group(Flat.LOSS), what="loss", error=told)

    def scale(
        self, loss: torch.Tensor, optimizers: Iterable[Optimizer], *, automatic: bool = False
    ) -> torch.Tensor:
        """The loss to call backward on: it has its own value still, for hooks that read it."""
        rank = self._mesh.cp_rank
        weight = self._weight(optimizers, automatic)
        self._is_used = True
        self._gone.append((self._counts, loss.detach()))
        if self._declared is not None:
            weighted = loss * (declared_scale(self._declared, rank) * weight).to(loss)
        elif self._valid[rank]:
            weighted = loss * (loss_scale(self._valid, rank) * weight)
        else:
            self._muted = loss.detach() if self._own is None else self._own
            weighted = mute(loss)
        return _Shown.apply(weighted, loss.detach())  # type: ignore[return-value]

    def shown(self, loss: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """A loss with the value of one process's, and the gradient of this rank's own."""
        self._own = loss.detach()
        return _Shown.apply(loss, value)  # type: ignore[return-value]

    def _weight(self, optimizers: Iterable[Optimizer], automatic: bool) -> float:
        """Of this data rank's mean loss in the gradient."""
        if self._accumulated is None:
            return 1.0
        group = None if automatic else self._mesh.control_group(Flat.LOSS)
        of_window = self._accumulated.weight(self, self._targets, optimizers, group)
        return self.data_weight * of_window

    @property
    def data_weight(self) -> float:
        """Of this data rank's mean in that of all of them: their mean weight is 1."""
        if self._accumulated is None:
            return 1.0
        counts = self._valid if self._declared is None else self._declared.tolist()
        share = sum(counts) / self._targets if self._targets else 0.0
        return share * self._mesh.data_size

    def require(self, loss: torch.Tensor | None) -> None:
        """Where a rank has no targets, all ranks ask whether backward will run through its model.

        Raises:
            ConfigError: a rank without targets has no loss, or one that is not computed from the model.
            RankFailure: that happened on another rank.
        """
        if not self._some_rank_empty:
            return
        error: ConfigError | None = None
        if not self._valid[self._mesh.cp_rank]:
            try:
                require_connected(loss)
            except ConfigError as refused:
                error = refused
        agree({}, self._mesh.control_group(Flat.LOSS), what="loss", error=error)

    def after_backward(self, state: StepState, parameters: Iterable[torch.Tensor]) -> None:
        """Where a rank had no targets, all ranks ask whether its loss did add nothing.

        Raises:
            NonFiniteError: a rank without targets has a loss that cannot be made to add nothing.
            RankFailure: that happened on another rank.
        """
        if not self._some_rank_empty:
            return
        error: NonFiniteError | None = None
        muted, self._muted = self._muted, None
        if muted is not None:
            try:
                require_muted(float(muted), _first_gradients(state, parameters))
            except NonFiniteError as refused:
                error = refused
        agree({}, self._mesh.control_group(Flat.LOSS), what="loss", error=error)


def _shares(counts: Sequence[float] | torch.Tensor) -> list[float]:
    numbers = counts.tolist() if isinstance(counts, torch.Tensor) else counts
    return [average_weight(numbers, rank) for rank in range(len(numbers))]


def _weights(counts: Sequence[float] | torch.Tensor) -> torch.Tensor:
    """float64: ``_shares``, without waiting for the device."""
    counts = torch.as_tensor(counts, dtype=torch.float64)
    return torch.where(counts.sum() > 0, counts / counts.sum(), 1 / len(counts))


def _is_same(value: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """bool []; NaN is NaN."""
    if value.numel() != 1:
        return torch.zeros((), dtype=torch.bool)
    a, b = value.detach().reshape(()).double(), loss.reshape(()).to(value.device).double()
    return (a == b) | (a.isnan() & b.isnan())


_TWICE = (
    "count_targets was called twice for one loss. Call it once before each backward, with all that the loss "
    "counts; with token_weighting='global' once in a batch."
)


class _Shown(torch.autograd.Function):
    """Another value for the same gradient.

    | tensor | shape | collectives |
    |---|---|---|
    | loss, value -> value | [] | none |
    | d value -> d loss | [] | none |
    """

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def _first_gradients(state: StepState, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of this rank's loss alone: the one that reached the model's last attention.

    Those of parameters are averaged over ranks by now, and dK and dV of other ranks pass through
    earlier layers, so that what another rank's overflow did would be found there as well. A model
    whose attention needs no gradient has only the parameters.
    """
    first, state.first_gradient = state.first_gradient, None
    if first is not None:
        return [first]
    return [x.grad for x in parameters if x.grad is not None]

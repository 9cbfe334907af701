"""Weight of a rank's loss: a mean over valid tokens that is exact under context parallelism.

A rank's loss is the mean over its own ``n_local`` targets, and the engine averages gradients over all
``data * cp`` ranks. Scaled by ``n_local * cp_size / n_group`` before backward, that average is

    1/(data*cp) sum_d sum_r n_dr cp / n_d loss_dr = 1/data sum_d (sum_r n_dr loss_dr) / n_d,

exactly the gradient of one process per sample: context parallelism changes nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_cp.batch.sharder import Sharding
from lightning_cp.batch.step_state import StepState
from lightning_cp.comm.consensus import raise_in_group
from lightning_cp.comm.reduce import all_sum
from lightning_cp.errors import ConfigError, NonFiniteError, ShapeError
from lightning_cp.layout.axes import Flat
from lightning_cp.loss.accumulation import AccumulatedTokens
from lightning_cp.loss.counts import COUNTS, MORE_TOKENS, NUMBER
from lightning_cp.loss.terms import declared_count, has_sequence_values
from lightning_cp.mesh import ContextParallelMesh
from lightning_cp.randomness.token_draws import find_token_dims
from lightning_cp.utils.autograd_notes import graph_nodes
from lightning_cp.utils.tensors import to_device, to_list


def loss_scale(valid: Sequence[int], cp_rank: int) -> float:
    """Return the factor on this rank's mean loss; 0.0 if the group has no targets."""
    total = sum(valid)
    return valid[cp_rank] * len(valid) / total if total else 0.0


def declared_scale(counts: torch.Tensor, cp_rank: int, uncounted: float = 0.0) -> torch.Tensor:
    """Return ``loss_scale`` of counts on a device, or ``uncounted``, without a copy to the host."""
    total = counts.sum()
    return torch.where(total > 0, counts[cp_rank] * len(counts) / total, uncounted)


Shares = Sequence[float] | torch.Tensor
"""Weights of ranks in an average, which sum to 1: numbers, or float64 [ranks] on the device."""


def average_weights(counts: Sequence[float] | torch.Tensor) -> Shares:
    """Return each rank's share of the group's targets, where the counts are; does not wait for a device."""
    if isinstance(counts, torch.Tensor):
        return torch.where(counts.sum() > 0, counts / counts.sum(), 1 / len(counts))
    total = sum(counts)
    return [count / total if total else 1.0 / len(counts) for count in counts]


def count_alike(counts: Sequence[float] | torch.Tensor) -> torch.Tensor | bool:
    """Return True if all ranks with targets have as many, where the counts are."""
    if isinstance(counts, torch.Tensor):
        return ((counts == counts.max()) | (counts == 0)).all()
    return len({*counts} - {0}) <= 1


def read_shares(shares: Shares) -> Sequence[float]:
    """Return shares as numbers; waits for the device where they are on it."""
    return to_list(shares) if isinstance(shares, torch.Tensor) else shares


def zero_loss(loss: torch.Tensor) -> torch.Tensor:
    """Return 0 times a loss over no targets, with a graph that adds exactly 0 to gradients.

    Backward must run through that graph, since other ranks' dK and dV pass through it. ``cross_entropy``
    means over nothing are 0/0, but their gradient is exactly zero, because ignored targets are skipped and
    not multiplied. NaN is replaced by 0 before the factor.
    """
    return torch.where(torch.isfinite(loss), loss, torch.zeros_like(loss)) * 0.0


def check_connected(loss: torch.Tensor | None) -> None:
    """Check, before backward, that a loss over no targets was computed from the model.

    Raises:
        ConfigError: no loss, or one whose graph has no parameter.
    """
    end = [] if loss is None else [loss.grad_fn]
    for node in graph_nodes(end, lambda node: (source for source, _ in node.next_functions)):
        leaf = getattr(node, "variable", None)
        # A scalar that is not a parameter is a constant.
        if leaf is not None and (leaf.dim() or isinstance(leaf, torch.nn.Parameter)):
            return
    shown = (
        "no loss"
        if loss is None
        else f"a loss of {float(loss.detach())} that is not computed from the model"
    )
    raise ConfigError(
        f"training_step returned {shown} on a rank whose part of the sequence has no valid label, but the "
        "gradients of other ranks pass through this rank's model, and would wait for it. Return the loss "
        "as computed: where there are no targets it is weighted by 0, NaN or not."
    )


def check_zero_loss(value: float, gradients: Iterable[torch.Tensor]) -> None:
    """Check, after backward, that a loss over no targets added nothing.

    Args:
        value: the loss before ``zero_loss``.
        gradients: gradients that it sent into the model.

    Raises:
        NonFiniteError: an infinite loss, or a NaN whose gradient is NaN even when scaled by 0.
    """
    if math.isfinite(value):
        return
    if math.isnan(value) and not any(bool(gradient.isnan().any()) for gradient in gradients):
        return
    raise NonFiniteError(
        f"the loss is {value} on a rank whose part of the sequence has no valid label, and it cannot be made "
        "to add nothing: its gradient is not finite even when scaled by 0. Compute the mean so that no "
        "targets give 0, for example cross_entropy(..., ignore_index=-100), or a sum divided by "
        "max(number of targets, 1)."
    )


_PastLoss = tuple[Sequence[float] | torch.Tensor, torch.Tensor]
"""Counts of all ranks in a loss, and its value."""


class StepLoss:
    """Weights of the losses of one batch, by the formula above, and checks on ranks without targets.

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
        self.without_labels = sharding.without_labels
        """``labels="none"``: ranks weigh alike until the step declares a count."""
        self.is_declared = False
        """The step has declared a count."""
        self._muted: torch.Tensor | None = None
        self._own: torch.Tensor | None = None
        self._declared: torch.Tensor | None = None
        self._layout, self._rows = sharding.part.layout, sharding.part.rows
        self._padding: torch.Tensor | None = None
        self._is_used = self._is_number = False
        self._gone: deque[_PastLoss] = deque(maxlen=16)
        """Latest losses that went backward, with their counts."""
        self._weigh_alike: torch.Tensor | None = None
        """True if all losses that went backward, and the next one, weigh ranks alike; ``None`` as long as
        there is one count."""

    @property
    def shares(self) -> Shares:
        """Share of each cp rank in the group's targets: the weights of averages over ranks."""
        return average_weights(self._counts)

    @property
    def _counts(self) -> Sequence[float] | torch.Tensor:
        return self._valid if self._declared is None else self._declared

    @property
    def has_several_counts(self) -> bool:
        """True if losses of other counts than the current ones went backward; on all ranks alike."""
        return self._weigh_alike is not None

    @property
    def awaits_loss(self) -> bool:
        """True from the declaration of a count to the backward of its loss; on all ranks alike."""
        return self._declared is not None and not self._is_used

    def likeness(self, value: torch.Tensor) -> torch.Tensor:
        """Return float64 [losses]: 1 for each past loss that equals this value on this rank."""
        found = [_is_same(value, loss).to(value.device, torch.float64) for _, loss in self._gone]
        return torch.stack(found)

    def shares_by(self, alike: torch.Tensor) -> Shares | None:
        """Return the weights for the average of a value that equals a past loss on all ranks with targets.

        Waits for the device.

        Args:
            alike: [ranks, losses], the ``likeness`` of each rank.

        Returns:
            ``None`` if no loss equals the value, and losses do not weigh ranks alike.
        """
        for (counts, _), of_ranks in reversed(list(zip(self._gone, to_list(alike.T), strict=True))):
            shares = read_shares(average_weights(counts))
            if all(same or not share for same, share in zip(of_ranks, shares, strict=True)):
                return shares
        return self.shares if self._weigh_alike is not None and self._weigh_alike else None

    @property
    def targets(self) -> torch.Tensor | int:
        """Targets of this rank, over which its loss should be a mean."""
        counts = self._valid if self._declared is None else self._declared
        return counts[self._mesh.cp_rank]

    @property
    def ranks_count_alike(self) -> torch.Tensor | bool:
        """True if all ranks of the sample that have targets have as many; stays where the counts are."""
        return count_alike(self._counts)

    @property
    def has_whole_rows(self) -> bool:
        """True if this rank has all tokens of its rows."""
        return self._mesh.cp_size == 1

    @property
    def tokens(self) -> int:
        """Tokens of this rank in all rows, with padding."""
        return self.rows * self.local_len

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return self._rows

    @property
    def local_len(self) -> int:
        """Tokens of a row on this rank, with padding."""
        return self._layout.local_len

    @property
    def is_without_targets(self) -> bool:
        """True if this rank has no targets, so that its loss adds nothing."""
        return self._declared is None and not self._valid[self._mesh.cp_rank]

    @property
    def depends_on_counts(self) -> bool:
        """True if other counts would give other gradients."""
        return self._mesh.cp_size > 1 or self._accumulated is not None

    @property
    def of_window(self) -> bool:
        """True if targets weigh alike in all data ranks and in an accumulation window."""
        return self._accumulated is not None and self._trains

    def checked_count(self, counted: torch.Tensor | float) -> torch.Tensor:
        """Check and return the count that this rank declares.

        Raises:
            ConfigError: an invalid count; a second one before the backward of the first, or in one batch
                with ``token_weighting="global"``; or, in evaluation, one that includes padding.
            ShapeError: a mask, or weights, of other tokens than this rank's.
        """
        if self.awaits_loss or (self.of_window and self._declared is not None):
            raise ConfigError(_TWICE)
        self._check_tokens(counted)
        self._note_padding(counted)
        if not self._trains and self._padding is not None and self._padding:
            raise ConfigError(COUNTS + MORE_TOKENS)
        return declared_count(counted)

    def _check_tokens(self, counted: torch.Tensor | float) -> None:
        """Check that a mask, or weights, of tokens are those of this rank's tokens.

        Raises:
            ShapeError: whole rows, or shifted ones: they would be taken for a number of targets.
        """
        rows, local = self._rows, self._layout.local_len
        if self._mesh.cp_size == 1 or not isinstance(counted, torch.Tensor):
            return
        if find_token_dims(counted.shape, rows, local) is not None or counted.numel() <= rows:
            return
        if counted.dim() > 1 or counted.numel() == rows * self._layout.seq_len:
            raise ShapeError(_OTHER_TOKENS.format(tuple(counted.shape), rows, local))

    def _note_padding(self, counted: torch.Tensor | float) -> None:
        """Record if a declared count includes padding of this rank; the flag stays on the device."""
        self._padding, self._is_number = None, False
        real, local = self._layout.real_len(self._mesh.cp_rank), self._layout.local_len
        if real == local:
            return
        shape = counted.shape if isinstance(counted, torch.Tensor) else ()
        place = find_token_dims(shape, self._rows, local)
        if not isinstance(counted, torch.Tensor) or place is None:
            self._is_number = True
        elif place.token is None:
            by_row = torch.unflatten(counted.detach(), 0, (-1, local))
            self._padding = (by_row[:, real:] != 0).any()
        else:
            self._padding = (counted.detach().narrow(place.token, real, local - real) != 0).any()

    def padding(self, *, by_hand: bool, asked: bool) -> tuple[str, torch.Tensor | None]:
        """Return the message about counted padding, and its flag; ``None``: no padding is known to count.

        Args:
            by_hand: the loss's own count is not known, so a number cannot be compared with it.
            asked: the step has asked which tokens are padding.
        """
        if self._is_number and by_hand and not asked:
            return NUMBER, torch.tensor(True)
        return COUNTS, self._padding

    def declare(self, count: torch.Tensor) -> None:
        """Replace the count of the batch's labels by ``count``, from here on. Collective.

        One sum over the cp group, on its device, of a number per rank; the host does not wait. With
        ``token_weighting="global"`` the sum is over all ranks, and the host waits for it.
        """
        of_window = self.of_window
        mesh, self._is_used = self._mesh, False
        ranks = mesh.cp_size * (mesh.data_size if of_window else 1)
        first = mesh.data_rank * mesh.cp_size if of_window else 0
        counts = torch.zeros(ranks, dtype=torch.float64, device=mesh.device_type)
        own = counts[first + mesh.cp_rank]
        # A number is an argument of the operator; the copy of a tensor on the host would wait.
        own.fill_(count.item()) if count.is_cpu else own.copy_(count)
        if ranks > 1:
            counts = all_sum(counts, mesh.group(Flat.LOSS if of_window else Flat.CP))
        declared = counts[first : first + mesh.cp_size]
        if self._gone:
            before, now = (_shares_on(declared.device, x) for x in (self._counts, declared))
            same = (before == now).all()
            self._weigh_alike = same if self._weigh_alike is None else self._weigh_alike & same
        self._declared, self.is_declared = declared, True
        if of_window:
            self._targets = float(counts.sum())

    def local_loss(self, loss: torch.Tensor) -> torch.Tensor | None:
        """Return this rank's own mean (``loss`` may show the group's), or ``None`` without targets."""
        own = self.own_value(loss)
        if self._declared is not None:
            return torch.where(self._declared[self._mesh.cp_rank] > 0, own.detach(), 0.0)
        return own if self._valid[self._mesh.cp_rank] else None

    def check_known(self, error: ConfigError | None) -> None:
        """Raise the error of this rank's loss; if some rank has no targets, all ranks agree on it first.

        A rank without targets often has another loss, ``0 * logits.sum()``, which is right with weight 0.

        Raises:
            ConfigError: ``error``, if the rank has targets.
            RankFailure: another rank raised.
        """
        if not self._some_rank_empty:
            if error is not None:
                raise error
            return
        error = None if self.is_without_targets else error
        raise_in_group(error, self._mesh.control_group(Flat.LOSS), what="loss")

    def scale(
        self, loss: torch.Tensor, optimizers: Iterable[Optimizer], *, automatic: bool = False
    ) -> torch.Tensor:
        """Return the weighted loss for backward; it shows the unweighted value, for hooks that read it.

        Where the group has no targets, ranks weigh alike if the loss has values of whole sequences.
        """
        rank = self._mesh.cp_rank
        weight = self._weight(optimizers, automatic)
        self._is_used = True
        self._gone.append((self._counts, loss.detach()))
        if self._declared is not None:
            uncounted = float(has_sequence_values(loss))
            scale = declared_scale(self._declared, rank, uncounted)
            weighted = loss * (scale * weight).to(loss)
        elif not any(self._valid) and has_sequence_values(loss):
            weighted = loss * weight
        elif self._valid[rank]:
            weighted = loss * (loss_scale(self._valid, rank) * weight)
        else:
            self._muted = self.own_value(loss).detach()
            weighted = zero_loss(loss)
        return _WithValue.apply(weighted, loss.detach())  # type: ignore[return-value]

    def own_value(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss that the step computed, for one that may have the mean of ranks as its value."""
        return loss if self._own is None else self._own

    def global_loss(self, loss: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return a loss with the value that one process has, and the gradient of this rank's own."""
        self._own = loss.detach()
        return _WithValue.apply(loss, value)  # type: ignore[return-value]

    def _weight(self, optimizers: Iterable[Optimizer], automatic: bool) -> float:
        """Return the weight of this data rank's mean loss in the gradient."""
        if self._accumulated is None:
            return 1.0
        group = None if automatic else self._mesh.control_group(Flat.LOSS)
        of_window = self._accumulated.weight(self, self._targets, optimizers, group)
        return self.data_weight * of_window

    @property
    def data_weight(self) -> float:
        """Weight of this data rank's mean among all data ranks, whose mean weight is 1."""
        if self._accumulated is None:
            return 1.0
        counts = self._valid if self._declared is None else to_list(self._declared)
        share = sum(counts) / self._targets if self._targets else 0.0
        return share * self._mesh.data_size

    def check_connected(self, loss: torch.Tensor | None) -> None:
        """Check, if some rank has no targets, that backward will run through its model. Collective.

        Raises:
            ConfigError: a rank without targets has no loss, or one that is not computed from the model.
            RankFailure: that happened on another rank.
        """
        if not self._some_rank_empty:
            return
        error: ConfigError | None = None
        if not self._valid[self._mesh.cp_rank]:
            try:
                check_connected(loss)
            except ConfigError as refused:
                error = refused
        raise_in_group(error, self._mesh.control_group(Flat.LOSS), what="loss")

    def after_backward(self, state: StepState, parameters: Iterable[torch.Tensor]) -> None:
        """Check, if some rank had no targets, that its loss added nothing. Collective.

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
                check_zero_loss(float(muted), _first_gradients(state, parameters))
            except NonFiniteError as refused:
                error = refused
        raise_in_group(error, self._mesh.control_group(Flat.LOSS), what="loss")


def _shares_on(device: torch.device, counts: Sequence[float] | torch.Tensor) -> torch.Tensor:
    shares = average_weights(counts)
    if isinstance(shares, torch.Tensor):
        return shares
    return to_device(torch.tensor(shares, dtype=torch.float64), device)


def _is_same(value: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """Return bool []: the values are equal; NaN equals NaN."""
    if value.numel() != 1:
        return torch.zeros((), dtype=torch.bool)
    a, b = value.detach().reshape(()).double(), loss.reshape(()).to(value.device).double()
    return (a == b) | (a.isnan() & b.isnan())


_OTHER_TOKENS = (
    "count_targets was given values {} of other tokens than this rank's, [{}, {}]. Pass a mask of these "
    "tokens, as long as its inputs (whole rows and shifted ones are not); a count of anything else is a "
    "number, mask.sum()."
)
_TWICE = (
    "count_targets was called twice for one loss. Call it once before each backward, with all that the loss "
    "counts; with token_weighting='global' once in a batch."
)


class _WithValue(torch.autograd.Function):
    """A loss with another value and the same gradient.

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
    """Return gradients of this rank's loss alone: the one that reached the model's last attention.

    Gradients of parameters are already averaged over ranks, and dK and dV of other ranks pass through
    earlier layers, so both would also show an overflow of another rank. A model whose attention needs no
    gradient has only the parameters' gradients.
    """
    first, state.first_gradient = state.first_gradient, None
    if first is not None:
        return [first]
    return [x.grad for x in parameters if x.grad is not None]

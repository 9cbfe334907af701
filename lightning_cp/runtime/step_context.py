"""StepContext: one batch from its sharding to the end of its backward, with its loss weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_cp.batch import unshard_output
from lightning_cp.batch.documents import documents_of, padding_mask_of
from lightning_cp.batch.loss_calls import LossCalls
from lightning_cp.batch.sharder import ShardedBatch, Sharding, read_if_known
from lightning_cp.batch.step_state import PositionInfo, StepState, raise_gradient_mismatch
from lightning_cp.errors import ConfigError, ShapeError
from lightning_cp.layout import SequenceLayout
from lightning_cp.layout.axes import Flat
from lightning_cp.logging.reduce import PendingFindings, equal, side_by_side, weighted_mean
from lightning_cp.loss.averages import NO_LOSS
from lightning_cp.loss.counts import TRAINS
from lightning_cp.loss.review import LossReview
from lightning_cp.loss.sequence import (
    SAME_ARGUMENTS,
    SAME_VALUES,
    Index,
    PartialSums,
    SequenceTokens,
    check_same_rows,
    facts_of_unshard,
    gather_rows,
)
from lightning_cp.loss.terms import NO_COUNT, declared_count, divisor
from lightning_cp.loss.weighting import Shares, StepLoss
from lightning_cp.mesh import ContextParallelMesh
from lightning_cp.models.hf.labels import check_labels_used
from lightning_cp.randomness.token_draws import draw_per
from lightning_cp.runtime.mesh_builder import MeshBuilder
from lightning_cp.runtime.model_binding import ModelBinding
from lightning_cp.runtime.records import RunRecords
from lightning_cp.utils.tracing import exclude_from_compile


class StepContext:
    """A batch of this rank, its state for attention calls, and the weights of its losses.

    It is made of the sharder's result, and is current from the begin of its step until its backward has
    ended, because recomputation runs in backward; callbacks after it still read its loss. Two may exist at
    once: the current and the next one.
    Without ``sharding`` it serves code outside of steps, and steps that share no sample.

    Args:
        meshes: source of the mesh.
        binding: the model with its swapped attention.
        losses: review of the run's losses, or of a probe's.
        records: counters and recorders of the run, or of a probe.
        sharding: this rank's part of a batch, and facts of the whole.
    """

    def __init__(
        self,
        meshes: MeshBuilder,
        binding: ModelBinding,
        losses: LossReview,
        records: RunRecords,
        sharding: Sharding | None = None,
    ) -> None:
        self._meshes, self._binding = meshes, binding
        self._losses, self._records = losses, records
        self._state: StepState | None = None
        self.part: ShardedBatch | None = None
        """This rank's part of the batch, and facts of the whole."""
        self.loss: StepLoss | None = None
        """Weights of the losses of this batch; ``None``: nothing is weighted."""
        self.trains = True
        """True if the step trains, and so has a loss."""
        self._positions = PositionInfo()
        self._sequences: SequenceTokens | None = None
        self.whole_batch: Any = None
        """The batch of a step that shares no sample."""
        self.layout_choice = None if sharding is None else sharding.choice
        if sharding is not None:
            self.part, self.trains = sharding.part, sharding.trains
            self._positions = sharding.positions
            self.loss = StepLoss(sharding, self.mesh, records.accumulated)

    # -- begin and end, called by the runtime --------------------------------------------------------

    def make_state(self) -> StepState:
        """Make the state that attention calls of this step read.

        Raises:
            ConfigError: there is no batch.
        """
        if self.part is None or self._binding.handle is None:
            raise ConfigError(_NO_BATCH)
        looks = self._records.looks_at_values(trains=self.trains)
        state = self._binding.state_of(
            self.part,
            self._positions,
            self.mesh.cp_rank,
            trains=self.trains,
            losses=LossCalls() if looks else None,
        )
        self._state = state
        return state

    def end(self) -> None:
        """Drop the state: only the batch and the weights of its losses stay until the next batch."""
        self._state = self.whole_batch = None

    def adopt_state(self, state: StepState) -> None:
        """Use the state of a step on the whole batch, which has no part."""
        self._state = state

    @cached_property
    def mesh(self) -> ContextParallelMesh:
        """The mesh of the run."""
        return self._meshes.mesh

    @property
    def state(self) -> StepState | None:
        """The state for attention calls; ``None`` before the step begins, and after its end."""
        return None if self._state is None or self._state.ended else self._state

    @property
    def batch(self) -> Any:
        """This rank's part of the batch; ``None`` without one."""
        return None if self.part is None else self.part.batch

    # -- use of the batch ------------------------------------------------------------------------------

    @property
    def is_unused(self) -> bool:
        """True if the step is current and did not call the model."""
        state = self.state
        return state is not None and not state.calls and not state.model_called

    @property
    def is_left(self) -> bool:
        """True if the step is unused and the loop of its batch is over."""
        return self.is_unused and self._state is not None and self._state.left

    @property
    def is_pending(self) -> bool:
        """True if the step is current and trains, and has had no backward."""
        state = self.state
        return state is not None and state.trains and not state.weighted

    @property
    def calls(self) -> int:
        """Attention calls that were intercepted in this step."""
        return 0 if self.state is None else self.state.calls

    @property
    def positions_ignored(self) -> bool:
        """True if nothing read the positions of the step's tokens, as far as can be seen."""
        handle = self._binding.handle
        if handle is None or self.part is None:
            return False
        asked = self._records.positions_taken or handle.provides_position_ids
        return not asked and self.part.positions_ignored

    def check(self) -> None:
        """Check that attention was shared, and that labels were read as declared.

        A step that did not call the model has nothing to check.

        Raises:
            ConfigError: no attention call was intercepted, or it is unknown who shifted the labels.
        """
        self.check_intercepted()
        state = self.state
        if state is not None:
            check_labels_used(state)

    def check_intercepted(self) -> None:
        """Check that attention was shared.

        Raises:
            ConfigError: the model was called, and no attention call was intercepted.
        """
        handle, model = self._binding.handle, self._binding.model
        if handle is not None and model is not None:
            handle.check_intercepted(model)

    # -- agreement of ranks ------------------------------------------------------------------------------

    def gathering(self) -> AbstractContextManager[None]:
        """A block at whose end ranks agree, also on the result of ``pop_findings``."""
        handle = self._binding.handle
        return nullcontext() if handle is None else handle.ranks.checks.deferring()

    def pop_findings(self) -> PendingFindings:
        """Remove and return findings that are unknown to other ranks."""
        handle, state = self._binding.handle, self.state
        if handle is None or state is None:
            return PendingFindings()
        waiting, needs = handle.ranks.checks.pop(), list(state.need_gradients)

        def compared() -> None:
            state.compared = len(needs)

        return PendingFindings(
            waiting.names, waiting.error, needs, compared, raise_gradient_mismatch
        )

    def pop_refused(self) -> Exception | None:
        """Return this rank's error if all ranks that share a sample know that the step failed."""
        handle = self._binding.handle
        return None if handle is None else handle.ranks.checks.pop_error()

    def before_data(self) -> None:
        """Send the results of checks, before ranks exchange data."""
        if self._binding.handle is not None:
            self._binding.handle.ranks.checks.flush_before_data()

    # -- values over the ranks that share a sample -----------------------------------------------------------

    @property
    def shares(self) -> Shares:
        """Each cp rank's share of the batch's targets."""
        return self.loss.shares if self.loss else [1 / self.mesh.cp_size] * self.mesh.cp_size

    @property
    def weights_by_loss(self) -> StepLoss | None:
        """The losses of a step with several counts; ``None``: one weight of a rank fits all values."""
        return self.loss if self.loss is not None and self.loss.has_several_counts else None

    @property
    def looks_at_values(self) -> bool:
        """True if logged values are compared with the step's loss functions; on all ranks alike."""
        state = self.state
        return state is not None and state.losses is not None and self.loss is not None

    @property
    def declares_targets(self) -> bool:
        """True if the step called ``count_targets``; on all ranks alike."""
        return self.loss is not None and self.loss.is_declared

    def evidence(self, value: torch.Tensor) -> torch.Tensor:
        """Return the possible origins of a value that will be weighted by ``shares``."""
        state = self.state
        assert state is not None
        assert state.losses is not None
        assert self.loss is not None
        return state.losses.evidence(value, self.loss.targets)

    def average(self, value: torch.Tensor) -> torch.Tensor:
        """Return the mean over the cp group, weighted by targets: the value of one process.

        In a step with losses of several counts, a value that equals a loss has the weights of that loss. Any
        other value has the count of ``count_targets``, from that call to the backward of its loss.

        Raises:
            ConfigError: the targets of the value are unknown.
        """
        mean, is_known = self.weighted_mean(value)
        if not is_known:
            raise ConfigError(NO_LOSS)
        return mean

    def weighted_mean(self, value: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Return the mean, and True if the targets of the value are known."""
        if self.loss is None:
            return value, True
        self.before_data()
        if not self.loss.has_several_counts:
            (rows,) = side_by_side([value], self.mesh)
            return weighted_mean(rows, self.shares).to(value), True
        rows, alike = side_by_side([value, self.loss.likeness(value)], self.mesh)
        shares = self.loss.shares_by(alike)
        is_known = shares is not None or self.loss.awaits_loss or bool(equal(rows).all())
        shares = self.shares if shares is None else shares
        return weighted_mean(rows, shares).to(value), is_known

    def unshard_output(self, output: Any, dims: Mapping[str, int | None]) -> Any:
        """Return an output of the step in original order and length, on every rank.

        Raises:
            ConfigError: a tensor without a sequence dimension that differs between ranks.
        """
        if self.part is None:
            return output
        return unshard_output(output, self.mesh, self.part.layout, dims)

    def unshard(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the whole tensor of a local one, in original order and length; differentiable.

        Every rank calls this; all know if one cannot.

        Raises:
            ShapeError: values of other tokens than this rank's.
            RankFailure: that happened on another rank.
            BatchMismatchError: another rank does not call this, or gives it other values.
        """
        handle = self._binding.handle
        if self.part is None or handle is None:
            return x
        layout = self.part.layout
        handle.ranks.checks.run(
            "unshard",
            partial(layout.check_shard, x, dim),
            facts=lambda _: facts_of_unshard(x, dim),
            remedy=SAME_VALUES,
        )
        return self.mesh.unshard(x, layout, dim=dim)

    def sequence_sum(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Return the sums of local values over whole sequences; see ``SequenceTokens``."""
        return self._over_sequences("sequence_sum", x, lambda tokens: tokens.sum(x, mask))

    def sequence_mean(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Return the means of local values over whole sequences."""
        return self._over_sequences("sequence_mean", x, lambda tokens: tokens.mean(x, mask))

    def sequence_pick(
        self, x: torch.Tensor, index: Index, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the values of one token of each whole sequence, among those that ``mask`` counts."""
        return self._over_sequences(
            "sequence_pick", x, lambda tokens: tokens.pick(x, index), counted=mask
        )

    def _over_sequences(
        self,
        name: str,
        x: torch.Tensor,
        of: Callable[[SequenceTokens], PartialSums],
        counted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return a value of whole sequences. Every rank calls this; all know if one cannot.

        Args:
            name: of the method.
            x: values of this rank's tokens.
            of: makes this rank's part.
            counted: [B, L], 0 for tokens that have no place in their sequences, beside padding.

        Raises:
            ConfigError, ShapeError: values that do not fit the step.
            RankFailure: that happened on another rank.
            BatchMismatchError: another rank does not call this, or gives it something else.
        """
        handle = self._binding.handle
        if self.part is None or handle is None:
            return of(self._whole_sequences(x, counted)).over(None)
        tokens = self._own_sequences(self.part, x.device)
        if counted is not None:
            check = partial(tokens.check_mask, counted)
            handle.ranks.checks.run(f"a mask of {name}", check)
            whole = self.mesh.unshard((counted != 0).byte(), self.part.layout)
            tokens = self._sequences_of(self.part, whole, x.device)
        facts, remedy = PartialSums.facts, SAME_ARGUMENTS
        own = handle.ranks.checks.run(name, partial(of, tokens), facts=facts, remedy=remedy)
        return own.over(self.mesh.group(Flat.CP))

    def _own_sequences(self, part: ShardedBatch, device: torch.device) -> SequenceTokens:
        """Return this rank's tokens of the batch's sequences."""
        if self._sequences is None:
            self._sequences = self._sequences_of(part, None, device)
        return self._sequences

    def _sequences_of(
        self, part: ShardedBatch, counted: torch.Tensor | None, device: torch.device
    ) -> SequenceTokens:
        """Return this rank's tokens of sequences; ``counted`` is [B, S]."""
        padding = None if self._binding.rules.reads_masks else part.padding_mask
        rank, rows = self.mesh.cp_rank, part.rows
        return SequenceTokens.of(part.layout, rank, rows, padding, device, counted)

    def _whole_sequences(self, x: torch.Tensor, counted: torch.Tensor | None) -> SequenceTokens:
        """Return the sequences of a batch that this rank has whole; its padding is known from the batch."""
        rules = self._binding.rules.without_targets
        batch = None if self.whole_batch is None else read_if_known(self.whole_batch, rules)
        found = SequenceTokens.whole(*x.shape[:2], device=x.device, mask=counted)
        if batch is None or (batch.rows, batch.seq_len) != x.shape[:2]:
            return found
        layout = SequenceLayout(batch.seq_len, documents=documents_of(batch, rules))
        padding = None if rules.reads_masks else padding_mask_of(batch.tensors)
        return SequenceTokens.of(layout, 0, batch.rows, padding, x.device, counted)

    def draw_whole(
        self, draw: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, dim: int
    ) -> torch.Tensor:
        """Return this rank's part of ``draw(x)`` for the whole sequence, as one process draws it.

        Raises:
            ShapeError: ``draw`` returns numbers of another length.
        """
        with draw_per("row"):
            if self.part is None:
                return draw(x)
            layout = self.part.layout
            like = x.new_empty([*x.shape[:dim], layout.seq_len, *x.shape[dim:][1:]])
            whole = draw(like)
        if whole.dim() <= dim or whole.shape[dim] != layout.seq_len:
            raise ShapeError(
                f"draw_whole gave its function a tensor {list(like.shape)}, and got {list(whole.shape)} "
                f"back. Return numbers of that shape, with one place for each token along dimension {dim}."
            )
        return self.mesh.shard(whole, layout, dim=dim)

    def gather_data(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows of all data ranks; differentiable. All ranks call this.

        Raises:
            ShapeError: ranks have other numbers of rows, or not all of them are here.
        """
        self.before_data()
        if self.mesh.data_size > 1:
            check_same_rows(x, self.mesh.control_group(Flat.LOSS))
        return gather_rows(x, self.mesh.group(Flat.DATA))

    def token_positions(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return int64 [B or 1, L]: global positions of the tokens; 0, 1, ... of ``x`` outside of a step."""
        self._records.positions_taken = True
        handle = self._binding.handle
        if handle is None or not handle.active or self.part is None:
            return torch.arange(x.size(dim), device=x.device)[None]
        return self.part.position_ids

    def token_mask(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return bool [1, L]: tokens of the sequence, without padding; all of ``x`` outside of a step."""
        size, real = x.size(dim), x.size(dim)
        if self.part is not None and self.state is not None:
            self.state.padding_asked = True
            size = self.part.layout.local_len
            real = self.part.layout.real_len(self.mesh.cp_rank)
        return (torch.arange(size, device=x.device) < real)[None]

    # -- loss ------------------------------------------------------------------------------------------------

    @exclude_from_compile
    def count_targets(self, counted: torch.Tensor | float) -> torch.Tensor:
        """Weight the step's loss by ``counted`` on this rank, and not by the batch's labels.

        Returns:
            The divisor of a sum over targets: the count of this rank, or 1 if that is 0.

        Raises:
            ConfigError: not a count, or a second count for the same loss.
            RankFailure: that happened on another rank.
            BatchMismatchError: another rank does not declare a count.
        """
        state = self.state
        if self.loss is None or self._binding.handle is None or state is None:
            count = declared_count(counted)
        else:
            count = self._binding.handle.ranks.checks.run(
                "count_targets", partial(self.loss.checked_count, counted)
            )
            self.loss.declare(count)
        if state is not None:
            state.refuse_if(~(count >= 0), NO_COUNT.format("a tensor"))
            state.counted = count
        return divisor(count)

    def local_loss(self, loss: torch.Tensor) -> torch.Tensor | None:
        """Return this rank's loss, given the loss that callbacks see; ``None`` on a rank without targets."""
        return loss if self.loss is None else self.loss.local_loss(loss)

    def global_loss(self, loss: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return the loss for callbacks, with one process's ``value`` and this rank's gradient."""
        return loss if self.loss is None else self.loss.global_loss(loss, value)

    def check_connected(self, loss: torch.Tensor | None) -> None:
        """Check that the backward of a rank without targets runs through its model. Collective.

        Raises:
            ConfigError: it does not, so that other ranks would wait.
            RankFailure: that happened on another rank.
        """
        if self.loss is not None:
            self.loss.check_connected(loss)

    def mark_loss_weighted(self) -> None:
        """Note that the loss of this step is weighted by the caller of backward."""
        state = self.state
        if state is not None:
            state.weighted = True

    def scale_loss(
        self, loss: torch.Tensor, optimizers: Iterable[Optimizer] = (), *, automatic: bool = False
    ) -> torch.Tensor:
        """Return the loss to call backward on.

        Args:
            loss: as the step computed it.
            optimizers: all optimizers of the run.
            automatic: True if gradients are zeroed after steps only.

        Raises:
            ConfigError: backward would run through attention on some ranks only, or the targets of the loss
                are unknown.
        """
        handle, state = self._binding.handle, self.state
        if state is not None:
            state.weighted = True
        if handle is not None and state is not None:
            handle.check_same_gradients()
        if self.loss is None:
            return loss
        asked = state is not None and state.padding_asked
        self._losses.check(
            loss, self.loss, padding_asked=asked, is_shared=self.mesh.sample_size > 1
        )
        return self.loss.scale(loss, optimizers, automatic=automatic)

    def after_backward(self, parameters: Iterable[torch.Tensor]) -> None:
        """Check that ranks without targets added nothing; note gradients of padding.

        Raises:
            NonFiniteError: the loss of a rank without targets is not finite, also scaled by 0.
            RankFailure: that happened on another rank.
        """
        state = self.state
        if self.loss is not None and state is not None:
            self._losses.counts.note_padding(TRAINS, state.take_padding_gradients())
            self._losses.counts.note_refusals(state.take_refusals())
            self.loss.after_backward(state, parameters)


_NO_BATCH = (
    "a context-parallel step began without a sharded batch. Let the strategy move the batch (do not override "
    "transfer with a step that takes dataloader_iter)."
)

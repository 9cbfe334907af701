"""The parity check: a step on one process and context parallel, and what is no fault of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info

from lightning_cp.batch.documents import padding_mask_of
from lightning_cp.comm.agreement import gathered_lists
from lightning_cp.containers import tensors_of
from lightning_cp.errors import ConfigError, ParityError
from lightning_cp.layout import SequenceLayout
from lightning_cp.mesh import Flat
from lightning_cp.parity.compare import Comparison, allowing
from lightning_cp.parity.passes import Part, Pass
from lightning_cp.parity.prefix import prefix_of
from lightning_cp.parity.report import begins, healthy
from lightning_cp.parity.uneven import has_ignored, with_uneven_labels
from lightning_cp.strategies.parity.comparing import Comparing
from lightning_cp.strategies.parity.explain import Explaining
from lightning_cp.strategies.parity.runner import CannotRun, Runner


class NotRepeatable(CannotRun):
    """One process's step is another one when it is repeated, so that no difference says anything."""


class _UnlikeNoise(CannotRun):
    """Ranks draw other numbers than one process."""


@dataclass
class ParityCheck:
    """Compares a step of one model; all ranks come here together."""

    runner: Runner
    tokens: int
    """Of a prefix, all rows together."""
    way_on: str = ""
    """How a user may train all the same: the last line of an error."""
    says: bool = True
    """The first line is said."""

    def run(self, batch: Any) -> str:
        """The line about a model that is well.

        Args:
            batch: whole, as it would be sharded next.

        Raises:
            ParityError: on every rank, with what differs and why.
            ConfigError: as a step of training does.
        """
        started = time.monotonic()
        part = self._prefix(batch, self.tokens)
        tokens = self.runner.count(part)
        if self.says:
            rank_zero_info(begins(tokens))
        base = self._compared(part)
        aside, mesh = self.runner.core.loss_aside, self.runner.core.mesh
        group = mesh.control_group(Flat.LOSS)
        aside.is_known &= aside.counts.shared_apart(group, mesh.cp_size) is None
        apart = aside.counts.factors_apart(group, mesh.cp_size)
        unknown = gathered_lists([aside.zeros] if aside.needs_fewer_labels else [], group)
        self._require_healthy(part, base, uneven=False)
        uneven = self._uneven(part)
        if uneven is not None:
            self._require_healthy(uneven, self._compared_unevenly(uneven), uneven=True)
        for zeros in {each for of_rank in unknown for each in of_rank}:
            self.runner.core.clear_unknown(zeros)
        self.runner.core.follows_factors &= apart is None
        chunked = self.runner.core.settings.loss_chunk_tokens is not None
        seconds, evaluation = time.monotonic() - started, self.runner.evaluation
        modes = {"chunked": chunked, "evaluation": evaluation, "uneven": uneven is not None}
        return healthy(base, tokens, seconds, **modes)

    def _require_healthy(self, batch: Any, base: Comparison, *, uneven: bool) -> None:
        if base.is_fault:
            core = self.runner.core
            padding = core.loss_aside.counts.padding(core.mesh.control_group(Flat.LOSS))
            if padding is not None:
                tokens = self.runner.count(batch)
                raise ConfigError(f"parity check on {tokens} tokens: {padding}")
            shown = self._shortest(batch, base)
            raise ParityError(Explaining(self.runner, uneven).explain(*shown, self.way_on))

    def _uneven(self, batch: Any) -> Any | None:
        """The batch with fewer labels, where the last loss needs a look at it; ``None``: it needs none.

        What is known of a loss is compared in every step.

        Raises:
            CannotRun: a step that may not know such labels must not fail on a GPU, which ends the process,
                or between ranks that gather parameters.
        """
        core, aside = self.runner.core, self.runner.core.loss_aside
        if not self._is_of_no_known_kind:
            return None
        whole = core.read(batch)
        layout = core.layout_for(whole)
        uneven = with_uneven_labels(batch, whole, core.rules, layout)
        if not self.runner.anywhere(uneven is not None):
            return None
        can_fail = core.mesh.device_type == "cpu" and not self.runner.engine.shards
        knows = aside.leaves_out or has_ignored(whole, layout) or not aside.needs_fewer_labels
        told = None if can_fail or knows or uneven is None else "no label of the batch is -100"
        self.runner.require(told, UNKNOWN)
        return batch if uneven is None else uneven

    @property
    def _is_of_no_known_kind(self) -> bool:
        """True if the last loss tells not what it counts, on any rank."""
        return self.runner.anywhere(self.runner.core.loss_aside.needs_fewer_labels)

    def _compared_unevenly(self, batch: Any) -> Comparison:
        try:
            return self._compared(batch)
        except NotRepeatable:
            raise
        except CannotRun as why:
            raise CannotRun(f"{UNKNOWN} ({why})") from None

    def _prefix(self, batch: Any, tokens: int) -> Any:
        """The window to be looked at; a batch that cannot be read is refused when it is sharded."""
        core, part, told = self.runner.core, None, None
        try:
            part = prefix_of(batch, core.rules, tokens, 4 * core.mesh.cp_size)
        except Exception as refused:  # any: on one rank, maybe
            told = f"{type(refused).__name__}: {refused}"
        self.runner.require(told, "the batch cannot be cut")
        return part

    def _compared(self, batch: Any) -> Comparison:
        """In the mode of the run, if all that it draws is drawn on both sides alike."""
        try:
            return self._base(batch)
        except _UnlikeNoise:
            if self.runner.evaluation:
                raise
            self.runner = replace(self.runner, evaluation=True)
            return self._base(batch)

    def _base(self, batch: Any) -> Comparison:
        """Where the step differs, what chance and rounding do to it is no fault."""
        comparing = Comparing(self.runner)
        alone, parallel = comparing.both(batch)
        base = comparing.of(alone, parallel)
        if base.is_spread:
            return base
        if not base.is_fault:
            if self._is_of_no_known_kind:  # a change between both could undo what is wrong with it
                self._require_repeatable(batch, alone)
            return base
        if self.runner.wide is not None:  # rounding does less without autocast
            step = self.runner.wide
            self.runner = replace(self.runner, step=step, wide=None, dtypes=frozenset())
            return self._base(batch)
        self._require_repeatable(batch, alone)
        self._require_no_noise(batch, alone, parallel)
        for draw in range(ROUNDINGS):
            other = replace(self.runner, rounding=draw).alone(batch)
            base = allowing(base, comparing.of(alone, self._on_one_rank(other, batch)))
            if not base.is_fault:
                self._require_repeatable(batch, alone)  # rounding has moved it, and no change since
                break
        return base

    def _require_repeatable(self, batch: Any, alone: Pass) -> None:
        """What differs between equal steps of one process is no rounding, and tells nothing of ranks.

        Raises:
            NotRepeatable: they differ.
        """
        again = self._on_one_rank(self.runner.alone(batch), batch)
        found = Comparing(self.runner).of(alone, again)
        if found.is_fault:
            worst = found.loss if found.loss.is_fault else found.worst
            name = f"gradient of {worst.name}" if worst in found.gradients else worst.name
            raise NotRepeatable(NO_REPEAT.format(name=name, error=worst.error))

    def _require_no_noise(self, batch: Any, alone: Pass, parallel: Pass) -> None:
        """A step that draws numbers for its tokens draws others where it has others.

        Raises:
            _UnlikeNoise: they decide what its loss is.
        """
        unlike = alone.drawn_on_cuda or not torch.equal(alone.drawn, parallel.drawn)
        if not self.runner.anywhere(unlike):
            return
        other = replace(self.runner, seed=1).alone(batch)
        if self.runner.anywhere(not torch.equal(other.loss, alone.loss)):
            raise _UnlikeNoise(
                "the step draws random numbers for its tokens, and a rank has other ones"
            )

    def _on_one_rank(self, alone: Pass, batch: Any) -> Pass:
        """To be compared with another pass of the kind."""
        whole = self.runner.core.read(batch)
        layout = SequenceLayout(whole.seq_len, 1, 1, "contiguous")
        real = padding_mask_of(dict(tensors_of(batch)))
        return replace(alone, part=Part(layout, 0, whole.rows, real))

    def _shortest(self, batch: Any, base: Comparison) -> tuple[Any, Comparison]:
        """Few tokens that show the difference too: all that passes through modules is kept for them."""
        if not self.runner.anywhere(self.runner.count(batch) > FEW):
            return batch, base
        part = self._prefix(batch, FEW)
        try:
            shorter = self._compared(part)
        except CannotRun:
            return batch, base
        return (part, shorter) if shorter.is_fault else (batch, base)


UNKNOWN = "its loss is of no known kind, and cannot be looked at with some labels left out, as -100"

NO_REPEAT = (
    "the step is not repeatable: run twice by one process, on the same tokens, its {name} differs by "
    "{error:.1e}, which is more than rounding. Keep what the step counts in attributes of the module or of "
    "objects of your own, where the check puts it back (not in globals, files or objects of other packages), "
    "and seed what it draws; of kernels ask PyTorch for deterministic ones"
)

FEW = 512
"""Tokens, all rows together, that a difference is looked for in."""

ROUNDINGS = 3
"""Draws of other rounding: one of them may miss a choice that is nearly even."""

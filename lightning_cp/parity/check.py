"""The parity check: a step on one process and context parallel, and what is no fault of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_cp.batch.documents import padding_mask_of
from lightning_cp.comm.consensus import gather_lists
from lightning_cp.errors import ConfigError, ParityError, ShapeError
from lightning_cp.layout import SequenceLayout
from lightning_cp.layout.axes import Axis, Flat
from lightning_cp.mesh import ContextParallelMesh
from lightning_cp.models.structure import expected_heads
from lightning_cp.parity.batches import (
    prefix_of,
    with_another_first_token,
    without_documents,
    without_padding,
)
from lightning_cp.parity.compare import (
    Comparison,
    Tolerance,
    allowing,
    compare,
    first_deviation,
    half_of,
    token_gradients,
    tolerance_of,
)
from lightning_cp.parity.diagnosis import (
    CONTIGUOUS,
    EVALUATION,
    NO_PACKING,
    NO_PADDING,
    PLAIN_LOSS,
    RING,
    ULYSSES,
    Beginning,
    Evidence,
    begins,
    diagnose,
    healthy,
    ill,
)
from lightning_cp.parity.passes import Event, LocalTokens, StepPass
from lightning_cp.parity.runner import CannotRun, Runner, StepFailed
from lightning_cp.parity.uneven import has_ignored, with_uneven_labels
from lightning_cp.runtime.probe import layout_of_kind, mesh_of
from lightning_cp.runtime.runtime import ContextParallelRuntime
from lightning_cp.utils.containers import tensors_of

# Passes of one batch, compared.


@dataclass
class Comparing:
    """Runs a step on one process and context parallel; all ranks come here together."""

    runner: Runner

    def both(self, batch: Any) -> tuple[StepPass, StepPass]:
        """One process's pass, and the context-parallel one, which is the first: a part of the tokens shows
        soon what is refused.

        Raises:
            CannotRun: there is nothing to compare with.
            ConfigError: as a step of training does.
        """
        runner, parallel, failed = self.runner, None, None
        try:
            parallel = runner.parallel(batch)
        except StepFailed as own:
            failed = own.error
        alone = runner.alone(batch)
        if parallel is None:  # and one process does not fail
            runner.tell(failed)
        assert parallel is not None
        finite = all(bool(x.isfinite().all()) for x in (alone.loss, *alone.gradients.values()))
        told = None if finite else "NaN or inf"
        runner.require(told, "in one process the loss or a gradient is not finite")
        return alone, parallel

    def of(self, alone: StepPass, other: StepPass) -> Comparison:
        """Of one process's pass and another one that knows which tokens it has."""
        return compare(alone, other, self.runner.runtime.mesh, self.tolerance(alone))

    def run(self, batch: Any) -> Comparison:
        """Both, compared."""
        return self.of(*self.both(batch))

    def tolerance(self, alone: StepPass) -> Tolerance:
        """By the dtypes of parameters, and those that the step computes in."""
        own = {p.dtype for p in self.runner.model.parameters()}
        return tolerance_of(own | self.runner.dtypes | half_of(alone.dtypes))


# The same step with all ranks on the Ulysses axis, or on the ring.


Mode = Callable[[], AbstractContextManager[None]]
"""The runtime has another mesh within."""


def other_modes(runtime: ContextParallelRuntime) -> dict[str, Mode | str]:
    """By name; or why one is not possible."""
    mesh = runtime.mesh
    modes: dict[str, Mode | str] = {}
    sizes = {ULYSSES: (mesh.cp_size, 1), RING: (1, mesh.cp_size)}
    for name, (ulysses, ring) in sizes.items():
        if (ulysses, ring) == (mesh.ulysses_size, mesh.ring_size):
            modes[name] = "the mode of this run"
            continue
        heads = expected_heads(runtime.binding.model) if runtime.binding.model is not None else None
        if heads is not None and heads.query % ulysses:
            modes[name] = f"not possible: {heads.query} heads, {ulysses} ranks"
            continue
        modes[name] = partial(_with_mesh, runtime, ulysses, ring)
    return modes


@contextmanager
def _with_mesh(runtime: ContextParallelRuntime, ulysses: int, ring: int) -> Iterator[None]:
    """Process groups are made and destroyed by all ranks together."""
    mesh = runtime.mesh
    other = ContextParallelMesh(
        ring_size=ring,
        ulysses_size=ulysses,
        device_type=mesh.device_type,
        data_parallel_replicate_size=mesh.sizes[Axis.DP_REPLICATE],
        data_parallel_shard_size=mesh.sizes[Axis.DP_SHARD],
        tensor_parallel_size=mesh.tp_size,
    )
    try:
        with mesh_of(runtime, other):
            yield
    finally:
        other.destroy()


# Why a model differs: where that begins, and what makes it go away.


@dataclass
class Explaining(Comparing):
    """Runs the step in other ways."""

    uneven: bool = False
    """The batch has fewer labels than the run's."""

    def explain(self, batch: Any, base: Comparison, way_on: str = "") -> str:
        """The whole of an error.

        Args:
            batch: that shows the difference.
            base: how large it is.
            way_on: how to train all the same; left out where the first step would be refused for its counts.
        """
        runtime = self.runner.runtime
        runner = replace(self.runner, everything=True)
        alone, parallel = runner.alone(batch), runner.parallel(batch)
        counts = runtime.losses.probe.counts
        other_counts = counts.difference(runtime.mesh.control_group(Flat.LOSS))
        beginning = self._beginning(batch, runner, alone, parallel)
        tokens = token_gradients(alone, parallel, runtime.mesh, self.tolerance(alone))
        ignored = parallel.positions_ignored
        made = self._experiments(batch)
        diagnosis = diagnose(
            Evidence(
                *(base, beginning, made, ignored, tokens),
                other_counts=other_counts,
                beside_other_terms=self.runner.anywhere(counts.beside_other_terms),
                counts_rows=not self.runner.anywhere(
                    not counts.are_of(runtime.binding.read(batch).rows)
                ),
            )
        )
        report = ill(base, made, diagnosis, self.runner.count(batch), uneven=self.uneven)
        return f"{report}\n{way_on}" if way_on and other_counts is None else report

    def _beginning(
        self, batch: Any, runner: Runner, alone: StepPass, parallel: StepPass
    ) -> Beginning | None:
        event = first_deviation(alone, parallel, runner.runtime.mesh, self.tolerance(alone))
        if event is None:
            return None
        before = parallel.events[: parallel.events.index(event)]
        attention = [at for at, one in enumerate(before) if one.kind == "attention"]
        agreed = [at for at, one in enumerate(before) if one.tensor is not None]
        behind = bool(attention) and (not agreed or attention[-1] > agreed[-1])
        matters = None if attention else self._other_tokens_matter(runner, batch, alone, event)
        return Beginning(event, behind, matters)

    def _other_tokens_matter(
        self, runner: Runner, batch: Any, alone: StepPass, event: Event
    ) -> bool | None:
        """True if another first token changes the tensor at other tokens, in one process."""
        changed = with_another_first_token(batch, runner.runtime.binding.rules)
        other = runner.alone(changed)
        known = {one.key: one.tensor for one in other.events}
        mine = {one.key: one.tensor for one in alone.events}
        a, b = mine.get(event.key), known.get(event.key)
        if a is None or b is None or a.shape != b.shape:
            return None
        length = runner.runtime.binding.read(batch).seq_len
        dims = [dim for dim, size in enumerate(a.shape) if size == length]
        if not dims:
            return None
        differs = (a != b).movedim(dims[0], 0)[1:].any()
        return bool(differs)

    def _experiments(self, batch: Any) -> dict[str, Comparison | str]:
        runtime = self.runner.runtime
        tries: dict[str, Callable[[], Comparison | str]] = {
            name: (lambda other=other: self._in_mode(other, batch))
            for name, other in other_modes(runtime).items()
        }

        def of(changed: Any | None, why: str) -> Callable[[], Comparison | str]:
            if not self.runner.anywhere(changed is not None):
                return lambda: why
            return lambda: self.run(batch if changed is None else changed)

        tries[NO_PADDING] = of(without_padding(batch), "the batch has none of its own")
        tries[NO_PACKING] = of(without_documents(batch, runtime.binding.rules), "nothing is packed")
        tries[PLAIN_LOSS] = lambda: Comparing(replace(self.runner, plain_loss=True)).run(batch)
        if not self.runner.evaluation:
            other = replace(self.runner, evaluation=True)
            tries[EVALUATION] = lambda: Comparing(other).run(batch)
        tries[CONTIGUOUS] = lambda: self._contiguous(batch)
        return {name: _tried(attempt) for name, attempt in tries.items()}

    def _in_mode(self, mode: Any, batch: Any) -> Comparison | str:
        if isinstance(mode, str):
            return mode
        with mode():
            return self.run(batch)

    def _contiguous(self, batch: Any) -> Comparison:
        with layout_of_kind(self.runner.runtime, "contiguous"):
            return self.run(batch)


def _tried(attempt: Callable[[], Comparison | str]) -> Comparison | str:
    try:
        return attempt()
    except (ConfigError, ShapeError, CannotRun) as error:
        return f"not possible: {str(error).split('. ')[0]}"


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
        aside, mesh = self.runner.runtime.losses.probe, self.runner.runtime.mesh
        group = mesh.control_group(Flat.LOSS)
        aside.is_known &= aside.counts.shared_difference(group, mesh.cp_size) is None
        apart = aside.counts.factor_difference(group, mesh.cp_size)
        unknown = gather_lists([aside.zeros] if aside.needs_fewer_labels else [], group)
        self._require_healthy(part, base, uneven=False)
        uneven = self._uneven(part)
        if uneven is not None:
            self._require_healthy(uneven, self._compared_unevenly(uneven), uneven=True)
        for zeros in {each for of_rank in unknown for each in of_rank}:
            self.runner.runtime.losses.note_exact(zeros)
        self.runner.runtime.losses.follows_factors &= apart is None
        chunked = self.runner.runtime.settings.loss_chunk_tokens is not None
        seconds, evaluation = time.monotonic() - started, self.runner.evaluation
        modes = {"chunked": chunked, "evaluation": evaluation, "uneven": uneven is not None}
        return healthy(base, tokens, seconds, **modes)

    def _require_healthy(self, batch: Any, base: Comparison, *, uneven: bool) -> None:
        if base.is_fault:
            runtime = self.runner.runtime
            padding = runtime.losses.probe.counts.padding(runtime.mesh.control_group(Flat.LOSS))
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
        runtime, aside = self.runner.runtime, self.runner.runtime.losses.probe
        if not self._is_of_no_known_kind:
            return None
        whole = runtime.binding.read(batch)
        layout = runtime.binding.layout_of(whole)
        uneven = with_uneven_labels(batch, whole, runtime.binding.rules, layout)
        if not self.runner.anywhere(uneven is not None):
            return None
        can_fail = runtime.mesh.device_type == "cpu" and not self.runner.engine.shards
        knows = aside.leaves_out or has_ignored(whole, layout) or not aside.needs_fewer_labels
        told = None if can_fail or knows or uneven is None else "no label of the batch is -100"
        self.runner.require(told, UNKNOWN)
        return batch if uneven is None else uneven

    @property
    def _is_of_no_known_kind(self) -> bool:
        """True if the last loss tells not what it counts, on any rank."""
        return self.runner.anywhere(self.runner.runtime.losses.probe.needs_fewer_labels)

    def _compared_unevenly(self, batch: Any) -> Comparison:
        try:
            return self._compared(batch)
        except NotRepeatable:
            raise
        except CannotRun as why:
            raise CannotRun(f"{UNKNOWN} ({why})") from None

    def _prefix(self, batch: Any, tokens: int) -> Any:
        """The window to be looked at; a batch that cannot be read is refused when it is sharded."""
        runtime, part, told = self.runner.runtime, None, None
        try:
            part = prefix_of(batch, runtime.binding.rules, tokens, 4 * runtime.mesh.cp_size)
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

    def _require_repeatable(self, batch: Any, alone: StepPass) -> None:
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

    def _require_no_noise(self, batch: Any, alone: StepPass, parallel: StepPass) -> None:
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

    def _on_one_rank(self, alone: StepPass, batch: Any) -> StepPass:
        """To be compared with another pass of the kind."""
        whole = self.runner.runtime.binding.read(batch)
        layout = SequenceLayout(whole.seq_len, 1, 1, "contiguous")
        real = padding_mask_of(dict(tensors_of(batch)))
        return replace(alone, part=LocalTokens(layout, 0, whole.rows, real))

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

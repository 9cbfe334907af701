"""The parity check: compares a step on one process with a context-parallel one, and explains differences."""

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
from lightning_cp.comm.consensus import gather_objects
from lightning_cp.errors import ConfigError, ParityError, ShapeError
from lightning_cp.layout import SequenceLayout
from lightning_cp.layout.axes import Axis, Flat
from lightning_cp.mesh import ContextParallelMesh
from lightning_cp.models.structure import expected_heads
from lightning_cp.parity.batches import (
    batch_window,
    has_ignored,
    with_another_first_token,
    with_uneven_labels,
    without_documents,
    without_padding,
)
from lightning_cp.parity.compare import (
    Comparison,
    Tolerance,
    allow_rounding,
    compare,
    first_deviation,
    half_dtypes,
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
    Evidence,
    FirstDifference,
    begins,
    diagnose,
    healthy,
    ill,
)
from lightning_cp.parity.passes import Event, LocalTokens, StepPass
from lightning_cp.parity.runner import CannotRun, Runner, StepFailure
from lightning_cp.runtime.probe import use_layout, use_mesh
from lightning_cp.runtime.runtime import ContextParallelRuntime
from lightning_cp.utils.containers import tensors_of

# Comparison of the passes of one batch.


@dataclass
class StepComparer:
    """Runs a step on one process and context parallel. Every method is collective."""

    runner: Runner

    def run_both(self, batch: Any) -> tuple[StepPass, StepPass]:
        """One process's pass, and the context-parallel one, which runs first: a part of the tokens shows
        early what is refused.

        Raises:
            CannotRun: there is nothing to compare.
            ConfigError: the same as in a training step.
        """
        runner, parallel, failed = self.runner, None, None
        try:
            parallel = runner.run_parallel(batch)
        except StepFailure as own:
            failed = own.error
        single = runner.run_single(batch)
        if parallel is None:  # and one process does not fail
            runner.raise_on_all(failed)
        assert parallel is not None
        finite = all(bool(x.isfinite().all()) for x in (single.loss, *single.gradients.values()))
        told = None if finite else "NaN or inf"
        runner.check_reason(told, "in one process the loss or a gradient is not finite")
        return single, parallel

    def of(self, single: StepPass, other: StepPass) -> Comparison:
        """Compare one process's pass with another one that knows its tokens."""
        return compare(single, other, self.runner.runtime.mesh, self.tolerance(single))

    def run(self, batch: Any) -> Comparison:
        """Compare one process with context parallelism."""
        return self.of(*self.run_both(batch))

    def tolerance(self, single: StepPass) -> Tolerance:
        """The tolerance for the dtypes of parameters and of the step's computation."""
        own = {p.dtype for p in self.runner.model.parameters()}
        return tolerance_of(own | self.runner.dtypes | half_dtypes(single.dtypes))


# The same step with all ranks on the Ulysses axis, or on the ring.


Mode = Callable[[], AbstractContextManager[None]]
"""A block in which the runtime has another mesh."""


def other_modes(runtime: ContextParallelRuntime) -> dict[str, Mode | str]:
    """Other modes by name, each with its block or the reason why it is impossible."""
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
    """Use another mesh within the block; its process groups are created and destroyed collectively."""
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
        with use_mesh(runtime, other):
            yield
    finally:
        other.destroy()


# The cause of a difference: its first tensor, and changes that remove it.


@dataclass
class DifferenceExplainer(StepComparer):
    """Runs the step with changes that may remove the difference."""

    uneven: bool = False
    """True if the batch has fewer labels than the run's."""

    def explain(self, batch: Any, base: Comparison, hint: str = "") -> str:
        """The text of an error.

        Args:
            batch: one that shows the difference.
            base: its comparison.
            hint: how to train in spite of it; empty where the first step would be refused for its
                counts.
        """
        runtime = self.runner.runtime
        runner = replace(self.runner, everything=True)
        single, parallel = runner.run_single(batch), runner.run_parallel(batch)
        probe, counts = runtime.losses.probe, runtime.losses.probe.counts
        other_counts = counts.difference(runtime.mesh.control_group(Flat.LOSS))
        first_difference = self._first_difference(batch, runner, single, parallel)
        tokens = token_gradients(single, parallel, runtime.mesh, self.tolerance(single))
        ignored = parallel.positions_ignored
        made = self._experiments(batch)
        diagnosis = diagnose(
            Evidence(
                *(base, first_difference, made, ignored, tokens),
                other_counts=other_counts,
                beside_other_terms=self.runner.is_any(counts.beside_other_terms),
                counts_rows=not self.runner.is_any(
                    not counts.equal_rows(runtime.binding.read(batch).rows)
                ),
                is_declared=self.runner.is_any(probe.is_declared),
                is_of_sequences=not self.runner.is_any(not probe.is_of_sequences),
            )
        )
        report = ill(base, made, diagnosis, self.runner.count(batch), uneven=self.uneven)
        return f"{report}\n{hint}" if hint and other_counts is None else report

    def _first_difference(
        self, batch: Any, runner: Runner, single: StepPass, parallel: StepPass
    ) -> FirstDifference | None:
        event = first_deviation(single, parallel, runner.runtime.mesh, self.tolerance(single))
        if event is None:
            return None
        before = parallel.events[: parallel.events.index(event)]
        attention = [at for at, one in enumerate(before) if one.kind == "attention"]
        agreed = [at for at, one in enumerate(before) if one.tensor is not None]
        behind = bool(attention) and (not agreed or attention[-1] > agreed[-1])
        matters = None if attention else self._other_tokens_matter(runner, batch, single, event)
        return FirstDifference(event, behind, matters)

    def _other_tokens_matter(
        self, runner: Runner, batch: Any, single: StepPass, event: Event
    ) -> bool | None:
        """True if another first token changes the tensor at other tokens, in one process."""
        changed = with_another_first_token(batch, runner.runtime.binding.rules)
        other = runner.run_single(changed)
        known = {one.key: one.tensor for one in other.events}
        mine = {one.key: one.tensor for one in single.events}
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
            if not self.runner.is_any(changed is not None):
                return lambda: why
            return lambda: self.run(batch if changed is None else changed)

        tries[NO_PADDING] = of(without_padding(batch), "the batch has none of its own")
        tries[NO_PACKING] = of(without_documents(batch), "nothing is packed")
        tries[PLAIN_LOSS] = lambda: StepComparer(replace(self.runner, plain_loss=True)).run(batch)
        if not self.runner.evaluation:
            other = replace(self.runner, evaluation=True)
            tries[EVALUATION] = lambda: StepComparer(other).run(batch)
        tries[CONTIGUOUS] = lambda: self._contiguous(batch)
        return {name: _try(attempt) for name, attempt in tries.items()}

    def _in_mode(self, mode: Any, batch: Any) -> Comparison | str:
        if isinstance(mode, str):
            return mode
        with mode():
            return self.run(batch)

    def _contiguous(self, batch: Any) -> Comparison:
        with use_layout(self.runner.runtime, "contiguous"):
            return self.run(batch)


def _try(attempt: Callable[[], Comparison | str]) -> Comparison | str:
    try:
        return attempt()
    except (ConfigError, ShapeError, CannotRun) as error:
        return f"not possible: {str(error).split('. ')[0]}"


class NotRepeatable(CannotRun):
    """One process's step differs when repeated, so that no comparison is valid."""


class _NoiseDiffers(CannotRun):
    """Ranks draw other random numbers than one process."""


@dataclass
class ParityCheck:
    """Compares a step of one model. Every method is collective."""

    runner: Runner
    tokens: int
    """Limit of a window, all rows together."""
    hint: str = ""
    """Last line of an error: how to train in spite of it."""
    verbose: bool = True
    """True to print the first line."""

    def run(self, batch: Any) -> str:
        """The line about a model that passes.

        Args:
            batch: the whole batch, as it would be sharded next.

        Raises:
            ParityError: on every rank, naming differences and their cause.
            ConfigError: the same as in a training step.
        """
        started = time.monotonic()
        part = self._window(batch, self.tokens)
        tokens = self.runner.count(part)
        if self.verbose:
            rank_zero_info(begins(tokens))
        base = self._compare_in_mode(part)
        aside, mesh = self.runner.runtime.losses.probe, self.runner.runtime.mesh
        group = mesh.control_group(Flat.LOSS)
        weighs_alike = aside.counts.shared_difference(group, mesh.cp_size) is None
        aside.is_known &= weighs_alike
        apart = aside.counts.factor_difference(group, mesh.cp_size)
        unknown = gather_objects([aside.zeros] if aside.needs_fewer_labels else [], group)
        self._check_healthy(part, base, uneven=False)
        uneven = self._uneven(part)
        if uneven is not None:
            self._check_healthy(uneven, self._compare_uneven(uneven), uneven=True)
        for zeros in {each for of_rank in unknown for each in of_rank}:
            self.runner.runtime.losses.note_exact(zeros)
        forms = gather_objects(list(aside.counts.checked_forms(weighs_alike=weighs_alike)), group)
        self.runner.runtime.losses.counts.exact |= {x for of_rank in forms for x in of_rank}
        self.runner.runtime.losses.follows_factors &= apart is None
        chunked = self.runner.runtime.settings.loss_chunk_tokens is not None
        seconds, evaluation = time.monotonic() - started, self.runner.evaluation
        modes = {"chunked": chunked, "evaluation": evaluation, "uneven": uneven is not None}
        return healthy(base, tokens, seconds, **modes)

    def _check_healthy(self, batch: Any, base: Comparison, *, uneven: bool) -> None:
        runtime = self.runner.runtime
        where, counts = (
            f"parity check on {self.runner.count(batch)} tokens",
            runtime.losses.probe.counts,
        )
        group = runtime.mesh.control_group(Flat.LOSS)
        if not base.is_spread:  # means of unequal losses may be right
            counts.check_values(where, group, runtime.mesh.cp_size)
        if base.is_fault:
            padding = counts.padding(group)
            if padding is not None:
                raise ConfigError(f"{where}: {padding}")
            shown = self._shortest(batch, base)
            raise ParityError(DifferenceExplainer(self.runner, uneven).explain(*shown, self.hint))

    def _uneven(self, batch: Any) -> Any | None:
        """The batch with fewer labels, if the last loss must be checked with it; else ``None``.

        Losses of known kinds are compared in every step.

        Raises:
            CannotRun: a step that may not support such labels must not fail on a GPU, which ends the
                process, or between ranks that gather parameters.
        """
        runtime, aside = self.runner.runtime, self.runner.runtime.losses.probe
        if not self._is_unknown_kind:
            return None
        whole = runtime.binding.read(batch)
        layout = runtime.binding.layout_of(whole)
        uneven = with_uneven_labels(batch, whole, runtime.binding.rules, layout)
        if not self.runner.is_any(uneven is not None):
            return None
        can_fail = runtime.mesh.device_type == "cpu" and not self.runner.engine.shards
        knows = aside.leaves_out or has_ignored(whole, layout) or not aside.needs_fewer_labels
        told = None if can_fail or knows or uneven is None else "no label of the batch is -100"
        self.runner.check_reason(told, UNKNOWN)
        return batch if uneven is None else uneven

    @property
    def _is_unknown_kind(self) -> bool:
        """True if the last loss does not show what it counts, on any rank."""
        return self.runner.is_any(self.runner.runtime.losses.probe.needs_fewer_labels)

    def _compare_uneven(self, batch: Any) -> Comparison:
        try:
            return self._compare_in_mode(batch)
        except NotRepeatable:
            raise
        except CannotRun as why:
            raise CannotRun(f"{UNKNOWN} ({why})") from None

    def _window(self, batch: Any, tokens: int) -> Any:
        """The window to compare; a batch that cannot be read is refused when it is sharded."""
        runtime, part, told = self.runner.runtime, None, None
        try:
            part = batch_window(batch, runtime.binding.rules, tokens, 4 * runtime.mesh.cp_size)
        except Exception as refused:  # any type: it may come from one rank only
            told = f"{type(refused).__name__}: {refused}"
        self.runner.check_reason(told, "the batch cannot be cut")
        return part

    def _compare_in_mode(self, batch: Any) -> Comparison:
        """Compare in the mode of the run, if all random numbers can be made the same on both sides."""
        try:
            return self._compare_allowing_noise(batch)
        except _NoiseDiffers:
            if self.runner.evaluation:
                raise
            self.runner = replace(self.runner, evaluation=True)
            return self._compare_allowing_noise(batch)

    def _compare_allowing_noise(self, batch: Any) -> Comparison:
        """Compare, and allow for randomness and rounding where the step differs."""
        comparing = StepComparer(self.runner)
        single, parallel = comparing.run_both(batch)
        base = comparing.of(single, parallel)
        if base.is_spread:
            return base
        if not base.is_fault:
            if self._is_unknown_kind:  # a change between both could hide the fault
                self._check_repeatable(batch, single)
            return base
        if self.runner.wide is not None:  # rounding is smaller without autocast
            step = self.runner.wide
            self.runner = replace(self.runner, step=step, wide=None, dtypes=frozenset())
            return self._compare_allowing_noise(batch)
        self._check_repeatable(batch, single)
        self._check_no_noise(batch, single, parallel)
        for draw in range(ROUNDINGS):
            other = replace(self.runner, rounding=draw).run_single(batch)
            base = allow_rounding(base, comparing.of(single, self._on_one_rank(other, batch)))
            if not base.is_fault:
                self._check_repeatable(
                    batch, single
                )  # rounding changed it, and no later change did
                break
        return base

    def _check_repeatable(self, batch: Any, single: StepPass) -> None:
        """Check that equal steps of one process are equal: a difference would be neither rounding nor
        parallelism.

        Raises:
            NotRepeatable: they differ.
        """
        again = self._on_one_rank(self.runner.run_single(batch), batch)
        found = StepComparer(self.runner).of(single, again)
        if found.is_fault:
            worst = found.loss if found.loss.is_fault else found.worst
            name = f"gradient of {worst.name}" if worst in found.gradients else worst.name
            raise NotRepeatable(NO_REPEAT.format(name=name, error=worst.error))

    def _check_no_noise(self, batch: Any, single: StepPass, parallel: StepPass) -> None:
        """Check that the step's random numbers do not depend on its tokens.

        Raises:
            _NoiseDiffers: they change its loss.
        """
        unlike = single.drew_on_cuda or not torch.equal(single.drawn, parallel.drawn)
        if not self.runner.is_any(unlike):
            return
        other = replace(self.runner, seed=1).run_single(batch)
        if self.runner.is_any(not torch.equal(other.loss, single.loss)):
            raise _NoiseDiffers(
                "the step draws random numbers for its tokens, and a rank has other ones"
            )

    def _on_one_rank(self, single: StepPass, batch: Any) -> StepPass:
        """The pass of one process, to be compared with another such pass."""
        whole = self.runner.runtime.binding.read(batch)
        layout = SequenceLayout(whole.seq_len, 1, 1, "contiguous")
        real = padding_mask_of(dict(tensors_of(batch)))
        return replace(single, part=LocalTokens(layout, 0, whole.rows, real))

    def _shortest(self, batch: Any, base: Comparison) -> tuple[Any, Comparison]:
        """The shortest window that shows the difference too, since all tensors of its modules are stored."""
        if not self.runner.is_any(self.runner.count(batch) > SHORT_TOKENS):
            return batch, base
        part = self._window(batch, SHORT_TOKENS)
        try:
            shorter = self._compare_in_mode(part)
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

SHORT_TOKENS = 512
"""Tokens of that window, all rows together."""

ROUNDINGS = 3
"""Draws of other rounding; a single one may miss a nearly even choice."""

"""The parity check: a step on one process and context parallel; where they differ, why."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_cp.batch import read_batch
from lightning_cp.comm.reduce import all_sum
from lightning_cp.errors import ConfigError, ParityError, ShapeError
from lightning_cp.mesh import Flat
from lightning_cp.parity.compare import Comparison, compare, first_deviation
from lightning_cp.parity.diagnosis import (
    CONTIGUOUS,
    NO_PACKING,
    NO_PADDING,
    PLAIN_LOSS,
    Beginning,
    Evidence,
    diagnose,
)
from lightning_cp.parity.events import Event
from lightning_cp.parity.passes import Pass
from lightning_cp.parity.prefix import (
    prefix_of,
    with_another_first_token,
    without_documents,
    without_padding,
)
from lightning_cp.parity.report import healthy, ill
from lightning_cp.parity.tolerance import Tolerance, tolerance_of
from lightning_cp.strategies.parity.modes import other_modes
from lightning_cp.strategies.parity.runner import CannotRun, Runner
from lightning_cp.strategies.parity.untouched import untouched


@dataclass
class ParityCheck:
    """Compares a step of one model; all ranks come here together."""

    runner: Runner
    tokens: int
    """Of a prefix, all rows together."""

    def run(self, batch: Any) -> str:
        """What to say of a model that is well.

        Args:
            batch: whole, as it would be sharded next.

        Raises:
            ParityError: on every rank, with what differs and why.
            ConfigError: as a step of training does.
        """
        started = time.monotonic()
        core = self.runner.core
        divisor = 4 * core.mesh.cp_size
        part = self._prefix(batch, divisor)
        with untouched(self.runner.model):
            self._require_step(part)
            base = self._compared(part)
            if base.is_fault and self.runner.wide is not None:
                # Rounding may change what a model chooses (experts): without autocast it does not.
                step = self.runner.wide
                self.runner = replace(self.runner, step=step, wide=None, dtypes=frozenset())
                base = self._compared(part)
            if base.is_fault:
                raise ParityError(self._explained(part, base))
        return healthy(base, _count(part, core), time.monotonic() - started)

    def _prefix(self, batch: Any, divisor: int) -> Any:
        """The window to be looked at; a batch that cannot be read is refused when it is sharded."""
        part = error = None
        try:
            part = prefix_of(batch, self.runner.core.rules, self.tokens, divisor)
        except Exception as refused:  # any: on one rank, maybe
            error = refused
        self._together(error, "its batch cannot be cut")
        return part

    def _together(self, error: BaseException | None, what: str) -> None:
        """Leave the check out on all ranks, if one cannot make it."""
        group = self.runner.core.mesh.control_group(Flat.LOSS)
        if int(all_sum(torch.tensor([int(error is not None)]), group)):
            told = f"{type(error).__name__}: {error}" if error is not None else "on another rank"
            raise CannotRun(f"{what} ({told})")

    def _require_step(self, batch: Any) -> None:
        """A step that fails on a part of a batch cannot be compared.

        Raises:
            ConfigError: it has failed between ranks that gather parameters, which cannot go on.
        """
        error: Exception | None = None
        try:
            self.runner.alone(batch, backward=False)
        except Exception as failed:  # any: it is the user's
            error = failed
            if self.runner.engine.shards and not isinstance(failed, CannotRun):
                raise ConfigError(
                    f"the parity check ran the step on {_count(batch, self.runner.core)} tokens of its "
                    f"batch, and it failed: {type(failed).__name__}: {failed}. If it does not fail in "
                    "training, say parity_check='off', or raise parity_tokens."
                ) from failed
        self._together(error, f"the step fails on {_count(batch, self.runner.core)} tokens")

    def _compared(self, batch: Any, runner: Runner | None = None) -> Comparison:
        runner = runner or self.runner
        alone = runner.alone(batch)
        finite = all(bool(x.isfinite().all()) for x in (alone.loss, *alone.gradients.values()))
        error = None if finite else ArithmeticError("NaN or inf in its loss or gradients")
        self._together(error, "one process cannot be compared with")
        return compare(alone, runner.parallel(batch), runner.core.mesh, self._tolerance)

    @property
    def _tolerance(self) -> Tolerance:
        own = {p.dtype for p in self.runner.model.parameters()}
        return tolerance_of(own | self.runner.dtypes)

    def _explained(self, batch: Any, base: Comparison) -> str:
        core = self.runner.core
        beginning, ignored = self._beginning(batch)
        made = self._experiments(batch)
        diagnosis = diagnose(Evidence(base, beginning, made, ignored))
        return ill(base, made, diagnosis, _count(batch, core))

    def _beginning(self, batch: Any) -> tuple[Beginning | None, bool]:
        runner = replace(self.runner, everything=True)
        alone, parallel = runner.alone(batch), runner.parallel(batch)
        event = first_deviation(alone, parallel, runner.core.mesh, self._tolerance)
        if event is None:
            return None, parallel.positions_ignored
        before = parallel.events[: parallel.events.index(event)]
        attention = [at for at, one in enumerate(before) if one.kind == "attention"]
        agreed = [at for at, one in enumerate(before) if one.tensor is not None]
        behind = bool(attention) and (not agreed or attention[-1] > agreed[-1])
        matters = None if attention else self._other_tokens_matter(runner, batch, alone, event)
        return Beginning(event, behind, matters), parallel.positions_ignored

    def _other_tokens_matter(
        self, runner: Runner, batch: Any, alone: Pass, event: Event
    ) -> bool | None:
        """Whether another first token changes the tensor at other tokens, in one process."""
        changed = with_another_first_token(batch, runner.core.rules)
        other = runner.alone(changed)
        known = {one.key: one.tensor for one in other.events}
        mine = {one.key: one.tensor for one in alone.events}
        a, b = mine.get(event.key), known.get(event.key)
        if a is None or b is None or a.shape != b.shape:
            return None
        length = read_batch(batch, runner.core.rules, needs_labels=False).seq_len
        dims = [dim for dim, size in enumerate(a.shape) if size == length]
        if not dims:
            return None
        differs = (a != b).movedim(dims[0], 0)[1:].any()
        return bool(differs)

    def _experiments(self, batch: Any) -> dict[str, Comparison | str]:
        core = self.runner.core
        tries: dict[str, Callable[[], Comparison | str]] = {
            name: (lambda other=other: self._in_mode(other, batch))
            for name, other in other_modes(core).items()
        }

        def of(changed: Any | None, why: str) -> Callable[[], Comparison | str]:
            if changed is None:
                return lambda: why
            return lambda: self._compared(changed)

        tries[NO_PADDING] = of(without_padding(batch), "nothing is padded")
        tries[NO_PACKING] = of(without_documents(batch, core.rules), "nothing is packed")
        tries[PLAIN_LOSS] = lambda: self._compared(batch, replace(self.runner, plain_loss=True))
        tries[CONTIGUOUS] = lambda: self._contiguous(batch)
        return {name: _tried(attempt) for name, attempt in tries.items()}

    def _in_mode(self, mode: Any, batch: Any) -> Comparison | str:
        if isinstance(mode, str):
            return mode
        with mode():
            return self._compared(batch)

    def _contiguous(self, batch: Any) -> Comparison:
        with self.runner.core.with_layout("contiguous"):
            return self._compared(batch)


def _tried(attempt: Callable[[], Comparison | str]) -> Comparison | str:
    try:
        return attempt()
    except (ConfigError, ShapeError, CannotRun) as error:
        return f"not possible: {str(error).split('. ')[0]}"


def _count(batch: Any, core: Any) -> int:
    whole = read_batch(batch, core.rules, needs_labels=False)
    return whole.rows * whole.seq_len

"""Why a model differs: where that begins, and what makes it go away."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lightning_cp.errors import ConfigError, ShapeError
from lightning_cp.mesh import Flat
from lightning_cp.parity.compare import Comparison, first_deviation, token_gradients
from lightning_cp.parity.diagnosis import (
    CONTIGUOUS,
    EVALUATION,
    NO_PACKING,
    NO_PADDING,
    PLAIN_LOSS,
    Beginning,
    Evidence,
    diagnose,
)
from lightning_cp.parity.events import Event
from lightning_cp.parity.passes import Pass
from lightning_cp.parity.prefix import with_another_first_token, without_documents, without_padding
from lightning_cp.parity.report import ill
from lightning_cp.strategies.parity.comparing import Comparing
from lightning_cp.strategies.parity.modes import other_modes
from lightning_cp.strategies.parity.runner import CannotRun, Runner


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
        core = self.runner.core
        runner = replace(self.runner, everything=True)
        alone, parallel = runner.alone(batch), runner.parallel(batch)
        counts = core.loss_aside.counts
        other_counts = counts.difference(core.mesh.control_group(Flat.LOSS))
        beginning = self._beginning(batch, runner, alone, parallel)
        tokens = token_gradients(alone, parallel, core.mesh, self.tolerance(alone))
        ignored = parallel.positions_ignored
        made = self._experiments(batch)
        diagnosis = diagnose(
            Evidence(
                *(base, beginning, made, ignored, tokens),
                other_counts=other_counts,
                beside_other_terms=self.runner.anywhere(counts.beside_other_terms),
                counts_rows=not self.runner.anywhere(not counts.are_of(core.read(batch).rows)),
            )
        )
        report = ill(base, made, diagnosis, self.runner.count(batch), uneven=self.uneven)
        return f"{report}\n{way_on}" if way_on and other_counts is None else report

    def _beginning(
        self, batch: Any, runner: Runner, alone: Pass, parallel: Pass
    ) -> Beginning | None:
        event = first_deviation(alone, parallel, runner.core.mesh, self.tolerance(alone))
        if event is None:
            return None
        before = parallel.events[: parallel.events.index(event)]
        attention = [at for at, one in enumerate(before) if one.kind == "attention"]
        agreed = [at for at, one in enumerate(before) if one.tensor is not None]
        behind = bool(attention) and (not agreed or attention[-1] > agreed[-1])
        matters = None if attention else self._other_tokens_matter(runner, batch, alone, event)
        return Beginning(event, behind, matters)

    def _other_tokens_matter(
        self, runner: Runner, batch: Any, alone: Pass, event: Event
    ) -> bool | None:
        """True if another first token changes the tensor at other tokens, in one process."""
        changed = with_another_first_token(batch, runner.core.rules)
        other = runner.alone(changed)
        known = {one.key: one.tensor for one in other.events}
        mine = {one.key: one.tensor for one in alone.events}
        a, b = mine.get(event.key), known.get(event.key)
        if a is None or b is None or a.shape != b.shape:
            return None
        length = runner.core.read(batch).seq_len
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
            if not self.runner.anywhere(changed is not None):
                return lambda: why
            return lambda: self.run(batch if changed is None else changed)

        tries[NO_PADDING] = of(without_padding(batch), "the batch has none of its own")
        tries[NO_PACKING] = of(without_documents(batch, core.rules), "nothing is packed")
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
        with self.runner.core.with_layout("contiguous"):
            return self.run(batch)


def _tried(attempt: Callable[[], Comparison | str]) -> Comparison | str:
    try:
        return attempt()
    except (ConfigError, ShapeError, CannotRun) as error:
        return f"not possible: {str(error).split('. ')[0]}"

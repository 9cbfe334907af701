"""What the strategy adds to a training step beyond attention: sharding, agreement, bookkeeping.

    python -m lightning_cp.bench.step_overhead

A small Llama (``configs/model/llama_small.yaml``) trains with the Trainer, in every mode, on one document
and on packed ones, others in every step. All times are CPU-seconds of all threads, summed over ranks.

*own*: time within the strategy's own functions (:mod:`lightning_cp.bench.strategy_time`), over the time of
the whole step, from one batch's end to the next one's. *by hand*: the same sharded batches through a loop
that calls the same attention and averages gradients the same way (:mod:`lightning_cp.bench.training_step`);
what the Trainer's steps take longer is the strategy's part and Lightning's own together, and as noisy as
the steps. The first step of a run makes and compiles what stays, and is left out. *own* is the mean over
the steps of a repeat; shown is the least of the repeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

from lightning_cp.bench import table
from lightning_cp.bench.clock import Figure
from lightning_cp.bench.processes import on_ranks
from lightning_cp.bench.quiet import quiet_lightning
from lightning_cp.bench.strategy_time import NAMES
from lightning_cp.bench.training_job import Job
from lightning_cp.bench.training_step import Steps, by_hand, by_trainer
from lightning_cp.command_help import argument_parser

HEAD = (
    *("ranks", "mode", "documents", "step, s", "own, ms", "own / step", "spread"),
    *(f"{name}, ms" for name in NAMES),
    *("by hand, s", "Trainer / by hand"),
)
Settings = dict[str, Any]
"""The strategy's arguments."""
Repeat = tuple[Steps, Steps]
"""By the Trainer, and by hand."""


@dataclass(frozen=True)
class Share:
    """Of one repeat: CPU-seconds a step, summed over ranks."""

    step: float
    own: dict[str, float]
    by_hand: float

    @classmethod
    def of(cls, ranks: Sequence[Repeat]) -> Share:
        """The means over the steps of all ranks."""
        trained, looped = zip(*ranks, strict=True)
        own = {name: sum(_mean_own(steps, name) for steps in trained) for name in NAMES}
        return cls(_together(trained), own, _together(looped))

    @property
    def share(self) -> float:
        """Of the strategy in the step."""
        return sum(self.own.values()) / self.step


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argument_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=4096, help="of a sequence")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="ranks that share it")
    parser.add_argument(
        "--packed", type=int, nargs="+", default=[0, 16], help="documents of a row; 0: one"
    )
    parser.add_argument("--steps", type=int, default=6, help="of a measurement")
    parser.add_argument("--repeats", type=int, default=3, help="of each measurement")
    parser.add_argument("--hooks", action="store_true", help="a callback has a hook at batch ends")
    options = parser.parse_args()
    print(table.head(HEAD))
    for ranks in options.ranks:
        jobs = [Job(options.tokens, x, hooks=options.hooks) for x in options.packed]
        every = [(name, how, job) for name, how in modes(ranks).items() for job in jobs]
        found = measure_shares(ranks, [row[1:] for row in every], options.steps, options.repeats)
        for (name, _, job), shares in zip(every, found, strict=True):
            print(table.row((ranks, name, job.packed or 1, *cells(shares))), flush=True)


def modes(ranks: int) -> dict[str, Settings]:
    """The strategy's arguments in each mode."""
    found: dict[str, Settings] = {
        "ring": {"ring_size": ranks, "ulysses_size": 1},
        "ulysses": {"ring_size": 1, "ulysses_size": ranks},
    }
    if ranks % 2 == 0 and ranks > 2:
        found["hybrid"] = {"ring_size": 2, "ulysses_size": ranks // 2}
    return found


def measure_shares(
    ranks: int, runs: Sequence[tuple[Settings, Job]], steps: int, repeats: int
) -> list[list[Share]]:
    """For each run one share a repeat; all in the same processes."""
    of_ranks = on_ranks(ranks, _every_run, runs, steps, repeats)
    return [
        [Share.of(of_repeat) for of_repeat in zip(*of_run, strict=True)]
        for of_run in zip(*of_ranks, strict=True)
    ]


def _every_run(
    runs: Sequence[tuple[Settings, Job]], steps: int, repeats: int
) -> list[list[Repeat]]:
    with quiet_lightning():
        return [[_repeat(how, job, steps, at) for at in range(repeats)] for how, job in runs]


def _repeat(settings: Settings, job: Job, steps: int, index: int) -> Repeat:
    this = replace(job, seed=1000 * index)  # documents of its own: nothing is known of them yet
    recorder = by_trainer(this, settings, steps)
    return recorder.steps, by_hand(this, recorder)[0]


def cells(shares: Sequence[Share]) -> list[str]:
    """Of a row: the repeat with the least share, and how the repeats spread."""
    best = min(shares, key=lambda share: share.share)
    spread = Figure.of([share.share for share in shares]).spread
    ratio = min(share.step for share in shares) / min(share.by_hand for share in shares)
    return [
        f"{best.step:.3f}",
        f"{1e3 * sum(best.own.values()):.1f}",
        f"{best.share:.2%}",
        table.percent(spread),
        *(f"{1e3 * best.own[name]:.2f}" for name in NAMES),
        f"{best.by_hand:.3f}",
        f"{ratio:.3f}",
    ]


def _mean_own(steps: Steps, name: str) -> float:
    return mean(own.get(name, 0.0) for own in steps.own)


def _together(ranks: Sequence[Steps]) -> float:
    """CPU-seconds of a step over all ranks."""
    return sum(mean(steps.cpu) for steps in ranks)


if __name__ == "__main__":
    main()

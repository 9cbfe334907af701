"""Predicted against measured CPU-seconds of training steps, by mode, ranks and length.

    python -m benchmarks.plan_validation.cost outputs/<date>/<time>/hardware.json

A small Llama is trained through the strategy's own core and engine on gloo ranks; the compared figure is the
CPU-seconds of whole steps, summed over ranks, the minimum of the repeats. Without context parallelism two
ranks train on separate rows, so that the machine is as busy as when it was measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from benchmarks.plan_validation.cpu_seconds import CpuSeconds, SendCost, cpu_seconds, send_costs
from lightning_cp.bench.model_step import ModelSizes, ModelStep, config_of
from lightning_cp.bench.processes import on_ranks
from lightning_cp.bench.timers import Samples, cpu_of_all, measure
from lightning_cp.planner.attention import attention_cost
from lightning_cp.planner.hardware import Hardware
from lightning_cp.planner.job import Job, MeshSizes, PlanCase, TrainingMethod
from lightning_cp.planner.machines import Machine, machine_of_hardware
from lightning_cp.planner.model import model_from_config
from lightning_cp.utils.command_help import argument_parser
from lightning_cp.utils.console import markdown_table, percent

SIZES = ModelSizes(256, 8, 4, 1024, 4, 2048, "float32")
LENGTHS = (1024, 2048, 3072, 4096)
REPEATS = 3
RANKS = {1: 2, 2: 2, 4: 4}
"""Processes, by the number of ranks that share a row."""
WAYS: dict[int, dict[str, tuple[int, int]]] = {
    1: {"alone": (1, 1)},
    2: {"ring": (2, 1), "ulysses": (1, 2), "zigzag_llama3": (2, 1)},
    4: {"ring": (4, 1), "ulysses": (1, 4), "hybrid": (2, 2), "zigzag_llama3": (4, 1)},
}
"""Sizes of ring and Ulysses of each mode, by the ranks that share a row."""
MEDIAN, LEAST, MOST = 0.10, 0.75, 1.35
"""Bounds of predictions: the median of their errors, and the extremes of predicted / measured."""
HEAD = ("mode", "cp", "tokens", "predicted, s", "measured, s", "ratio", "spread")


@dataclass(frozen=True)
class Cell:
    """One mode at one length."""

    mode: str
    cp: int
    tokens: int
    predicted: CpuSeconds
    measured: float
    """CPU-seconds of a step, summed over ranks, the minimum of the repeats."""
    spread: float | None

    @property
    def ratio(self) -> float:
        """Predicted / measured."""
        return self.predicted.total / self.measured


def measured_cost(
    hardware: Hardware,
    *,
    sizes: ModelSizes = SIZES,
    lengths: Sequence[int] = LENGTHS,
    cp_sizes: Sequence[int] = tuple(RANKS),
    repeats: int = REPEATS,
) -> list[Cell]:
    """Measure every mode at every length, with one set of processes for each context-parallel size.

    Args:
        hardware: this machine's rates, from a run of the bench.
        sizes: the model's sizes.
        lengths: tokens of a row.
        cp_sizes: keys of ``RANKS``.
        repeats: repeats of each step, after one that is not counted.

    Raises:
        ConfigError: a rate that the prediction needs is missing.
    """
    machine = machine_of_hardware(hardware, dtype=sizes.dtype, head_dim=sizes.head_dim)
    sending = send_costs(hardware)
    cells: list[Cell] = []
    for cp in cp_sizes:
        places = [(mode, tokens) for mode in WAYS[cp] for tokens in lengths]
        predicted = [
            predicted_cost(machine, sending, sizes, cp, mode, tokens) for mode, tokens in places
        ]  # first, so that a missing rate raises before anything is measured
        of_ranks = on_ranks(RANKS[cp], _samples, sizes, cp, tuple(lengths), repeats)
        for (mode, tokens), expected, samples in zip(
            places, predicted, zip(*of_ranks, strict=True), strict=True
        ):
            figure = cpu_of_all(samples)
            cells.append(Cell(mode, cp, tokens, expected, figure.best, figure.spread))
    return cells


def predicted_cost(
    machine: Machine,
    sending: Sequence[SendCost],
    sizes: ModelSizes,
    cp: int,
    mode: str,
    tokens: int,
) -> CpuSeconds:
    """Return the planner's prediction for a cell."""
    ranks, (ring, ulysses) = RANKS[cp], WAYS[cp][mode]
    data = ranks // cp
    exchange = "all_gather" if mode == "zigzag_llama3" else "ring"
    choice = TrainingMethod(MeshSizes(data, 1, ring, ulysses), "ddp", exchange)
    job = Job(
        model_from_config(config_of(sizes), "a small Llama"),
        machine,
        ranks,
        tokens,
        data,
        "fp32",
        "adamw",
    )
    case = PlanCase(job, choice)
    attention = {window: attention_cost(case, window) for window in job.model.windows}
    return cpu_seconds(case, attention, sending)


def _samples(sizes: ModelSizes, cp: int, lengths: Sequence[int], repeats: int) -> list[Samples]:
    """Return this rank's samples in the order of modes, then lengths."""
    found: list[Samples] = []
    for mode, split in WAYS[cp].items():
        step = ModelStep(sizes, mode, split)
        found += [measure(step.of(tokens), repeats=repeats) for tokens in lengths]
        step.end()
        dist.barrier()
    return found


def table_of(cells: Sequence[Cell]) -> str:
    """Return the table with a line for each cell."""
    return markdown_table(
        HEAD,
        [
            [
                *(cell.mode, str(cell.cp), f"{cell.tokens:,}"),
                *(f"{cell.predicted.total:.3f}", f"{cell.measured:.3f}", f"{cell.ratio:.3f}"),
                percent(cell.spread),
            ]
            for cell in cells
        ],
    )


def summary_of(cells: Sequence[Cell]) -> str:
    """Return a sentence with the median error, the extremes, and the verdict."""
    errors = [abs(cell.ratio - 1) for cell in cells]
    ratios = sorted(cell.ratio for cell in cells)
    return (
        f"{len(cells)} cells: median error {statistics.median(errors):.1%} (asked: {MEDIAN:.0%}), predicted "
        f"/ measured {ratios[0]:.3f} to {ratios[-1]:.3f} (asked: {LEAST} to {MOST}): "
        f"{'as asked' if as_asked(cells) else 'NOT as asked'}"
    )


def as_asked(cells: Sequence[Cell]) -> bool:
    """True if all cells, and their median, are within bounds."""
    within = all(LEAST <= cell.ratio <= MOST for cell in cells)
    return within and statistics.median(abs(cell.ratio - 1) for cell in cells) <= MEDIAN


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the table and the summary."""
    parser = argument_parser(__doc__)
    parser.add_argument("hardware", type=Path, help="hardware.json of this machine")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=LENGTHS, help="tokens of a sequence"
    )
    parser.add_argument(
        "--cp",
        type=int,
        nargs="+",
        default=list(RANKS),
        choices=list(RANKS),
        help="ranks that share it",
    )
    parser.add_argument("--repeats", type=int, default=REPEATS, help="of each step")
    parser.add_argument("--terms", action="store_true", help="what predictions are made of")
    given = parser.parse_args(arguments)
    cells = measured_cost(
        Hardware.load(given.hardware),
        lengths=given.lengths,
        cp_sizes=given.cp,
        repeats=given.repeats,
    )
    print(f"{SIZES}\n\n{table_of(cells)}")
    if given.terms:
        print(f"\n{terms_of(cells)}")
    print(f"\n{summary_of(cells)}")


def terms_of(cells: Sequence[Cell]) -> str:
    """Return a table of each cell's seconds by term."""
    names = list(vars(cells[0].predicted))
    return markdown_table(
        ("mode", "cp", "tokens", *names),
        [
            [
                *(cell.mode, str(cell.cp), f"{cell.tokens:,}"),
                *(f"{getattr(cell.predicted, name):.3f}" for name in names),
            ]
            for cell in cells
        ],
    )


if __name__ == "__main__":
    main()

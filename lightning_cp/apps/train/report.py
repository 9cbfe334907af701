"""The end of the main job: its files, final table and ``loss.png``; after an error, one rank's report.

After an error the status is 1, and no process is left behind. Lightning starts the other ranks, and ends the
whole job with SIGKILL when it sees that one of them failed. So the first process takes them over, and ends
them after the error is shown.
"""

from __future__ import annotations

import csv
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import TextWrapper
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from lightning_cp import error_display
from lightning_cp.utils.subprocess import take_processes

BITS = "val/bits_per_byte"
PERPLEXITY = "val/perplexity"


@dataclass(frozen=True)
class RunFiles:
    """The paths of a run's files, all inside its own folder."""

    folder: Path

    @property
    def metrics(self) -> Path:
        """The CSV of every step and every validation."""
        return self.folder / "metrics" / "metrics.csv"

    @property
    def picture(self) -> Path:
        """The picture of the losses."""
        return self.folder / "loss.png"

    @property
    def checkpoints(self) -> Path:
        """The folder of ``last.ckpt`` and ``best.ckpt``."""
        return self.folder / "checkpoints"


@dataclass(frozen=True)
class Outcome:
    """The result of a run."""

    strategy: str
    mesh: str
    """Axes of more than one rank, with their sizes."""
    parity: str
    """The result of the parity check, or why there was none."""
    processes: int
    data_parallel_size: int
    steps: int
    tokens: int
    """Tokens trained on; a token that several ranks share counts once."""
    seconds: float
    """Seconds from start to end, validation and start-up included."""
    step_seconds: float
    """Seconds in training steps."""
    before: Mapping[str, float]
    """Metrics before the first step; empty if an earlier process validated and left no line."""
    after: Mapping[str, float]
    """Metrics of the last validation."""
    entropy: float
    """Byte-unigram entropy of the validation text, bits per byte."""

    def table(self, files: RunFiles) -> str:
        """Return a line for each fact, and more for long ones."""
        rows = {
            "strategy": self.strategy,
            "mesh": self.mesh,
            "processes": f"{self.processes}, batches at a time: {self.data_parallel_size}",
            "trained": f"{self.steps} steps, {self.tokens:,} tokens",
            "time": f"{self.seconds:.0f} s, of which {self.step_seconds:.0f} s in training steps",
            "speed": f"{self.tokens / max(self.step_seconds, 1e-9):,.0f} tokens/s",
            "validation": f"{self._change(BITS, 3)} bits per byte",
            "byte-unigram entropy": f"{self.entropy:.3f} bits per byte",
            "perplexity": self._change(PERPLEXITY, 2),
            "parity": self.parity,
            "metrics": files.metrics,
            "picture": files.picture,
            "checkpoint": files.checkpoints / "last.ckpt",
        }
        width = max(map(len, rows))
        options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
        wrap = TextWrapper(100, subsequent_indent=" " * (width + 4), **options)
        return "\n".join(wrap.fill(f"  {name:<{width}}  {value}") for name, value in rows.items())

    def _change(self, name: str, digits: int) -> str:
        before = f"{self.before[name]:.{digits}f}" if name in self.before else "?"
        return f"{before} -> {self.after[name]:.{digits}f}"


Points = tuple[list[float], list[float]]


def draw_losses(metrics: Path, picture: Path, entropy: float) -> None:
    """Draw the losses in a metrics CSV over the tokens trained on.

    Args:
        metrics: a CSV with columns ``tokens`` and ``train/bits_per_byte`` or ``val/bits_per_byte``.
        picture: the PNG to write.
        entropy: byte-unigram entropy of the validation text in bits per byte, drawn as a line.
    """
    # Imported here because only one rank draws; the object interface needs no display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(*read_points(metrics, "train/bits_per_byte"), lw=0.8, alpha=0.7, label="training")
    axes.plot(*read_points(metrics, "val/bits_per_byte"), marker="o", ms=4, label="validation")
    axes.axhline(entropy, color="gray", ls="--", label=f"byte-unigram entropy {entropy:.2f}")
    axes.set(xlabel="tokens (bytes)", ylabel="bits per byte", ylim=(0, 9))
    nats = axes.secondary_yaxis("right", functions=(_to_nats, _to_bits))
    nats.set_ylabel("loss (nats per byte)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120)


def _to_nats(bits: ArrayLike) -> ArrayLike:
    return np.multiply(bits, np.log(2))


def _to_bits(nats: ArrayLike) -> ArrayLike:
    return np.divide(nats, np.log(2))


def read_points(metrics: Path, column: str) -> Points:
    """Return ``(tokens, values)`` of the rows in which the column is filled."""
    with metrics.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get(column) and row.get("tokens")]
    return [float(row["tokens"]) for row in rows], [float(row[column]) for row in rows]


@contextmanager
def one_report() -> Iterator[list[Any]]:
    """Show an error once and exit with status 1.

    Yields:
        A list for the Trainer, whose processes are ended after an error.
    """
    trainers: list[Any] = []
    try:
        yield trainers
    except Exception as error:
        others = [one for each in trainers for one in take_processes(each.strategy.launcher)]
        error_display.show(error_display.error_of(error) or error)
        _end(others)
        raise SystemExit(1) from None


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Kill processes: they failed too, or wait in a collective, where they handle no other signal."""
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()

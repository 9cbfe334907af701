"""``loss.png``: training and validation loss over tokens, drawn from the logged CSV."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

Points = tuple[list[float], list[float]]


def draw_losses(metrics: Path, picture: Path, entropy: float) -> None:
    """Draw the losses in a metrics CSV over the tokens trained on.

    Args:
        metrics: a CSV with columns ``tokens`` and ``train/bits_per_byte`` or ``val/bits_per_byte``.
        picture: the PNG to write.
        entropy: byte-unigram entropy of the validation text in bits per byte, drawn as a line.
    """
    # Imported here, since only one rank ever draws; the object interface needs no display.
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
    """``(tokens, values)`` of the rows in which the column is filled."""
    with metrics.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get(column) and row.get("tokens")]
    return [float(row["tokens"]) for row in rows], [float(row[column]) for row in rows]

"""Muon and AdamW of one process, written down once more: what optimizers are held against."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def newton_schulz(x: Array, steps: int) -> Array:
    """Of x [m, n], by the polynomial of its singular values' own matrix, always on the left."""
    y = x / max(float(np.sqrt((x * x).sum())), 1e-7)
    for _ in range(steps):
        square = y @ y.T
        y = 3.4445 * y - 4.7750 * (square @ y) + 2.0315 * (square @ (square @ y))
    return y


class ByHand:
    """In float64, with the settings of a test.

    Args:
        start: parameters by name.
        matrices: names of those that Muon steps.
        cuts: name -> rows at which a fused projection is cut.
    """

    def __init__(
        self,
        start: Mapping[str, Array],
        matrices: Sequence[str],
        cuts: Mapping[str, Sequence[int]] | None = None,
        rate: float = 0.02,
        decay: float = 0.1,
        steps: int = 5,
        adjust: str = "match_rms_adamw",
    ) -> None:
        self.now = {name: np.array(x) for name, x in start.items()}
        self._matrices, self._cuts = set(matrices), cuts or {}
        self._rate, self._decay, self._steps, self._adjust = rate, decay, steps, adjust
        self._first = {name: np.zeros_like(x) for name, x in self.now.items()}
        self._second = {name: np.zeros_like(x) for name, x in self.now.items()}
        self._count = 0

    def step(self, gradients: Mapping[str, Array]) -> None:
        """All parameters."""
        self._count += 1
        for name, g in gradients.items():
            self.now[name] *= 1 - self._rate * self._decay
            moved = self._muon(name, g) if name in self._matrices else self._adamw(name, g)
            self.now[name] -= self._rate * moved

    def _muon(self, name: str, g: Array) -> Array:
        buffer = self._first[name] = 0.95 * self._first[name] + 0.05 * g
        update = 0.05 * g + 0.95 * buffer
        pieces = np.split(update, list(self._cuts.get(name, ())))
        return np.concatenate([self._scale(x) * newton_schulz(x, self._steps) for x in pieces])

    def _scale(self, x: Array) -> float:
        rows, columns = x.shape
        if self._adjust == "original":
            return max(1.0, math.sqrt(rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))

    def _adamw(self, name: str, g: Array) -> Array:
        first = self._first[name] = 0.9 * self._first[name] + 0.1 * g
        second = self._second[name] = 0.95 * self._second[name] + 0.05 * g * g
        mean, square = first / (1 - 0.9**self._count), second / (1 - 0.95**self._count)
        return mean / (np.sqrt(square) + 1e-8)

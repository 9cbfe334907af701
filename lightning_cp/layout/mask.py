"""The mask within a document: which keys a query may see."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import index
from typing import SupportsIndex, cast

from lightning_cp.errors import ConfigError

UNBOUNDED = 1 << 60
"""A distance larger than any sequence, small enough that sums of two do not overflow int64."""


def _integer(value: object) -> object:
    """Integers of NumPy and others as Python's; anything else as it is."""
    try:
        return index(value) if isinstance(value, SupportsIndex) else value
    except TypeError:  # a tensor of floats has the method too
        return value


@dataclass(frozen=True)
class Mask:
    """Causality and a window, as in flash-attn.

    Args:
        causal: a query sees no later key.
        window: (left, right) distances still visible; -1 is unbounded.
        uses_distance: the scores depend on the distance (ALiBi, dropout), so that tiles from
            different global places must not be joined. A window implies it.
    """

    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    uses_distance: bool = False

    def __post_init__(self) -> None:
        # Configs give lists, which have no hash and equal no tuple.
        given = cast("Iterable[object] | int | None", self.window)
        sides = given if isinstance(given, Iterable) else ()
        window = tuple(side if isinstance(side, bool) else _integer(side) for side in sides)
        if len(window) != 2 or any(type(side) is not int or side < -1 for side in window):
            raise ConfigError(
                f"window must be (left, right) whole distances of at least 0, or -1 for unbounded, "
                f"got {self.window}. "
                "Leave it out for no window."
            )
        object.__setattr__(self, "window", window)

    @property
    def left(self) -> int:
        """The distance that a key may be back; ``UNBOUNDED`` if any."""
        return UNBOUNDED if self.window[0] < 0 else self.window[0]

    @property
    def right(self) -> int:
        """The distance that a key may be ahead: 0 when causal; ``UNBOUNDED`` if any."""
        right = UNBOUNDED if self.window[1] < 0 else self.window[1]
        return min(right, 0) if self.causal else right

    @property
    def joins_segments(self) -> bool:
        """True if tiles from different global places may be joined into one."""
        return not self.uses_distance and self.window == (-1, -1)

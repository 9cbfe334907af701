"""Every box of every small tensor, against indexing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest

from lightning_cp.checkpoint.pretrained.reader import ElementRun, runs_of_box

Sides = tuple[int, int, int]
"""Of one dimension: its size, where the box begins, and how long it is."""

SIDES = [(n, at, length) for n in (1, 2, 3) for at in range(n) for length in range(n - at + 1)]


def places(rows: Iterator[ElementRun]) -> list[int]:
    """Of a box's elements, in the box's order, in the tensor."""
    found: list[int] = []
    for some in rows:
        assert some.at == len(found)
        for row in range(some.count):
            start = some.start + row * some.step
            found += range(start, start + some.length)
        assert len(found) == some.at + some.numel
    return found


@pytest.mark.parametrize("dims", [0, 1, 2, 3])
def test_rows_are_the_elements_that_indexing_finds(dims: int) -> None:
    for sides in product(SIDES, repeat=dims):
        shape, offsets, lengths = zip(*sides, strict=True) if sides else ((), (), ())
        box = tuple(slice(at, at + n) for at, n in zip(offsets, lengths, strict=True))
        expected = np.arange(np.prod(shape, dtype=int)).reshape(shape)[box].ravel().tolist()
        rows = list(runs_of_box(offsets, lengths, shape))
        assert places(iter(rows)) == expected, sides
        for most in (1, 2, 5):
            parts = [part for some in rows for part in some.cut(most)]
            assert places(iter(parts)) == expected, (sides, most)
            assert all(part.numel <= most for part in parts)


def test_rows_at_one_distance_are_one() -> None:
    (rows,) = runs_of_box((0, 0, 0), (4, 5, 2), (4, 5, 6))
    assert rows == ElementRun(start=0, count=20, length=2, step=6, at=0)
    (rows,) = runs_of_box((1, 0, 0), (2, 5, 6), (4, 5, 6))
    assert (rows.numel, rows.step) == (60, rows.length)

"""The key ranges that tiles touch, merged where they overlap or meet."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def merged(owner: Ints, start: Ints, length: Ints, stretch: int) -> tuple[Ints, Ints, Ints]:
    """Sorted, disjoint ranges of each owner.

    Args:
        owner: whose range each one is.
        start: where it begins.
        length: how long it is.
        stretch: more than any range reaches to.

    Returns:
        owner, begin and end of each merged range, sorted by owner and begin.
    """
    if not start.size:
        return start, start, start
    # All owners at once, on one line: each gets a stretch that no range of it reaches the end of.
    at = owner * stretch + start
    order = np.argsort(at, kind="stable")
    at = at[order]
    reach = np.maximum.accumulate(at + length[order])
    first = np.flatnonzero(np.concatenate([[True], at[1:] > reach[:-1]]))
    last = np.append(first[1:], at.size) - 1
    of = at[first] // stretch
    return of, at[first] - of * stretch, reach[last] - of * stretch

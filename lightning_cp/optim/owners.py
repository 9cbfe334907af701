"""Who orthogonalises which matrix, and when. Plain integers, the same on every rank.

Each matrix has one owner. The costliest is given first, each to whoever has least to do (longest processing
time first; Graham 1969), so that ranks have about equal work whatever the shapes. What owners hold at once is
bounded: they go through their matrices in rounds.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import NamedTuple


class Size(NamedTuple):
    """Of a matrix."""

    flops: int
    nbytes: int


def assign(
    sizes: Sequence[Size], ranks: Sequence[int], loads: MutableMapping[int, int]
) -> list[int]:
    """The owner of each matrix, as a place in ``ranks``.

    Args:
        sizes: of the matrices.
        ranks: who may own them.
        loads: FLOPs that ranks have been given already; these are added.
    """
    owners = [0] * len(sizes)
    for at in sorted(range(len(sizes)), key=lambda at: (-sizes[at].flops, at)):
        place = min(range(len(ranks)), key=lambda place: (loads.get(ranks[place], 0), place))
        owners[at] = place
        loads[ranks[place]] = loads.get(ranks[place], 0) + sizes[at].flops
    return owners


def rounds(
    sizes: Sequence[Size], owners: Sequence[int], chunk_bytes: int
) -> list[dict[int, list[int]]]:
    """Matrices of each round, by owner: together at most ``chunk_bytes`` of one owner, or one matrix.

    The costliest first, so that owners are about equally long at work in each round.
    """
    found: list[dict[int, list[int]]] = []
    of_owner: dict[int, list[int]] = {}
    for at in sorted(range(len(sizes)), key=lambda at: (-sizes[at].flops, at)):
        of_owner.setdefault(owners[at], []).append(at)
    for owner, matrices in of_owner.items():
        number, held = 0, 0
        for at in matrices:
            if held and held + sizes[at].nbytes > chunk_bytes:
                number, held = number + 1, 0
            held += sizes[at].nbytes
            if number == len(found):
                found.append({})
            found[number].setdefault(owner, []).append(at)
    return found

"""True if all ranks name the same checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

from lightning_cp.comm.objects import World
from lightning_cp.errors import without_home


def odd_path(world: World, path: Path) -> tuple[int, list[Path]] | None:
    """The first rank whose path is not that of rank 0, and the paths of all. Collective.

    Ranks may run in folders of their own: what is the same from each one's working directory is the same.
    """
    every = world.gather((str(path), _near(path)))
    first, near = every[0]
    for rank, (other, other_near) in enumerate(every):
        if other != first and other_near != near:
            return rank, [Path(other) for other, _ in every]
    return None


def both(rank: int, every: list[Path]) -> str:
    """The texts of the first rank and the odd one, so that they can be told apart."""
    first, other = every[0], every[rank]
    if first.parent == other.parent:
        first, other = Path(first.name), Path(other.name)
    return f"{without_home(str(first))} on rank 0, {without_home(str(other))} on rank {rank}"


def _near(path: Path) -> str:
    try:
        return os.path.relpath(path)
    except FileNotFoundError:  # the working directory is gone
        return str(path)

"""Signs of life from work that takes long and knows of no run: files that are read, hashed and written.

A file system may be slow for longer than any limit. As long as bytes move, nobody hangs: whoever moves them
says so after every piece, and every run of this process that is watched counts that as its progress.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_cp.faults.position import Position

PIECE = 16 * 2**20
"""Bytes after which a sign is given at the latest."""

_watched: tuple[Position, ...] = ()  # replaced as a whole, as other threads go through it


def sign_of_life() -> None:
    """Something was done; from any thread."""
    for position in _watched:
        position.progress()


def pieces(data: memoryview) -> Iterator[memoryview]:
    """Bytes to be written piece by piece, with a sign after each."""
    for start in range(0, len(data), PIECE):
        yield data[start : start + PIECE]
        sign_of_life()


def count(position: Position) -> None:
    """From now on signs of life are this run's progress."""
    global _watched
    ignore(position)
    _watched = (*_watched, position)


def ignore(position: Position) -> None:
    """The run has ended."""
    global _watched
    _watched = tuple(each for each in _watched if each is not position)

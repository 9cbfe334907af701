"""Blocks that are said to be a tensor: each element in one of them, and in no other."""

from __future__ import annotations

import itertools
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_cp.checkpoint.read import open_checkpoint
from lightning_cp.checkpoint.save import save_checkpoint
from lightning_cp.checkpoint.shards import _fills
from lightning_cp.errors import CheckpointError
from tests.unit.checkpoint.test_interrupted import change_index

Blocks = list[tuple[tuple[int, ...], tuple[int, ...]]]


def counted(shape: tuple[int, ...], blocks: Blocks) -> bool:
    """The same by counting how often each element comes."""
    count = torch.zeros(shape, dtype=torch.int64)
    for offsets, sizes in blocks:
        count[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] += 1
    return bool((count == 1).all())


PARTS: dict[str, tuple[Blocks, bool]] = {
    "one in another": ([((0,), (6,)), ((1,), (2,))], False),
    "two that overlap": ([((0,), (5,)), ((4,), (3,))], False),
    "overlapping and beside": ([((0,), (4,)), ((2,), (2,)), ((6,), (2,))], False),
    "halves": ([((4,), (4,)), ((0,), (4,))], True),
    "uneven": ([((0,), (3,)), ((3,), (3,)), ((6,), (2,)), ((8,), (0,))], True),
}


@pytest.mark.parametrize(("blocks", "fits"), PARTS.values(), ids=PARTS)
def test_blocks_of_a_row(blocks: Blocks, fits: bool, tmp_path: Path) -> None:
    """What no block has would be uninitialised memory."""
    save_checkpoint({"w": torch.arange(8.0)}, tmp_path / "a", form="sharded")

    def change(tensor: dict[str, Any]) -> None:
        chunk = tensor["chunks"][0]
        tensor["chunks"] = [
            {**chunk, "offsets": list(o), "sizes": list(s), "begin": chunk["begin"] + 4 * o[0]}
            for o, s in blocks
        ]

    change_index(tmp_path / "a", change)
    if fits:
        assert torch.equal(open_checkpoint(tmp_path / "a").read()["w"], torch.arange(8.0))
        return
    with pytest.raises(CheckpointError, match=r"the blocks of w are not all of its shape \[8\]"):
        open_checkpoint(tmp_path / "a")


def test_any_blocks_are_told_as_counting_tells_them() -> None:
    """Cut at random, and then one of them is moved, doubled, grown or left out, or none."""
    at_random = random.Random(0)
    seen = {True: 0, False: 0}
    for _ in range(2000):
        shape = tuple(at_random.randint(1, 5) for _ in range(at_random.randint(0, 3)))
        blocks = cut(((0,) * len(shape), shape), at_random)
        if at_random.random() < 0.7:
            spoil(blocks, shape, at_random)
        got = _fills(shape, blocks)
        assert got == counted(shape, blocks), (shape, blocks)
        seen[got] += 1
    assert min(seen.values()) > 300


def cut(block: Any, at_random: random.Random) -> Blocks:
    """Into two, and those again, at any places: few such blocks are a grid."""
    offsets, sizes = block
    wide = [dim for dim, size in enumerate(sizes) if size > 1]
    if not wide or at_random.random() < 0.3:
        return [block]
    dim = at_random.choice(wide)
    first = at_random.randint(1, sizes[dim] - 1)
    left = (offsets, (*sizes[:dim], first, *sizes[dim + 1 :]))
    place = (*offsets[:dim], offsets[dim] + first, *offsets[dim + 1 :])
    right = (place, (*sizes[:dim], sizes[dim] - first, *sizes[dim + 1 :]))
    return cut(left, at_random) + cut(right, at_random)


def spoil(blocks: Blocks, shape: tuple[int, ...], at_random: random.Random) -> None:
    at = at_random.randrange(len(blocks))
    offsets, sizes = blocks.pop(at)
    match at_random.randrange(3):
        case 0:
            moved = [at_random.randint(0, n - s) for n, s in zip(shape, sizes, strict=True)]
            blocks.append((tuple(moved), sizes))
        case 1:
            grown = [at_random.randint(1, n - o) for n, o in zip(shape, offsets, strict=True)]
            blocks.append((offsets, tuple(grown)))
        case _:
            blocks += [(offsets, sizes)] * at_random.choice((0, 2))


def test_thousands_of_blocks_take_no_time() -> None:
    blocks: Blocks = [((i, 2 * j), (1, 2)) for i, j in itertools.product(range(64), range(64))]
    begun = time.process_time()
    assert _fills((64, 128), blocks)
    assert not _fills((64, 128), [*blocks[:-1], blocks[0]])
    assert time.process_time() - begun < 1

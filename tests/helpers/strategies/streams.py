"""Loaders of all kinds over the same rows, and a module that remembers what it was shown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, WeightedRandomSampler

from tests.helpers.strategies.small import Batch, Staged, samples

Rows = list[dict[str, torch.Tensor]]


class Stream(IterableDataset[Any]):
    """Rows in order, for one process or a share of them."""

    def __init__(self, rows: Rows, rank: int = 0, size: int = 1) -> None:
        self.rows = rows[rank::size]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


class SizedStream(Stream):
    """Knows how many."""

    def __len__(self) -> int:
        return len(self.rows)


class Batches:
    """No DataLoader at all: anything that can be iterated."""

    def __init__(self, rows: Rows) -> None:
        self.batches = [rows[at : at + 2] for at in range(0, len(rows), 2)]

    def __iter__(self) -> Iterator[Any]:
        for pair in self.batches:
            yield {name: torch.stack([row[name] for row in pair]) for name in pair[0]}


class Drawing(Stream):
    """Changes its rows at random, by the generator that everybody uses."""

    def __iter__(self) -> Iterator[Any]:
        for row in self.rows:
            yield {**row, "input_ids": row["input_ids"].roll(int(torch.randint(29, ())))}


class Nobody(IterableDataset[Any]):
    """In place of data that a rank does not have."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("a rank that only receives has read")

    def __len__(self) -> int:
        raise NotImplementedError("nobody knows")


def loader_of(kind: str, rows: Rows) -> Any:
    """A loader over ``rows``, two to a batch."""
    generator = torch.Generator().manual_seed(4)
    weights = [1.0 + at for at in range(len(rows))]
    made: dict[str, Any] = {
        "stream": lambda: DataLoader(Stream(rows), 2),
        "sized stream": lambda: DataLoader(SizedStream(rows), 2),
        "iterable": lambda: Batches(rows),
        "drawing": lambda: DataLoader(Drawing(rows), 2),
        "shuffled": lambda: _mapped(rows, shuffle=True),
        "shuffled, own generator": lambda: _mapped(rows, shuffle=True, generator=generator),
        "with replacement": lambda: _mapped(rows, sampler=RandomSampler(rows, True, 6)),
        "weighted": lambda: _mapped(rows, sampler=WeightedRandomSampler(weights, 8)),
        "batch sampler": lambda: DataLoader(rows, batch_sampler=[[0], [3, 1, 2], [2, 5]]),  # type: ignore[arg-type]
        "worker": lambda: _mapped(
            rows, num_workers=1, persistent_workers=True, multiprocessing_context="fork"
        ),
    }
    return made[kind]()


def _mapped(rows: Rows, **options: Any) -> DataLoader[Any]:
    return DataLoader(rows, batch_size=2, **options)  # type: ignore[arg-type]


class Noisy(Staged):
    """Draws a number in every step, which is the same on ranks that share a sample."""

    def setup(self, stage: str) -> None:
        torch.manual_seed(5)  # Lightning does it where it starts processes, and only there

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1 + torch.rand(()).item())


def rows_of(count: int) -> Rows:
    """Samples whose targets are spread unevenly."""
    return samples(count)

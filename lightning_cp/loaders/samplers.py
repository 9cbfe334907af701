"""Samplers: checks that they shard over data ranks, and one order of samples on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from lightning_cp.comm.reduce import broadcast_integer
from lightning_cp.errors import ConfigError

_INSIDE = ("sampler", "batch_sampler", "dataset", "_distributed", "distributed_env")
"""Attributes under which a loader holds its parts; the last two say how Hugging Face's and LitData's
streams are split."""

_NAMES = (("num_replicas", "rank"), ("num_processes", "process_index"))
_NAMES_INSIDE = {
    "_distributed": ("world_size", "rank"),
    "distributed_env": ("world_size", "global_rank"),
}


def check_data_sharding(loader: Any, size: int, rank: int) -> None:
    """Refuse samplers and datasets that shard over anything but data ranks.

    Args:
        loader: any loader; parts that do not say how they shard are left to the comparison of batches.
        size: number of data ranks.
        rank: this rank's number among them.

    Raises:
        ConfigError: a part shards over other ranks; names its numbers and the right ones.
    """
    for part, names in _parts(loader):
        got = tuple(getattr(part, name, None) for name in names)
        if any(type(number) is not int for number in got) or got == (size, rank):
            continue
        shown, wanted = (
            ", ".join(f"{name}={number}" for name, number in zip(names, numbers, strict=True))
            for numbers in (got, (size, rank))
        )
        raise ConfigError(
            f"{type(part).__name__} shards samples with {shown}, but on this rank it must be {wanted}: ranks "
            "that share a sequence read the same samples. Use strategy.data_parallel_size and "
            "strategy.data_rank (for a sampler **trainer.distributed_sampler_kwargs), or leave the sampler "
            "to Lightning."
        )


def _parts(loader: Any) -> Iterator[tuple[Any, tuple[str, str]]]:
    """Return all parts that could shard, with the attributes that say how."""
    found: list[Any] = [loader]
    seen = {id(loader)}
    while found:
        whole = found.pop()
        for name in _INSIDE:
            part = getattr(whole, name, None)
            if part is None or id(part) in seen:
                continue
            seen.add(id(part))
            found.append(part)
            for names in _NAMES if name not in _NAMES_INSIDE else [_NAMES_INSIDE[name]]:
                yield part, names


# One order of samples where every rank reads all of them: that of one process.


GroupOf = Callable[[], dist.ProcessGroup | None]


def agree_on_order(dataloader: DataLoader[Any], group: GroupOf) -> None:
    """Give a shuffling loader the same order on all ranks; other loaders stay as they are.

    Each rank draws a seed as one process would, and the first rank's is used. Ranks usually have the same
    random state (``rng.keep_random_state``), so it is the order of one process; they agree whatever their
    states are.

    Args:
        dataloader: the loader whose sampler is replaced.
        group: returns the ranks that share samples; called at the start of every pass.
    """
    batches, sampler = dataloader.batch_sampler, dataloader.sampler
    if (
        type(batches) is BatchSampler
        and type(sampler) is RandomSampler
        and sampler.generator is None
    ):
        batches.sampler = _AgreedRandomSampler(sampler, group)


class _AgreedRandomSampler(RandomSampler):
    """A RandomSampler with the seed of the group's first rank."""

    def __init__(self, like: RandomSampler, group: GroupOf) -> None:
        data: Sized = like.data_source
        drawn = like._num_samples
        super().__init__(data, replacement=like.replacement, num_samples=drawn)
        self._group = group

    def __iter__(self) -> Iterator[int]:
        seed = int(
            torch.empty((), dtype=torch.int64).random_().item()
        )  # drawn as RandomSampler draws it
        group = self._group()
        generator = torch.Generator()
        generator.manual_seed(seed if group is None else broadcast_integer(seed, group))
        self.generator = generator
        try:
            yield from super().__iter__()
        finally:
            self.generator = None

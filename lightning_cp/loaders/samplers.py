"""Whatever shards samples by itself has to count data ranks, not processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from lightning_cp.comm.reduce import broadcast_integer
from lightning_cp.errors import ConfigError

_INSIDE = ("sampler", "batch_sampler", "dataset", "_distributed", "distributed_env")
"""Where a loader's parts, and theirs, are found; the last two say how Hugging Face's and LitData's streams
are split."""

_NAMES = (("num_replicas", "rank"), ("num_processes", "process_index"))
_NAMES_INSIDE = {
    "_distributed": ("world_size", "rank"),
    "distributed_env": ("world_size", "global_rank"),
}


def require_data_sharding(loader: Any, size: int, rank: int) -> None:
    """Refuse samplers and datasets that say they shard over something other than data ranks.

    Args:
        loader: any loader; what does not say how it shards is left to the comparison of batches.
        size: data ranks.
        rank: this rank's number among them.

    Raises:
        ConfigError: naming what was got and what is wanted.
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
            "that share a sequence read the same samples. Count data ranks, "
            "strategy.data_parallel_size and strategy.data_rank (a sampler takes "
            "**trainer.distributed_sampler_kwargs), or leave the sampler to Lightning."
        )


def _parts(loader: Any) -> Iterator[tuple[Any, tuple[str, str]]]:
    """Everything that could shard, with the names by which it would say how."""
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


# The order of samples where every rank reads all of them: that of one process.


GroupOf = Callable[[], dist.ProcessGroup | None]


def agree_on_order(dataloader: DataLoader[Any], group: GroupOf) -> None:
    """Have a shuffling loader draw the same order on all ranks; others are left as they are.

    Each rank draws a seed as one process would, and the first rank's is taken: from the same random state,
    which they have as a rule (``draws.going_on``), it is the order of one process, and ranks agree whatever
    their states are.

    Args:
        dataloader: the loader, whose sampler is replaced.
        group: asked at the beginning of every pass for the ranks that share samples.
    """
    batches, sampler = dataloader.batch_sampler, dataloader.sampler
    if (
        type(batches) is BatchSampler
        and type(sampler) is RandomSampler
        and sampler.generator is None
    ):
        batches.sampler = _AgreedRandomSampler(sampler, group)


class _AgreedRandomSampler(RandomSampler):
    """A RandomSampler whose seed is that of the group's first rank."""

    def __init__(self, like: RandomSampler, group: GroupOf) -> None:
        data: Sized = like.data_source
        drawn = like._num_samples
        super().__init__(data, replacement=like.replacement, num_samples=drawn)
        self._group = group

    def __iter__(self) -> Iterator[int]:
        seed = int(torch.empty((), dtype=torch.int64).random_().item())  # as RandomSampler draws it
        group = self._group()
        generator = torch.Generator()
        generator.manual_seed(seed if group is None else broadcast_integer(seed, group))
        self.generator = generator
        try:
            yield from super().__iter__()
        finally:
            self.generator = None

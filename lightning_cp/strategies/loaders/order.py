"""The order of samples where every rank reads all of them: that of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from lightning_cp.comm.broadcast import broadcast_integer

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

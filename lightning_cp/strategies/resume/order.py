"""The order of samples, where data ranks or batches are others than before.

The place of a loader is a number of steps, so a step has to use as many samples as before: then what was
used, over all ranks, is the beginning of an order that all meshes share: nothing is repeated or left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from lightning_cp.errors import CheckpointError


def order_of(loader: Any) -> str | None:
    """A name that two loaders share if they deal one order out to data ranks; ``None``: nobody knows."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    plain = loader.batch_sampler is None or type(loader.batch_sampler) is BatchSampler
    if not plain or not isinstance(sampler, DistributedSampler):
        return None
    return f"{type(sampler).__name__}, shuffle={sampler.shuffle}, seed={sampler.seed}"


def require_same_order(loader: Any, saved: Mapping[str, Any]) -> None:
    """Refuse to go on within a pass where what is left of it would not be read.

    As many data ranks go on by the state of a loader that has one; without one, and without a known order or
    batch_size, nobody can tell, and the loader is taken for the same.

    Raises:
        CheckpointError: saying what has to be equal.
    """
    before, now = saved.get("ranks", (1, 1))
    same_ranks = before == now
    if not saved["batches"] or (same_ranks and saved["state"] is not None):
        return
    was, size = saved["batch_size"], getattr(loader, "batch_size", None)
    order = order_of(loader)
    if same_ranks:
        _require_same_pass((saved["order"], order), (was, size))
    elif saved["state"] is not None or order is None or order != saved["order"]:
        raise CheckpointError(
            f"the checkpoint was saved within a pass through a loader that {before} data ranks shared, and "
            f"now there are {now}. What is left of it is known only where both read through a "
            "DistributedSampler of the same seed over data ranks (num_replicas=strategy.data_parallel_size, "
            f"rank=strategy.data_rank); it was {saved['order'] or 'another sampler or a stream'}, and is "
            f"{order or 'another one'}. Resume with as many data ranks, or from the end of an epoch."
        )
    elif was is None or size is None or was * before != size * now:
        raise CheckpointError(
            f"the checkpoint was saved within a pass in which a step used {before} x {was} samples (data "
            f"ranks x batch_size), and now it would use {now} x {size}. Keep the product, or resume from the "
            "end of an epoch."
        )


def _require_same_pass(
    orders: tuple[str | None, str | None], sizes: tuple[int | None, int | None]
) -> None:
    for what, (was, now) in (("a batch_size of", sizes), ("the sampler", orders)):
        if was is not None and now is not None and was != now:
            raise CheckpointError(
                f"the checkpoint was saved within a pass through a loader with {what} {was}, and now it is "
                f"{now}, so that what is left of the pass cannot be found. Keep it, or resume from the end "
                "of an epoch."
            )

"""Messages about loaders that do not go together."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from lightning_cp.errors import BatchMismatchError, ConfigError

UNSIZED, RECEIVES = -1, -2
"""In the place of a length: a loader that has none, a rank that is given batches by another one."""


def refuse_lengths(
    lengths: Sequence[int],
    group: dist.ProcessGroup,
    sample_size: int,
    *,
    training: bool,
    at_most: int | None,
) -> None:
    """Loaders that have to go together must have one length, as far as it is used.

    Args:
        lengths: of every rank of ``group``, ``UNSIZED`` or ``RECEIVES``.
        group: all ranks; those that share samples follow each other.
        sample_size: ranks that share samples.
        training: all ranks go together, and not just those that share samples.
        at_most: batches that are used.

    Raises:
        BatchMismatchError: naming every rank's length.
    """
    together = len(lengths) if training else sample_size
    for first in range(0, len(lengths), together):
        ranks = [rank for rank in range(first, first + together) if lengths[rank] != RECEIVES]
        used = {lengths[rank] if at_most is None else min(lengths[rank], at_most) for rank in ranks}
        if len(used) > 1:
            shown = ", ".join(
                f"rank {dist.get_global_rank(group, rank)}: "
                f"{'no length' if lengths[rank] == UNSIZED else lengths[rank]}"
                for rank in ranks
            )
            raise BatchMismatchError(
                f"ranks have loaders of different lengths, in batches ({shown}). {_why(training)}"
            )


def refuse_ends(
    ended: Sequence[int], going: Sequence[int], read: int, group: dist.ProcessGroup, training: bool
) -> None:
    """Some loaders ended, and others did not.

    Args:
        ended: places in the group of those that ended.
        going: of those that have one more batch.
        read: batches before that.
        group: who goes together.
        training: all ranks go together, and not just those that share samples.

    Raises:
        BatchMismatchError: naming ranks and the batch.
    """
    if not ended or not going:
        return
    raise BatchMismatchError(
        f"the loader of {_ranks(ended, group)} ended after {read} batches, but that of "
        f"{_ranks(going, group)} has batch {read + 1}. {_why(training)}"
    )


def refuse_same_stream(marks: Sequence[int]) -> None:
    """Data ranks that train on the same samples.

    Args:
        marks: of every data rank's first batch; 0 if there is none.

    Raises:
        ConfigError: saying how to shard a stream.
    """
    for rank, mark in enumerate(marks):
        first = marks.index(mark)
        if mark and first < rank:
            raise ConfigError(
                f"data ranks {first} and {rank} read the same first batch: a stream (an IterableDataset, or "
                "a loader that is no DataLoader) has no sampler, and this one does not shard itself. Have it "
                f"give each of the {len(marks)} data ranks its own samples, by strategy.data_rank and "
                "strategy.data_parallel_size, not by the process's rank: islice(samples, data_rank, None, "
                "data_parallel_size). batch_sync='broadcast' has one rank read for each group, but groups "
                "still need a share each."
            )


def refuse_other_calls(marks: Sequence[int], own: int, group: dist.ProcessGroup) -> None:
    """Ranks that do not fetch from the same loader.

    Raises:
        BatchMismatchError: naming them.
    """
    others = [rank for rank, mark in enumerate(marks) if mark != own]
    if others:
        raise BatchMismatchError(
            f"this rank fetches a batch, but {_ranks(others, group)} fetched from another loader, or did "
            "something else. All ranks go through all loaders together: none may stop early, or look at a "
            "loader alone (look at its dataset instead)."
        )


def _ranks(places: Sequence[int], group: dist.ProcessGroup) -> str:
    ranks = [str(dist.get_global_rank(group, place)) for place in places]
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(ranks)}"


def _why(training: bool) -> str:
    if training:
        return (
            "Every rank takes part in every step of training, and in all steps where parameters are sharded "
            "over data ranks, so all need the same number of batches: give every data rank as many samples, "
            "or stop all with limit_train_batches=<the smallest number> (limit_val_batches, ...). "
            "Ranks that share a sequence must read the same batches; batch_sync='broadcast' has one rank "
            "read for its group."
        )
    return (
        "Ranks that share a sequence must read the same batches: shard by strategy.data_rank and "
        "strategy.data_parallel_size, or have one rank read for its group: batch_sync='broadcast'."
    )

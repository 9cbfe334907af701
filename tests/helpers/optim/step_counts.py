"""What a step of Muon computes and sends, counted from its rounds."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lightning_cp.optim.work_list import Round


def flops_of_ranks(every: Iterable[Round]) -> dict[int, int]:
    """FLOPs of orthogonalisation by global rank."""
    found: dict[int, int] = {}
    for each in every:
        for place, rank in enumerate(each.grid.flat):
            own = sum(x.flops for x in each.owned.get(place, ()))
            found[rank] = found.get(rank, 0) + own
    return found


def sent_bytes_of_ranks(every: Iterable[Round], dtype: torch.dtype) -> dict[int, int]:
    """Bytes that each rank sends in a step, by global rank: parts to owners, results to all holders of a
    part.

    A broadcast to c copies counts as c - 1 messages of its source.
    """
    found: dict[int, int] = {}
    for each in every:
        grid = each.grid
        for place, rank in enumerate(grid.flat):
            copy, part = divmod(place, grid.parts)
            own = each.of(copy, part)
            gathered = sum(x.parts[part].numel for x in each.of_copy(copy))
            gathered -= sum(x.parts[part].numel for x in own)
            scattered = sum(x.numel - x.parts[part].numel for x in own)
            copied = sum(x.parts[part].numel for x in each.of_copy(copy)) * (grid.copies - 1)
            sent = gathered * each.message_dtype.itemsize + (scattered + copied) * dtype.itemsize
            found[rank] = found.get(rank, 0) + sent
    return found

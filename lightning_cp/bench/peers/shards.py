"""Which tokens a rank holds in the layouts that other packages use; padding counts on from the sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def of_documents(lengths: Sequence[int], ranks: int, rank: int, *, zigzag: bool) -> torch.Tensor:
    """A share of every document, in one chunk per rank or in two; documents are padded for that.

    Returns:
        int64 [L]: global positions; those of padding are the sequence's length.
    """
    parts = 2 * ranks if zigzag else ranks
    chunks = (rank, parts - 1 - rank) if zigzag else (rank,)
    tokens, start = sum(lengths), 0
    found: list[torch.Tensor] = []
    for length in lengths:
        size = -(-length // parts)
        inside = torch.cat([torch.arange(chunk * size, (chunk + 1) * size) for chunk in chunks])
        found.append(torch.where(inside < length, start + inside, tokens))
        start += length
    return torch.cat(found)


def striped(tokens: int, ranks: int, rank: int) -> torch.Tensor:
    """Every ``ranks``-th token, from token ``rank`` on."""
    return torch.arange(rank, -(-tokens // ranks) * ranks, ranks)


def of_grid(tokens: int, ulysses: int, ring: int, rank: int) -> torch.Tensor:
    """Zigzag over the ring, and an equal part of it for each neighbouring Ulysses rank."""
    padded = -(-tokens // (2 * ring * ulysses)) * 2 * ring * ulysses
    ring_rank, ulysses_rank = divmod(rank, ulysses)
    own = of_documents([padded], ring, ring_rank, zigzag=ring > 1)
    return own.chunk(ulysses)[ulysses_rank]


def boundaries(lengths: Sequence[int]) -> torch.Tensor:
    """int32 [documents + 1]: where each begins, and the end."""
    return torch.tensor([0, *lengths]).cumsum(0).int()

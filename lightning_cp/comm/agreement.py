"""Ranks agree before data moves.

Collectives with shapes or dtypes that differ between ranks do not fail, they corrupt (gloo's
all-to-all returns unwritten memory), and a rank that raises alone leaves the others waiting. So
ranks first exchange a short vector of integers: an error flag, and named facts that must be equal.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

from lightning_cp.errors import BatchMismatchError, RankFailure
from lightning_cp.named_ranges import named

T = TypeVar("T")

_SAME_BATCH = (
    "Every rank of a context-parallel group must be given the same batch: shard samplers and streams over "
    "strategy.data_parallel_size and strategy.data_rank, not over the world size; or let one rank read for "
    "its group: batch_sync='broadcast'."
)
WIDTH = 40
"""Facts per agreement; fixed, so that ranks with different facts still exchange equal sizes."""


def fingerprint(value: object) -> int:
    """A 32-bit checksum of ``repr(value)`` (or of raw bytes), equal across processes."""
    data = value if isinstance(value, bytes) else repr(value).encode()
    return zlib.crc32(data)


def agree(
    facts: Mapping[str, int],
    group: dist.ProcessGroup,
    *,
    what: str,
    within: Sequence[Sequence[int]] | None = None,
    error: Exception | None = None,
    texts: Mapping[str, str] | None = None,
    remedy: str | None = None,
) -> list[dict[str, int]]:
    """Exchange ``facts`` and check that they are equal where they must be.

    Args:
        facts: named integers of this rank; at most ``WIDTH``.
        group: a group whose backend moves CPU tensors.
        what: what the facts describe, for the error message.
        within: lists of ranks that must agree with each other; all ranks of the group by default, none if
            it is empty.
        error: what went wrong on this rank already, if anything did: then every rank raises.
        texts: fact -> what to show of this rank's if it differs; the integer by default.
        remedy: what to do about a difference; by default what to do about different batches.

    Returns:
        The facts of every rank of the group; where ``within`` is given, other subgroups may have other
        facts, listed under this rank's names in order.

    Raises:
        BatchMismatchError: a fact differs; on every rank, naming the fact and each rank's value.
        RankFailure: another rank reported an error; carries its text. The rank itself raises its own.
    """
    names = list(facts)
    assert len(names) <= WIDTH, names
    numbers = [int(error is not None), fingerprint(names), *(facts[name] for name in names)]
    numbers += [0] * (WIDTH + 2 - len(numbers))
    gathered = [x.tolist() for x in exchange(torch.tensor(numbers, dtype=torch.int64), group)]
    if any(other[0] for other in gathered):
        raise_reported(error, group)
    table = [dict(zip(names, other[2 : 2 + len(names)], strict=True)) for other in gathered]
    for ranks in [range(len(table))] if within is None else within:
        if len({gathered[rank][1] for rank in ranks}) > 1:
            raise BatchMismatchError(
                f"{what}: ranks that share one sample are not at the same call, or were given different "
                f"fields. This rank has: {', '.join(names)}."
            )
        _check_equal(table, list(ranks), group, what, texts or {}, remedy or _SAME_BATCH)
    return table


def exchange(vector: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Every rank's ``vector``, which has one shape and dtype on all of them, in rank order."""
    gathered = [torch.empty_like(vector) for _ in range(group.size())]
    with named("agreement"):
        dist.all_gather(gathered, vector, group=group)
    return gathered


def lists_of_ranks(items: Sequence[T], group: dist.ProcessGroup) -> list[list[T]]:
    """Every rank's list, in rank order; one small exchange where all have the same.

    Args:
        items: whatever is equal and looks the same (``repr``) on ranks that mean the same.
        group: a group whose backend moves CPU tensors.
    """
    own = torch.tensor([fingerprint(list(items))], dtype=torch.int64)
    if all(torch.equal(own, other) for other in exchange(own, group)):
        return [list(items)] * group.size()
    lists: list[list[T]] = [[] for _ in range(group.size())]
    dist.all_gather_object(lists, list(items), group=group)
    return lists


def same_in_the_world(value: int) -> bool:
    """Whether every rank has this number; before there is a mesh, over the default group."""
    every: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return len(set(every)) == 1


def checksum(x: torch.Tensor) -> int:
    """A checksum of a tensor's values that depends on their order; computed where the tensor lives.

    The values' bits, as integers, are multiplied by odd numbers that depend on their place and summed
    modulo 2**64: one differing value always changes the sum, several hardly ever cancel. For that,
    values and places are mixed first: round numbers in float64 have upper bits only, of which a
    product keeps little, and factors linear in the place would let tokens trade places in pairs.
    """
    flat = x.detach().contiguous().view(-1)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    bits = flat.view(integers[flat.element_size()]).to(torch.int64)
    place = torch.arange(1, bits.numel() + 1, device=bits.device, dtype=torch.int64)
    factors = _fold(_fold(place * 0x1E3779B97F4A7C15) * 0x3F58476D1CE4E5B9) | 1
    return int((_fold(bits) * factors).sum())


def _fold(x: torch.Tensor) -> torch.Tensor:
    """The upper half of each int64 added to the lower one, bit by bit; different stay different."""
    return x ^ ((x >> 32) & 0xFFFFFFFF)


def _check_equal(
    table: list[dict[str, int]],
    ranks: list[int],
    group: dist.ProcessGroup,
    what: str,
    texts: Mapping[str, str],
    remedy: str,
) -> None:
    for name in table[0]:
        if len({table[rank][name] for rank in ranks}) > 1:
            own = table[dist.get_group_rank(group, dist.get_rank())][name]
            shown: list[str] = [""] * group.size()  # all ranks have this table, and come here
            dist.all_gather_object(shown, texts.get(name, str(own)), group=group)
            listed = ", ".join(
                f"rank {dist.get_global_rank(group, rank)}: {shown[rank]}" for rank in ranks
            )
            raise BatchMismatchError(
                f"{what}: ranks that share one sample disagree on {name} ({listed}). {remedy}"
            )


def raise_reported(error: Exception | None, group: dist.ProcessGroup) -> NoReturn:
    """Raise on every rank of the group, once all of them know that some rank has an error.

    Raises:
        RankFailure: another rank has one; carries its text. The rank itself raises its own.
    """
    texts: list[str | None] = [None] * group.size()
    dist.all_gather_object(
        texts, f"{type(error).__name__}: {error}" if error else None, group=group
    )
    if error is not None:
        raise error
    failed = {
        dist.get_global_rank(group, rank): text
        for rank, text in enumerate(texts)
        if text is not None
    }
    shown = "; ".join(f"rank {rank} raised {text}" for rank, text in failed.items())
    raise RankFailure(f"stopped before any data moved, because {shown}")

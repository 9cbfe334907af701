"""Ranks agree before data moves.

Collectives with shapes or dtypes that differ between ranks do not fail, they corrupt (gloo's
all-to-all returns unwritten memory), and a rank that raises alone leaves the others waiting. So
ranks first tell each other of errors, and compare named facts that must be equal.

Every agreement begins with a vote (see :mod:`lightning_cp.comm.vote`), so that ranks that are at different
agreements find that out. Only if it is not unanimous do ranks exchange what they have to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from lightning_cp.comm.checksum import fingerprint
from lightning_cp.comm.outcome import raise_reported
from lightning_cp.comm.vote import vote
from lightning_cp.errors import BatchMismatchError
from lightning_cp.named_ranges import named

T = TypeVar("T")

_SAME_BATCH = (
    "Every rank of a context-parallel group must be given the same batch: shard samplers and streams over "
    "strategy.data_parallel_size and strategy.data_rank, not over the world size; or let one rank read for "
    "its group: batch_sync='broadcast'."
)
WIDTH = 40
"""Facts per agreement; fixed, so that ranks with different facts still exchange equal sizes."""


def agree(
    facts: Mapping[str, int],
    group: dist.ProcessGroup,
    *,
    what: str,
    within: Sequence[Sequence[int]] | None = None,
    error: Exception | None = None,
    texts: Mapping[str, str] | None = None,
    remedy: str | None = None,
    limit: timedelta | None = None,
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
        limit: how long to wait for the others' votes; by default the group's own timeout.

    Returns:
        The facts of every rank of the group; where ``within`` is given, other subgroups may have other
        facts, listed under this rank's names in order.

    Raises:
        BatchMismatchError: a fact differs; on every rank, naming the fact and each rank's value.
        RankFailure: another rank reported an error; carries its text. The rank itself raises its own.
        RuntimeError: the others did not come within the limit.
    """
    if vote((what, *facts.items()), group, dissents=error is not None, limit=limit):
        return [dict(facts) for _ in range(group.size())]
    return find_difference(
        facts, group, what=what, within=within, error=error, texts=texts, remedy=remedy
    )


def find_difference(
    facts: Mapping[str, int],
    group: dist.ProcessGroup,
    *,
    what: str,
    within: Sequence[Sequence[int]] | None = None,
    error: Exception | None = None,
    texts: Mapping[str, str] | None = None,
    remedy: str | None = None,
) -> list[dict[str, int]]:
    """Do what ``agree`` does once a vote was not unanimous: the same arguments, result and errors."""
    names = list(facts)
    rows = _rows(facts, group, error=error, what=what, within=within)
    for ranks in [range(len(rows))] if within is None else within:
        require_equal(rows, names, ranks, group, what=what, texts=texts, remedy=remedy)
    return [dict(zip(names, row, strict=False)) for row in rows]


def tell(
    facts: Mapping[str, int],
    group: dist.ProcessGroup,
    *,
    what: str,
    error: Exception | None = None,
) -> list[dict[str, int]]:
    """Every rank's facts, of the same names, once a vote was not unanimous.

    Args:
        facts: named integers of this rank; at most ``WIDTH``.
        group: the group that has voted.
        what: what the facts describe, for the error message.
        error: what went wrong on this rank, if anything did: then every rank raises.

    Raises:
        BatchMismatchError: ranks are at different calls.
        RankFailure: another rank reported an error; carries its text. The rank itself raises its own.
    """
    rows = _rows(facts, group, what=what, error=error, within=None)
    return [dict(zip(facts, row, strict=False)) for row in rows]


def _rows(
    facts: Mapping[str, int],
    group: dist.ProcessGroup,
    *,
    what: str,
    error: Exception | None,
    within: Sequence[Sequence[int]] | None,
) -> list[list[int]]:
    """``WIDTH`` numbers of every rank, also those whose names are known to the ranks of one list only."""
    names = list(facts)
    assert len(names) <= WIDTH, names
    numbers = [int(error is not None), fingerprint(what), fingerprint(names), *facts.values()]
    numbers += [0] * (WIDTH + 3 - len(numbers))
    gathered = [x.tolist() for x in exchange(torch.tensor(numbers, dtype=torch.int64), group)]
    if any(other[0] for other in gathered):
        raise_reported(error, group)
    everybody = range(len(gathered))
    if len({row[1] for row in gathered}) > 1:
        raise BatchMismatchError(_elsewhere(what, group))
    if any(len({gathered[rank][2] for rank in of}) > 1 for of in within or [everybody]):
        raise BatchMismatchError(
            f"{what}: ranks are not at the same call, or those that share one sample were given different "
            f"fields. This rank has: {', '.join(names)}. {_SAME_BATCH}"
        )
    return [other[3:] for other in gathered]


def _elsewhere(what: str, group: dist.ProcessGroup) -> str:
    """Ranks are at different agreements; all of them come here."""
    every = gathered_lists([what], group)
    listed = "; ".join(
        f"rank {dist.get_global_rank(group, rank)}: {name}" for rank, (name,) in enumerate(every)
    )
    return (
        f"{what}: ranks are not at the same call ({listed}), as some of them left out something that ranks "
        "do together: a call of a model, backward, or the optimizer's step. Let all ranks do it, or none: "
        "decide by self.average(loss), with Fabric by strategy.average(loss), and not by the loss of a "
        "rank's own tokens."
    )


def exchange(vector: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Every rank's ``vector``, which has one shape and dtype on all of them, in rank order."""
    gathered = [torch.empty_like(vector) for _ in range(group.size())]
    with named("agreement"):
        dist.all_gather(gathered, vector, group=group)
    return gathered


def lists_of_ranks(items: Sequence[T], group: dist.ProcessGroup, *, what: str) -> list[list[T]]:
    """Every rank's list, in rank order; a vote where all have the same.

    Args:
        items: whatever is equal and looks the same (``repr``) on ranks that mean the same.
        group: a group whose backend moves CPU tensors.
        what: what they are, for the error message.

    Raises:
        BatchMismatchError: ranks are at different calls.
        RankFailure: another rank reported an error instead.
    """
    if vote((what, list(items)), group):
        return [list(items)] * group.size()
    tell({}, group, what=what)
    return gathered_lists(items, group)


def gathered_lists(items: Sequence[T], group: dist.ProcessGroup) -> list[list[T]]:
    """Every rank's list, of any length, in rank order."""
    lists: list[list[T]] = [[] for _ in range(group.size())]
    dist.all_gather_object(lists, list(items), group=group)
    return lists


def same_in_the_world(value: int) -> bool:
    """True if every rank has this number; before there is a mesh, over the default group."""
    every: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return len(set(every)) == 1


def require_equal(
    rows: Sequence[Sequence[int]],
    names: Sequence[str],
    ranks: Sequence[int],
    group: dist.ProcessGroup,
    *,
    what: str,
    texts: Mapping[str, str] | None = None,
    remedy: str | None = None,
) -> None:
    """Refuse facts that differ between ``ranks``; every rank of the group has the rows, and comes here.

    Args:
        rows: of every rank of the group, equally long.
        names: of this rank's numbers, from the first on; the same on all of ``ranks``.
        ranks: of the group.
        group: all that come here.
        what: as for ``agree``.
        texts: as for ``agree``.
        remedy: as for ``agree``.

    Raises:
        BatchMismatchError: naming the first fact that differs, and each rank's value.
    """
    differ = [at for at in range(len(rows[0])) if len({rows[rank][at] for rank in ranks}) > 1]
    if not differ:
        return
    at, rank = differ[0], dist.get_group_rank(group, dist.get_rank())
    name = names[at] if at < len(names) else ""
    shown = gathered_lists([name, (texts or {}).get(name, str(rows[rank][at]))], group)
    listed = ", ".join(
        f"rank {dist.get_global_rank(group, rank)}: {shown[rank][1]}" for rank in ranks
    )
    raise BatchMismatchError(
        f"{what}: ranks that share one sample disagree on {shown[ranks[0]][0]} ({listed}). "
        f"{remedy or _SAME_BATCH}"
    )

"""Agreement of ranks before data moves: votes, facts that must be equal, and errors of other ranks.

Collectives with shapes or dtypes that differ between ranks do not fail, they corrupt (gloo's all-to-all
returns unwritten memory), and a rank that raises alone leaves the others waiting. So ranks first exchange
errors and compare named facts. Every agreement begins with a vote (16 bytes), which also detects ranks at
different agreements; the facts themselves are exchanged only if the vote is not unanimous.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from lightning_cp.errors import BatchMismatchError, RankFailure, without_home
from lightning_cp.utils.tracing import profile_range

# Checksums and hashes of values, equal across processes.


def fingerprint(value: object) -> int:
    """Return a 32-bit checksum of ``repr(value)`` (or of raw bytes), equal across processes."""
    data = value if isinstance(value, bytes) else repr(value).encode()
    return zlib.crc32(data)


def checksum(x: torch.Tensor) -> int:
    """Return a checksum of a tensor's values that depends on their order; computed on the tensor's device.

    The values' bits, as integers, are multiplied by odd numbers that depend on their place and summed
    modulo 2**64: one differing value always changes the sum, several almost never cancel. For that,
    values and places are mixed first: round numbers in float64 have upper bits only, most of which a
    product drops, and with factors linear in the place, swaps of pairs of tokens could cancel.
    """
    flat = x.detach().contiguous().view(-1)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    bits = flat.view(integers[flat.element_size()]).to(torch.int64)
    small = bits.numel() <= _CACHED_PLACES  # most batches are, and have one length
    factors = (_cached_factors if small else _factors)(bits.numel(), bits.device)
    return int((_fold(bits) * factors).sum())


def _factors(count: int, device: torch.device) -> torch.Tensor:
    place = torch.arange(1, count + 1, device=device, dtype=torch.int64)
    return _fold(_fold(place * 0x1E3779B97F4A7C15) * 0x3F58476D1CE4E5B9) | 1


_CACHED_PLACES = 2**20
"""Most places whose factors are cached: 8 MB."""
_cached_factors = lru_cache(maxsize=4)(_factors)


def _fold(x: torch.Tensor) -> torch.Tensor:
    """XOR the upper half of each int64 into the lower one; a bijection."""
    return x ^ ((x >> 32) & 0xFFFFFFFF)


T = TypeVar("T")

_MAX_TEXT_LENGTH = 2000
"""Most characters of another rank's error: enough to name what failed."""


class World:
    """All ranks of the run; a single process is a world of size 1."""

    def __init__(self) -> None:
        alone = not (dist.is_available() and dist.is_initialized())
        self.size = 1 if alone else dist.get_world_size()
        self.rank = 0 if alone else dist.get_rank()

    def gather(self, value: T) -> list[T]:
        """Gather every rank's ``value``, in rank order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def run_on_all(self, action: Callable[[], T], failure: Callable[[str], Exception]) -> list[T]:
        """Run an action on every rank and gather the results; an error on one rank raises on all.

        Args:
            action: makes this rank's result; does not communicate.
            failure: makes the other ranks' exception from ``rank 2: OSError: ...``.

        Raises:
            Exception: the rank's own error where ``action`` failed, the result of ``failure`` elsewhere.
        """
        mine, error = None, None
        try:
            mine = action()
        except Exception as raised:
            error = raised
        every = self.gather((mine, None if error is None else error_summary(error)))
        if error is not None:
            raise error
        failed = [
            f"rank {rank}: {said}" for rank, (_, said) in enumerate(every) if said is not None
        ]
        if failed:
            more = f" (and on {len(failed) - 1} other ranks)" if len(failed) > 1 else ""
            raise failure(failed[0] + more)
        return [result for result, _ in every]  # type: ignore[misc]


def error_summary(error: BaseException) -> str:
    """Return an error as short text for other ranks and reports, without the paths of one machine."""
    return _os_error_text(error) or error_summary_with_type(error)


def error_summary_with_type(error: BaseException) -> str:
    """Return the same with the error's class, for errors of the operating system too."""
    said = _os_error_text(error) or str(error)
    return without_home(f"{type(error).__name__}: {said}")[:_MAX_TEXT_LENGTH]


def _os_error_text(error: BaseException) -> str:
    """Return the operating system's message about a file; empty for other errors."""
    if not isinstance(error, OSError) or error.errno is None:
        return ""
    name = Path(str(error.filename)).name if error.filename else ""
    hidden = not name or name.startswith(".")  # a staged file, whose name tells nothing
    return f"{error.strerror}{'' if hidden else f' ({name})'}"


def raise_on_all(error: Exception | None, device_type: str, *, what: str) -> None:
    """Raise on every rank if one of them has an error; all ranks of the world call it together.

    Args:
        error: this rank's, if there is one.
        device_type: of tensors that the default group's backend moves.
        what: the work of the ranks, for the message.

    Raises:
        Exception: ``error``.
        RankFailure: another rank has an error; carries its text.
    """
    texts = gather_error_texts(error, device_type)
    if any(texts):
        _raise_own_or_remote(error, dict(enumerate(texts)), f"{what} ended on all ranks")


def raise_on_group(error: Exception | None, group: dist.ProcessGroup) -> NoReturn:
    """Raise on every rank of the group, once all of them know that some rank has an error.

    Raises:
        RankFailure: another rank has an error; carries its text. The rank itself raises its own.
    """
    texts = [""] * group.size()
    dist.all_gather_object(
        texts, "" if error is None else error_summary_with_type(error), group=group
    )
    by_rank = {dist.get_global_rank(group, at): text for at, text in enumerate(texts)}
    _raise_own_or_remote(error, by_rank, "stopped before any data moved")


def _raise_own_or_remote(error: Exception | None, texts: Mapping[int, str], what: str) -> NoReturn:
    """Raise this rank's own error, or a ``RankFailure`` with the texts of the others'."""
    if error is not None:
        raise error
    shown = "; ".join(f"rank {rank} raised {text}" for rank, text in texts.items() if text)
    raise RankFailure(f"{what}, because {shown}")


def gather_error_texts(error: Exception | None, device_type: str) -> list[str]:
    """Gather every rank's error as text, empty where there is none; costs one small sum if none has one."""
    own = "" if error is None else error_summary_with_type(error)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [own]
    failed = torch.tensor([int(error is not None)], device=device_type)
    dist.all_reduce(failed)
    if not int(failed):
        return [""] * dist.get_world_size()
    texts = [""] * dist.get_world_size()
    dist.all_gather_object(texts, own)
    return texts


def sum_over_world(values: list[int], device_type: str) -> list[int]:
    """Sum integers over all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return values
    numbers = torch.tensor(values, dtype=torch.int64, device=device_type)
    dist.all_reduce(numbers)
    return [int(x) for x in numbers.tolist()]


# Votes. A rank's vote is a hash of its fact times a factor. The factors of all ranks add up to 0, so that
# equal votes do (modulo 2**64), and different ones almost never. A sum of two numbers is the cheapest message
# of gloo: with 4 and 8 ranks it took an eighth to a quarter of the CPU time of a gather, and of the same sum
# of three or more numbers, which travels around a ring.


def vote(
    fact: object,
    group: dist.ProcessGroup,
    *,
    dissents: bool = False,
    limit: timedelta | None = None,
) -> bool:
    """Return True if all ranks have the same ``fact`` (as ``repr`` shows it), and none dissents.

    The result is the same on every rank. If it is false, all ranks continue with :func:`gather_facts`.

    Args:
        fact: the value that has to be equal.
        group: a group whose backend moves CPU tensors.
        dissents: this rank has an error, or a message for the others.
        limit: longest wait for the others; by default the group's own timeout.

    Raises:
        RuntimeError: the others did not vote within the limit.
    """
    return tally(fact, group, dissents=dissents, limit=limit) is not None


def tally(
    fact: object,
    group: dist.ProcessGroup,
    *,
    dissents: bool = False,
    number: int = 0,
    of: tuple[int, int] | None = None,
    own: object = None,
    limit: timedelta | None = None,
) -> int | None:
    """Vote, and sum every rank's ``number``; ``None`` on all ranks if they disagree or one dissents.

    Args:
        fact: equal on all ranks of the group.
        group: a group whose backend moves CPU tensors.
        dissents: this rank has an error, or a message for the others.
        number: its sum over the ranks stays below 2**63.
        of: ``(part, size)``: this rank's part of the group, which consists of parts of ``size`` consecutive
            ranks.
        own: equal on all ranks of the part.
        limit: as for ``vote``.
    """
    size, rank = group.size(), dist.get_group_rank(group, dist.get_rank())
    ballot = _ballot(fact, rank, size)
    if of is not None:
        part, members = of
        ballot += _ballot((part, own), rank % members, members)
    if dissents:
        ballot += stable_hash(("dissents", rank))
    numbers = torch.tensor([_as_int64(ballot), number], dtype=torch.int64)
    with profile_range("agreement"):
        if limit is None:
            dist.all_reduce(numbers, group=group)
        else:
            work = dist.all_reduce(numbers, group=group, async_op=True)
            assert work is not None  # None only for ranks outside the group
            work.wait(limit)
    ballots, total = numbers.tolist()
    return None if ballots else total


def _ballot(value: object, rank: int, size: int) -> int:
    """Make a number whose sum over ranks is 0 (modulo 2**64) if all values are equal, else almost never."""
    return stable_hash(value) * (1 if rank else 1 - size)


def stable_hash(value: object) -> int:
    """Return 64 bits of a hash of ``repr(value)`` as an int64, equal across processes."""
    data = repr(value).encode()
    digest = hashlib.blake2b(data, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _as_int64(number: int) -> int:
    """Wrap an integer to the range of int64."""
    return (number + 2**63) % 2**64 - 2**63


_SAME_BATCH = (
    "Every rank of a context-parallel group must be given the same batch: shard samplers and streams over "
    "strategy.data_parallel_size and strategy.data_rank, not over the world size; or let one rank read for "
    "its group: batch_sync='broadcast'."
)
MAX_FACTS = 40
"""Most facts of an agreement. Its messages always have this size, for ranks with different facts too."""


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
        facts: named integers of this rank; at most ``MAX_FACTS``.
        group: a group whose backend moves CPU tensors.
        what: the subject of the facts, for the error message.
        within: lists of ranks that must agree with each other; all ranks of the group by default, none if
            it is empty.
        error: an earlier error of this rank, if there is one: then every rank raises.
        texts: fact -> text to show of this rank's value if it differs; the integer by default.
        remedy: the fix of a difference, for the message; by default that of different batches.
        limit: longest wait for the others' votes; by default the group's own timeout.

    Returns:
        The facts of every rank of the group; where ``within`` is given, other subgroups may have other
        facts, listed under this rank's names in order.

    Raises:
        BatchMismatchError: a fact differs; on every rank, naming the fact and each rank's value.
        RankFailure: another rank reported an error; carries its text. The rank itself raises its own.
        RuntimeError: the others did not vote within the limit.
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
    """Compare facts as ``agree`` does after a vote without unanimity; same arguments, result and errors."""
    names = list(facts)
    rows = _gather_rows(facts, group, error=error, what=what, within=within)
    for ranks in [range(len(rows))] if within is None else within:
        check_equal(rows, names, ranks, group, what=what, texts=texts, remedy=remedy)
    return [dict(zip(names, row, strict=False)) for row in rows]


def gather_facts(
    facts: Mapping[str, int],
    group: dist.ProcessGroup,
    *,
    what: str,
    error: Exception | None = None,
) -> list[dict[str, int]]:
    """Gather every rank's facts, which have the same names, after a vote that was not unanimous.

    Args:
        facts: named integers of this rank; at most ``MAX_FACTS``.
        group: the group that has voted.
        what: the subject of the facts, for the error message.
        error: an error of this rank, if there is one: then every rank raises.

    Raises:
        BatchMismatchError: ranks are at different calls.
        RankFailure: another rank reported an error; carries its text. The rank itself raises its own.
    """
    rows = _gather_rows(facts, group, what=what, error=error, within=None)
    return [dict(zip(facts, row, strict=False)) for row in rows]


def _gather_rows(
    facts: Mapping[str, int],
    group: dist.ProcessGroup,
    *,
    what: str,
    error: Exception | None,
    within: Sequence[Sequence[int]] | None,
) -> list[list[int]]:
    """Gather ``MAX_FACTS`` numbers of every rank, including those whose names only some ranks know."""
    names = list(facts)
    assert len(names) <= MAX_FACTS, names
    numbers = [int(error is not None), fingerprint(what), fingerprint(names), *facts.values()]
    numbers += [0] * (MAX_FACTS + 3 - len(numbers))
    gathered = [x.tolist() for x in gather_vectors(torch.tensor(numbers, dtype=torch.int64), group)]
    if any(other[0] for other in gathered):
        raise_on_group(error, group)
    everyone = range(len(gathered))
    if len({row[1] for row in gathered}) > 1:
        raise BatchMismatchError(_different_calls_message(what, group))
    if any(len({gathered[rank][2] for rank in of}) > 1 for of in within or [everyone]):
        raise BatchMismatchError(
            f"{what}: ranks are not at the same call, or those that share one sample were given different "
            f"fields. This rank has: {', '.join(names)}. {_SAME_BATCH}"
        )
    return [other[3:] for other in gathered]


def _different_calls_message(what: str, group: dist.ProcessGroup) -> str:
    """Return the message for ranks at different agreements; all ranks call it together."""
    every = gather_lists([what], group)
    listed = "; ".join(
        f"rank {dist.get_global_rank(group, rank)}: {name}" for rank, (name,) in enumerate(every)
    )
    return (
        f"{what}: ranks are not at the same call ({listed}), as some of them left out something that ranks "
        "do together: a call of a model, backward, or the optimizer's step. Let all ranks do it, or none: "
        "decide by self.average(loss), with Fabric by strategy.average(loss), and not by the loss of a "
        "rank's own tokens."
    )


def gather_vectors(vector: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Gather every rank's ``vector`` in rank order; shape and dtype are the same on all ranks."""
    gathered = [torch.empty_like(vector) for _ in range(group.size())]
    with profile_range("agreement"):
        dist.all_gather(gathered, vector, group=group)
    return gathered


def gather_lists_by_vote(
    items: Sequence[T], group: dist.ProcessGroup, *, what: str
) -> list[list[T]]:
    """Gather every rank's list, in rank order; costs only a vote where all are the same.

    Args:
        items: values whose ``repr`` is equal exactly where they are.
        group: a group whose backend moves CPU tensors.
        what: the subject of the items, for the error message.

    Raises:
        BatchMismatchError: ranks are at different calls.
        RankFailure: another rank reported an error instead.
    """
    if vote((what, list(items)), group):
        return [list(items)] * group.size()
    gather_facts({}, group, what=what)
    return gather_lists(items, group)


def gather_lists(items: Sequence[T], group: dist.ProcessGroup) -> list[list[T]]:
    """Gather every rank's list, of any length, in rank order."""
    lists: list[list[T]] = [[] for _ in range(group.size())]
    dist.all_gather_object(lists, list(items), group=group)
    return lists


def is_equal_on_all_ranks(value: int) -> bool:
    """Return True if every rank has this number; uses the default group, for calls before a mesh exists."""
    every: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return len(set(every)) == 1


def check_equal(
    rows: Sequence[Sequence[int]],
    names: Sequence[str],
    ranks: Sequence[int],
    group: dist.ProcessGroup,
    *,
    what: str,
    texts: Mapping[str, str] | None = None,
    remedy: str | None = None,
) -> None:
    """Check that facts are equal on ``ranks``; all ranks of the group call it together, with the same rows.

    Args:
        rows: numbers of every rank of the group, equally many.
        names: of this rank's numbers, from the first on; the same on all of ``ranks``.
        ranks: of the group.
        group: the ranks that call this.
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
    shown = gather_lists([name, (texts or {}).get(name, str(rows[rank][at]))], group)
    listed = ", ".join(
        f"rank {dist.get_global_rank(group, rank)}: {shown[rank][1]}" for rank in ranks
    )
    raise BatchMismatchError(
        f"{what}: ranks that share one sample disagree on {shown[ranks[0]][0]} ({listed}). "
        f"{remedy or _SAME_BATCH}"
    )

"""Agreement of ranks before data moves: votes, facts that must be equal, errors of other ranks, any objects.

Collectives with shapes or dtypes that differ between ranks do not fail, they corrupt (gloo's all-to-all
returns unwritten memory), and a rank that raises alone leaves the others waiting. So ranks first exchange
errors and compare named facts. Every agreement begins with a vote (16 bytes, ``all_equal``), which also
detects ranks at different agreements; the facts themselves are gathered only if the vote is not unanimous.
All objects of other ranks come through ``gather_objects``, or are broadcast as tensors' plain bytes and a
pickle of the rest. Pickle is as safe here as the process group itself: all data comes from ranks of this run.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from lightning_cp.errors import BatchMismatchError, RankFailure, without_home
from lightning_cp.utils.tracing import profile_range

_Place = tuple[int, torch.dtype, tuple[int, ...]]


# Checksums and hashes of values, equal across processes.


def fingerprint(value: object) -> int:
    """Return a 32-bit checksum of ``repr(value)`` (or of raw bytes), equal across processes."""
    data = value if isinstance(value, bytes) else repr(value).encode()
    return zlib.crc32(data)


def checksum(x: torch.Tensor) -> int:
    """Return a checksum of a tensor's values that depends on their order; waits for the tensor's device."""
    return int(start_checksum(x))


def start_checksum(x: torch.Tensor) -> torch.Tensor:
    """Return the checksum of ``checksum`` on the tensor's device, int64 []; does not wait.

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
    return (_fold(bits) * factors).sum()


def _factors(count: int, device: torch.device) -> torch.Tensor:
    place = torch.arange(1, count + 1, device=device, dtype=torch.int64)
    return _fold(_fold(place * 0x1E3779B97F4A7C15) * 0x3F58476D1CE4E5B9) | 1


_CACHED_PLACES = 2**20
"""Most places whose factors are cached: 8 MB."""
_cached_factors = lru_cache(maxsize=4)(_factors)


def _fold(x: torch.Tensor) -> torch.Tensor:
    """XOR the upper half of each int64 into the lower one; a bijection."""
    return x ^ ((x >> 32) & 0xFFFFFFFF)


def stable_hash(value: object) -> int:
    """Return 64 bits of a hash of ``repr(value)`` as an int64, equal across processes."""
    data = repr(value).encode()
    digest = hashlib.blake2b(data, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


T = TypeVar("T")

# Objects of all ranks, and the errors of some.


def gather_objects(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Gather every rank's value, in rank order; ``None`` is a group of this process alone."""
    if group is None or group.size() == 1:
        return [value]
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


class World:
    """All ranks of the run; a single process is a world of size 1."""

    def __init__(self) -> None:
        alone = not (dist.is_available() and dist.is_initialized())
        self.size = 1 if alone else dist.get_world_size()
        self.rank = 0 if alone else dist.get_rank()

    def gather(self, value: T) -> list[T]:
        """Gather every rank's value, in rank order."""
        return gather_objects(value, dist.group.WORLD if self.size > 1 else None)

    def sum(self, value: int, device_type: str) -> int:
        """Sum an integer over all ranks; ``device_type``: of tensors that the world's backend moves."""
        if self.size == 1:
            return value
        total = torch.tensor([value], dtype=torch.int64, device=device_type)
        dist.all_reduce(total)
        return int(total)

    def run_on_all(self, action: Callable[[], T], failure: Callable[[str], Exception]) -> T:
        """Run an action on every rank; return this rank's result, or raise on all as ``gather_results``."""
        results: list[T] = []
        self.gather_results(lambda: results.append(action()), failure)
        return results[0]

    def gather_results(
        self, action: Callable[[], T], failure: Callable[[str], Exception]
    ) -> list[T]:
        """Run an action on every rank and gather the results; an error on one rank raises on all.

        Args:
            action: makes this rank's result; does not communicate.
            failure: makes the other ranks' exception from ``rank 2: OSError: ...``.

        Raises:
            Exception: the rank's own error where ``action`` failed, the result of ``failure`` elsewhere.
        """
        result, error = None, None
        try:
            result = action()
        except Exception as raised:
            error = raised
        every = self.gather((result, None if error is None else error_summary(error)))
        if error is not None:
            raise error
        failed = [
            f"rank {rank}: {text}" for rank, (_, text) in enumerate(every) if text is not None
        ]
        if failed:
            more = f" (and on {len(failed) - 1} other ranks)" if len(failed) > 1 else ""
            raise failure(failed[0] + more)
        return [result for result, _ in every]  # type: ignore[misc]

    def raise_on_all(self, error: Exception | None, device_type: str, *, what: str) -> None:
        """Raise on every rank if one of them has an error; costs one small sum if none has one.

        Args:
            error: this rank's, if there is one.
            device_type: of tensors that the world's backend moves.
            what: the work of the ranks, for the message.

        Raises:
            Exception: ``error``.
            RankFailure: another rank has an error; carries its text.
        """
        if self.sum(int(error is not None), device_type):
            texts = dict(enumerate(self.gather(_error_text(error))))
            _raise_own_or_remote(error, texts, f"{what} ended on all ranks")

    @contextmanager
    def raising_on_all(self, device_type: str, *, what: str) -> Iterator[None]:
        """Raise on all ranks after the block what one of them raised in it; arguments of ``raise_on_all``."""
        error = None
        try:
            yield
        except Exception as raised:  # any: a rank that raised alone would leave the others waiting
            error = raised
        self.raise_on_all(error, device_type, what=what)


def _raise_own_or_remote(error: Exception | None, texts: Mapping[int, str], what: str) -> NoReturn:
    """Raise this rank's own error, or a ``RankFailure`` with the texts of the others'."""
    if error is not None:
        raise error
    shown = "; ".join(f"rank {rank} raised {text}" for rank, text in texts.items() if text)
    raise RankFailure(f"{what}, because {shown}")


_MAX_TEXT_LENGTH = 2000
"""Most characters of another rank's error: enough to name what failed."""


def error_summary(error: BaseException) -> str:
    """Return an error as short text for other ranks and reports, without the paths of one machine."""
    return _os_error_text(error) or error_summary_with_type(error)


def error_summary_with_type(error: BaseException) -> str:
    """Return the same with the error's class, for errors of the operating system too."""
    said = _os_error_text(error) or str(error)
    return without_home(f"{type(error).__name__}: {said}")[:_MAX_TEXT_LENGTH]


def _error_text(error: Exception | None) -> str:
    return "" if error is None else error_summary_with_type(error)


def _os_error_text(error: BaseException) -> str:
    """Return the operating system's message about a file; empty for other errors."""
    if not isinstance(error, OSError) or error.errno is None:
        return ""
    name = Path(str(error.filename)).name if error.filename else ""
    hidden = not name or name.startswith(".")  # a staged file, whose name tells nothing
    return f"{error.strerror}{'' if hidden else f' ({name})'}"


# Votes. A rank's vote is a hash of its fact times a factor. The factors of all ranks add up to 0, so that
# equal votes do (modulo 2**64), and different ones almost never. A sum of two numbers is the cheapest message
# of gloo: with 4 and 8 ranks it took an eighth to a quarter of the CPU time of a gather, and of the same sum
# of three or more numbers, which travels around a ring.


def all_equal(
    fact: object,
    group: dist.ProcessGroup,
    *,
    dissents: bool = False,
    limit: timedelta | None = None,
    device_type: str = "cpu",
) -> bool:
    """Return True if all ranks have the same ``fact`` (as ``repr`` shows it), and none dissents.

    The result is the same on every rank. If it is false, all ranks continue with :func:`gather_facts`.

    Args:
        fact: the value that has to be equal.
        group: the ranks that vote.
        dissents: this rank has an error, or a message for the others.
        limit: longest wait for the others; by default the group's own timeout.
        device_type: of tensors that the group's backend moves.

    Raises:
        RuntimeError: the others did not vote within the limit.
    """
    votes = all_equal_sum(fact, group, dissents=dissents, limit=limit, device_type=device_type)
    return votes is not None


def all_equal_sum(
    fact: object,
    group: dist.ProcessGroup,
    *,
    dissents: bool = False,
    number: int = 0,
    of: tuple[int, int] | None = None,
    own: object = None,
    limit: timedelta | None = None,
    device_type: str = "cpu",
) -> int | None:
    """Vote, and sum every rank's ``number``; ``None`` on all ranks if they disagree or one dissents.

    Args:
        fact: equal on all ranks of the group.
        group: as for ``all_equal``.
        dissents: as for ``all_equal``.
        number: its sum over the ranks stays below 2**63.
        of: ``(part, size)``: this rank's part of the group, which consists of parts of ``size`` consecutive
            ranks.
        own: equal on all ranks of the part.
        limit: as for ``all_equal``.
        device_type: as for ``all_equal``.
    """
    size, rank = group.size(), dist.get_group_rank(group, dist.get_rank())
    ballot = stable_hash(fact) * (1 if rank else 1 - size)
    if of is not None:
        part, members = of
        ballot += stable_hash((part, own)) * (1 if rank % members else 1 - members)
    if dissents:
        ballot += stable_hash(("dissents", rank))
    ballot = (ballot + 2**63) % 2**64 - 2**63  # wrapped to the range of int64
    numbers = torch.tensor([ballot, number], dtype=torch.int64, device=device_type)
    with profile_range("agreement"):
        if limit is None:
            dist.all_reduce(numbers, group=group)
        else:
            work = dist.all_reduce(numbers, group=group, async_op=True)
            assert work is not None  # None only for ranks outside the group
            work.wait(limit)
    ballots, total = numbers.tolist()
    return None if ballots else total


# Facts that ranks compare by a vote, and gather if they differ. The group's backend moves CPU tensors.

Facts = Mapping[str, object]
"""Named values of a rank. They are equal where ``repr`` shows the same; ``str`` shows them in messages."""

_SAME_BATCH = (
    "Every rank of a context-parallel group must be given the same batch: shard samplers and streams over "
    "strategy.data_parallel_size and strategy.data_rank, not over the world size; or let one rank read for "
    "its group: batch_sync='broadcast'."
)


def gather_facts(
    facts: T, group: dist.ProcessGroup, *, what: str, error: Exception | None = None
) -> list[T]:
    """Gather every rank's facts, after a vote that was not unanimous.

    Args:
        facts: any object of this rank.
        group: the group that has voted.
        what: the subject of the facts, for the error message; another one is another call.
        error: an error of this rank, if there is one: then every rank raises.

    Raises:
        BatchMismatchError: ranks are at different calls.
        RankFailure: another rank has an error; carries its text. The rank itself raises its own.
    """
    with profile_range("agreement"):
        every = gather_objects((what, facts, _error_text(error)), group)
    calls, facts_of_ranks, errors = zip(*every, strict=True)
    ranks = dist.get_process_group_ranks(group)
    if any(errors):
        texts = dict(zip(ranks, errors, strict=True))
        _raise_own_or_remote(error, texts, "stopped before any data moved")
    if len(set(calls)) > 1:
        listed = (f"rank {rank}: {call}" for rank, call in zip(ranks, calls, strict=True))
        raise BatchMismatchError(
            f"{what}: ranks are not at the same call ({'; '.join(listed)}), as some of them left out "
            "something that ranks do together: a call of a model, sequence_sum and its kin, backward, or the "
            "optimizer's step. Let all ranks do it, or none: decide by self.average(loss), with Fabric by "
            "strategy.average(loss), and not by the loss of a rank's own tokens."
        )
    return list(facts_of_ranks)


def gather_by_vote(
    facts: T,
    group: dist.ProcessGroup,
    *,
    what: str,
    error: Exception | None = None,
    limit: timedelta | None = None,
) -> list[T]:
    """Gather every rank's facts, in rank order; costs only a vote where all are the same.

    Args:
        facts: a value whose ``repr`` is equal exactly where it is.
        group: the ranks.
        what: as for ``gather_facts``.
        error: as for ``gather_facts``.
        limit: longest wait for the others' votes; by default the group's own timeout.

    Raises:
        Exception: as ``gather_facts``.
        RuntimeError: the others did not vote within the limit.
    """
    if all_equal((what, facts), group, dissents=error is not None, limit=limit):
        return [facts] * group.size()
    return gather_facts(facts, group, what=what, error=error)


def raise_in_group(
    error: Exception | None,
    group: dist.ProcessGroup,
    *,
    what: str,
    limit: timedelta | None = None,
) -> None:
    """Raise on every rank of the group if one of them has an error; raises as ``gather_by_vote``."""
    gather_by_vote(None, group, what=what, error=error, limit=limit)


def check_equal(
    facts: Facts,
    group: dist.ProcessGroup,
    *,
    what: str,
    error: Exception | None = None,
    remedy: str | None = None,
) -> None:
    """Check that all ranks have the same facts.

    Args:
        facts: of this rank.
        group: the ranks.
        what: as for ``gather_facts``.
        error: as for ``gather_facts``.
        remedy: as for ``check_gathered``.

    Raises:
        BatchMismatchError: a fact differs, or ranks are at different calls.
        RankFailure: another rank has an error; carries its text. The rank itself raises its own.
    """
    if not all_equal((what, facts), group, dissents=error is not None):
        every = gather_facts(facts, group, what=what, error=error)
        check_gathered(every, group, what=what, remedy=remedy)


def check_gathered(
    every: Sequence[Facts],
    group: dist.ProcessGroup,
    *,
    what: str,
    within: Sequence[Sequence[int]] | None = None,
    remedy: str | None = None,
) -> None:
    """Check that gathered facts are equal; sends nothing.

    Args:
        every: facts of every rank of the group.
        group: the ranks.
        what: the subject of the facts, for the error message.
        within: lists of ranks of the group that must agree with each other; all of it by default.
        remedy: the fix of a difference, for the message; by default that of different batches.

    Raises:
        BatchMismatchError: naming the first fact that differs, and each rank's value.
    """
    lists = [range(len(every))] if within is None else within
    if any(len({tuple(every[rank]) for rank in ranks}) > 1 for ranks in lists):
        raise BatchMismatchError(
            f"{what}: ranks are not at the same call, or those that share one sample were given different "
            f"fields. This rank has: {', '.join(every[group.rank()])}. {_SAME_BATCH}"
        )
    for ranks in lists:
        for name in every[ranks[0]]:
            if len({repr(every[rank][name]) for rank in ranks}) > 1:
                listed = ", ".join(
                    f"rank {dist.get_global_rank(group, rank)}: {every[rank][name]}"
                    for rank in ranks
                )
                raise BatchMismatchError(
                    f"{what}: ranks that share one sample disagree on {name} ({listed}). "
                    f"{remedy or _SAME_BATCH}"
                )


@dataclass(frozen=True)
class PackedObject:
    """A packed object."""

    rest: bytes
    """The object without its tensors, pickled; each tensor is replaced by its place."""
    tensors: list[torch.Tensor]


def pack(value: Any) -> PackedObject:
    """Split an object into tensors and the pickled rest; sends nothing.

    Raises:
        Exception: any that pickle raises, for an object that cannot be pickled.
    """
    buffer = io.BytesIO()
    packer = _Packer(buffer)
    packer.dump(value)
    return PackedObject(buffer.getvalue(), packer.tensors)


def broadcast_packed(packed: PackedObject | None, group: dist.ProcessGroup) -> Any:
    """Broadcast the packed object of the group's first rank and unpack it, with its tensors on the CPU.

    Args:
        packed: given on the first rank, ``None`` on the others.
        group: a group whose backend moves CPU tensors.
    """
    sizes = torch.zeros(2, dtype=torch.int64)
    data = torch.empty(0, dtype=torch.uint8)
    if packed is not None:
        parts = [_bytes_of(x) for x in packed.tensors]
        data = torch.cat([torch.frombuffer(bytearray(packed.rest), dtype=torch.uint8), *parts])
        sizes = torch.tensor([len(packed.rest), data.numel()])
    dist.broadcast(sizes, group=group, group_src=0)
    rest, total = sizes.tolist()
    if packed is None:
        data = torch.empty(total, dtype=torch.uint8)
    dist.broadcast(data, group=group, group_src=0)
    return _Unpacker(data, rest).load()


class _Packer(pickle.Pickler):
    """Pickler that leaves tensors out, since a pickled view includes all of its storage."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> _Place | None:
        if type(obj) is not torch.Tensor or obj.layout != torch.strided or obj.is_quantized:
            return None
        place = self._places.setdefault(id(obj), len(self.tensors))
        if place == len(self.tensors):
            self.tensors.append(obj)
        return place, obj.dtype, tuple(obj.shape)


class _Unpacker(pickle.Unpickler):
    """Unpickler that inserts the tensors; places occur in the order of the tensors in the data."""

    def __init__(self, data: torch.Tensor, rest: int) -> None:
        super().__init__(io.BytesIO(data[:rest].numpy().tobytes()))
        self._data, self._next = data, rest
        self._tensors: list[torch.Tensor] = []

    def persistent_load(self, pid: _Place) -> torch.Tensor:
        place, dtype, shape = pid
        if place == len(self._tensors):
            empty = torch.empty(shape, dtype=dtype)
            size = empty.numel() * empty.element_size()
            part = self._data[self._next : self._next + size]
            _bytes_of(empty).copy_(part)
            self._tensors.append(empty)
            self._next += size
        return self._tensors[place]


def _bytes_of(x: torch.Tensor) -> torch.Tensor:
    """Values of a tensor as uint8 [bytes] on the CPU; a view if the tensor is contiguous there."""
    return x.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1).view(torch.uint8)

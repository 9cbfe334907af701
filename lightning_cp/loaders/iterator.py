"""One way through a loader, batch by batch together with the other ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from lightning_cp.comm.consensus import checksum, fingerprint, gather_facts, vote
from lightning_cp.comm.object_broadcast import PackedObject, broadcast_packed, pack
from lightning_cp.errors import BatchMismatchError, ConfigError
from lightning_cp.layout.axes import Flat
from lightning_cp.loaders.position import LoaderPosition, read_as_before, reopen
from lightning_cp.loaders.rng import RandomStates, drawn_since, follow, random_state
from lightning_cp.mesh import ContextParallelMesh
from lightning_cp.randomness.token_draws import without_token_draws
from lightning_cp.utils.containers import tensors_of

# Messages about loaders that do not go together.


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


_RECEIVES, _HAS, _ENDED = 0, 1, 2


@dataclass
class _Fetched:
    """The outcome of asking this rank's loader for a batch."""

    status: int
    batch: Any = None
    parcel: PackedObject | None = None
    error: Exception | None = None


class SynchronizedIterator(Iterator[Any]):
    """An iterator over the batches of a loader.

    Args:
        loader: is read on this rank, unless it only receives.
        mesh: the process groups.
        number: which loader of the run it is.
        broadcasts: the first rank of each cp group reads for the others.
        trains: whether the next fetch is for training.
        together: data ranks take part in each other's steps outside of training, too.
        is_stream: no sampler shards the loader.
        place: is told how far this pass is.
        before_training: called before a batch to train on is read.
    """

    def __init__(
        self,
        loader: Any,
        mesh: ContextParallelMesh,
        *,
        number: int,
        broadcasts: bool,
        trains: Callable[[], bool],
        together: bool,
        is_stream: bool,
        place: LoaderPosition,
        before_training: Callable[[], object],
    ) -> None:
        self._mesh, self._trains, self._is_stream = mesh, trains, is_stream
        self._together = together
        self._loader, self._place, self._before_training = loader, place, before_training
        self._waiting: deque[RandomStates] = deque()
        self._name = fingerprint(("loader", number))
        self._shares = mesh.control_group(Flat.CP) if broadcasts else None
        self._reads = self._shares is None or mesh.sample_rank == 0
        place.received = not self._reads
        self._read, self._ended = 0, False
        self._error: Exception | None = None
        self._batches: Iterator[Any] | None = None
        if place.resumed is not None:  # the random state to begin with is not there yet
            if place.resumed.get("over"):
                place.take_generators(loader)
                self._ended = True
            return
        before = random_state() if broadcasts else {}
        try:
            self._open()
        except Exception as refused:  # told to all with the first batch
            self._error = refused
        if self._shares is not None:
            self._agree_on_loader()
            parcel = pack(drawn_since(before)) if self._reads else None
            follow(broadcast_packed(parcel, self._shares))

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is at its end: workers and groups are those of this run."""
        return iter, ((),)

    def _open(self) -> Iterator[Any]:
        """The way through this rank's loader, from its beginning or from the place to go on from."""
        saved = self._place.resumed
        if saved is None or saved["begin"] is None:
            self._place.begins(self._loader)
            self._batches = iter(self._loader) if self._reads else iter(())
        else:
            self._place.goes_on(saved)
            self._waiting = deque(saved["pending"])
            self._batches = reopen(self._loader, saved) if self._reads else iter(())
        return self._batches

    def _next(self) -> Any:
        """This rank's next batch."""
        batches = self._open() if self._batches is None else self._batches
        self._place.asked(trains=self._trains())
        # Batches that wait were read before the moment that was saved.
        moment = self._waiting.popleft() if self._waiting else None
        self._place.reads(self._loader, moment)
        if moment is not None:
            return read_as_before(moment, self._loader, lambda: next(batches))
        return next(batches)

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        training = self._trains()
        if training:
            # What is saved before the first batch is the beginning of this pass, not of the next one.
            self._place.asked(trains=True)
            self._before_training()
        with (
            without_token_draws()
        ):  # with Fabric the step before lasts until the next batch is sharded
            fetched = self._fetch()
        try:
            self._agree(fetched, training)
        except StopIteration:
            self._place.ends()
            raise
        self._read += 1
        self._place.has_read()
        if self._shares is None:
            return fetched.batch
        batch, draws = broadcast_packed(fetched.parcel, self._shares)
        if self._reads:
            return fetched.batch
        follow(draws)
        return batch

    def _agree_on_loader(self) -> None:
        group = self._mesh.control_group(Flat.CP)
        if not vote(("a pass begins", self._name), group):
            table = gather_facts({"loader": self._name}, group, what="pass begins")
            refuse_other_calls([row["loader"] for row in table], self._name, group)

    def _fetch(self) -> _Fetched:
        if not self._reads:
            if self._batches is None:
                self._open()
            self._place.asked(trains=self._trains())
            return _Fetched(_RECEIVES)
        if self._error is not None:
            return _Fetched(_ENDED, error=self._error)
        try:
            if self._shares is None:
                return _Fetched(_HAS, self._next())
            before = random_state()
            batch = self._next()
            return _Fetched(_HAS, batch, pack((batch, drawn_since(before))))
        except StopIteration:
            return _Fetched(_ENDED)
        except Exception as refused:  # any: a rank that raised alone would leave the others waiting
            return _Fetched(_ENDED, error=refused)

    def _agree(self, fetched: _Fetched, training: bool) -> None:
        """Have all ranks that go together know what each of them has.

        Raises:
            StopIteration: all are at the end.
            BatchMismatchError: some are.
            ConfigError: data ranks read the same stream.
            RankFailure: another rank's loader failed. The rank itself raises its own error.
        """
        together = training or self._together
        group = self._mesh.control_group(Flat.LOSS if together else Flat.CP)
        watches = training and self._is_stream and self._mesh.data_size > 1 and not self._read
        if vote(self._name, group, dissents=watches or fetched.status == _ENDED):
            return
        facts = {
            "loader": self._name,
            "status": fetched.status,
            "first": _mark(fetched.batch) if watches else 0,
        }
        table = gather_facts(facts, group, what="loader", error=fetched.error)
        refuse_other_calls([row["loader"] for row in table], self._name, group)
        places = {
            status: [at for at, row in enumerate(table) if row["status"] == status]
            for status in (_ENDED, _HAS)
        }
        refuse_ends(places[_ENDED], places[_HAS], self._read, group, together)
        if places[_ENDED]:
            self._ended = True
            raise StopIteration
        if watches:
            refuse_same_stream([row["first"] for row in table[:: self._mesh.sample_size]])


def _mark(batch: Any) -> int:
    """Of all tensors of a batch; 0 if there are none to be found."""
    found = [(name, checksum(x)) for name, x in tensors_of(batch)]
    return fingerprint(found) if found else 0

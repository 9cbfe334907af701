"""Iterator over a loader that all ranks advance together, batch by batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from lightning_cp.comm.consensus import (
    PackedObject,
    all_equal,
    broadcast_packed,
    checksum,
    fingerprint,
    gather_by_vote,
    gather_facts,
    pack,
)
from lightning_cp.errors import BatchMismatchError, ConfigError
from lightning_cp.layout.axes import Flat
from lightning_cp.loaders.position import LoaderPosition, open_at, read_with_random_state
from lightning_cp.loaders.rng import RandomStates, drawn_since, follow, random_state
from lightning_cp.mesh import ContextParallelMesh
from lightning_cp.randomness.token_draws import without_token_draws
from lightning_cp.utils.containers import tensors_of

# Errors for loaders that do not match between ranks.


UNSIZED, RECEIVES = -1, -2
"""Stand-ins for a length: of a loader without one, and of a rank that receives its batches from another
one."""


def check_lengths(
    lengths: Sequence[int],
    group: dist.ProcessGroup,
    sample_size: int,
    *,
    training: bool,
    at_most: int | None,
) -> None:
    """Refuse loaders of different lengths, as far as they are used.

    Args:
        lengths: batches on each rank of ``group``, or ``UNSIZED``, or ``RECEIVES``.
        group: all ranks; those that share samples are consecutive.
        sample_size: number of ranks that share samples.
        training: all ranks advance together, not just those that share samples.
        at_most: number of batches that are used.

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


def raise_uneven_ends(
    ended: Sequence[int], going: Sequence[int], read: int, group: dist.ProcessGroup, training: bool
) -> None:
    """Refuse loaders of which some ended and others did not.

    Args:
        ended: group ranks whose loader ended.
        going: group ranks that have one more batch.
        read: number of batches before that.
        group: the ranks that advance together.
        training: all ranks advance together, not just those that share samples.

    Raises:
        BatchMismatchError: naming ranks and the batch.
    """
    if not ended or not going:
        return
    raise BatchMismatchError(
        f"the loader of {_ranks(ended, group)} ended after {read} batches, but that of "
        f"{_ranks(going, group)} has batch {read + 1}. {_why(training)}"
    )


def check_streams_differ(marks: Sequence[int]) -> None:
    """Refuse a stream that gives several data ranks the same samples.

    Args:
        marks: checksum of every data rank's first batch; 0 if there is none.

    Raises:
        ConfigError: saying how to shard a stream.
    """
    for rank, mark in enumerate(marks):
        first = marks.index(mark)
        if mark and first < rank:
            raise ConfigError(
                f"data ranks {first} and {rank} read the same first batch: this stream (an IterableDataset, "
                f"or any loader without a sampler) does not shard itself. Give each of the {len(marks)} data "
                "ranks its own samples: islice(samples, strategy.data_rank, None, "
                "strategy.data_parallel_size). Streams need this with batch_sync='broadcast', too."
            )


def check_same_loader(marks: Sequence[int], own: int, group: dist.ProcessGroup) -> None:
    """Refuse ranks that fetch from different loaders.

    Raises:
        BatchMismatchError: naming them.
    """
    others = [rank for rank, mark in enumerate(marks) if mark != own]
    if others:
        raise BatchMismatchError(
            f"this rank fetches a batch, but {_ranks(others, group)} fetched from another loader, or did "
            "something else. All ranks must iterate over all loaders in step: no rank may stop early or "
            "iterate alone (to look at samples, index the dataset)."
        )


def _ranks(places: Sequence[int], group: dist.ProcessGroup) -> str:
    ranks = [str(dist.get_global_rank(group, place)) for place in places]
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(ranks)}"


def _why(training: bool) -> str:
    if training:
        return (
            "Every rank takes part in every training step (and, with sharded parameters, in every step), so "
            "all need the same number of batches. Give every data rank as many samples, or set "
            "limit_train_batches (limit_val_batches, ...) to the smallest number. Ranks that share a "
            "sequence must read the same batches; with batch_sync='broadcast' one rank reads for its group."
        )
    return (
        "Ranks that share a sequence must read the same batches: shard by strategy.data_rank and "
        "strategy.data_parallel_size, or have one rank read for its group: batch_sync='broadcast'."
    )


_RECEIVES, _HAS, _ENDED = 0, 1, 2


@dataclass
class _FetchResult:
    """The outcome of asking this rank's loader for a batch."""

    status: int
    batch: Any = None
    packed: PackedObject | None = None
    error: Exception | None = None


class SynchronizedIterator(Iterator[Any]):
    """An iterator over the batches of a loader.

    Args:
        loader: the loader to read, unless this rank only receives.
        mesh: the process groups.
        number: index of the loader in the run.
        broadcasts: the first rank of each cp group reads for the others.
        trains: returns whether the next fetch is for training.
        together: data ranks take part in each other's steps outside of training, too.
        is_stream: no sampler shards the loader.
        place: the position to keep up to date.
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
        if place.resumed is not None:  # the random state to begin with is not known yet
            if place.resumed.get("over"):
                place.restore_generators(loader)
                self._ended = True
            return
        before = random_state() if broadcasts else {}
        try:
            self._open()
        except Exception as refused:  # sent to all with the first batch
            self._error = refused
        if self._shares is not None:
            self._agree_on_loader()
            packed = pack(drawn_since(before)) if self._reads else None
            follow(broadcast_packed(packed, self._shares))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle or copy as an exhausted iterator: workers and groups belong to this run."""
        return iter, ((),)

    def _open(self) -> Iterator[Any]:
        """Open this rank's loader, from its beginning or from the position to resume at."""
        saved = self._place.resumed
        if saved is None or saved["begin"] is None:
            self._place.start_pass(self._loader)
            self._batches = iter(self._loader) if self._reads else iter(())
        else:
            self._place.resume_pass(saved)
            self._waiting = deque(saved["pending"])
            self._batches = open_at(self._loader, saved) if self._reads else iter(())
        return self._batches

    def _next(self) -> Any:
        """Return this rank's next batch."""
        batches = self._open() if self._batches is None else self._batches
        self._place.request_batch(trains=self._trains())
        # Pending batches were read before the saved moment.
        moment = self._waiting.popleft() if self._waiting else None
        self._place.before_read(self._loader, moment)
        if moment is not None:
            return read_with_random_state(moment, self._loader, lambda: next(batches))
        return next(batches)

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        training = self._trains()
        if training:
            # A state saved before the first batch is the beginning of this pass, not of the next one.
            self._place.request_batch(trains=True)
            self._before_training()
        with (
            without_token_draws()
        ):  # under Fabric the previous step lasts until the next batch is sharded
            fetched = self._fetch()
        try:
            self._agree(fetched, training)
        except StopIteration:
            self._place.end_pass()
            raise
        self._read += 1
        self._place.after_read()
        if self._shares is None:
            return fetched.batch
        batch, draws = broadcast_packed(fetched.packed, self._shares)
        if self._reads:
            return fetched.batch
        follow(draws)
        return batch

    def _agree_on_loader(self) -> None:
        group = self._mesh.control_group(Flat.CP)
        names = gather_by_vote(self._name, group, what="pass begins")
        check_same_loader(names, self._name, group)

    def _fetch(self) -> _FetchResult:
        if not self._reads:
            if self._batches is None:
                self._open()
            self._place.request_batch(trains=self._trains())
            return _FetchResult(_RECEIVES)
        if self._error is not None:
            return _FetchResult(_ENDED, error=self._error)
        try:
            if self._shares is None:
                return _FetchResult(_HAS, self._next())
            before = random_state()
            batch = self._next()
            return _FetchResult(_HAS, batch, pack((batch, drawn_since(before))))
        except StopIteration:
            return _FetchResult(_ENDED)
        except (
            Exception
        ) as refused:  # any error: a rank that raised alone would leave the others waiting
            return _FetchResult(_ENDED, error=refused)

    def _agree(self, fetched: _FetchResult, training: bool) -> None:
        """Exchange each rank's outcome, and check that all match.

        Raises:
            StopIteration: all are at the end.
            BatchMismatchError: some are.
            ConfigError: data ranks read the same stream.
            RankFailure: another rank's loader failed. The rank itself raises its own error.
        """
        together = training or self._together
        group = self._mesh.control_group(Flat.LOSS if together else Flat.CP)
        watches = training and self._is_stream and self._mesh.data_size > 1 and not self._read
        if all_equal(self._name, group, dissents=watches or fetched.status == _ENDED):
            return
        facts = {
            "loader": self._name,
            "status": fetched.status,
            "first": _mark(fetched.batch) if watches else 0,
        }
        table = gather_facts(facts, group, what="loader", error=fetched.error)
        check_same_loader([row["loader"] for row in table], self._name, group)
        places = {
            status: [at for at, row in enumerate(table) if row["status"] == status]
            for status in (_ENDED, _HAS)
        }
        raise_uneven_ends(places[_ENDED], places[_HAS], self._read, group, together)
        if places[_ENDED]:
            self._ended = True
            raise StopIteration
        if watches:
            check_streams_differ([row["first"] for row in table[:: self._mesh.sample_size]])


def _mark(batch: Any) -> int:
    """Return a checksum of all tensors in a batch; 0 if it has none."""
    found = [(name, checksum(x)) for name, x in tensors_of(batch)]
    return fingerprint(found) if found else 0

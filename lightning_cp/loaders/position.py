"""Position of a loader: pass, batches within it, and states of random number generators."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import Parameter, signature
from itertools import islice
from typing import Any

from lightning.fabric.utilities.data import _set_sampler_epoch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from lightning_cp.errors import CheckpointError
from lightning_cp.loaders.rng import RandomStates

# Resuming with another number of data ranks or another batch size.
#
# A loader's position is a number of steps, so a step must use as many samples as before: then the samples
# used, over all ranks, are the beginning of an order that all meshes share, and none is repeated or left
# out.


def order_of(loader: Any) -> str | None:
    """Return a key that is equal for loaders that deal one order of samples out to data ranks;
    ``None``: unknown."""
    sampler = _sampler_of(loader)
    if not isinstance(sampler, DistributedSampler):
        return None
    return f"{type(sampler).__name__}, shuffle={sampler.shuffle}, seed={sampler.seed}"


def _sampler_of(loader: Any) -> Any:
    """Return the sampler of single samples; ``None``: there is none, or batches are not simply made of it."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    plain = loader.batch_sampler is None or type(loader.batch_sampler) is BatchSampler
    return getattr(loader.batch_sampler, "sampler", loader.sampler) if plain else None


def _kind_of_order(loader: Any) -> str | None:
    """Return the kind of order of PyTorch's plain samplers; ``None``: it is another sampler."""
    sampler = _sampler_of(loader)
    if isinstance(sampler, RandomSampler):
        return "random"
    return "sequential" if isinstance(sampler, SequentialSampler) else None


def check_same_order(loader: Any, saved: Mapping[str, Any]) -> None:
    """Refuse to resume within a pass whose remaining samples would not be the ones read.

    A dataset, or a loader of another kind, with a state resumes on as many data ranks. Without a known order
    or a batch_size there is nothing to compare, and the loader is taken for the same.

    Raises:
        CheckpointError: saying what has to be equal.
    """
    before, now = saved.get("ranks", (1, 1))
    same_ranks = before == now
    resumes = saved["state"] is not None and not (
        isinstance(loader, DataLoader) and _has_state(loader)  # its state counts batches
    )
    if not saved["batches"] or (same_ranks and resumes):
        return
    was, size = saved["batch_size"], getattr(loader, "batch_size", None)
    order = order_of(loader)
    if same_ranks:
        _check_same("a batch_size of", was, size)
        _check_same("an order that is", saved.get("kind"), _kind_of_order(loader))
        _check_same("the sampler", saved["order"], order)
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


def _check_same(what: str, was: object, now: object) -> None:
    if was is not None and now is not None and was != now:
        raise CheckpointError(
            f"the checkpoint was saved within a pass through a loader with {what} {was}, and now it is "
            f"{now}, so that what is left of the pass cannot be found. Keep it, or resume from the end of "
            "an epoch."
        )


# Skip the batches of a pass that were used before, without reading them.


@contextmanager
def skip_batches(loader: Any, count: int) -> Iterator[Callable[[], int]]:
    """Context in which an iterator of the loader begins after ``count`` batches, if samples have an index.

    Yields:
        A callable that skips the batches and returns their number.
    """
    by_index = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    if not count or not by_index:
        yield lambda: 0
        return
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    before = getattr(loader, name)
    skips = _SkippingSampler(before, count)
    object.__setattr__(loader, name, skips)  # a DataLoader refuses to set it after construction
    try:
        yield skips.skip
    finally:
        object.__setattr__(loader, name, before)


class _SkippingSampler:
    """A sampler whose next pass, and only that one, omits the first samples."""

    def __init__(self, sampler: Any, count: int) -> None:
        self._sampler, self._count = sampler, count
        self._iterator: Iterator[Any] | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "_sampler":
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        if self._iterator is not None:
            return iter(self._sampler)
        self._iterator = iter(self._sampler)
        return self._after(self._iterator)

    def _after(self, indices: Iterator[Any]) -> Iterator[Any]:
        self.skip()
        yield from indices

    def skip(self) -> int:
        """Skip the first samples, now or earlier; return their number."""
        left, self._count, self._skipped = self._count, 0, getattr(self, "_skipped", 0)
        if left:
            assert self._iterator is not None
            self._skipped += sum(1 for _ in islice(self._iterator, left))
        return self._skipped


_MAX_READ_AHEAD = 4
"""Maximum number of batches read ahead: Lightning reads one ahead of streams."""


@dataclass
class StateBeforeRead:
    """Random state just before the batch was read."""

    moment: RandomStates
    state: Any = None
    """State of a loader or a dataset that has a ``state_dict``."""


@dataclass
class LoaderPosition:
    """The position of one loader, kept up to date while the loader is read."""

    passes: int = 0
    """Passes begun so far."""
    read: int = 0
    """Batches read in the current pass."""
    ended: bool = True
    epoch: int | None = None
    """Epoch that was set on the sampler."""
    begin: RandomStates | None = None
    """Random state before the loader was asked for an iterator."""
    first: RandomStates | None = None
    """Random state before the first batch was read."""
    recent: deque[StateBeforeRead] = field(default_factory=lambda: deque(maxlen=_MAX_READ_AHEAD))
    received: bool = False
    """True if batches come from another rank: this rank does not read its loader."""
    trained: bool = False
    """True if the current pass is trained on; evaluation passes restart instead."""
    resumed: dict[str, Any] | None = None
    """The position at which the next pass begins, if not at its start."""
    counts_epochs: bool = False
    """True if the epochs set on samplers were counted from 0 again."""

    @property
    def finished(self) -> int:
        """Number of complete passes."""
        return self.passes - (not self.ended)

    def start_next_pass_at(self, saved: dict[str, Any], *, counts_epochs: bool = False) -> None:
        """Set the position at which the next pass begins."""
        self.resumed, self.counts_epochs = saved, counts_epochs
        begun = saved["begin"] is not None
        self.passes, self.read, self.ended = saved["passes"], saved["batches"], not begun

    def start_pass(self, loader: Any) -> None:
        """Record the start of a new pass."""
        self.restore_generators(loader)
        if self.counts_epochs:
            _set_sampler_epoch(loader, self.passes)
        self.passes, self.read, self.ended = self.passes + 1, 0, False
        self.trained = False
        self.begin, self.first, self.epoch = RandomStates.now(loader), None, _epoch_of(loader)
        self.recent.clear()

    def restore_generators(self, loader: Any) -> None:
        """Restore the loader's own generators to their saved states."""
        saved = self.resumed
        self.resumed = None
        if saved is not None and saved["now"] is not None:
            saved["now"].restore_own(loader)

    def resume_pass(self, saved: dict[str, Any]) -> None:
        """Record that a pass is resumed."""
        self.passes, self.read, self.ended = saved["passes"], saved["batches"], False
        self.begin, self.first, self.epoch = saved["begin"], saved["first"], saved["epoch"]
        self.trained, self.resumed = True, None
        self.recent.clear()

    def request_batch(self, *, trains: bool) -> None:
        """Record that a next batch was requested, from this rank or another one."""
        self.trained |= trains

    def before_read(self, loader: Any, moment: RandomStates | None = None) -> None:
        """Record that a batch is about to be read here, with the random state of ``moment`` or the
        present one."""
        moment = moment or RandomStates.now(loader)
        self.first = self.first or moment
        self.recent.append(StateBeforeRead(moment, state_of(loader)))

    def after_read(self) -> None:
        """Record that the batch was read."""
        self.read += 1

    def end_pass(self) -> None:
        """Record that the loader had no batch left."""
        self.ended = True
        self.recent.clear()

    def saved(self, loader: Any, waiting: int = 0) -> dict[str, Any]:
        """Return the position after the batches that were used.

        Args:
            loader: the loader.
            waiting: number of batches that were read and not used yet.
        """
        if self.resumed is not None:
            return self.resumed
        if self.ended or not self.trained:
            return position_before_pass(self.passes, RandomStates.now(loader))
        waiting = min(waiting, self.read)
        pending = list(self.recent)[max(0, len(self.recent) - waiting) :]
        state = pending[0].state if pending else None if self.received else state_of(loader)
        return {
            "passes": self.passes,
            "batches": self.read - waiting,
            "batch_size": getattr(loader, "batch_size", None),
            "order": order_of(loader),
            "kind": _kind_of_order(loader),
            "epoch": self.epoch,
            "begin": self.begin,
            "first": self.first,
            "pending": [each.moment for each in pending],
            "now": RandomStates.now(loader),
            "state": state,
        }


def position_before_pass(number: int, now: RandomStates | None = None) -> dict[str, Any]:
    """Return the position before a pass; ``now`` has the loader's own generators."""
    return {"passes": number, "batches": 0, "begin": None, "now": now}


def packed(saved: dict[str, Any]) -> dict[str, Any]:
    """Encode ``LoaderPosition.saved`` for a checkpoint."""
    moments = {name: x.packed() for name, x in saved.items() if isinstance(x, RandomStates)}
    return {**saved, **moments, "pending": [each.packed() for each in saved.get("pending", ())]}


def unpacked(saved: dict[str, Any]) -> dict[str, Any]:
    """Decode what ``packed`` returned."""
    names = [name for name in ("begin", "first", "now") if saved.get(name) is not None]
    moments = {name: RandomStates.unpacked(saved[name]) for name in names}
    return {
        **saved,
        **moments,
        "pending": [RandomStates.unpacked(each) for each in saved["pending"]],
    }


def open_at(loader: Any, saved: dict[str, Any]) -> Iterator[Any]:
    """Open an iterator over the batches after a saved position; the process's random state is unchanged.

    A loader or dataset with a state of its own is given it. In others the sampler is advanced, which reads
    nothing; streams without a state are read from the beginning of the pass.

    Raises:
        CheckpointError: the data ranks would read other samples than the remaining ones.
    """
    check_same_order(loader, saved)
    entry, begin, count = RandomStates.now(), saved["begin"], saved["batches"]
    if saved["epoch"] is not None:
        _set_sampler_epoch(loader, saved["epoch"])
    goes_on = count and (saved["state"] is not None or _resumes_by_itself(loader))
    if saved["state"] is not None:
        _owner_of_state(loader).load_state_dict(saved["state"])
    begin.restore(loader)
    with skip_batches(loader, 0 if goes_on else count) as skip:
        batches = iter(loader)
        if saved["first"] is not None:
            saved["first"].restore(loader)
        skipped = skip()
    for _ in range(0 if goes_on else count - skipped):
        next(batches)
    entry.restore()
    saved["now"].restore_own(loader)
    return batches


def read_with_random_state(moment: RandomStates, loader: Any, read: Callable[[], Any]) -> Any:
    """Read a batch with the random state of its first reading, then restore the present state."""
    entry = RandomStates.now(loader)
    moment.restore(loader)
    try:
        return read()
    finally:
        entry.restore(loader)


def state_of(loader: Any) -> Any:
    """Return the state of a loader or its dataset that can resume by itself; else ``None``."""
    owner = _owner_of_state(loader)
    return None if owner is None else owner.state_dict()


def _owner_of_state(loader: Any) -> Any:
    if _has_state(loader):
        return loader
    dataset = getattr(loader, "dataset", None)
    in_process = isinstance(loader, DataLoader) and not loader.num_workers
    return dataset if in_process and _has_state(dataset) else None


def _has_state(owner: Any) -> bool:
    """True if the object has ``state_dict()`` and ``load_state_dict(state)``, callable with these
    arguments."""
    save, load = (
        getattr(type(owner), "state_dict", None),
        getattr(type(owner), "load_state_dict", None),
    )
    return callable(save) and callable(load) and _needed(save) == 1


def _needed(method: Any) -> int:
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    parameters = signature(method).parameters.values()
    return sum(p.default is p.empty and p.kind in kinds for p in parameters)


def _resumes_by_itself(loader: Any) -> bool:
    """True if a sampler asks the Trainer for its position."""
    return bool(getattr(getattr(loader, "sampler", None), "resumes_by_itself", False))


def _epoch_of(loader: Any) -> int | None:
    for sampler in (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
        epoch = getattr(getattr(sampler, "sampler", sampler), "epoch", None)
        epoch = getattr(sampler, "epoch", epoch)
        if isinstance(epoch, int):
            return epoch
    return None

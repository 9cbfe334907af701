"""Where a loader is: which way through it, how many batches of that, and what the random numbers were."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import Parameter, signature
from itertools import islice
from typing import Any

from lightning.fabric.utilities.data import _set_sampler_epoch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from lightning_cp.errors import CheckpointError
from lightning_cp.loaders.rng import RandomStates

# The order of samples, where data ranks or batches are others than before.
#
# The place of a loader is a number of steps, so a step has to use as many samples as before: then what was
# used, over all ranks, is the beginning of an order that all meshes share: nothing is repeated or left out.


def order_of(loader: Any) -> str | None:
    """A name that two loaders share if they deal one order out to data ranks; ``None``: nobody knows."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    plain = loader.batch_sampler is None or type(loader.batch_sampler) is BatchSampler
    if not plain or not isinstance(sampler, DistributedSampler):
        return None
    return f"{type(sampler).__name__}, shuffle={sampler.shuffle}, seed={sampler.seed}"


def require_same_order(loader: Any, saved: Mapping[str, Any]) -> None:
    """Refuse to go on within a pass where what is left of it would not be read.

    As many data ranks go on by the state of a loader that has one; without one, and without a known order or
    batch_size, nobody can tell, and the loader is taken for the same.

    Raises:
        CheckpointError: saying what has to be equal.
    """
    before, now = saved.get("ranks", (1, 1))
    same_ranks = before == now
    if not saved["batches"] or (same_ranks and saved["state"] is not None):
        return
    was, size = saved["batch_size"], getattr(loader, "batch_size", None)
    order = order_of(loader)
    if same_ranks:
        _require_same_pass((saved["order"], order), (was, size))
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


def _require_same_pass(
    orders: tuple[str | None, str | None], sizes: tuple[int | None, int | None]
) -> None:
    for what, (was, now) in (("a batch_size of", sizes), ("the sampler", orders)):
        if was is not None and now is not None and was != now:
            raise CheckpointError(
                f"the checkpoint was saved within a pass through a loader with {what} {was}, and now it is "
                f"{now}, so that what is left of the pass cannot be found. Keep it, or resume from the end "
                "of an epoch."
            )


# Leaving out the batches of a pass that were used before, without reading them.


@contextmanager
def skipping(loader: Any, count: int) -> Iterator[Callable[[], int]]:
    """Within the block, an iterator of the loader begins after ``count`` batches, if samples have an index.

    Yields:
        What skips them, and says how many it has skipped.
    """
    by_index = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    if not count or not by_index:
        yield lambda: 0
        return
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    before = getattr(loader, name)
    skips = _Skips(before, count)
    object.__setattr__(loader, name, skips)  # a DataLoader refuses it once it is made
    try:
        yield skips.skip
    finally:
        object.__setattr__(loader, name, before)


class _Skips:
    """A sampler whose next pass, and only that one, leaves out what comes first."""

    def __init__(self, sampler: Any, count: int) -> None:
        self._sampler, self._count = sampler, count
        self._going: Iterator[Any] | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "_sampler":
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        if self._going is not None:
            return iter(self._sampler)
        self._going = iter(self._sampler)
        return self._after(self._going)

    def _after(self, indices: Iterator[Any]) -> Iterator[Any]:
        self.skip()
        yield from indices

    def skip(self) -> int:
        """Take the first ones, now or before; how many."""
        left, self._count, self._skipped = self._count, 0, getattr(self, "_skipped", 0)
        if left:
            assert self._going is not None
            self._skipped += sum(1 for _ in islice(self._going, left))
        return self._skipped


_KEPT = 4
"""Batches that may be read and not trained on: Lightning reads one ahead of streams."""


@dataclass
class Reading:
    """Just before a batch is read."""

    moment: RandomStates
    state: Any = None
    """Of a loader or a dataset that has a ``state_dict``."""


@dataclass
class LoaderPosition:
    """Of one loader, kept up to date while it is read."""

    passes: int = 0
    """Begun so far."""
    read: int = 0
    """Batches of the current one."""
    ended: bool = True
    epoch: int | None = None
    """What the sampler was told."""
    begin: RandomStates | None = None
    """Before the loader was asked for an iterator."""
    first: RandomStates | None = None
    """Before the first batch was read."""
    recent: deque[Reading] = field(default_factory=lambda: deque(maxlen=_KEPT))
    received: bool = False
    """Batches come from another rank: this one's loader is not read."""
    trained: bool = False
    """On a batch of the current pass, or about to; passes of an evaluation begin anew."""
    resumed: dict[str, Any] | None = None
    """Where the next pass begins, if not at its beginning."""
    counts_epochs: bool = False
    """Whoever tells samplers the epoch has begun to count anew."""

    @property
    def finished(self) -> int:
        """Passes."""
        return self.passes - (not self.ended)

    def begin_from(self, saved: dict[str, Any], *, counts_epochs: bool = False) -> None:
        """Have the next pass begin there."""
        self.resumed, self.counts_epochs = saved, counts_epochs
        begun = saved["begin"] is not None
        self.passes, self.read, self.ended = saved["passes"], saved["batches"], not begun

    def begins(self, loader: Any) -> None:
        """A new way through the loader."""
        self.take_generators(loader)
        if self.counts_epochs:
            _set_sampler_epoch(loader, self.passes)
        self.passes, self.read, self.ended = self.passes + 1, 0, False
        self.trained = False
        self.begin, self.first, self.epoch = RandomStates.now(loader), None, _epoch_of(loader)
        self.recent.clear()

    def take_generators(self, loader: Any) -> None:
        """Have the loader's own ones go on from where they were."""
        saved = self.resumed
        self.resumed = None
        if saved is not None and saved["now"] is not None:
            saved["now"].restore_own(loader)

    def goes_on(self, saved: dict[str, Any]) -> None:
        """A way through the loader is resumed."""
        self.passes, self.read, self.ended = saved["passes"], saved["batches"], False
        self.begin, self.first, self.epoch = saved["begin"], saved["first"], saved["epoch"]
        self.trained, self.resumed = True, None
        self.recent.clear()

    def asked(self, *, trains: bool) -> None:
        """There is to be a next batch, read here or by another rank."""
        self.trained |= trains

    def reads(self, loader: Any, moment: RandomStates | None = None) -> None:
        """It is about to be read here, as at that moment or now."""
        moment = moment or RandomStates.now(loader)
        self.first = self.first or moment
        self.recent.append(Reading(moment, state_of(loader)))

    def has_read(self) -> None:
        """It was."""
        self.read += 1

    def ends(self) -> None:
        """There was none."""
        self.ended = True
        self.recent.clear()

    def saved(self, loader: Any, waiting: int = 0) -> dict[str, Any]:
        """The place after the batches that were used.

        Args:
            loader: the loader.
            waiting: how many of the batches that were read have not been used yet.
        """
        if self.resumed is not None:
            return self.resumed
        if self.ended or not self.trained:
            return at_pass(self.passes, RandomStates.now(loader))
        waiting = min(waiting, self.read)
        pending = list(self.recent)[max(0, len(self.recent) - waiting) :]
        state = pending[0].state if pending else None if self.received else state_of(loader)
        return {
            "passes": self.passes,
            "batches": self.read - waiting,
            "batch_size": getattr(loader, "batch_size", None),
            "order": order_of(loader),
            "epoch": self.epoch,
            "begin": self.begin,
            "first": self.first,
            "pending": [each.moment for each in pending],
            "now": RandomStates.now(loader),
            "state": state,
        }


def at_pass(number: int, now: RandomStates | None = None) -> dict[str, Any]:
    """The place before a way through the loader; ``now`` has the loader's own generators."""
    return {"passes": number, "batches": 0, "begin": None, "now": now}


def packed(saved: dict[str, Any]) -> dict[str, Any]:
    """``LoaderPosition.saved``, as what a checkpoint may hold."""
    moments = {name: x.packed() for name, x in saved.items() if isinstance(x, RandomStates)}
    return {**saved, **moments, "pending": [each.packed() for each in saved.get("pending", ())]}


def unpacked(saved: dict[str, Any]) -> dict[str, Any]:
    """The values that ``packed`` was made of."""
    names = [name for name in ("begin", "first", "now") if saved.get(name) is not None]
    moments = {name: RandomStates.unpacked(saved[name]) for name in names}
    return {
        **saved,
        **moments,
        "pending": [RandomStates.unpacked(each) for each in saved["pending"]],
    }


def reopen(loader: Any, saved: dict[str, Any]) -> Iterator[Any]:
    """An iterator over what comes after a saved place; the process's random state is left as it is.

    A loader or dataset with a state of its own is given it. In others the sampler is gone through again,
    which reads nothing; streams without a state are read again from the beginning of the pass.

    Raises:
        CheckpointError: other data ranks would read other samples than those that are left.
    """
    require_same_order(loader, saved)
    entry, begin, count = RandomStates.now(), saved["begin"], saved["batches"]
    if saved["epoch"] is not None:
        _set_sampler_epoch(loader, saved["epoch"])
    goes_on = count and (saved["state"] is not None or _goes_on_by_itself(loader))
    if saved["state"] is not None:
        _owner_of_state(loader).load_state_dict(saved["state"])
    begin.restore(loader)
    with skipping(loader, 0 if goes_on else count) as skip:
        batches = iter(loader)
        if saved["first"] is not None:
            saved["first"].restore(loader)
        skipped = skip()
    for _ in range(0 if goes_on else count - skipped):
        next(batches)
    entry.restore()
    saved["now"].restore_own(loader)
    return batches


def read_as_before(moment: RandomStates, loader: Any, read: Callable[[], Any]) -> Any:
    """Read a batch with the random numbers that it was read with; then they go on as if it had not been."""
    entry = RandomStates.now(loader)
    moment.restore(loader)
    try:
        return read()
    finally:
        entry.restore(loader)


def state_of(loader: Any) -> Any:
    """The state of a loader or of its dataset that can go on by itself, else ``None``."""
    owner = _owner_of_state(loader)
    return None if owner is None else owner.state_dict()


def _owner_of_state(loader: Any) -> Any:
    if _has_state(loader):
        return loader
    dataset = getattr(loader, "dataset", None)
    in_process = isinstance(loader, DataLoader) and not loader.num_workers
    return dataset if in_process and _has_state(dataset) else None


def _has_state(owner: Any) -> bool:
    """True if it has ``state_dict()`` and ``load_state_dict(state)``, called with nothing else."""
    methods = [getattr(type(owner), name, None) for name in ("state_dict", "load_state_dict")]
    return all(callable(method) for method in methods) and _needed(methods[0]) == 1


def _needed(method: Any) -> int:
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    parameters = signature(method).parameters.values()
    return sum(p.default is p.empty and p.kind in kinds for p in parameters)


def _goes_on_by_itself(loader: Any) -> bool:
    """A sampler that asks the Trainer where it is."""
    return bool(getattr(getattr(loader, "sampler", None), "goes_on_by_itself", False))


def _epoch_of(loader: Any) -> int | None:
    for sampler in (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
        epoch = getattr(getattr(sampler, "sampler", sampler), "epoch", None)
        epoch = getattr(sampler, "epoch", epoch)
        if isinstance(epoch, int):
            return epoch
    return None

"""Where a loader is: which way through it, how many batches of that, and what the random numbers were."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from inspect import Parameter, signature
from typing import Any

from lightning.fabric.utilities.data import _set_sampler_epoch
from torch.utils.data import DataLoader

from lightning_cp.strategies.resume.order import order_of, require_same_order
from lightning_cp.strategies.resume.random_state import Moment
from lightning_cp.strategies.resume.skipping import skipping

_KEPT = 4
"""Batches that may be read and not trained on: Lightning reads one ahead of streams."""


@dataclass
class Reading:
    """Just before a batch is read."""

    moment: Moment
    state: Any = None
    """Of a loader or a dataset that has a ``state_dict``."""


@dataclass
class Place:
    """Of one loader, kept up to date while it is read."""

    passes: int = 0
    """Begun so far."""
    read: int = 0
    """Batches of the current one."""
    ended: bool = True
    epoch: int | None = None
    """What the sampler was told."""
    begin: Moment | None = None
    """Before the loader was asked for an iterator."""
    first: Moment | None = None
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
        self.begin, self.first, self.epoch = Moment.now(loader), None, _epoch_of(loader)
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

    def reads(self, loader: Any, moment: Moment | None = None) -> None:
        """It is about to be read here, as at that moment or now."""
        moment = moment or Moment.now(loader)
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
            return at_pass(self.passes, Moment.now(loader))
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
            "now": Moment.now(loader),
            "state": state,
        }


def at_pass(number: int, now: Moment | None = None) -> dict[str, Any]:
    """The place before a way through the loader; ``now`` has the loader's own generators."""
    return {"passes": number, "batches": 0, "begin": None, "now": now}


def packed(saved: dict[str, Any]) -> dict[str, Any]:
    """``Place.saved``, as what a checkpoint may hold."""
    moments = {name: x.packed() for name, x in saved.items() if isinstance(x, Moment)}
    return {**saved, **moments, "pending": [each.packed() for each in saved.get("pending", ())]}


def unpacked(saved: dict[str, Any]) -> dict[str, Any]:
    """The values that ``packed`` was made of."""
    names = [name for name in ("begin", "first", "now") if saved.get(name) is not None]
    moments = {name: Moment.unpacked(saved[name]) for name in names}
    return {**saved, **moments, "pending": [Moment.unpacked(each) for each in saved["pending"]]}


def reopen(loader: Any, saved: dict[str, Any]) -> Iterator[Any]:
    """An iterator over what comes after a saved place; the process's random state is left as it is.

    A loader or dataset with a state of its own is given it. In others the sampler is gone through again,
    which reads nothing; streams without a state are read again from the beginning of the pass.

    Raises:
        CheckpointError: other data ranks would read other samples than those that are left.
    """
    require_same_order(loader, saved)
    entry, begin, count = Moment.now(), saved["begin"], saved["batches"]
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


def read_as_before(moment: Moment, loader: Any, read: Callable[[], Any]) -> Any:
    """Read a batch with the random numbers that it was read with; then they go on as if it had not been."""
    entry = Moment.now(loader)
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

"""Synchronized loaders: all ranks iterate in step, and no rank waits for a batch that another one lacks.

Before a batch is used, ranks exchange whether they have one, are at the end, or failed. With
``batch_sync="broadcast"`` the first rank of each cp group reads and sends its batches to the others.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import DataLoader, IterableDataset

from lightning_cp.comm.consensus import gather_by_vote
from lightning_cp.config import StrategyConfig
from lightning_cp.errors import ConfigError
from lightning_cp.layout.axes import Flat
from lightning_cp.loaders.iterator import RECEIVES, UNSIZED, SynchronizedIterator, check_lengths
from lightning_cp.loaders.position import LoaderPosition
from lightning_cp.loaders.samplers import agree_on_order, check_data_sharding
from lightning_cp.mesh import ContextParallelMesh

# A proxy in front of a loader that replaces only its iterator.


class LoaderProxy:
    """A proxy with all attributes of the loader, ``__dict__`` included, which Fabric reads.

    Attributes are set on the loader: Lightning ends workers by setting ``_iterator``.
    """

    __slots__ = ("_loader",)

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __bool__(self) -> bool:
        return bool(self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # half constructed or half unpickled
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(type(self), name):
            object.__setattr__(self, name, value)
        else:
            setattr(self._loader, name, value)

    @property
    def __class__(self) -> type:  # type: ignore[override]
        """The loader's class, for ``isinstance`` checks of Lightning and callbacks.

        Lists and dicts keep the proxy's class: code that maps over collections would iterate over the
        batches.
        """
        loader = object.__getattribute__(self, "_loader")
        return type(self) if isinstance(loader, (Sequence, Mapping)) else type(loader)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as the loader itself: ranks belong to one run."""
        return _itself, (self._loader,)

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        return getattr(self._loader, "__dict__", {})


def _itself(loader: Any) -> Any:
    return loader


class MeshOwner(Protocol):
    """The run of a loader: its settings, and its mesh once that exists."""

    @property
    def settings(self) -> StrategyConfig:
        """The user's settings."""
        ...

    @property
    def mesh(self) -> ContextParallelMesh:
        """The mesh; raises ``ConfigError`` before it exists."""
        ...


class SharedLoader(LoaderProxy):
    """A loader that all ranks of one run iterate over in step.

    Args:
        loader: a ``DataLoader``, or anything that can be iterated.
        run: the owner of the mesh; without it (the strategy is gone) this is the plain loader.
        number: index of the loader in the run, the same on all ranks.
        trains: returns whether the next fetch is for training. Then data ranks advance together, too: they
            average gradients, so all of them need the same number of batches.
    """

    __slots__ = (
        "__weakref__",
        "_before_pass",
        "_before_training",
        "_length",
        "_number",
        "_place",
        "_run",
        "_trains",
    )

    def __init__(
        self,
        loader: Any,
        run: MeshOwner,
        number: int,
        trains: Callable[[], bool],
    ) -> None:
        super().__init__(loader)
        self._run = weakref.ref(run)
        self._number, self._trains = number, trains
        self._length: int | None = None
        self._place = LoaderPosition()
        self._before_pass: Callable[[], object] = bool
        self._before_training: Callable[[], object] = bool

    def saved_place(self, waiting: int = 0) -> dict[str, Any]:
        """Return this rank's position, without the last ``waiting`` batches, which were not used yet."""
        return self._place.saved(self._loader, waiting)

    @property
    def place(self) -> LoaderPosition:
        """The position of the loader after the last batch read."""
        return self._place

    def set_callbacks(
        self,
        *,
        before_pass: Callable[[], object] = bool,
        before_training: Callable[[], object] = bool,
    ) -> None:
        """Set functions to call before each pass, and before each batch to train on is read."""
        self._before_pass, self._before_training = before_pass, before_training

    def __iter__(self) -> Iterator[Any]:
        mesh = self._mesh()
        if mesh is None:
            return iter(self._loader)
        if self._length is None:
            self.agree_on_length()
        self._before_pass()
        return SynchronizedIterator(
            self._loader,
            mesh,
            number=self._number,
            broadcasts=self._broadcasts,
            trains=self._trains,
            together=self._together,
            is_stream=is_stream(self._loader),
            place=self._place,
            before_training=self._before_training,
        )

    def __len__(self) -> int:
        if not self._broadcasts or self._length is None:
            return len(self._loader)
        if self._length == UNSIZED:
            raise TypeError(f"{type(self._loader).__name__} of the reading rank has no length")
        return self._length

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state, if it has one; Lightning looks for this method on the class."""
        own = getattr(self._loader, "state_dict", None)
        return own() if own is not None else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a loader that has one."""
        if state_dict:
            self._loader.load_state_dict(state_dict)

    def agree_on_length(self, *, training: bool = False, at_most: int | None = None) -> None:
        """Compare the numbers of batches; ranks that only receive take the reading rank's.

        Args:
            training: all ranks need the same number, not just those that share samples.
            at_most: number of batches of a pass that are used.

        Raises:
            ConfigError: a sampler that shards over something other than data ranks.
            BatchMismatchError: the lengths differ.
            RankFailure: another rank's loader was refused.
        """
        mesh = self._mesh()
        if mesh is None:
            return
        reads = not self._broadcasts or mesh.sample_rank == 0
        error: Exception | None = None
        own = RECEIVES
        try:
            if reads:
                check_data_sharding(self._loader, mesh.data_size, mesh.data_rank)
                length = sized_len(self._loader)
                own = UNSIZED if length is None else length
        except Exception as refused:
            error = refused
        group = mesh.control_group(Flat.LOSS)
        lengths = gather_by_vote(own, group, what="loader's length", error=error)
        check_lengths(lengths, group, mesh.sample_size, training=training, at_most=at_most)
        self._length = lengths[mesh.data_rank * mesh.sample_size]

    @property
    def _together(self) -> bool:
        run = self._run()
        return run is not None and run.settings.forward_is_shared

    @property
    def _broadcasts(self) -> bool:
        run = self._run()
        return run is not None and run.settings.batch_sync == "broadcast"

    def _mesh(self) -> ContextParallelMesh | None:
        """The mesh; ``None`` if ranks share no samples: without a strategy, or (Fabric) before the
        model."""
        run = self._run()
        try:
            return None if run is None else run.mesh
        except ConfigError:
            if self._broadcasts:
                raise
            return None


def unwrap_loader(loader: Any) -> Any:
    """Return the loader behind a proxy: a ``CombinedLoader`` keeps the loaders it was given."""
    return loader._loader if isinstance(loader, SharedLoader) else loader


def cp_group_of(run: MeshOwner) -> Callable[[], dist.ProcessGroup | None]:
    """Return the ranks that draw one order of samples: the cp group, or this rank where it reads for
    all."""
    known = weakref.ref(run)

    def group() -> dist.ProcessGroup | None:
        run = known()
        if run is None or run.settings.batch_sync == "broadcast":
            return None
        try:
            return run.mesh.control_group(Flat.CP)
        except ConfigError:  # Fabric, before the model is set up
            return None

    return group


def is_stream(loader: Any) -> bool:
    """True if no sampler orders the samples."""
    return not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset)


class LoaderSynchronizer:
    """Loaders of one run: all ranks go through them together, and their workers are seeded alike.

    Args:
        owner: the run.
    """

    def __init__(self, owner: MeshOwner) -> None:
        self._owner = owner
        self._count = 0

    def seed_workers(self, dataloader: object, data_rank: int, *, overwrite: bool) -> None:
        """Seed workers by the data rank: ranks that share a sample draw the same numbers.

        Lightning seeds them by the global rank.
        """
        if not isinstance(dataloader, DataLoader) or not int(
            os.environ.get("PL_SEED_WORKERS", "0")
        ):
            return
        if overwrite or dataloader.worker_init_fn is None:
            dataloader.worker_init_fn = partial(pl_worker_init_function, rank=data_rank)

    def share(
        self,
        dataloader: Any,
        trains: Callable[[], bool],
        *,
        training: bool = False,
        at_most: int | None = None,
    ) -> SharedLoader:
        """Return a loader that all ranks go through together, and that knows how far it was read.

        Args:
            dataloader: the user's.
            trains: whether the next fetch is for training.
            training: all ranks need the same number of batches.
            at_most: batches of a pass that are used.

        Raises:
            ConfigError, BatchMismatchError, RankFailure: as ``SharedLoader.agree_on_length``.
        """
        if self._owner.settings.data_parallel_size == 1 and isinstance(dataloader, DataLoader):
            agree_on_order(dataloader, cp_group_of(self._owner))
        self._count += 1
        shared = SharedLoader(dataloader, self._owner, self._count, trains)
        shared.agree_on_length(training=training, at_most=at_most)
        return shared

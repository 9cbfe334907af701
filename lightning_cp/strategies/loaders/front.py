"""Loaders of both strategies: gone through by all ranks together, their workers seeded alike."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import DataLoader

from lightning_cp.strategies.loaders.order import agree_on_order
from lightning_cp.strategies.loaders.shared import SharedLoader, cp_group_of


class LoadsTogether:
    """Comes before a ``DDPStrategy``."""

    _loaders = 0

    def _seed_workers(self: Any, dataloader: object, *, overwrite: bool) -> None:
        """Lightning seeds by the global rank; ranks that share a sample must draw the same numbers."""
        if not isinstance(dataloader, DataLoader) or not int(
            os.environ.get("PL_SEED_WORKERS", "0")
        ):
            return
        if overwrite or dataloader.worker_init_fn is None:
            dataloader.worker_init_fn = partial(pl_worker_init_function, rank=self.data_rank)

    def _share(
        self: Any,
        dataloader: Any,
        trains: Callable[[], bool],
        *,
        training: bool = False,
        at_most: int | None = None,
    ) -> Any:
        """The loader, to be gone through by all ranks together; it knows how far it was read."""
        if self.data_parallel_size == 1 and isinstance(dataloader, DataLoader):
            agree_on_order(dataloader, cp_group_of(self._core))
        self._loaders += 1
        shared = SharedLoader(dataloader, self._core, self._loaders, trains)
        shared.agree_on_length(training=training, at_most=at_most)
        return shared

"""Before the first batch: processes are there, know each other, and have a mesh."""

from __future__ import annotations

from multiprocessing.util import Finalize
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_cp import console
from lightning_cp.errors import ConfigError
from lightning_cp.strategies.arguments.contradictions import check_backend
from lightning_cp.strategies.engines.tensor_parallel import is_shared
from lightning_cp.strategies.launch.end import let_gloo_rest_at_exit
from lightning_cp.strategies.launch.ranks import check_ranks
from lightning_cp.strategies.launch.sweeps import refuse_foreign_launcher
from lightning_cp.strategies.watch.launchers import reporting
from lightning_cp.strategies.watch.run import name_of
from lightning_cp.strategies.watch.same import require_same_start


class Processes:
    """Comes before a ``DDPStrategy``, which has the launcher and the environment."""

    _ends_watch = False
    """Its end is the watch's, too."""

    def tell_rank(self: Any) -> None:
        """Have Lightning know which rank a worker is, before it says anything as the first one."""
        tell = getattr(self, "set_world_ranks", None) or self._set_world_ranks  # Fabric's
        tell()

    def _hide_library_warnings(self: Any) -> None:
        """On ranks that are not the first; also those of loggers that were made since the last call."""
        if self.global_rank > 0:
            self._library_warnings.hide()

    def _check_ranks(self: Any) -> None:
        """Where no sample is shared, whoever trains finds out, as with DDP."""
        if self._settings.context_parallel_size != 1:
            check_ranks(
                *(self.cluster_environment, self._start_method, self.num_processes, self.num_nodes)
            )

    def _configure_launcher(self: Any) -> None:
        parent: Any = super()
        parent._configure_launcher()
        self._launcher = reporting(self._launcher)

    def _begin_watch(self: Any, trainer: Any = None) -> None:
        settings, started = self._core.settings, bool(getattr(self.launcher, "procs", None))
        name = name_of(self.global_rank, self.world_size, settings)
        console.take(console.Seat(self.global_rank, name, self.num_processes, launches=started))
        require_same_start(settings, trainer, self._chosen_besides())
        address = self.cluster_environment.main_address
        handles = trainer is not None  # the Trainer stops all ranks at one step
        self._core.watch.begin(settings, address, self.launcher, handles_sigterm=handles)
        if not self._ends_watch:  # there may be many stages
            self._ends_watch = True
            # Not the core's method: the core knows the model, that the Trainer, and that this strategy.
            # Nor weakref.finalize: a forked process ends without atexit, and would be taken for killed.
            Finalize(self, self._core.watch.stop, exitpriority=1)
            Finalize(self, self._core.progress.forget, exitpriority=1)
            let_gloo_rest_at_exit()

    def _chosen_besides(self: Any) -> dict[str, object]:
        """Settings of Lightning's that ranks have to agree on."""
        plugin = self.precision_plugin if hasattr(self, "precision_plugin") else self.precision
        precision = (type(plugin).__qualname__, getattr(plugin, "precision", None))
        return {**self._ddp_options, **vars(self._comm_hook), "precision": precision}

    def _check_launcher(self: Any) -> None:
        check_backend(self._process_group_backend)
        processes = self.num_nodes * self.num_processes
        refuse_foreign_launcher(self.cluster_environment, self._start_method, processes)

    def _check_world(self: Any) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        if world != self.world_size:
            raise ConfigError(
                f"the Trainer wants {self.world_size} processes, but torch.distributed was initialised with "
                f"{world} before. Start a fresh process for each run."
            )
        if rank != self.global_rank:  # a worker that was forked with its parent's group
            raise ConfigError(
                f"this process is rank {self.global_rank}, but torch.distributed was initialised as rank "
                f"{rank} before. Start a fresh process for each run."
            )

    def _build_mesh(
        self: Any, model: nn.Module | None = None, num_heads: int | None = None
    ) -> None:
        if model is not None and is_shared(model):
            model = None  # it tells of a rank's own heads; they were looked at when it was shared
        self._hide_library_warnings()
        self._core.end_other_steps()
        factors = self._core.build_mesh(
            self.world_size, self.root_device.type, self.num_processes, model, num_heads
        )
        if factors is not None:
            rank_zero_info(
                f"context parallel: ulysses {factors.ulysses_size} x ring {factors.ring_size} "
                f"({factors.why}), data parallel {self.data_parallel_size}, layout "
                f"{self._core.settings.layout}"
            )

"""ContextParallelCallback: where a batch is sharded, outputs are unsharded, and logs are averaged.

The strategy attaches one by itself. Subclass it and pass yours to the Trainer to change how batches
become shards; the hooks below are called by the strategy at the right moment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral, Real
from typing import Any, Protocol

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_cp.errors import ConfigError
from lightning_cp.mesh import ContextParallelMesh, Flat
from lightning_cp.step_log import StepLog


class Core(Protocol):
    """What the callback needs of the strategy's core."""

    @property
    def in_step(self) -> bool: ...
    def shard(self, batch: Any, *, needs_labels: bool) -> Any: ...
    def unshard(self, output: Any, dims: Mapping[str, int | None]) -> Any: ...
    def average(self, value: torch.Tensor) -> torch.Tensor: ...
    def average_all(self, values: list[torch.Tensor]) -> list[torch.Tensor]: ...
    def names_on_every_rank(self, names: list[str]) -> set[str]: ...
    def end_step(self) -> None: ...
    @property
    def mesh(self) -> ContextParallelMesh: ...


class ContextParallelCallback(Callback):
    """Shards batches, unshards predictions, and makes ``self.log`` show what one process would log."""

    def __init__(self) -> None:
        self._core: Core | None = None
        self._logging_module: LightningModule | None = None
        self._step_log = StepLog()

    def connect(self, core: Core) -> None:
        """Called by the strategy before anything else."""
        self._core = core

    @property
    def core(self) -> Core:
        """The strategy's core.

        Raises:
            ConfigError: the Trainer has another strategy.
        """
        if self._core is None:
            raise ConfigError(
                "ContextParallelCallback needs the context-parallel strategy: "
                "Trainer(strategy='ulysses_ring'), "
                "or strategy=UlyssesRingStrategy(...)."
            )
        return self._core

    def shard_batch(self, batch: Any, *, needs_labels: bool) -> Any:
        """The local part of a batch; override to shard containers of your own."""
        return self.core.shard(batch, needs_labels=needs_labels)

    def unshard_output(self, output: Any, dims: Mapping[str, int | None]) -> Any:
        """What ``predict_step`` returned, in original order and length."""
        return self.core.unshard(output, dims)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a foreign strategy; average what the module logs inside a step."""
        core = self.core
        if self._logging_module is not None:
            return
        own_log = pl_module.log

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            if not core.in_step or kwargs.get("rank_zero_only") or not _is_mean(value):
                own_log(name, value, *args, **kwargs)
                return

            def emit(value: torch.Tensor, shared: bool) -> None:
                options = {**_sync_options(core.mesh), **kwargs} if shared else kwargs
                own_log(name, value, *args, **options)

            value = value if isinstance(value, torch.Tensor) else torch.tensor(float(value))
            if self._step_log.open:
                self._step_log.add(name, value, emit)
            else:  # a hook between the step and its end
                emit(core.average(value), True)

        object.__setattr__(pl_module, "log", log)
        self._logging_module = pl_module

    @contextmanager
    def logging_together(self) -> Iterator[None]:
        """While a step function runs: what it logs is averaged when it ends."""
        if not self.core.in_step:
            yield
            return
        self._step_log.begin()
        try:
            yield
            self._step_log.end(self.core)
        finally:
            self._step_log.drop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the module as it was."""
        self._release()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Leave the module as it was, after an error too."""
        self._release()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Backward is over: the model is the plain model until the next batch."""
        self.core.end_step()

    def _release(self) -> None:
        if self._core is not None:
            self._core.end_step()
        module, self._logging_module = self._logging_module, None
        if module is not None:
            module.__dict__.pop("log", None)


def callback_among(callbacks: list[Any]) -> ContextParallelCallback:
    """The one of a Trainer's callbacks; put in front of them if there is none.

    Raises:
        ConfigError: there are several.
    """
    found = [callback for callback in callbacks if isinstance(callback, ContextParallelCallback)]
    if len(found) > 1:
        raise ConfigError(
            f"the Trainer has {len(found)} ContextParallelCallbacks; pass at most one (the strategy adds one "
            "by itself)."
        )
    if not found:
        found = [ContextParallelCallback()]
        callbacks.insert(0, found[0])
    return found[0]


def _is_mean(value: Any) -> bool:
    """Floating-point scalars are means over targets; metrics and counts synchronise themselves."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and value.is_floating_point()
    return isinstance(value, Real) and not isinstance(value, Integral)  # NumPy's own as well


def _sync_options(mesh: ContextParallelMesh) -> dict[str, Any]:
    """What is left to synchronise once the cp group agrees: ranks with other samples, if there are any."""
    options: dict[str, Any] = {"sync_dist_group": mesh.group(Flat.DATA)}
    return options if mesh.data_size > 1 else {**options, "sync_dist": True}

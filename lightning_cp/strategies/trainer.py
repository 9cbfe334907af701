"""The Trainer's strategy: DDPStrategy with a sequence dimension."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_cp.callback import ContextParallelCallback, callback_among
from lightning_cp.errors import ConfigError
from lightning_cp.mesh import ContextParallelMesh
from lightning_cp.mixin import options_of
from lightning_cp.strategies._core import ContextParallelCore
from lightning_cp.strategies.engines import engine
from lightning_cp.strategies.engines.ddp import check_options
from lightning_cp.strategies.settings import Settings


class UlyssesRingStrategy(DDPStrategy):
    """Puts the sequence on a mesh axis: Ulysses inside, a ring outside, data parallel around both.

    An unmodified ``training_step`` gives the loss, gradients and weights of one process.

    Args:
        context_parallel_size: ranks that share a sample; ``auto``: all that data parallelism leaves.
        mode: ``auto`` (Ulysses as far as the heads allow, ring for the rest), ``ulysses``, ``ring`` or
            ``hybrid``; ``ulysses_only`` and ``ring_only`` are aliases.
        ulysses_size: ranks that trade sequence for heads; must divide the number of heads.
        ring_size: ranks that K/V travel around.
        num_heads: query heads, if the mesh is wanted before the model exists or the model does not tell.
        exchange: how keys and values move on the ring axis: ``ring``.
        forward_execution: ``two_kernel``.
        backward_execution: ``two_kernel``.
        data_parallel: the engine: ``ddp``.
        data_parallel_size: groups of ranks with different samples.
        data_parallel_replicate_size: 1.
        tensor_parallel_size: 1.
        layout: ``auto``, ``zigzag`` or ``contiguous``.
        kernel: ``auto``, ``aten``, ``reference``, or one kernel's own name.
        token_weighting: ``micro_batch``: the loss is the mean over each micro-batch.
        loss_reduction: ``mean`` over targets.
        labels: ``auto`` (Hugging Face models that are called with labels: shifted on the whole sequence),
            ``shift`` (the same, and the step takes its targets from ``batch["shift_labels"]``) or
            ``aligned`` (labels[i] is the target of token i), which any other module must declare.
        label_key: dotted name of the labels in a batch; an index for tuples: ``"1"``.
        sequence_dims: dotted name of a batch tensor -> its sequence dimension, ``None`` to replicate it.
        padding: pad sequences that do not divide, which is exact; ``False`` refuses them.
        parity_check: ``off`` or ``None``.
        **kwargs: as for ``DDPStrategy`` (``process_group_backend``, ``timeout``, ``start_method``, ...).

    Raises:
        ConfigError: a setting that is unknown, not available yet, or contradicts another one.
    """

    def __init__(
        self,
        context_parallel_size: int | str = "auto",
        mode: str = "auto",
        ulysses_size: int | None = None,
        ring_size: int | None = None,
        num_heads: int | None = None,
        exchange: str = "ring",
        forward_execution: str = "two_kernel",
        backward_execution: str = "two_kernel",
        data_parallel: str = "ddp",
        data_parallel_size: int = 1,
        data_parallel_replicate_size: int = 1,
        tensor_parallel_size: int = 1,
        layout: str = "auto",
        kernel: str = "auto",
        token_weighting: str = "micro_batch",  # noqa: S107 - no password
        loss_reduction: str = "mean",
        labels: str = "auto",
        label_key: str = "labels",
        sequence_dims: Mapping[str, int | None] | None = None,
        padding: bool = True,
        parity_check: str | None = "off",
        **kwargs: Any,
    ) -> None:
        settings = Settings.take(locals())
        super().__init__(**kwargs)
        check_options(self._ddp_kwargs)
        self._core = ContextParallelCore(settings)
        self._engine = engine(data_parallel)
        self._callback: ContextParallelCallback | None = None
        self._announced: weakref.ref[LightningModule] | None = None

    # -- who this rank is ------------------------------------------------------------------------

    @property
    def mesh(self) -> ContextParallelMesh:
        """The process groups; available from setup on, earlier if the number of heads is given."""
        return self._core.mesh

    @property
    def data_parallel_size(self) -> int:
        """Groups of ranks with different samples: what samplers shard over, not the world size."""
        return self._core.settings.data_parallel_size

    @property
    def data_rank(self) -> int:
        """Which of the ``data_parallel_size`` samples this rank works on."""
        return self.mesh.data_rank

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.data_parallel_size, "rank": self.data_rank}

    # -- before the first batch ------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        self._attach_callback()
        super().setup_environment()
        world = dist.get_world_size()
        if world != self.world_size:
            raise ConfigError(
                f"the Trainer wants {self.world_size} processes, but torch.distributed was initialised with "
                f"{world} before. Start a fresh process for each run."
            )
        self._build_mesh()

    @override
    def setup(self, trainer: Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        options = options_of(module)
        self._build_mesh(module, options.get("num_heads"))
        for step in ("training_step", "validation_step", "test_step", "predict_step"):
            _refuse_dataloader_iter(module, step)
        needs_labels = trainer.state.fn != TrainerFn.PREDICTING
        swapped = self._core.attach(module, options, needs_labels=needs_labels)
        self._announce(module, swapped)
        super().setup(trainer)

    @override
    def _setup_model(self, model: nn.Module) -> Any:
        return self._engine.wrap(model, self.mesh, self.root_device, self._ddp_kwargs)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        seeded = int(os.environ.get("PL_SEED_WORKERS", "0"))  # seed_everything(workers=True)
        if seeded and isinstance(dataloader, DataLoader) and dataloader.worker_init_fn is None:
            # Lightning seeds by the global rank; ranks that share a sample must draw the same numbers.
            dataloader.worker_init_fn = partial(pl_worker_init_function, rank=self.data_rank)
        return super().process_dataloader(dataloader)

    # -- one batch -------------------------------------------------------------------------------

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        batch = super().batch_to_device(batch, device, dataloader_idx)
        module = self.lightning_module
        assert self._callback is not None
        assert module is not None
        training = module.trainer.training
        return self._callback.shard_batch(batch, needs_labels=training)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._core.begin_step()  # ends in on_train_batch_end: backward may recompute
        output = super().training_step(*args, **kwargs)
        self._core.check_step()
        assert self.lightning_module is not None
        if self.lightning_module.automatic_optimization:
            self._core.require_loss(output.get("loss") if isinstance(output, Mapping) else output)
        return output

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._step():
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._step():
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._step():
            output = super().predict_step(*args, **kwargs)
        assert self._callback is not None
        dims = options_of(self.lightning_module).get("output_dims") or {}
        return self._callback.unshard_output(output, dims)

    @override
    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        assert self.model is not None
        loss = super().backward(self._core.scale_loss(closure_loss), *args, **kwargs)
        self._core.after_backward(self.model.parameters())
        return loss

    def unshard(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """A local tensor of the current step, whole, in original order and length, on every rank."""
        return self._core.unshard_tensor(x, dim)

    def token_positions(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """int64 [B or 1, L]: the positions of a step's tokens; see ``ContextParallelMixin``."""
        return self._core.token_positions(x, dim)

    @override
    def teardown(self) -> None:
        self._core.detach()
        super().teardown()

    # -- helpers ---------------------------------------------------------------------------------

    @contextmanager
    def _step(self) -> Iterator[None]:
        self._core.begin_step()
        try:
            yield
            self._core.check_step()
        finally:
            self._core.end_step()

    def _build_mesh(
        self, model: LightningModule | None = None, num_heads: int | None = None
    ) -> None:
        factors = self._core.build_mesh(
            self.world_size, self.root_device.type, self.num_processes, model, num_heads
        )
        if factors is not None:
            rank_zero_info(
                f"context parallel: ulysses {factors.ulysses_size} x ring {factors.ring_size} "
                f"({factors.why}), "
                f"data parallel {self.data_parallel_size}, layout {self._core.settings.layout}"
            )

    def _announce(self, module: LightningModule, swapped: list[str]) -> None:
        """Say once of each model, not at every stage, where its attention was swapped."""
        if swapped and (self._announced is None or self._announced() is not module):
            rank_zero_info(f"context parallel attention in: {', '.join(swapped)}")
            self._announced = weakref.ref(module)

    def _attach_callback(self) -> None:
        module = self.lightning_module
        assert module is not None
        callbacks: list[Any] = module.trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        self._callback = callback_among(callbacks)
        self._callback.connect(self._core)


def _refuse_dataloader_iter(module: LightningModule, step: str) -> None:
    if is_param_in_hook_signature(getattr(module, step), "dataloader_iter", explicit=True):
        raise ConfigError(
            f"{step}(dataloader_iter) fetches batches by itself, so they are never sharded. Take the batch "
            f"instead: {step}(self, batch, batch_idx)."
        )

"""A whole training step of a small Llama on ranks of a mesh, as the strategies make it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lightning_cp.bench.length_step import Sizes, model_of
from lightning_cp.bench.quiet import quiet_lightning
from lightning_cp.strategies.arguments.settings import Settings
from lightning_cp.strategies.engines import engine as engine_of
from lightning_cp.strategies.engines.comm_hooks import CommHook
from lightning_cp.strategies.step.core import ContextParallelCore

MODES: dict[str, dict[str, Any]] = {
    "alone": {},
    "ulysses": {},
    "ring": {},
    "hybrid": {},
    "zigzag_llama3": {"exchange": "all_gather"},
}
"""What the strategy is given beside sizes."""


class ModelStep:
    """A model on this rank's part of the world, with the strategy's own core and engine.

    Args:
        sizes: of the model.
        mode: one of ``MODES``.
        split: sizes of (ring, ulysses); other ranks are data-parallel.
        engine: ``ddp``, ``fsdp``, ...
        device_type: ``cpu`` or ``cuda``.
    """

    def __init__(
        self,
        sizes: Sizes,
        mode: str,
        split: tuple[int, int],
        engine: str = "ddp",
        device_type: str = "cpu",
    ) -> None:
        ring, ulysses = split
        ranks = dist.get_world_size()
        settings = Settings(
            ring_size=ring,
            ulysses_size=ulysses,
            data_parallel=engine,
            data_parallel_size=ranks // (ring * ulysses),
            parity_check="off",
            **MODES[mode],
        )
        self._sizes = sizes
        device = torch.device(device_type)
        model = model_of(sizes).to(device)
        self._core = ContextParallelCore(settings)
        with quiet_lightning():
            self._core.build_mesh(ranks, device_type, None, model)
            self._core.attach(model, {}, needs_labels=True)
        self._engine = engine_of(settings, CommHook())
        self._model = self._engine.wrap(model, self._core.mesh, device, {})
        self._optimizer = torch.optim.AdamW(self._model.parameters())

    def of(self, tokens: int) -> Callable[[], None]:
        """A step on one row of so many tokens for each data rank."""
        draw = torch.Generator().manual_seed(self._core.mesh.data_rank)
        ids = torch.randint(self._sizes.vocabulary, (1, tokens), generator=draw)
        ids = ids.to(self._core.mesh.device_type)

        def step() -> None:
            self._optimizer.zero_grad()
            batch = self._core.shard({"input_ids": ids, "labels": ids.clone()}, needs_labels=True)
            self._core.begin_step()
            loss = self._core.scale_loss(self._model(**batch).loss)
            self._engine.expect(loss)
            loss.backward()
            self._engine.require_averaged()
            self._core.end_step()
            self._optimizer.step()

        return step

    def end(self) -> None:
        """The model is as it was, and the groups are gone."""
        self._core.detach()

"""A small Llama and its whole training step on the ranks of a mesh, as the strategies make it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lightning_cp.config import StrategyConfig
from lightning_cp.engines.base import engine as engine_of
from lightning_cp.engines.ddp_options import CommHook
from lightning_cp.runtime.runtime import ContextParallelRuntime
from lightning_cp.utils.console import quiet_lightning


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a small model; ``family`` and ``dtype`` by name."""

    features: int = 128
    heads: int = 4
    kv_heads: int = 2
    inner: int = 512
    layers: int = 4
    vocabulary: int = 131072
    dtype: str = "bfloat16"
    family: str = "llama"
    tied: bool = True

    @property
    def head_dim(self) -> int:
        """Features of each head."""
        return self.features // self.heads


def config_of(sizes: ModelSizes) -> dict[str, Any]:
    """Return the content of the model's ``config.json``."""
    given: dict[str, Any] = {
        "model_type": sizes.family,
        "vocab_size": sizes.vocabulary,
        "hidden_size": sizes.features,
        "intermediate_size": sizes.inner,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "num_hidden_layers": sizes.layers,
        "max_position_embeddings": 1 << 20,
        "use_cache": False,
        "tie_word_embeddings": sizes.tied,
    }
    if sizes.family == "gemma2":
        given["attn_logit_softcapping"] = None
        given["layer_types"] = ["full_attention"] * sizes.layers
    return given


def model_of(sizes: ModelSizes) -> Any:
    """Build the model, with the same weights on every rank."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config_of(sizes)))
    return model.to(getattr(torch, sizes.dtype)).train()


MODES: dict[str, dict[str, Any]] = {
    "alone": {},
    "ulysses": {},
    "ring": {},
    "hybrid": {},
    "zigzag_llama3": {"exchange": "all_gather"},
}
"""The strategy's arguments besides sizes, by mode."""


class ModelStep:
    """The training step of a model on this rank, with the strategy's own runtime and engine.

    Args:
        sizes: the model's sizes.
        mode: one of ``MODES``.
        split: (ring size, Ulysses size); the other ranks are data-parallel.
        engine: ``ddp``, ``fsdp``, ...
        device_type: ``cpu`` or ``cuda``.
    """

    def __init__(
        self,
        sizes: ModelSizes,
        mode: str,
        split: tuple[int, int],
        engine: str = "ddp",
        device_type: str = "cpu",
    ) -> None:
        ring, ulysses = split
        ranks = dist.get_world_size()
        settings = StrategyConfig(
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
        self._runtime = ContextParallelRuntime(settings)
        with quiet_lightning():
            self._runtime.meshes.build(ranks, device_type, None, model)
            self._runtime.attach(model, {}, needs_labels=True)
        self._engine = engine_of(settings, CommHook())
        self._model = self._engine.wrap(model, self._runtime.mesh, device, {})
        self._optimizer = torch.optim.AdamW(self._model.parameters())

    def of(self, tokens: int) -> Callable[[], None]:
        """Return a step on one row of ``tokens`` tokens for each data rank."""
        draw = torch.Generator().manual_seed(self._runtime.mesh.data_rank)
        ids = torch.randint(self._sizes.vocabulary, (1, tokens), generator=draw)
        ids = ids.to(self._runtime.mesh.device_type)

        def step() -> None:
            self._optimizer.zero_grad()
            batch = self._runtime.shard(
                {"input_ids": ids, "labels": ids.clone()}, needs_labels=True
            )
            self._runtime.begin_step()
            loss = self._runtime.step.scale_loss(self._model(**batch).loss)
            self._engine.prepare_backward(loss)
            loss.backward()
            self._engine.finish_backward()
            self._runtime.end_step()
            self._optimizer.step()

        return step

    def end(self) -> None:
        """Restore the model and destroy the process groups."""
        self._runtime.detach()

"""One training step of a small Llama on some ranks: what it keeps for backward, and its peak."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lightning_cp.bench.loading import reset_peak, status
from lightning_cp.bench.peak_bytes import PeakBytes
from lightning_cp.bench.quiet import quiet_lightning
from lightning_cp.strategies.arguments.settings import Settings
from lightning_cp.strategies.step.core import ContextParallelCore


@dataclass(frozen=True)
class Sizes:
    """Of the model; ``family`` and ``dtype`` by name."""

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
        """Of each head."""
        return self.features // self.heads


@dataclass(frozen=True)
class Spent:
    """By the rank that needs most; parameters, and the batch, are not counted."""

    local_tokens: int
    kept: int
    """Bytes made in forward that are there when backward begins."""
    peak: int
    """The most bytes of tensors at once, gradients of parameters included."""
    resident: int
    """What the process's own peak rose in the step."""
    seconds: float
    loss: float


def config_of(sizes: Sizes) -> dict[str, Any]:
    """What its ``config.json`` says."""
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


def model_of(sizes: Sizes) -> Any:
    """The same weights on every rank."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config_of(sizes)))
    return model.to(getattr(torch, sizes.dtype)).train()


def step(sizes: Sizes, local_tokens: int, settings: dict[str, Any]) -> Spent:
    """Forward and backward of one row of ``local_tokens`` times as many tokens as there are ranks."""
    model, core = attached(sizes, settings)
    batch = batch_of(sizes, local_tokens, core)
    core.begin_step()
    reset_peak()
    before, started = status("VmRSS"), time.monotonic()
    with PeakBytes() as found:
        loss = model(**batch).loss
        kept = found.live
        core.scale_loss(loss).backward()
    seconds = time.monotonic() - started
    mine = [kept, found.peak, status("VmHWM") - before]
    mean = float(core.average(loss).detach())
    core.detach()
    kept, peak, resident = most_of_all(mine)
    return Spent(local_tokens, kept, peak, resident, seconds, mean)


def attached(sizes: Sizes, settings: dict[str, Any]) -> tuple[Any, ContextParallelCore]:
    """A model, and the core that has swapped its attention: all ranks are a ring."""
    ranks = dist.get_world_size()
    model = model_of(sizes)
    core = ContextParallelCore(Settings(ring_size=ranks, ulysses_size=1, **settings))
    with quiet_lightning():
        core.build_mesh(ranks, "cpu", None, model)
        core.attach(model, {}, needs_labels=True)
    return model, core


def batch_of(sizes: Sizes, local_tokens: int, core: ContextParallelCore) -> Any:
    """This rank's part of one row."""
    draw = torch.Generator().manual_seed(1)
    row = (1, dist.get_world_size() * local_tokens)
    ids = torch.randint(sizes.vocabulary, row, generator=draw)
    return core.shard({"input_ids": ids, "labels": ids.clone()}, needs_labels=True)


def most_of_all(mine: list[int]) -> list[int]:
    """Of each number, the largest of all ranks."""
    most = torch.tensor(mine)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.tolist()

"""A small Llama and its whole training step on a mesh, as the strategies make it; the step's fixed cost.

The fixed cost is independent of the step's length: Python, launches and tiny messages. Two models with few
features and different numbers of layers train on a short row, each mode on all devices. Their difference is
the cost of the added layers; the rest is the step's. A mode's layers minus those without context parallelism
give the cost of its calls. The median of the repeats counts: a real step consists of many such parts, and its
minimum is not the sum of their minima.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from lightning_cp.bench.settings import BenchSettings
from lightning_cp.bench.timers import Figure, device_seconds, largest_spread, measure_on_ranks
from lightning_cp.config import StrategyConfig
from lightning_cp.engines.base import engine as engine_of
from lightning_cp.engines.ddp_comm_hook import CommHook
from lightning_cp.layout import HeadSplit, Mask, SequenceLayout, attention_traffic, schedule
from lightning_cp.runtime.runtime import ContextParallelRuntime
from lightning_cp.utils.console import quiet_lightning

FEW, MANY = 1, 5
"""Layers of the two models."""
TOKENS = 16
"""Tokens of each rank."""
OFTEN = 10
"""Factor on the repeats of other suites: steps are short, and most of each is waiting."""


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
        more: other arguments of the strategy.
    """

    def __init__(
        self,
        sizes: ModelSizes,
        mode: str,
        split: tuple[int, int],
        engine: str = "ddp",
        device_type: str = "cpu",
        more: Mapping[str, Any] = MappingProxyType({}),
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
            **more,
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


@dataclass(frozen=True)
class OverheadRow:
    """One mode; where fewer ranks than devices share a row, the other ranks have other rows."""

    mode: str
    """alone, ulysses, ring or zigzag_llama3."""
    ranks: int
    """Ranks that share a row."""
    layer_seconds: float
    """Forward and backward on the slowest device, the median of the repeats. On CPU, CPU-seconds of the mean
    rank."""
    step_seconds: float
    """Seconds besides layers, the optimizer included."""
    calls: int
    """Collectives of one layer's attention, forward and backward."""
    spread: float | None
    """(most - least) / least of the repeats, of the longer step or the shorter; ``None`` of one."""


def measure_overheads(settings: BenchSettings, tell: Callable[[str], None]) -> list[OverheadRow]:
    """Measure each mode on all ranks; every rank returns the same rows.

    Args:
        settings: the number of ranks and of repeats.
        tell: shows progress.
    """
    return list(_rows(settings, tell))


def _rows(settings: BenchSettings, tell: Callable[[str], None]) -> Iterator[OverheadRow]:
    devices = settings.devices
    ways = [("alone", (1, 1))]
    for ranks in (n for n in range(2, devices + 1) if devices % n == 0):
        ways += [("ulysses", (1, ranks)), ("ring", (ranks, 1)), ("zigzag_llama3", (ranks, 1))]
    for mode, split in ways:
        tell(f"{mode}, {split[0] * split[1]} ranks")
        few, many = (_figure(mode, split, layers, settings) for layers in (FEW, MANY))
        layer = max(many.middle - few.middle, 0.0) / (MANY - FEW)
        step = max(few.middle - FEW * layer, 0.0)
        spread = largest_spread((few.spread, many.spread))
        sizes = (mode, split[0] * split[1])
        yield OverheadRow(*sizes, layer, step, _calls(mode, split, devices), spread)


def _sizes(ranks: int, layers: int) -> ModelSizes:
    """A small model with two heads for every rank."""
    heads = 2 * ranks
    return ModelSizes(8 * heads, heads, ranks, 8 * heads, layers, vocabulary=64, dtype="float32")


def _figure(mode: str, split: tuple[int, int], layers: int, settings: BenchSettings) -> Figure:
    step = ModelStep(
        _sizes(settings.devices, layers), mode, split, device_type=settings.device_type
    )
    row = step.of(TOKENS * split[0] * split[1])
    often = replace(settings, repeats=OFTEN * settings.repeats)
    figure = device_seconds(measure_on_ranks(row, often), settings.device_type)
    step.end()
    return figure


def _calls(mode: str, split: tuple[int, int], ranks: int) -> int:
    """Count a layer's collectives from the schedule of its attention."""
    sizes, (ring, ulysses) = _sizes(ranks, FEW), split
    layout = SequenceLayout(
        TOKENS * ring * ulysses, ring, ulysses, "zigzag" if ring > 1 else "contiguous"
    )
    sent = attention_traffic(
        schedule(layout, None, Mask()),
        HeadSplit(sizes.heads, sizes.kv_heads, ulysses),
        0,
        batch=1,
        head_dim=sizes.head_dim,
        itemsize=4,
        accumulate_itemsize=4,
        exchange="all_gather" if mode == "zigzag_llama3" else "ring",
    )
    return sum(one.total_calls for one in sent)

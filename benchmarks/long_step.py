"""One rank of a long training step, replayed with few layers and scaled to all of them.

Qwen3-8B at 1,048,576 tokens on 8 ranks does not fit one GPU's time: here one rank of the ring computes its
131,072 tokens with one layer, and with two, on the real code (recomputation that keeps attention, offload,
chunked loss). What other ranks send is random numbers. The difference of both is a layer: seconds and bytes
of all 36 follow. Parameters, gradients and optimizer states, of which a rank holds an eighth, are the
planner's; what is measured of memory is activations.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.no_comm import OneRank, one_rank
from benchmarks.step_memory import PeakBytes
from lightning_cp.attention.function import attend
from lightning_cp.bench.methods import AttentionCase, ContextParallelMethod
from lightning_cp.bench.timers import measure
from lightning_cp.layout.axes import Axis
from lightning_cp.memory.activations import recompute_blocks
from lightning_cp.memory.chunked_loss import linear_cross_entropy
from lightning_cp.planner.job import Job
from lightning_cp.planner.machines import MACHINES
from lightning_cp.planner.model import model_from_config
from lightning_cp.planner.search import Limits, MethodPlan, search

GIB, GB = 1 << 30, 10**9
QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "use_cache": False,
}
PUBLISHED_SECONDS, PUBLISHED_BYTES, PUBLISHED_MACHINE = 380.0, 56.2 * GB, "h100"
"""Of a step of this model at this length on 8 GPUs, as others published it."""
NAME = "lightning_cp_replayed"


@dataclass(frozen=True)
class LongSizes:
    """The step."""

    config: dict[str, Any] = field(default_factory=lambda: QWEN3_8B)
    tokens: int = 1 << 20
    ranks: int = 8
    few: tuple[int, int] = (1, 2)
    """Layers of the two models that are run."""
    chunk_tokens: int = 1024
    kernel: str = "auto"
    dtype: torch.dtype = torch.bfloat16
    device_type: str = "cuda"
    repeats: int = 1
    machine: str = PUBLISHED_MACHINE
    """Of the planner."""

    @property
    def case(self) -> AttentionCase:
        """The attention call of a layer."""
        heads = (self.config["num_attention_heads"], self.config["num_key_value_heads"])
        sizes = (self.tokens, self.ranks, *heads, self.config["head_dim"])
        return AttentionCase(*sizes, dtype=self.dtype, device_type=self.device_type)


@dataclass(frozen=True)
class LayersRow:
    """A step with few layers."""

    layers: int
    seconds: float
    activations: int
    """The peak of bytes without parameters and their gradients."""


@dataclass(frozen=True)
class LongRow:
    """The step with all layers, by others, by the planner, and scaled from few layers."""

    source: str
    seconds: float
    bytes: float

    @property
    def failed(self) -> bool:
        """True for a figure that is none."""
        return not (self.seconds > 0 and self.bytes > 0)


LONG_HEAD = ("source", "seconds of a step", "GB", "GiB", "seconds of published")


def long_cells(row: LongRow) -> list[object]:
    """Return a line's cells."""
    share = f"{row.seconds / PUBLISHED_SECONDS:.2f}"
    sizes = (f"{row.bytes / GB:.3f}", f"{row.bytes / GIB:.3f}")
    return [row.source, f"{row.seconds:.4g}", *sizes, share]


def long_rows(sizes: LongSizes) -> list[LongRow]:
    """Measure few layers, and return the scaled figures beside the planner's and the published ones."""
    plan = planned(sizes)
    few, more = (layers_row(sizes, layers) for layers in sizes.few)
    layers = sizes.config["num_hidden_layers"]
    steps = (layers - more.layers) / (more.layers - few.layers)
    seconds = more.seconds + steps * (more.seconds - few.seconds)
    activations = more.activations + steps * (more.activations - few.activations)
    kinds = plan.memory.by_kind
    held = sum(size for kind, size in kinds.items() if kind not in _ACTIVATIONS)
    return [
        LongRow(f"published by others, {PUBLISHED_MACHINE}", PUBLISHED_SECONDS, PUBLISHED_BYTES),
        LongRow(f"planner, {sizes.machine}", plan.seconds.total, plan.memory.total),
        LongRow(
            f"{few.layers} and {more.layers} layers replayed, scaled to {layers}",
            *(seconds, activations + held + plan.memory.reserve),
        ),
        *(
            LongRow(f"{row.layers} layers, activations alone", row.seconds, row.activations)
            for row in (few, more)
        ),
    ]


def machine_of_device(name: str) -> str:
    """Return the planner's machine with a device's name; that of the published figures if it has none.

    Args:
        name: as ``torch.cuda.get_device_name`` returns it, such as ``NVIDIA H200``.
    """
    words = re.findall(r"\w+", name.lower())
    return next((machine for machine in MACHINES if machine in words), PUBLISHED_MACHINE)


_ACTIVATIONS = ("activations", "attention buffers", "logits and loss")
"""Kinds of the planner that are measured here."""


def planned(sizes: LongSizes) -> MethodPlan:
    """Return the planner's figures of the same step: a ring of all ranks with fsdp, the same settings."""
    model = model_from_config(sizes.config, "the model")
    job = Job(model, MACHINES[sizes.machine], sizes.ranks, sizes.tokens, 1)
    limits = Limits(
        {Axis.RING: sizes.ranks},
        engine="fsdp",
        exchange="ring",
        checkpointing="keep_attention",
        offload=True,
        chunked_loss=True,
        tiled_mlp=False,
    )
    (plan,) = search(job, limits).plans
    return plan


def layers_row(sizes: LongSizes, layers: int) -> LayersRow:
    """Measure the step of a rank with some layers: forward, loss and backward."""
    way = ContextParallelMethod(1, sizes.ranks, kernel=sizes.kernel)
    with one_rank(way, sizes.case, 0, arrived=True) as alone:
        assert alone.arrivals is not None
        alone.arrivals.depth = 2  # as many as are on their way at once
        tokens = alone.inputs[0].shape[1]
        alone.inputs.clear()
        alone.dout = torch.empty(0)
        with _registered(alone):
            step, own = _step(sizes, layers, tokens)
            return _measured(sizes, layers, step, own)


def _measured(sizes: LongSizes, layers: int, step: Callable[[], object], own: int) -> LayersRow:
    if sizes.device_type == "cuda":
        step()
        torch.cuda.reset_peak_memory_stats()
        samples = measure(step, repeats=sizes.repeats, warm_up=0, device_type="cuda")
        peak = torch.cuda.max_memory_allocated()
    else:
        with PeakBytes() as found:
            step()
            found.forget_peak()
            step()
            peak = found.peak
        own = 0  # made outside of the block
        samples = measure(step, repeats=sizes.repeats, warm_up=0)
    gc.collect()
    return LayersRow(layers, min(samples.wall), peak - own)


def _step(sizes: LongSizes, layers: int, tokens: int) -> tuple[Callable[[], object], int]:
    """Return the step, and the bytes of parameters and their gradients."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**sizes.config, "num_hidden_layers": layers})
    config.max_position_embeddings = sizes.tokens
    with torch.device(sizes.device_type):
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=NAME, dtype=sizes.dtype
        ).train()
    blocks = recompute_blocks(model, keeps_attention=True, offloads=sizes.device_type == "cuda")
    ids = torch.randint(sizes.config["vocab_size"], (1, tokens), device=sizes.device_type)
    positions = torch.arange(tokens, device=sizes.device_type)[None]
    own = 2 * sum(p.nbytes for p in model.parameters())

    def step() -> None:
        leave = blocks.enter()
        try:
            hidden = model.model(input_ids=ids, position_ids=positions).last_hidden_state
            head = model.lm_head.weight
            loss = linear_cross_entropy(
                *(hidden, head, None, ids), reduction="mean", chunk_tokens=sizes.chunk_tokens
            )
            loss.backward()
        finally:
            leave()

    return step, own


@contextmanager
def _registered(alone: OneRank) -> Iterator[None]:
    """A block in which transformers' models call the attention of one rank."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    arrivals = alone.arrivals
    assert arrivals is not None

    def call(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, None]:
        """[B, H, L, D] -> [B, L, H, D]."""
        arrivals.begin()
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out = attend(q, k, v, alone.plan)
        assert isinstance(out, torch.Tensor)
        return out, None

    AttentionInterface.register(NAME, call)
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)
    try:
        yield
    finally:
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(NAME, None)

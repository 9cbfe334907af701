"""Families of transformers x modes x kinds of batches, against two oracles that know nothing of ranks.

The first is our `reference` kernel on the whole sequence, in one process: the same float64 mathematics. The
second is the model's own eager attention, often float32 inside: documents, and rows without their padding, go
through it one by one, so that it needs no idea of either.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from lightning_cp.config import StrategyConfig
from lightning_cp.models.hf.positions import parameters_of
from lightning_cp.runtime.runtime import ContextParallelRuntime
from tests.helpers.models.litgpt_zoo import LITGPT_FAMILIES
from tests.helpers.models.steps import (
    CUTS,
    LENGTH,
    ROWS,
    Case,
    Outcome,
    cross_entropy,
    make_batch,
    make_model,
    step_of,
)
from tests.helpers.pool import run_ranks

MODES = {"ring 4": (1, 4), "ulysses 4": (4, 1), "hybrid 2x2": (2, 2)}
BATCHES = ("plain", "right", "left", "packed")
LITGPT_BATCHES = ("plain", "right", "packed", "segments")
"""LitGPT takes no mask: it attends to padding, which on the right nothing sees."""

FAMILIES: dict[str, str] = {
    "llama": "Llama",
    "mistral": "Mistral, window",
    "mixtral": "Mixtral",
    "qwen2": "Qwen2, window in one layer",
    "qwen3": "Qwen3",
    "phi3": "Phi-3",
    "phi3_longrope": "Phi-3, longrope",
    "gemma": "Gemma",
    "gemma2_capped": "Gemma 2, alternating windows, caps",
    "cohere": "Cohere",
    "gpt_neox": "GPT-NeoX",
    "gpt_oss": "gpt-oss, sinks, alternating windows",
    "deepseek_v2": "DeepSeek V2, latent attention",
    "deepseek_v3": "DeepSeek V3, latent attention",
    "axk1": "A.X K1, latent attention",
    "glm4_moe_lite": "GLM-4 MoE Lite, latent attention",
    "longcat_flash": "LongCat Flash, latent attention",
    "minicpm3": "MiniCPM3, latent attention",
    "mistral4": "Mistral 4, latent attention",
    "youtu": "Youtu, latent attention",
    "mimo_v2_flash": "MiMo V2 Flash, narrow values, sinks, window",
    "bert": "BERT, bidirectional",
    "gpt2": "GPT-2",
    "bloom": "BLOOM, ALiBi",
    "falcon": "Falcon, RoPE, one key head",
    "falcon_new": "Falcon, RoPE, groups",
    "falcon_alibi": "Falcon, ALiBi",
}
"""By its name in the zoo: what it is called in the table."""

FLOAT32 = {
    *("cohere", "axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash"),
    *("mimo_v2_flash", "minicpm3", "mistral4", "youtu"),
}
"""Norms, rotary products or routers are float32."""

NEED_SDPA = {"falcon_alibi"}
"""transformers adds its bias twice in eager attention, which is refused."""


@dataclass(frozen=True)
class Cell:
    """The worst errors of one family and mode over all batches, relative to the largest entry."""

    reference: float
    """Of gradients, to the reference kernel on the whole sequence."""
    eager: float
    """Of gradients, to the model's own eager attention."""
    loss: float
    """Relative, to the former."""


def case_of(model: str, batch: str) -> Case:
    """A window that cuts shards; no cache, so that models may read packing from positions, if they do."""
    if batch == "packed" and model in LITGPT_FAMILIES:
        batch = "declared"  # it takes no positions, so that they alone say nothing to it
    if batch == "packed" and model.startswith(("bloom", "falcon", "gpt_oss")):
        batch = "segments"
    attention = "sdpa" if model in NEED_SDPA else "eager"
    return Case(model=model, batch=batch, window=11, use_cache=False, attention=attention)


def cell(model: str, mode: str, batches: tuple[str, ...] = BATCHES) -> Cell:
    """Run the ranks of one mode for each kind of batch."""
    ulysses, ring = MODES[mode]
    found: list[tuple[float, float, float]] = []
    for kind in batches:
        case = case_of(model, kind)
        whole, own = whole_sequence(case), eager(case)
        for got in run_ranks(4, ranks, case, ulysses, ring, timeout=60):
            loss = abs(got.loss - whole.loss) / abs(whole.loss)
            found.append((worst(got, whole), worst(got, own), loss))
    parts = torch.tensor(found, dtype=torch.float64)
    return Cell(*parts.max(0).values.tolist())  # NaN if any is


def worst(got: Outcome, want: Outcome) -> float:
    """The largest error of a gradient, as a part of its largest entry."""
    assert got.gradients.keys() == want.gradients.keys()
    errors = [
        float((got.gradients[name] - gradient).abs().max()) / max(float(gradient.abs().max()), 1e-3)
        for name, gradient in want.gradients.items()
    ]
    return float(torch.tensor(errors, dtype=torch.float64).max())


def ranks(rank: int, world_size: int, case: Case, ulysses: int, ring: int) -> Outcome:
    """One step on the ranks of one cp group."""
    model, runtime = make_model(case), _runtime(case, ulysses, ring)
    runtime.meshes.build(world_size, "cpu", None, model)
    runtime.attach(model, {}, needs_labels=True)
    try:
        return step_of(runtime, case, model, world_size)
    finally:
        runtime.detach()


@lru_cache(maxsize=8)
def whole_sequence(case: Case) -> Outcome:
    """The reference kernel in a cp group of one rank."""
    return run_ranks(1, alone, case)[0]


def alone(rank: int, world_size: int, case: Case) -> Outcome:
    model, runtime = make_model(case), _Alone(_settings(case, 1, 1, kernel="reference"))
    runtime.meshes.build(1, "cpu", None, model)
    runtime.attach(model, {}, needs_labels=True)
    try:
        return step_of(runtime, case, model, 1)
    finally:
        runtime.detach()


class _Alone(ContextParallelRuntime):
    """Swaps attention although nobody shares the sequence."""

    enabled = True  # type: ignore[assignment]


def _runtime(case: Case, ulysses: int, ring: int) -> ContextParallelRuntime:
    return ContextParallelRuntime(_settings(case, ulysses, ring))


def _settings(case: Case, ulysses: int, ring: int, **more: Any) -> StrategyConfig:
    labels = "aligned" if case.model == "bert" else "shift"
    return StrategyConfig(ulysses_size=ulysses, ring_size=ring, labels=labels, **more)


@lru_cache(maxsize=8)
def eager(case: Case) -> Outcome:
    """The model's own attention, of what belongs together in a row and nothing else."""
    model, batch = make_model(case), make_batch(case)
    _take_frequencies_of_all(model, batch)
    logits = torch.stack([_row(model, batch, row) for row in range(ROWS)])
    loss = cross_entropy(model, logits, batch)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Outcome(float(loss.detach()), gradients, logits.detach())


def _take_frequencies_of_all(model: Any, batch: dict[str, torch.Tensor]) -> None:
    """Longrope chooses them by the longest of a call, which in every batch here is all of one row."""
    model(input_ids=batch["input_ids"])
    for part in model.modules():
        if hasattr(part, "long_inv_freq"):
            part.original_inv_freq.copy_(part.long_inv_freq)


def _row(model: Any, batch: dict[str, torch.Tensor], row: int) -> torch.Tensor:
    """Logits [L, vocabulary]; 0 where there is padding. Documents count from 0, others where they are."""
    mask = batch.get("attention_mask")
    if mask is None:
        packed = "position_ids" in batch or "segment_ids" in batch
        spans = list(pairwise(CUTS[row])) if packed else [(0, LENGTH)]
        first = 0
    else:
        (inside,) = mask[row].nonzero(as_tuple=True)
        first = int(inside[0])
        spans = [(first, int(inside[-1]) + 1)]
    parts: list[torch.Tensor] = []
    for begin, end in spans:
        given: dict[str, Any] = {"input_ids": batch["input_ids"][row, begin:end][None]}
        if first and "position_ids" in parameters_of(model):
            given["position_ids"] = torch.arange(begin, end)[None]
        parts.append(model(**given).logits[0])
    return F.pad(torch.cat(parts), (0, 0, spans[0][0], LENGTH - spans[-1][1]))

"""Speed of the parts of a training step besides attention, on all devices at once.

Matrix products are measured in operations per second; norms, activations and residuals of a layer, the loss
and the optimizer in bytes per second, with the bytes that the planner counts (``planner/time_model.py``).
Shapes are those of a Llama with the configured heads, four times as many inner features as features, and a
vocabulary of eight times the features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from lightning_cp.bench.methods import AttentionCase, Step
from lightning_cp.bench.settings import BenchSettings
from lightning_cp.bench.timers import device_seconds, measure_on_ranks
from lightning_cp.planner.activations import RankStep
from lightning_cp.planner.model import Model, model_from_config
from lightning_cp.planner.time_model import (
    layer_bytes_moved,
    loss_bytes_moved,
    optimizer_bytes_moved,
)

INNER, VOCABULARY = 4, 8
"""Multiples of the features."""
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class ComputeRow:
    """One part of a step at one length."""

    what: str
    """products, layer, loss or optimizer."""
    dtype: str
    features: int
    tokens: int
    seconds: float
    """Forward and backward on the slowest device, the minimum of the repeats. On CPU, CPU-seconds of the mean
    rank."""
    operations: float
    """0 for parts that are counted in bytes."""
    bytes: float
    """0 for parts that are counted in operations."""
    spread: float | None
    """(maximum - minimum) / minimum of the repeats; ``None`` for one repeat."""


def measure_compute(settings: BenchSettings, tell: Callable[[str], None]) -> list[ComputeRow]:
    """Measure every part at every length; all ranks return the same rows.

    Args:
        settings: the measurements asked for.
        tell: shows progress.
    """
    return [
        _row(what, case, settings, tell)
        for case in settings.cases(1)
        for what in PARTS
        if case.head_dim == settings.head_dims[0]  # the result does not depend on it
    ]


def _row(
    what: str, case: AttentionCase, settings: BenchSettings, tell: Callable[[str], None]
) -> ComputeRow:
    tell(f"{what}, {case.tokens:,} tokens")
    model = _model(case)
    part = PARTS[what](case, model)
    figure = device_seconds(measure_on_ranks(part.step, settings), settings.device_type)
    dtype = str(case.dtype).removeprefix("torch.")
    shape = (model.features, case.tokens)
    return ComputeRow(what, dtype, *shape, figure.best, part.operations, part.bytes, figure.spread)


@dataclass(frozen=True)
class TimedWork:
    """A timed step, and the operations or bytes of it."""

    step: Step
    operations: float = 0.0
    bytes: float = 0.0


def _model(case: AttentionCase) -> Model:
    features = case.heads * case.head_dim
    config = {
        "model_type": "llama",
        "hidden_size": features,
        "intermediate_size": INNER * features,
        "num_hidden_layers": 1,
        "num_attention_heads": case.heads,
        "num_key_value_heads": case.kv_heads,
        "head_dim": case.head_dim,
        "vocab_size": VOCABULARY * features,
    }
    return model_from_config(config, "measured")


def _products(case: AttentionCase, model: Model) -> TimedWork:
    """Return the projection to the inner features."""
    draw = _random_tensors(case)
    x, weight = draw(case.tokens, model.features), draw(model.inner, model.features)
    step = _passes(lambda: (functional.linear(x, weight),), (x, weight))
    return TimedWork(step, operations=6.0 * case.tokens * weight.numel())


def _layer(case: AttentionCase, model: Model) -> TimedWork:
    """Return a layer without its products and attention, whose inputs and results are given tensors."""
    draw, tokens = _random_tensors(case), case.tokens
    x, attended, down = (draw(1, tokens, model.features) for _ in range(3))
    gate, up = (draw(1, tokens, model.inner) for _ in range(2))
    # Projections make [batch, tokens, heads, head dim], which attention reads with heads in front.
    q, k = (draw(1, tokens, heads, model.head_dim) for heads in (model.heads, model.kv_heads))
    weights = draw(model.features), draw(model.features)
    cos, sin = (draw(1, 1, tokens, model.head_dim).detach() for _ in range(2))

    def forward() -> Tensors:
        given = _norm(x, weights[0])
        turned = [_rotated(one.transpose(1, 2), cos, sin) for one in (q, k)]
        between = x + attended
        behind = _norm(between, weights[1])
        inner = functional.silu(gate) * up
        # Three projections take what the first norm makes, and two what the second one does.
        return given, given, given, *turned, behind, behind, inner, between + down

    step = _passes(forward, (x, attended, down, gate, up, q, k, *weights))
    whole = RankStep(model, tokens, itemsize=case.dtype.itemsize)
    return TimedWork(step, bytes=layer_bytes_moved(whole))


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the RMS norm, as transformers computes it."""
    wide = x.to(torch.float32)
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * (wide * scale).to(x.dtype)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary positions, as transformers does."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def _loss(case: AttentionCase, model: Model) -> TimedWork:
    logits = _random_tensors(case)(case.tokens, model.vocabulary)
    targets = torch.arange(case.tokens, device=case.device_type) % model.vocabulary
    step = _passes(lambda: (functional.cross_entropy(logits.float(), targets),), (logits,))
    return TimedWork(step, bytes=loss_bytes_moved(model.vocabulary, case.tokens))


def _optimizer(case: AttentionCase, model: Model) -> TimedWork:
    """Return AdamW's step on the parameters of a layer."""
    draw = _random_tensors(case)
    parameters = [draw(*one.shape) for one in model.layers[0].parameters]
    for one in parameters:
        one.grad = torch.ones_like(one)
    optimizer = torch.optim.AdamW(parameters)
    count = sum(one.numel() for one in parameters)
    return TimedWork(
        optimizer.step, bytes=optimizer_bytes_moved(count, case.dtype.itemsize, "adamw")
    )


def _random_tensors(case: AttentionCase) -> Callable[..., torch.Tensor]:
    """Return a function that makes random tensors that require gradients."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=case.dtype, device=case.device_type).requires_grad_()

    return draw


def _passes(forward: Callable[[], Tensors], inputs: Tensors) -> Step:
    """Return a step of forward and backward, with gradients that are made once."""
    gradients = [torch.randn_like(one) for one in forward()]

    def step() -> Tensors:
        return torch.autograd.grad(forward(), inputs, gradients)

    return step


PARTS: dict[str, Callable[[AttentionCase, Model], TimedWork]] = {
    "products": _products,
    "layer": _layer,
    "loss": _loss,
    "optimizer": _optimizer,
}
"""The parts by name."""

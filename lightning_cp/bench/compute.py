"""How fast a device computes what a training step has besides attention, on every device at once.

Matrix products in operations a second; norms, activations and residuals of a layer, the loss and the
optimizer in bytes a second, in those bytes that the planner counts for them (``planner/moved.py``).
Shapes are those of a Llama with the heads that are asked for, four times as many inner features as features,
and eight times as many entries in its vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from lightning_cp.bench.case import Case
from lightning_cp.bench.clock import busy
from lightning_cp.bench.settings import Settings
from lightning_cp.bench.together import together
from lightning_cp.bench.ways import Step
from lightning_cp.planner.activations import RankStep
from lightning_cp.planner.families import model_of
from lightning_cp.planner.model import Model
from lightning_cp.planner.moved import layer_moved, loss_moved, optimizer_moved

INNER, VOCABULARY = 4, 8
"""Times the features."""
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
    """Forward and backward on the slowest device, the least of the repeats. On CPU, CPU-seconds of the mean
    rank."""
    operations: float
    """0 of what is counted in bytes."""
    bytes: float
    """0 of what is counted in operations."""
    spread: float | None
    """(most - least) / least of the repeats; ``None`` of one."""


def measure_compute(settings: Settings, tell: Callable[[str], None]) -> list[ComputeRow]:
    """Every part at every length; on all ranks, which find the same.

    Args:
        settings: what to measure.
        tell: told what is measured now.
    """
    return [
        _row(what, case, settings, tell)
        for case in settings.cases(1)
        for what in PARTS
        if case.head_dim == settings.head_dims[0]  # nothing of this depends on it
    ]


def _row(what: str, case: Case, settings: Settings, tell: Callable[[str], None]) -> ComputeRow:
    tell(f"{what}, {case.tokens:,} tokens")
    model = _model(case)
    part = PARTS[what](case, model)
    figure = busy(together(part.step, settings), settings.device_type)
    dtype = str(case.dtype).removeprefix("torch.")
    shape = (model.features, case.tokens)
    return ComputeRow(what, dtype, *shape, figure.best, part.operations, part.bytes, figure.spread)


@dataclass(frozen=True)
class Part:
    """What is timed, and how much of it there is."""

    step: Step
    operations: float = 0.0
    bytes: float = 0.0


def _model(case: Case) -> Model:
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
    return model_of(config, "measured")


def _products(case: Case, model: Model) -> Part:
    """A projection to the inner features."""
    draw = _drawn(case)
    x, weight = draw(case.tokens, model.features), draw(model.inner, model.features)
    step = _passes(lambda: (functional.linear(x, weight),), (x, weight))
    return Part(step, operations=6.0 * case.tokens * weight.numel())


def _layer(case: Case, model: Model) -> Part:
    """A layer without its products and attention: what they make and take is given."""
    draw, tokens = _drawn(case), case.tokens
    x, attended, down = (draw(1, tokens, model.features) for _ in range(3))
    gate, up = (draw(1, tokens, model.inner) for _ in range(2))
    # Projections make [batch, tokens, heads, head dim], which attention reads with heads in front.
    q, k = (draw(1, tokens, heads, model.head_dim) for heads in (model.heads, model.kv_heads))
    weights = draw(model.features), draw(model.features)
    cos, sin = (draw(1, 1, tokens, model.head_dim).detach() for _ in range(2))

    def forward() -> Tensors:
        given = _norm(x, weights[0])
        turned = [_turned(one.transpose(1, 2), cos, sin) for one in (q, k)]
        between = x + attended
        behind = _norm(between, weights[1])
        inner = functional.silu(gate) * up
        # Three projections take what the first norm makes, and two what the second one does.
        return given, given, given, *turned, behind, behind, inner, between + down

    step = _passes(forward, (x, attended, down, gate, up, q, k, *weights))
    whole = RankStep(model, tokens, itemsize=case.dtype.itemsize)
    return Part(step, bytes=layer_moved(whole))


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMS, as transformers computes it."""
    wide = x.to(torch.float32)
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * (wide * scale).to(x.dtype)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions, as transformers computes them."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def _loss(case: Case, model: Model) -> Part:
    logits = _drawn(case)(case.tokens, model.vocabulary)
    targets = torch.arange(case.tokens, device=case.device_type) % model.vocabulary
    step = _passes(lambda: (functional.cross_entropy(logits.float(), targets),), (logits,))
    return Part(step, bytes=loss_moved(model.vocabulary, case.tokens))


def _optimizer(case: Case, model: Model) -> Part:
    """AdamW on the parameters of a layer."""
    draw = _drawn(case)
    parameters = [draw(*one.shape) for one in model.layers[0].parameters]
    for one in parameters:
        one.grad = torch.ones_like(one)
    optimizer = torch.optim.AdamW(parameters)
    count = sum(one.numel() for one in parameters)
    return Part(optimizer.step, bytes=optimizer_moved(count, case.dtype.itemsize, "adamw"))


def _drawn(case: Case) -> Callable[..., torch.Tensor]:
    """Makes random tensors that want gradients."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=case.dtype, device=case.device_type).requires_grad_()

    return draw


def _passes(forward: Callable[[], Tensors], inputs: Tensors) -> Step:
    """Forward, and backward of gradients that are made once."""
    gradients = [torch.randn_like(one) for one in forward()]

    def step() -> Tensors:
        return torch.autograd.grad(forward(), inputs, gradients)

    return step


PARTS: dict[str, Callable[[Case, Model], Part]] = {
    "products": _products,
    "layer": _layer,
    "loss": _loss,
    "optimizer": _optimizer,
}
"""By name."""

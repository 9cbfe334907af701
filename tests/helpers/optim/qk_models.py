"""A Llama that is trained with QK-clip; by hand its largest scores and weights as one process has them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

from lightning_cp.optim.qk_clip import QKClip
from tests.helpers.strategies.plain_llama import PlainLlama
from tests.helpers.strategies.small import VOCAB, Small

HEADS, KV_HEADS, LAYERS = 4, 2, 2
Batch = Any


class ClippedSGD(torch.optim.SGD):
    """Any optimizer may clip so."""

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]], clip: QKClip, lr: float) -> None:
        listed = list(named)
        super().__init__([p for _, p in listed], lr=lr)
        self.qk_clip = clip
        clip.bind(listed)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.qk_clip.check_ready()
        super().step()
        self.qk_clip.apply()
        return loss


def llama(layers: int = LAYERS) -> PlainLlama:
    """Its scores are large; each head's differ."""
    torch.manual_seed(11)
    torch.set_default_dtype(torch.float64)
    model = PlainLlama(VOCAB, num_heads=HEADS, num_kv_heads=KV_HEADS, layers=layers)
    with torch.no_grad():
        for block in model.blocks:
            scale = torch.linspace(2.0, 9.0, HEADS).repeat_interleave(8)
            block.q.weight.mul_(scale[:, None])  # type: ignore[union-attr, operator]
            block.k.weight.mul_(3.0)  # type: ignore[union-attr, operator]
    return model


class Clipped(Small):
    """Trained by the Trainer."""

    def __init__(self, clip: QKClip, lr: float, layers: int = LAYERS) -> None:
        super().__init__()
        self.model = llama(layers)
        self.clip, self.lr = clip, lr

    def configure_optimizers(self) -> Any:
        return ClippedSGD(self.model.named_parameters(), self.clip, self.lr)


class Watched(QKClip):
    """Keeps what each step found."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(query="q", key="k", **settings)
        self.steps: list[dict[str, list[float]]] = []

    def check_ready(self) -> None:
        super().check_ready()
        assert self._ready is not None
        self.steps.append(self._ready)


def seen_in(batch: Batch, length: int) -> torch.Tensor:
    """bool [B, S, S]: causal, and within documents."""
    seen = batch["input_ids"].new_ones(length, length, dtype=torch.bool).tril()[None]
    segments = batch.get("segment_ids")
    return seen if segments is None else seen & (segments[:, :, None] == segments[:, None, :])


def maxima_by_hand(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    """float64 [H] of each block: scores of the whole sequence, in one process."""
    ids = batch["input_ids"]
    length = ids.shape[1]
    seen = seen_in(batch, length)
    positions = batch.get("position_ids", torch.arange(length, device=ids.device)[None])
    found: list[torch.Tensor] = []

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> Any:
        keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = (q @ keys.transpose(2, 3)) / math.sqrt(q.shape[3])
        scores = scores.masked_fill(~seen[:, None], -math.inf)
        found.append(scores.amax((0, 2, 3)))
        return scores.softmax(-1) @ values

    with torch.no_grad(), mock.patch.object(F, "scaled_dot_product_attention", attention):
        model(ids, positions)
    return {f"blocks.{at}": x for at, x in enumerate(found)}


def clipped_by_hand(
    weights: Mapping[str, torch.Tensor],
    maxima: Mapping[str, torch.Tensor],
    tau: float,
    alpha: float,
) -> dict[str, torch.Tensor]:
    """Row by row; the group of query heads of a key head has one gamma."""
    after = {name: x.clone() for name, x in weights.items()}
    for layer, largest in maxima.items():
        q, k = (after[f"{layer}.{part}.weight"] for part in ("q", "k"))
        dim = q.shape[0] // len(largest)
        group = q.shape[0] // k.shape[0]
        for kv in range(k.shape[0] // dim):
            some = largest[kv * group : (kv + 1) * group]
            gamma = min(1.0, tau / float(some.max().float()))
            k[kv * dim : (kv + 1) * dim] *= gamma ** (1 - alpha)
            q[kv * group * dim : (kv + 1) * group * dim] *= gamma**alpha
    return after

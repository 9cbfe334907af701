"""A small model that is well, and the same model with each of the faults that the doctor knows."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn

from lightning_cp import ContextParallelMixin

VOCAB, LENGTH, FEATURES, HEADS = 41, 48, 32, 4


class Attention(nn.Module):
    """Causal, by torch's function."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(FEATURES, 3 * FEATURES)
        self.out = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        q, k = self.turned(q, x), self.turned(k, x)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))

    def turned(self, q: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return q


class LocallyTurned(Attention):
    """Rotary positions counted from 0 on every rank."""

    def turned(self, q: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(x.shape[1])[:, None] * 0.3 ** torch.arange(FEATURES // HEADS // 2)
        a, b = q.chunk(2, -1)
        cos, sin = angles.cos().to(q), angles.sin().to(q)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Mixing(nn.Module):
    """Each token is moved by the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.own(F.pad(x, (0, 0, 1, 0))[:, :-1])


class Block(nn.Module):
    def __init__(self, attention: nn.Module, mixing: nn.Module) -> None:
        super().__init__()
        self.mixing, self.attention = mixing, attention
        self.norm_1, self.norm_2 = nn.LayerNorm(FEATURES), nn.LayerNorm(FEATURES)
        self.mlp = nn.Sequential(
            nn.Linear(FEATURES, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, FEATURES)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(self.mixing(x)))
        return x + self.mlp(self.norm_2(x))


class Healthy(pl.LightningModule):
    """Positions from the batch, labels aligned by the dataset."""

    attention: Any = Attention
    mixing: Any = nn.Identity

    def __init__(self, dtype: torch.dtype = torch.float64, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(7)
        torch.set_default_dtype(dtype)
        self.tokens, self.places = nn.Embedding(VOCAB, FEATURES), nn.Embedding(LENGTH, FEATURES)
        self.blocks = nn.ModuleList(Block(self.attention(), self.mixing()) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(FEATURES), nn.Linear(FEATURES, VOCAB)
        self.losses: list[float] = []
        self.counted = 0

    def positions(self, batch: Any) -> torch.Tensor:
        return batch["position_ids"]

    def logits(self, batch: Any) -> torch.Tensor:
        x = self.tokens(batch["input_ids"]) + self.places(self.positions(batch))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, logits: torch.Tensor, batch: Any) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(self.logits(batch), batch)
        self.log("loss", loss)
        self.losses.append(float(loss.detach()))
        self.counted += 1
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class OfTargets(Healthy):
    """Takes its targets from the batch, which the strategy has shifted."""

    def loss(self, logits: torch.Tensor, batch: Any) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())


class OfTargetsIfAny(OfTargets):
    """Shifts them itself where nobody did."""

    def loss(self, logits: torch.Tensor, batch: Any) -> torch.Tensor:
        targets = batch.get("shift_labels")
        if targets is None:
            targets = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
        return super().loss(logits, {"shift_labels": targets})


class Summed(Healthy):
    """Unscaled loss: a sum over what a rank has, instead of the mean."""

    def loss(self, logits: torch.Tensor, batch: Any) -> torch.Tensor:
        return 0.01 * F.cross_entropy(
            logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum"
        )


class SummedTargets(OfTargets):
    """The same, of targets that the strategy has shifted: one rank has one less."""

    def loss(self, logits: torch.Tensor, batch: Any) -> torch.Tensor:
        targets = batch["shift_labels"].flatten()
        return 0.01 * F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")


class FirstHeldBack(Healthy):
    """A term beside the mean over targets, of the first token that a rank has."""

    def loss(self, logits: torch.Tensor, batch: Any) -> torch.Tensor:
        return super().loss(logits, batch) + 0.1 * logits[:, 0].square().mean()


class Preferred(Healthy):
    """A function of sums over sequences, of which a rank has a part."""

    def loss(self, logits: torch.Tensor, batch: Any) -> torch.Tensor:
        found = logits.log_softmax(-1).gather(-1, batch["labels"][..., None])[..., 0]
        first, second = self.sums(found)
        return -F.logsigmoid(0.1 * (first - second) + 0.3)

    def sums(self, found: torch.Tensor) -> torch.Tensor:
        return found.sum(1)


class PreferredWhole(ContextParallelMixin, Preferred):
    """The same, put together before it is summed."""

    def sums(self, found: torch.Tensor) -> torch.Tensor:
        return self.unshard(found).sum(1)


class Swelling(Healthy):
    """Code of training alone: scaled by the length that it sees."""

    def logits(self, batch: Any) -> torch.Tensor:
        logits = super().logits(batch)
        return logits * (1 + logits.shape[1] ** -0.5) if self.training else logits


class CountedHere(Healthy):
    """Local positions, of an embedding."""

    def positions(self, batch: Any) -> torch.Tensor:
        return torch.arange(batch["input_ids"].shape[1])


class TurnedHere(CountedHere):
    """Local positions, within attention; no others."""

    attention = LocallyTurned

    def positions(self, batch: Any) -> torch.Tensor:
        return torch.zeros_like(batch["input_ids"])


class ShiftedHere(Healthy):
    """Local labels: shifted in the step, so that the last token of each rank has no target."""

    def loss(self, logits: torch.Tensor, batch: Any) -> torch.Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())


class Mixed(Healthy):
    """A module that mixes the sequence, as a convolution does."""

    mixing = Mixing


class SummedBefore(Healthy):
    """The same, in the step itself and not in a module."""

    def logits(self, batch: Any) -> torch.Tensor:
        x = self.tokens(batch["input_ids"]).cumsum(1) + self.places(self.positions(batch))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class DrawnPerRank(Healthy):
    """Different data inside the cp group: each rank hides other tokens."""

    def logits(self, batch: Any) -> torch.Tensor:
        draw = torch.Generator().manual_seed(self.global_rank)
        hidden = torch.rand(batch["input_ids"].shape, generator=draw) < 0.3
        return super().logits({**batch, "input_ids": batch["input_ids"].masked_fill(hidden, 0)})


def rows(count: int, packed: bool = False, padded: bool = False) -> list[dict[str, torch.Tensor]]:
    """Samples of ``LENGTH`` tokens; packed ones declare two documents."""
    draw = torch.Generator().manual_seed(3)
    found: list[dict[str, torch.Tensor]] = []
    for _ in range(count):
        ids = torch.randint(0, VOCAB, (LENGTH + 1,), generator=draw)
        row = {"input_ids": ids[:-1], "labels": ids[1:].clone()}
        if packed:
            row["segment_ids"] = (torch.arange(LENGTH) >= 19).long()
        if padded:
            row["labels"][-9:] = -100
        found.append(row)
    return found

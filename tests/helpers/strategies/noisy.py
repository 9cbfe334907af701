"""A model that drops out and adds noise in every form, trained by N ranks and by one.

The one is a plain Trainer (or Fabric); the package's random functions learn that it holds whole rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_cp.layout import SequenceLayout
from lightning_cp.randomness.functions import patch_random_functions
from lightning_cp.randomness.token_draws import StepTokens, TokenDraws
from tests.helpers.strategies.plain_llama import PlainLlama
from tests.helpers.strategies.small import VOCAB, Small, alone, trainer_of, whole
from tests.ranks.strategies.test_fabric import fabric_of

LENGTH = 61  # a length that divides by nothing


@dataclass(frozen=True)
class Run:
    """One run; ``settings`` are the strategy's, ``None`` is one process."""

    settings: tuple[tuple[str, Any], ...] | None = None
    fabric: bool = False
    packed: bool = False
    compiled: bool = False
    rows: int = 2
    steps: int = 3
    accumulate: int = 1
    data_size: int = 1


@dataclass
class Result:
    losses: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    masks: list[torch.Tensor] = field(default_factory=list)
    """[rows, L] of this rank, of each micro-batch: one feature of a dropout."""
    state: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """Of the generator, at the end."""


class Noise(nn.Module):
    """[B, L, D] -> [B, L, D]: per token and per row, by modules, functions and methods."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.in_place = nn.Dropout(0.2), nn.Dropout(0.1, inplace=True)
        self.alpha, self.mask = nn.AlphaDropout(0.1), torch.empty(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        kept = self.dropout(x)
        self.mask = (kept[..., 0] == 0).detach()
        x = self.alpha(self.in_place(kept * 1.0))
        x = F.dropout(x.flatten(0, 1), 0.1).view_as(x)
        x = F.dropout1d(x, 0.1) + 0.01 * torch.randn_like(x)
        x = x + torch.empty_like(x).uniform_(-0.01, 0.01)
        x = x * torch.bernoulli(torch.full(x.shape[:2], 0.9, dtype=x.dtype))[..., None]
        level = torch.rand(x.shape[0], 1, 1)  # of a row
        return x * (1 + 0.1 * level) if torch.rand(()) < 0.7 else x


class NoisyMlp(nn.Module):
    """What can be cut into tiles."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 3 * hidden), nn.Linear(3 * hidden, hidden)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.dropout(F.silu(self.up(x)))
        return self.dropout(self.down(y) + 0.01 * torch.randn_like(x))


class NoisyBlock(nn.Module):
    """A block with noise on both sides of its MLP."""

    def __init__(self, block: nn.Module, hidden: int) -> None:
        super().__init__()
        self.attention, self.noise, self.mlp = block, Noise(), NoisyMlp(hidden)

    def forward(self, x: torch.Tensor, *given: Any) -> torch.Tensor:
        x = self.noise(self.attention(x, *given))
        return x + self.mlp(x)


class Noisy(Small):
    """Trained for a few steps; remembers what was dropped."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.model = PlainLlama(VOCAB, num_heads=4, num_kv_heads=2, layers=2)
        self.model.blocks = nn.ModuleList(NoisyBlock(each, 32) for each in self.model.blocks)
        self.run = run
        self.result = Result()

    def logits(self, batch: Any) -> torch.Tensor:
        ids, segments, mask = batch["input_ids"], batch.get("segment_ids"), None
        if segments is not None and self.run.settings is None:
            mask = (segments[:, :, None] == segments[:, None, :]).tril()
        default = torch.arange(ids.shape[1])[None]
        return self.model(ids, batch.get("position_ids", default), mask)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.run.compiled and self.run.settings is not None:
            strategy: Any = self.trainer.strategy  # a loss in a graph shows nothing of itself
            strategy.count_targets(batch["labels"] != -100)
        loss = self.loss(batch)
        show_loss(self, loss)
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.run.settings is None:
            self.draws.begin(whole_rows(batch))

    def setup(self, stage: str) -> None:
        if self.run.settings is None:
            self.draws, self.end = TokenDraws(self.model), patch_random_functions()

    def note(self) -> None:
        """After a micro-batch."""
        self.result.masks.append(self.model.blocks[0].noise.mask.clone())  # type: ignore[union-attr]

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        self.note()
        self.result.losses.append(float(self.trainer.callback_metrics["loss"]))

    def teardown(self, stage: str) -> None:
        if self.run.settings is None:
            self.draws.end()
            self.end()


def _show_loss(module: Any, loss: torch.Tensor) -> None:
    module.log("loss", loss)


show_loss: Any = torch.compiler.disable(_show_loss)
"""Log it, where PyTorch's compiler does not look: it fails within Lightning's own method."""


def whole_rows(batch: Any) -> StepTokens:
    """One process's."""
    rows, length = batch["input_ids"].shape
    return StepTokens.of(SequenceLayout(length, 1, 1, "contiguous"), 0, rows)


def loader_of(run: Run, data_rank: int) -> DataLoader[Any]:
    """Samples in order; data ranks take turns, as with Lightning's sampler."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for _ in range(run.steps * run.accumulate * run.rows * run.data_size):
        ids, labels = torch.randint(0, VOCAB, (2, LENGTH), generator=generator)
        labels[torch.rand(LENGTH, generator=generator) < 0.3] = -100
        sample = {"input_ids": ids, "labels": labels}
        if run.packed:
            starts = torch.rand(LENGTH, generator=generator) < 0.12
            starts[0] = True
            firsts = starts.nonzero()[:, 0][starts.cumsum(0) - 1]
            sample |= {
                "segment_ids": starts.cumsum(0),
                "position_ids": torch.arange(LENGTH) - firsts,
            }
            labels[starts] = -100
        found.append(sample)
    return DataLoader(found[data_rank :: run.data_size], batch_size=run.rows)  # type: ignore[arg-type]


def execute(rank: int, world_size: int, run: Run) -> Result:
    """Train on every rank."""
    module = Noisy(run)
    settings = None if run.settings is None else {"parity_check": "off", **dict(run.settings)}
    result = (_by_fabric if run.fabric else _by_trainer)(rank, world_size, run, module, settings)
    for name, p in module.named_parameters():
        plain = name.replace("_forward_module.", "").replace("model.module.", "model.")
        result.weights[plain] = whole(p.detach()).clone()
    result.state = torch.get_rng_state()
    return result


def _by_trainer(
    rank: int, world_size: int, run: Run, module: Noisy, settings: dict[str, Any] | None
) -> Result:
    trainer = trainer_of(world_size, settings, accumulate_grad_batches=run.accumulate)
    data_rank = 0 if settings is None else trainer.strategy.data_rank  # type: ignore[attr-defined]
    called: Any = torch.compile(module, backend="aot_eager") if run.compiled else module
    torch.manual_seed(5)
    trainer.fit(called, loader_of(run, data_rank))
    return module.result


def _by_fabric(
    rank: int, world_size: int, run: Run, module: Noisy, settings: dict[str, Any] | None
) -> Result:
    if settings is None:
        alone()
    fabric = fabric_of(world_size, settings)
    fabric.launch()
    strategy: Any = fabric.strategy
    setup: Any = fabric.setup(module.model, module.configure_optimizers())
    module.model, optimizer = setup
    module.setup("fit")
    torch.manual_seed(5)
    for batch in loader_of(run, 0):
        if settings is None:
            module.draws.begin(whole_rows(batch))
        part = batch if settings is None else strategy.shard_batch(batch)
        loss = module.loss(part)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        module.note()
        shown = loss if settings is None else strategy.average(loss)
        module.result.losses.append(float(shown.detach()))
    module.teardown("fit")
    return module.result

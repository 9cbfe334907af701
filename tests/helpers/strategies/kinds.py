"""Modules whose steps do all kinds of things, and their training under any strategy."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_cp import ContextParallelMixin
from tests.helpers.pool import run_ranks
from tests.helpers.strategies.small import (
    LENGTH,
    Batch,
    Settings,
    Small,
    loader,
    samples,
    trainer_of,
    weights,
)


def fitted(
    rank: int, world_size: int, settings: Settings | None, kind: str, fits: int = 1
) -> torch.Tensor:
    """The weights after training a module of some kind."""
    module = KINDS[kind]()
    for _ in range(fits):
        data = module.loader() if hasattr(module, "loader") else loader(8)
        trainer_of(world_size, settings, **OPTIONS.get(kind, {})).fit(module, data)
        assert "log" not in module.__dict__
    return weights(module)


@lru_cache(maxsize=32)
def plain(kind: str, fits: int = 1) -> torch.Tensor:
    """What one process makes of it."""
    want = run_ranks(1, fitted, None, kind, fits)[0]
    assert not torch.equal(want, weights(KINDS[kind]())), "nothing was trained"
    return want


class Manual(Small):
    """Steps its optimizer itself, after two backward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False  # type: ignore[assignment]

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        self.manual_backward(0.25 * loss, retain_graph=True)
        self.manual_backward(0.75 * loss)
        if batch_idx % 2:
            self.clip_gradients(optimizer, 0.5)
            optimizer.step()
            optimizer.zero_grad()


class TwoOptimizers(Manual):
    """Alternates between two optimizers, each for its own parameters."""

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        halves = parameters[: len(parameters) // 2], parameters[len(parameters) // 2 :]
        return [torch.optim.SGD(half, lr=0.05) for half in halves]


class Checkpointed(Small):
    """Recomputes its blocks; ranks without targets have a loss of NaN."""

    reentrant = False

    def logits(self, batch: Batch) -> torch.Tensor:
        positions = batch.get("position_ids", torch.arange(batch["input_ids"].shape[1])[None])
        x: Any = self.model.embed(batch["input_ids"])
        for block in self.model.blocks:
            x = checkpoint(block, x, positions, use_reentrant=self.reentrant)
        return self.model.head(self.model.norm(x))


class Reentrant(Checkpointed):
    reentrant = True


class InATuple(ContextParallelMixin, Small):
    """Batches are (ids, labels, something else)."""

    context_parallel_labels = "aligned"
    context_parallel_label_key = "1"
    context_parallel_sequence_dims = {"0": 1, "1": 1}  # noqa: RUF012

    def loss(self, batch: Batch) -> torch.Tensor:
        ids, labels, factor = batch
        logits = self.model(ids, torch.zeros_like(ids))  # a tuple has no room for positions
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) * factor.mean()

    def loader(self) -> DataLoader[Any]:
        rows = [(x["input_ids"], x["labels"], torch.tensor(1.5)) for x in samples(8)]
        return DataLoader(rows, batch_size=2)  # type: ignore[arg-type]


class OfAllLengths(Small):
    """Every batch has another length, and the last one fewer rows."""

    def loader(self) -> DataLoader[Any]:
        rows = [row for length in (9, 16, 23, 40) for row in samples(3, length)]
        order = [[3 * at, 3 * at + 1, 3 * at + 2][: 3 if at < 3 else 1] for at in range(4)]
        return DataLoader(rows, batch_sampler=order)  # type: ignore[arg-type]


class InADictionary(Small):
    """``training_step`` returns more than the loss, after a hook changed the batch."""

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        assert batch["input_ids"].shape[1] == LENGTH, "users see the whole sequence"
        return {**batch, "labels": batch["labels"].masked_fill(batch["labels"] % 5 == 0, -100)}

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return {"loss": loss, "double": 2 * loss}


class LabelsAreInputs(ContextParallelMixin, Small):
    """A Hugging Face model that is trained on its own inputs; there is no key for labels."""

    context_parallel_label_key = "input_ids"

    def __init__(self) -> None:
        from tests.helpers.models.steps import Case, make_llama

        super().__init__()
        self.model = make_llama(Case())

    def loss(self, batch: Batch) -> torch.Tensor:
        return self.model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss

    def loader(self) -> DataLoader[Any]:
        rows = [{"input_ids": x["input_ids"] % 43} for x in samples(8)]
        return DataLoader(rows, batch_size=2)  # type: ignore[arg-type]


class ScaledByHooks(Small):
    """Gradients are read between backward and the step, and the learning rate is scheduled."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm()
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / float(norm)


class ByName(ContextParallelMixin, Small):
    context_parallel_labels = "aligned"


KINDS: dict[str, Callable[[], Any]] = {
    "small": Small,
    "manual": Manual,
    "two optimizers": TwoOptimizers,
    "checkpointed": Checkpointed,
    "reentrant": Reentrant,
    "tuple": InATuple,
    "lengths": OfAllLengths,
    "dictionary": InADictionary,
    "labels are inputs": LabelsAreInputs,
    "hooks": ScaledByHooks,
    "named": ByName,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "hooks": {"accumulate_grad_batches": 2},
    "dictionary": {"max_epochs": 2},
}

"""A sharded model that is called outside of steps, or whose weights are changed there or within a step."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_cp.errors import ConfigError
from lightning_cp.utils.dtensor import local_part
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.helpers.strategies.small import (
    LENGTH,
    RING,
    VOCAB,
    Small,
    Staged,
    close,
    loader,
    trainer_of,
    weights,
)
from tests.ranks.strategies.test_fabric import fabric_of, model_of

PROMPT = torch.arange(LENGTH)[None] % VOCAB
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": None,
}
PLACES = ("on_fit_start", "on_train_batch_start", "on_train_batch_end", "on_validation_epoch_end")


class CallsOutside(Staged):
    """Calls its model, with whole rows, in a hook; keeps what it got."""

    def __init__(self, place: str, *, trains: bool = False) -> None:
        super().__init__()
        self.got: list[torch.Tensor] = []
        self.trains = trains
        setattr(self, place, self.call)

    def call(self, *_: Any) -> None:
        with torch.set_grad_enabled(self.trains):
            self.got.append(self.model(PROMPT, torch.arange(LENGTH)[None]).detach().clone())


def called(
    _rank: int, world_size: int, settings: dict[str, Any] | None, place: str, trains: bool
) -> Any:
    """The outputs of all calls, and the weights that training led to."""
    module = CallsOutside(place, trains=trains)
    trainer = trainer_of(world_size, settings)
    trainer.fit(module, loader(6), loader(2))
    return torch.stack(module.got), weights(module)


@pytest.mark.quick("fsdp-on_train_batch_end-grad")
@pytest.mark.parametrize("trains", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("engine", ["ddp", "fsdp", "zero1"])
def test_calls_in_hooks_equal_those_of_one_process(engine: str, place: str, trains: bool) -> None:
    (want,) = run_ranks(1, called, None, place, trains)
    for got in run_ranks(2, called, {**RING, "data_parallel": engine}, place, trains):
        close(got, want)


class TransformsOutside(CallsOutside):
    """Calls its model through transforms of ``torch.func``, with whole rows, in a hook."""

    def call(self, *_: Any) -> None:
        at = torch.arange(LENGTH)[None]

        def by_embedding(weight: torch.Tensor) -> torch.Tensor:
            logits = torch.func.functional_call(self.model, {"embed.weight": weight}, (PROMPT, at))
            return logits[0, -1, :2]

        with torch.no_grad():
            rows = torch.stack([PROMPT, PROMPT.flip(1)])
            self.got.append(torch.vmap(lambda row: self.model(row, at))(rows).flatten())
            weight = self.model.embed.weight.detach()
            self.got.append(torch.func.jacrev(by_embedding)(weight).flatten())
        self.got = [torch.cat(self.got)]


def transformed(_rank: int, world_size: int, settings: dict[str, Any] | None) -> torch.Tensor:
    module = TransformsOutside("on_train_batch_end")
    trainer_of(world_size, settings).fit(module, loader(4), loader(2))
    return module.got[0]


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:There is a performance drop because:UserWarning")
def test_transforms_of_the_model_in_a_hook() -> None:
    (want,) = run_ranks(1, transformed, None)
    for got in run_ranks(2, transformed, RING):
        close(got, want)


class MapsPart(Small):
    """Maps its model over the rows of a part of a batch, before its step begins."""

    def on_train_batch_start(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        at = torch.arange(batch["input_ids"].shape[1])[None]
        torch.vmap(lambda row: self.model(row[None], at))(batch["input_ids"])


def maps_part(rank: int, world_size: int) -> None:
    trainer_of(world_size, RING).fit(MapsPart(), loader(2))


@pytest.mark.nightly
def test_a_transform_over_a_part_of_a_batch() -> None:
    match = "PlainLlama is called with this rank's part of a batch outside of the step"
    expect_on_every_rank(2, maps_part, error=ConfigError, match=match)


class Generates(pl.LightningModule):
    """Generates between steps, on each rank another number of tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        torch.set_default_dtype(torch.float64)
        self.model: Any = LlamaForCausalLM(LlamaConfig(**SIZES))
        self.got: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(**batch).loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.got += self.model.generate(
            PROMPT[:, :6], max_new_tokens=3 + self.global_rank, do_sample=False
        ).tolist()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def generated(_rank: int, world_size: int, settings: dict[str, Any] | None) -> list[list[int]]:
    module = Generates()
    trainer_of(world_size, settings).fit(module, loader(6))
    return module.got


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["fsdp", "zero1"])
def test_generate_between_steps_ends_when_that_of_all_ranks_does(engine: str) -> None:
    (want,) = run_ranks(1, generated, None)
    settings = {**RING, "data_parallel": engine, "labels": "auto"}
    first, second = run_ranks(2, generated, settings)
    assert first == want
    assert [len(row) for row in second] == [10] * len(want)
    assert [row[:9] for row in second] == want


class InfersFirst(Small):
    """Calls its model in inference mode before anything else has."""

    def on_fit_start(self) -> None:
        with torch.inference_mode():
            self.model(PROMPT, torch.arange(LENGTH)[None])


class ChangesWeights(Staged):
    """Halves its weights at the end of a validation, as averages of weights are put in and out."""

    def on_validation_epoch_end(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                local_part(parameter).mul_(0.5)


def changed(_rank: int, world_size: int, settings: dict[str, Any] | None) -> Any:
    module = ChangesWeights()
    trainer = trainer_of(world_size, settings, val_check_interval=1)
    trainer.fit(module, loader(6), loader(2))
    return weights(module), trainer.callback_metrics["val_loss"]


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["ddp", "fsdp", "zero1"])
def test_weights_that_a_validation_changed_are_those_of_the_next_step(engine: str) -> None:
    (want,) = run_ranks(1, changed, None)
    for got in run_ranks(2, changed, {**RING, "data_parallel": engine}):
        close(got, want)


class FailsOutside(Small):
    """Calls its model between steps with tokens that it does not know, and catches the error."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with pytest.raises(IndexError):
            self.model(PROMPT + VOCAB, torch.arange(LENGTH)[None])
        if self.trainer.world_size > 1:
            assert all(isinstance(x, DTensor) for x in self.parameters())  # sharded again


class BlockFirst(Small):
    """Calls one of its blocks before anything else has."""

    def on_fit_start(self) -> None:
        block, width = self.model.blocks[0], self.model.embed.weight.shape[1]
        block(torch.ones(1, LENGTH, width), torch.arange(LENGTH)[None])


class CallsInWindow(Small):
    """Calls its model between the batches of an accumulation window, and after it."""

    window = 2

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.model(PROMPT, torch.arange(LENGTH)[None])


class ChangesAfterCall(Small):
    """Calls itself between steps, with gradients, and halves its weights."""

    by_part = False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids, torch.arange(LENGTH)[None])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self(PROMPT) if not self.by_part else self.model(PROMPT, torch.arange(LENGTH)[None])
        with torch.no_grad():
            for parameter in self.parameters():
                local_part(parameter).mul_(0.5)


class ChangesAfterPart(ChangesAfterCall):
    by_part = True


class StepsWithin(Small):
    """Optimizes by hand, twice per batch; looks at its loss before the optimizer steps."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        for _ in range(2):
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            with torch.no_grad():
                self.loss(batch)
            optimizer.step()


class StepsFirst(Small):
    """Optimizes by hand: the optimizer steps before the forward of the next batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        if batch_idx:
            optimizer.step()
            optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        return loss.detach()


class StepWithinStep(Small):
    """Calls another of its steps, and uses a parameter of the root after it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            self.test_step(batch, batch_idx)
        return self.loss(batch) + 0.0 * self.model.head.weight.sum()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)


MODULES = [
    *(InfersFirst, FailsOutside, BlockFirst, CallsInWindow, ChangesAfterCall, ChangesAfterPart),
    *(StepsWithin, StepsFirst, StepWithinStep),
]


def trained(_rank: int, world_size: int, settings: Any, module: type[Small]) -> torch.Tensor:
    model = module()
    window = getattr(module, "window", 1)
    trainer_of(world_size, settings, accumulate_grad_batches=window).fit(model, loader(8))
    return weights(model)


@pytest.mark.quick("fsdp-InfersFirst", "fsdp-FailsOutside", "zero1-ChangesAfterPart")
@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("engine", ["fsdp", "zero1"])
def test_steps_and_hooks_see_current_weights(engine: str, module: type[Small]) -> None:
    (want,) = run_ranks(1, trained, None, module)
    settings = {**RING, "data_parallel": engine, "parity_check": "off"}
    for got in run_ranks(2, trained, settings, module):
        close(got, want)


class Recomputed(torch.nn.Module):
    """Keeps its logits, so that backward does not begin at its output; computes its blocks twice."""

    kept: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = model_of()

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.inner.embed(ids)
        for block in self.inner.blocks:
            x = checkpoint(block, x, positions, use_reentrant=False)
        self.kept = self.inner.head(self.inner.norm(x))
        return self.kept.detach()


def recomputed(_rank: int, world_size: int, settings: Any) -> torch.Tensor:
    fabric = fabric_of(world_size, settings)
    fabric.launch()
    plain, strategy = Recomputed(), fabric.strategy
    model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.05))
    for whole_batch in loader(6):
        batch: Any = whole_batch if settings is None else strategy.shard_batch(whole_batch)  # type: ignore[attr-defined]
        model(batch["input_ids"], batch.get("position_ids", torch.arange(LENGTH)[None]))
        fabric.backward(F.cross_entropy(plain.kept.flatten(0, 1), batch["labels"].flatten()))
        optimizer.step()
        optimizer.zero_grad()
    return weights(plain)


@pytest.mark.parametrize("engine", ["fsdp", "zero1"])
def test_recomputation_is_no_call_between_steps(engine: str) -> None:
    (want,) = run_ranks(1, recomputed, None)
    for got in run_ranks(2, recomputed, {**RING, "data_parallel": engine}):
        close(got, want)

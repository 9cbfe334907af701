"""The Fabric twin: a loop that the user writes gives what it gives in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader

from lightning_cp.errors import ConfigError, ShapeError
from lightning_cp.fabric import UlyssesRingStrategy
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.helpers.pool.environment import PoolEnvironment
from tests.helpers.strategies.plain_llama import PlainLlama
from tests.helpers.strategies.small import (
    HYBRID,
    RING,
    ULYSSES,
    VOCAB,
    Batch,
    Settings,
    alone,
    close,
    loader,
)
from tests.helpers.strategies.streams import Nobody, loader_of, rows_of


def fabric_of(world_size: int, settings: Settings | None) -> Fabric:
    """``settings`` are the strategy's; ``None`` is a plain Fabric in one process."""
    if settings is None:
        alone()
        return Fabric(accelerator="cpu", devices=1)
    strategy = UlyssesRingStrategy(**{"labels": "aligned", **settings})
    plugins: Any = [PoolEnvironment()]
    return Fabric(accelerator="cpu", devices=world_size, strategy=strategy, plugins=plugins)


def model_of() -> PlainLlama:
    """Four heads, one layer, float64."""
    torch.manual_seed(11)
    torch.set_default_dtype(torch.float64)
    return PlainLlama(VOCAB, num_heads=4, num_kv_heads=2, layers=1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class Loop:
    """A user's loop: accumulation over two batches, clipping, validation, prediction."""

    def __init__(
        self,
        world_size: int,
        settings: Settings | None,
        *,
        frozen: bool = False,
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    ) -> None:
        self.fabric = fabric_of(world_size, settings)
        self.fabric.launch()
        self.parallel = settings is not None
        plain = model_of()
        plain.embed.requires_grad_(not frozen)
        setup: Any = self.fabric.setup(plain, make_optimizer(plain))
        self.model, self.optimizer = setup

    def batches(self, count: int, **options: Any) -> Any:
        found: Any = self.fabric.setup_dataloaders(loader(count), **options)
        return found

    def shard(self, batch: Batch) -> Batch:
        strategy: Any = self.fabric.strategy
        return strategy.shard_batch(batch) if self.parallel else batch

    def logits(self, batch: Batch) -> torch.Tensor:
        ids = batch["input_ids"]
        return self.model(ids, batch.get("position_ids", torch.arange(ids.shape[1])[None]))

    def loss(self, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(self.logits(batch).flatten(0, 1), batch["labels"].flatten())

    def shown(self, loss: torch.Tensor) -> torch.Tensor:
        strategy: Any = self.fabric.strategy
        return (strategy.average(loss) if self.parallel else loss).detach()

    def train(self, batches: Any) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        for index, batch in enumerate(batches):
            waits = index % 2 == 0
            with self.fabric.no_backward_sync(self.model, enabled=waits and self.parallel):
                loss = self.loss(batch)
                self.fabric.backward(loss / 2)
            losses.append(self.shown(loss))
            if not waits:
                losses.append(
                    self.fabric.clip_gradients(self.model, self.optimizer, max_norm=0.3).detach()  # type: ignore[union-attr]
                )
                self.optimizer.step()
                self.optimizer.zero_grad()
        return losses

    def end(self) -> None:
        """The next case is another script."""
        strategy: Any = self.fabric.strategy
        if self.parallel:
            strategy.end_step()

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()]).clone()


def run(rank: int, world_size: int, settings: Settings | None, folder: Path) -> Any:
    loop = Loop(world_size, settings)
    sharded = settings is not None and settings.get("shard_dataloaders", False)
    batches = loop.batches(8, use_distributed_sampler=False)
    losses = loop.train(batches if sharded else (loop.shard(batch) for batch in batches))
    loop.fabric.save(folder / "state.ckpt", {"model": loop.model, "optimizer": loop.optimizer})
    state: Any = {"model": loop.model, "optimizer": loop.optimizer}
    after = loop.weights()
    with torch.no_grad():
        for parameter in loop.model.parameters():
            parameter.zero_()
    loop.fabric.load(folder / "state.ckpt", state)
    close(loop.weights(), after)
    outputs: list[torch.Tensor] = []
    loop.model.eval()
    with torch.no_grad():
        for batch in batches:
            local = batch if sharded else loop.shard(batch)
            logits = loop.logits(local)
            losses.append(
                loop.shown(F.cross_entropy(logits.flatten(0, 1), local["labels"].flatten()))
            )
            strategy: Any = loop.fabric.strategy
            outputs.append(strategy.unshard(logits) if loop.parallel else logits)
    loop.end()
    return after, losses, outputs


@lru_cache(maxsize=1)
def plain(folder: Path) -> Any:
    return run_ranks(1, run, None, folder)[0]


@pytest.mark.quick("hybrid")
@pytest.mark.parametrize(
    "settings",
    [RING, ULYSSES, HYBRID, {"shard_dataloaders": True}],
    ids=["ring", "ulysses", "hybrid", "sharded loaders"],
)
def test_a_loop_equals_one_process(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    want = plain(tmp_path / "alone")
    world_size = 4 if settings is HYBRID else 2
    for got in run_ranks(world_size, run, settings, tmp_path):
        close(got, want)


def run_hf(rank: int, world_size: int, settings: Settings | None) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    fabric = fabric_of(world_size, None if settings is None else {"labels": "auto", **settings})
    fabric.launch()
    plain_model = LlamaForCausalLM(config)
    plain_model.gradient_checkpointing_enable({"use_reentrant": False})
    setup: Any = fabric.setup(plain_model, torch.optim.SGD(plain_model.parameters(), lr=0.1))
    model, optimizer = setup
    model.train()
    strategy: Any = fabric.strategy
    losses: list[float] = []
    for batch in loader(6):
        local = batch if settings is None else strategy.shard_batch(batch)
        loss = model(**local).loss
        fabric.backward(loss)
        shown = loss if settings is None else strategy.average(loss)
        losses.append(float(shown.detach()))
        optimizer.step()
        optimizer.zero_grad()
    if settings is not None:
        strategy.end_step()
        if rank == 0:  # alone: the model is the plain model again
            (whole,) = loader(2)
            logits = plain_model.eval()(input_ids=whole["input_ids"]).logits
            assert logits.shape[1] == whole["input_ids"].shape[1]
    return losses


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
def test_a_hugging_face_model_and_a_plain_call_in_between() -> None:
    (want,) = run_ranks(1, run_hf, None)
    for got in run_ranks(4, run_hf, HYBRID):
        assert got == pytest.approx(want, rel=1e-6)


# -- data ranks ---------------------------------------------------------------------------------------


def samples_of(rank: int, world_size: int) -> list[int]:
    """The first token of each sample that a rank is given; the mesh does not exist yet."""
    fabric = fabric_of(world_size, {"data_parallel_size": 2})
    fabric.launch()
    rows: Any = [torch.tensor([index]) for index in range(8)]
    found: Any = fabric.setup_dataloaders(DataLoader(rows, batch_size=1))
    return [int(batch) for batch in found]


def test_samplers_shard_over_data_ranks() -> None:
    assert run_ranks(4, samples_of) == [[0, 2, 4, 6]] * 2 + [[1, 3, 5, 7]] * 2


# -- what is refused ----------------------------------------------------------------------------------


def misuse(rank: int, world_size: int, how: str) -> None:
    settings = {**RING, **({"labels": "auto"} if how == "labels" else {})}
    loop = Loop(world_size, settings, frozen=how == "unfrozen")
    loop.model.requires_grad_()
    (batch, *_) = loader(2)
    strategy: Any = loop.fabric.strategy
    if how == "not sharded":
        loop.fabric.backward(loop.loss(batch))
    local = strategy.shard_batch(batch)
    if how == "sharded twice":
        strategy.shard_batch(local)
    if how == "unfrozen":
        loop.fabric.backward(loop.loss(local))
    if how == "own attention":
        loop.fabric.backward(loop.model.head(loop.model.embed(local["input_ids"])).sum())
    if how == "two batches":
        first = loop.loss(local)
        loop.fabric.backward(first + loop.loss(strategy.shard_batch(batch)))
    if how == "never called":
        strategy.shard_batch(batch)
    raise AssertionError("nothing was refused")


def too_early(rank: int, world_size: int, launched: bool) -> None:
    fabric = fabric_of(world_size, RING)
    if launched:
        fabric.launch()
    (batch, *_) = loader(2)
    strategy: Any = fabric.strategy
    strategy.shard_batch(batch)


@pytest.mark.parametrize(
    ("launched", "match"),
    [
        (False, "the mesh does not exist yet: processes start first"),
        (True, r"sharded before there is a model. Call fabric\.setup"),
    ],
)
def test_sharding_too_early(launched: bool, match: str) -> None:
    expect_on_every_rank(2, too_early, launched, error=ConfigError, match=match)


def test_sharding_twice() -> None:
    match = "'input_ids' was sharded already: expected the whole sequence of 29 tokens, got this rank's 16"
    expect_on_every_rank(2, misuse, "sharded twice", error=ShapeError, match=match)


def shards_again(rank: int, world_size: int, settings: Settings | None) -> torch.Tensor:
    """A loop that catches the refusal, and trains on the shard that it has."""
    loop = Loop(world_size, settings)
    (batch, *_) = loader(2)
    local = loop.shard(batch)
    if settings is not None:
        with pytest.raises(ShapeError, match="was sharded already"):
            loop.shard(local)
    loop.fabric.backward(loop.loss(local))
    loop.optimizer.step()
    loop.end()
    return loop.weights()


def test_a_step_goes_on_after_its_shard_was_refused() -> None:
    (want,) = run_ranks(1, shards_again, None)
    for got in run_ranks(2, shards_again, RING):
        close(got, want)


@pytest.mark.quick(
    "labels-it is not known how PlainLlama reads its labels",
    "own attention-no attention call was intercepted",
    "never called-match2",
)
@pytest.mark.parametrize(
    ("how", "match"),
    [
        ("labels", "it is not known how PlainLlama reads its labels"),
        ("own attention", "no attention call was intercepted"),
        (
            "never called",
            r"the batch before was sharded, and no model was called with it.*one batch for each "
            r"backward.*join their rows.*strategy\.end_step\(\)",
        ),
        ("two batches", "whose step has ended.*one batch for each backward.*join their rows"),
        ("unfrozen", r"embed\.weight \(1 in all\) were frozen when fabric\.setup"),
        ("not sharded", r"backward without a sharded batch.*shard_batch"),
    ],
)
def test_misuse(how: str, match: str) -> None:
    expect_on_every_rank(2, misuse, how, error=ConfigError, match=match)


# -- several loaders, and one rank that reads for its group -------------------------------------------


def from_two_loaders(rank: int, world_size: int, settings: Settings | None) -> Any:
    """Trains on two loaders in turn; afterwards validates on a third, which is a stream."""
    loop = Loop(world_size, settings)
    reads = settings is None or rank == 0 or "batch_sync" not in settings
    made: list[Any] = [loader_of(kind, rows_of(8)) for kind in ("shuffled", "batch sampler")]
    made.append(loader_of("stream", rows_of(6)))
    if not reads:
        made = [DataLoader(Nobody(), 2) for _ in made]
    torch.manual_seed(2)
    first, second, third = loop.fabric.setup_dataloaders(*made)  # type: ignore[misc]
    losses = loop.train(
        loop.shard(batch) for pair in zip(first, second, strict=False) for batch in pair
    )
    loop.model.eval()
    with torch.no_grad():
        for batch in third:
            losses.append(loop.shown(loop.loss(loop.shard(batch))))
    loop.end()
    return loop.weights(), losses, torch.rand(2)


@pytest.mark.nightly
@pytest.mark.parametrize("settings", [RING, {**RING, "batch_sync": "broadcast"}])
def test_several_loaders(settings: Settings) -> None:
    (want,) = run_ranks(1, from_two_loaders, None)
    for got in run_ranks(2, from_two_loaders, settings):
        close(got, want)


def looks(rank: int, world_size: int) -> list[Any]:
    """What a loader that gives sharded batches shows of itself."""
    loop = Loop(world_size, {**RING, "shard_dataloaders": True})
    batches = loop.batches(6)
    first = next(iter(batches))
    loop.loss(first)
    loop.end()
    return [len(batches), len(batches.dataset), batches.batch_size, tuple(first["input_ids"].shape)]


def test_a_sharding_loader_keeps_its_attributes() -> None:
    assert run_ranks(2, looks) == [[3, 6, 2, (2, 16)]] * 2


def early_statistics(rank: int, world_size: int) -> int:
    """Goes through a loader before there is a model, and so before there is a mesh; alone, on rank 0."""
    fabric = fabric_of(world_size, {})
    fabric.launch()
    batches: Any = fabric.setup_dataloaders(loader(6, shuffle=True))
    return sum(len(batch["input_ids"]) for batch in batches) if rank == 0 else 6


def test_a_loader_before_the_model() -> None:
    assert run_ranks(2, early_statistics) == [6, 6]

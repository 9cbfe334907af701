"""Tensor parallelism around context parallelism and inside fsdp: nothing changes, and mistakes have names."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torchmetrics import SumMetric

from lightning_cp import ContextParallelCallback, ContextParallelMixin
from lightning_cp.errors import BatchMismatchError, ConfigError
from lightning_cp.fabric import UlyssesRingStrategy as FabricStrategy
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.helpers.pool.environment import PoolEnvironment
from tests.helpers.strategies.runs import Result, Run, execute
from tests.helpers.strategies.small import Small, Staged, close, loader, samples, trainer_of, whole
from tests.ranks.strategies.test_exactness import baseline, compare

FSDP = {"data_parallel": "fsdp", "tensor_parallel_size": 2}


def shared(**more: Any) -> Any:
    """Strategy arguments, hashable."""
    return tuple({**FSDP, **more}.items())


def equal_to_one_process(run: Run, ranks: int, tolerance: float, **more: Any) -> None:
    """Losses, norms, validation, predictions and weights."""
    alone = run
    results: list[Result] = run_ranks(
        ranks, execute, Run(**{**vars(run), "strategy": shared(**more)}), timeout=200
    )
    compare(results, baseline(alone), tolerance)


@pytest.mark.nightly
def test_hugging_face_on_two_times_two_ranks() -> None:
    """Its loss is computed by transformers, on sharded logits; its norms are float32 inside."""
    equal_to_one_process(Run(model="hf", steps=8, clip=1.0), 4, 1e-6)


@pytest.mark.nightly
def test_packed_documents_and_accumulation() -> None:
    equal_to_one_process(Run(packed=True, steps=6, accumulate=2, clip=0.3), 4, 1e-10)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (2, {"context_parallel_size": 1}),
        (4, {"ulysses_size": 2, "ring_size": 1}),
        (4, {"mode": "zigzag_llama3"}),
        (8, {"ulysses_size": 2, "ring_size": 2}),
        (8, {"tensor_parallel_size": 4, "num_heads": 8}),
    ],
    ids=str,
)
def test_meshes(ranks: int, more: dict[str, Any]) -> None:
    heads = (8, 4) if more.get("tensor_parallel_size") == 4 else (8, 2)
    equal_to_one_process(Run(heads=heads, steps=8, clip=1.0), ranks, 1e-10, **more)


@lru_cache
def plain(kind: str) -> torch.Tensor:
    """One process."""
    return run_ranks(1, fitted, None, kind)[0]


def fitted(rank: int, world_size: int, settings: dict[str, Any] | None, kind: str) -> torch.Tensor:
    """The weights after training."""
    module = KINDS[kind]()
    trainer_of(world_size, settings).fit(module, loader(8))
    return torch.cat([whole(p.detach()).flatten() for p in module.parameters()]).clone()


class Dropping(Small):
    """Drops whole activations: all ranks of a group have to drop the same."""

    def __init__(self) -> None:
        super().__init__()
        self.model.norm = nn.Sequential(nn.Dropout(0.3), self.model.norm)  # type: ignore[assignment]


KINDS = {"small": Small, "dropping": Dropping}


@pytest.mark.nightly
def test_dropout_of_whole_activations_is_that_of_one_process() -> None:
    for got in run_ranks(2, fitted, {**FSDP, "context_parallel_size": 1}, "dropping"):
        close(got, plain("dropping"))


STYLES = {
    "blocks.*.q": ColwiseParallel(),
    "blocks.*.k": "colwise",
    "blocks.*.v": "colwise",
    "blocks.*.o": RowwiseParallel(),
}


@pytest.mark.nightly
def test_a_plan_of_the_users_own() -> None:
    for got in run_ranks(4, fitted, {**FSDP, "tensor_parallel_plan": STYLES}, "small"):
        close(got, plain("small"))


@pytest.mark.nightly
def test_one_rank_reads_for_all_that_share_a_sample() -> None:
    for got in run_ranks(4, fitted, {**FSDP, "batch_sync": "broadcast"}, "small"):
        close(got, plain("small"))


# -- what a rank holds -----------------------------------------------------------------------------


def held(rank: int, world_size: int) -> tuple[int, int, int]:
    """Numbers in this rank's parameters and optimizer state, and those of the closed form."""
    module = Small()
    whole_sizes = {name: p.numel() for name, p in module.named_parameters()}
    trainer_of(world_size, FSDP, max_steps=1).fit(module, loader(2))
    local = {name: _local(p) for name, p in module.named_parameters()}
    kept = ("norm",)
    form = sum(
        size // 2 // (1 if any(k in name for k in kept) else 2)
        for name, size in whole_sizes.items()
    )
    optimizer: Any = module.optimizers()
    state = sum(_local(s["momentum_buffer"]) for s in optimizer.state.values())
    return sum(local.values()), state, form


def _local(x: Any) -> int:
    assert isinstance(x, DTensor)
    return x.to_local().numel()


@pytest.mark.nightly
def test_a_rank_holds_its_part_of_a_part() -> None:
    """cp 2 x tp 2: shared layers are a quarter each, norms a half."""
    for parameters, state, form in run_ranks(4, held):
        assert parameters == state == form


# -- what is counted -------------------------------------------------------------------------------


class Counting(Staged):
    """Counts targets in all ways that there are."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = SumMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        targets = (batch["labels"] != -100).sum().double()
        self.counted.update(targets)
        self.log("counted", self.counted)
        self.log("summed", targets, reduce_fx="sum", sync_dist=True)


def counts(rank: int, world_size: int, settings: dict[str, Any] | None) -> list[float]:
    module = Counting()
    trainer = trainer_of(world_size, settings)
    trainer.validate(module, loader(8), verbose=False)
    found = [float(trainer.callback_metrics[name]) for name in ("counted", "summed", "val_loss")]
    if settings is not None:
        strategy: Any = trainer.strategy
        one = torch.ones(())
        assert float(strategy.reduce(one.clone(), reduce_op="sum")) == world_size / 2
        assert float(strategy.reduce(one.clone(), reduce_op="mean")) == 1.0
        assert strategy.reduce_boolean_decision(True, all=True)
        assert not strategy.reduce_boolean_decision(rank == 0, all=True)
        assert strategy.reduce_boolean_decision(rank == 0, all=False)
    return found


@pytest.mark.filterwarnings("ignore:.*got different values from ranks")
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_layers_count_once(ranks: int) -> None:
    (want,) = run_ranks(1, counts, None)
    for got in run_ranks(ranks, counts, FSDP):
        assert got[:2] == want[:2]
        assert got[2] == pytest.approx(want[2], rel=1e-6)


# -- mistakes --------------------------------------------------------------------------------------


def different(rank: int, world_size: int, own: tuple[int, ...]) -> None:
    """Some ranks change a token of the batch."""
    strategy = FabricStrategy(labels="aligned", **FSDP)
    fabric = Fabric(
        accelerator="cpu", devices=world_size, strategy=strategy, plugins=[PoolEnvironment()]
    )
    fabric.launch()
    module = Small()
    model: Any = fabric.setup(module.model)
    batch = {key: x[None].clone() for key, x in samples(1)[0].items()}
    strategy.shard_batch(batch)
    strategy.runtime.end_step()
    if rank in own:
        batch["input_ids"][0, 3] += 1
    strategy.shard_batch({key: x.clone() for key, x in batch.items()})
    assert model is not None


@pytest.mark.quick("(1,)", "(1, 3)")
@pytest.mark.parametrize("own", [(1,), (1, 3), (2,)], ids=str)
def test_different_batches_in_a_group_are_refused_on_all_ranks(own: tuple[int, ...]) -> None:
    """Ranks 0 and 1 share layers, so do 2 and 3; 0 and 2 share a sequence."""
    expect_on_every_rank(
        4, different, own, error=BatchMismatchError, match="share one sample disagree on input_ids"
    )


class DeepSpeedStrategy(SingleDeviceStrategy):
    """Of this name; the package need not be installed."""


class Mixed(ContextParallelMixin, Small):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.average(self.loss(batch))


@pytest.mark.parametrize("given", ["callback", "mixin"])
def test_deepspeed_is_refused(given: str) -> None:
    callbacks = [ContextParallelCallback()] if given == "callback" else []
    trainer = trainer_of(1, {}, strategy=DeepSpeedStrategy(), plugins=[], callbacks=callbacks)
    who = "ContextParallelCallback" if given == "callback" else "ContextParallelMixin"
    with pytest.raises(
        ConfigError, match=rf"{who} does not work with DeepSpeedStrategy.*'zero1'.*'fsdp'"
    ):
        trainer.fit(Mixed(), loader(2))


def fit_small(rank: int, world_size: int, settings: dict[str, Any]) -> None:
    trainer_of(world_size, settings).fit(Small(), loader(2))


@pytest.mark.parametrize(
    ("ranks", "settings", "match"),
    [
        (2, {"tensor_parallel_size": 3}, "tensor_parallel_size=3 does not divide the world size 2"),
        (
            4,
            {"data_parallel_size": 4},
            "data_parallel_size=4 x tensor_parallel_size=2 does not divide the world size 4. With 4 ranks "
            "and tensor_parallel_size=2, data_parallel_size can be 1 or 2",
        ),
        (
            4,
            {"context_parallel_size": 4},
            "got data_parallel_size=1 x context_parallel_size=4 x tensor_parallel_size=2, which is 8 ranks",
        ),
        (
            4,
            {"num_heads": 3},
            "tensor_parallel_size=2 does not divide the model's 3 attention heads",
        ),
        (
            6,
            {"ulysses_size": 3},
            "does not divide the model's 2 attention heads that tensor_parallel_size=2 leaves to a rank",
        ),
        (
            4,
            {"tensor_parallel_size": 4},
            "does not divide the 4 attention heads and 2 key/value heads",
        ),
        (2, {"tensor_parallel_plan": {"nothing": "colwise"}}, "no module is named 'nothing'"),
    ],
)
def test_sizes_and_plans_that_do_not_fit(ranks: int, settings: dict[str, Any], match: str) -> None:
    expect_on_every_rank(ranks, fit_small, {**FSDP, **settings}, error=ConfigError, match=match)

"""What engines promise beyond the matrix: odd parameters, windows, clipping, freezing, several models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_cp.engines.gradients import gradient_norm
from lightning_cp.errors import ConfigError
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.helpers.strategies.engine_runs import Cell, errors
from tests.helpers.strategies.plain_llama import PlainLlama
from tests.helpers.strategies.small import (
    VOCAB,
    Small,
    close,
    loader,
    samples,
    trainer_of,
    weights,
    whole,
)
from tests.ranks.strategies.test_fabric import fabric_of

RING = {"ring_size": 2, "ulysses_size": 1}
SHARDING = ("fsdp", "zero1")


# -- parameters of every kind ---------------------------------------------------------------------


class Odd(Small):
    """A scalar, tied weights, a frozen layer, sizes that no number of ranks divides, and a part that is
    used where the first token is even, which on some ranks it is not."""

    def __init__(self) -> None:
        super().__init__()
        self.model = PlainLlama(VOCAB, num_heads=4, num_kv_heads=2, layers=2)
        self.model.head.weight = self.model.embed.weight
        self.model.blocks[0].norm1.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.1))
        self.bias = nn.Parameter(torch.zeros(VOCAB))
        self.three = nn.Parameter(torch.ones(3, 5))
        self.sometimes = nn.Parameter(torch.ones(7))
        self.never = nn.Parameter(torch.ones(2, 2))

    def loss(self, batch: Any) -> torch.Tensor:
        logits = self.logits(batch) * self.scale + self.bias * self.three.mean()
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        more = 0.1 * self.sometimes.square().sum()
        if "position_ids" not in batch:
            return loss + more
        strategy: Any = self.trainer.strategy
        # A share of the step's own says nothing of what the loss counts.
        strategy.count_targets(batch["labels"] != -100)
        share = self.share(batch["labels"])
        holds_first = int(batch["position_ids"][0, 0]) == 0
        # One process adds it always; of several, one rank, by whose share of targets it is multiplied.
        return loss + more / share if holds_first else loss

    @staticmethod
    def share(labels: torch.Tensor) -> torch.Tensor:
        """Of all ranks' targets."""
        own = (labels != -100).sum().double()
        whole = own.clone()
        dist.all_reduce(whole)
        return own / whole

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)


def train(rank: int, world_size: int, settings: Any, kind: type[Small], options: Any) -> Any:
    """Six steps; the weights."""
    module = kind()
    if settings is not None and kind is Odd:  # which asks its batch whether there are others
        settings = {**settings, "parity_check": "off"}
    trainer = trainer_of(world_size, settings, **dict(options))
    trainer.fit(module, loader(12))
    return weights(module), [n for n, p in module.named_parameters() if p.grad is not None]


@pytest.mark.quick("fsdp")
@pytest.mark.parametrize("engine", SHARDING)
def test_odd_parameters_are_trained_as_in_one_process(engine: str) -> None:
    options = (("gradient_clip_val", 0.5),)
    want, _ = run_ranks(1, train, None, Odd, options)[0]
    for got, trained in run_ranks(2, train, {**RING, "data_parallel": engine}, Odd, options):
        close(got, want)
        assert "never" not in trained


# -- accumulation ---------------------------------------------------------------------------------


@contextmanager
def counting_calls() -> Iterator[dict[str, int]]:
    """How often gradients are reduced and parameters gathered within."""
    calls = {"reduce": 0, "gather": 0}

    def counting(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return own(*args, **kwargs)

        return call

    scatter = (
        "reduce_scatter_single"
        if hasattr(dist, "reduce_scatter_single")
        else "reduce_scatter_tensor"
    )
    gather = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    before = {name: getattr(dist, name) for name in (scatter, gather)}
    setattr(dist, scatter, counting("reduce", before[scatter]))
    setattr(dist, gather, counting("gather", before[gather]))
    try:
        yield calls
    finally:
        for name, own in before.items():
            setattr(dist, name, own)


def counted(rank: int, world_size: int, engine: str, accumulate: int) -> dict[str, int]:
    """In two windows."""
    with counting_calls() as calls:
        settings = {**RING, "data_parallel": engine, "parity_check": "off"}
        trainer = trainer_of(world_size, settings, accumulate_grad_batches=accumulate)
        trainer.fit(Small(), loader(4 * accumulate))
    return calls


@pytest.mark.nightly
@pytest.mark.parametrize("engine", SHARDING)
def test_a_window_reduces_once(engine: str) -> None:
    once, thrice = (run_ranks(2, counted, engine, n)[0] for n in (1, 3))
    assert once["reduce"] == thrice["reduce"] > 0
    if engine == "zero1":  # parameters stay whole from the first micro-batch on
        assert once["gather"] == thrice["gather"] > 0
    else:
        assert thrice["gather"] == 3 * once["gather"]


class Called(Small):
    """Called by its forward."""

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.model(ids, positions)


def counted_in_fabric(rank: int, world_size: int, engine: str, kind: str) -> tuple[int, int]:
    """How often parameters were gathered, and are to be: each unit once a step, and again for backward."""
    fabric = fabric_of(world_size, {**RING, "data_parallel": engine})
    fabric.launch()
    plain: Any = Small().model if kind == "plain" else Called()
    setup: Any = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.05))
    model, optimizer = setup
    strategy: Any = fabric.strategy
    with counting_calls() as calls:
        for whole_batch in loader(6):
            batch = strategy.shard_batch(whole_batch)
            if kind == "step":
                loss = model.training_step(batch, 0)
            else:
                logits = model(batch["input_ids"], batch["position_ids"])
                loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    strategy.end_step()
    units = sum(
        isinstance(module, FSDPModule) and any(True for _ in own_parameters(module))
        for module in plain.modules()
    )
    return calls["gather"], 3 * (units + (engine == "fsdp") * (units - 1))


def own_parameters(unit: Any) -> Iterator[nn.Parameter]:
    """Those that are in no unit of it."""
    yield from unit.parameters(recurse=False)
    for child in unit.children():
        if not isinstance(child, FSDPModule):
            yield from own_parameters(child)


@pytest.mark.quick("zero1-forward")
@pytest.mark.parametrize("kind", ["plain", "forward", "step"])
@pytest.mark.parametrize("engine", SHARDING)
def test_a_step_of_fabric_gathers_once(engine: str, kind: str) -> None:
    for gathered, wanted in run_ranks(2, counted_in_fabric, engine, kind):
        assert gathered == wanted > 0


@pytest.mark.quick("per_parameter")
@pytest.mark.parametrize(
    "cell",
    [
        Cell("fsdp", 2, accumulate=3, steps=5, optimizer="adamw", clip_by="value", clip=1e-3),
        pytest.param(
            Cell("zero1", 2, accumulate=2, steps=5, driver="fabric", clip_by="value", clip=1e-3),
            marks=pytest.mark.nightly,
        ),
        Cell("hsdp", 1, data=2, accumulate=2, steps=5, driver="fabric", optimizer="adamw"),
        Cell("fsdp", 2, steps=5, more=(("cpu_offload", True),)),
        Cell(
            "fsdp", 2, steps=5, driver="fabric", more=(("wrap_modules", ("blocks.0", "RMSNorm")),)
        ),
        Cell("ddp", 2, steps=5, accumulate=2, more=(("bucket_cap_mb", "per_parameter"),)),
    ],
    ids=["by_value", "by_value_zero1", "hsdp", "offload", "wrapped", "per_parameter"],
)
def test_options_change_nothing(cell: Cell) -> None:
    found = errors(cell)
    assert found.worst <= 1e-10, found


# -- norms ----------------------------------------------------------------------------------------


def norms(rank: int, world_size: int) -> list[float]:
    """Of sharded, replicated and plain gradients at once, by several p."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(3)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    placed = [(Shard(0), Shard(1)), (Replicate(), Shard(0)), (Replicate(), Replicate())]
    parameters: list[Any] = []
    for shape, at in zip([(5, 6), (3,), (4, 4)], placed, strict=True):
        parameter = nn.Parameter(distribute_tensor(torch.zeros(shape).double(), mesh, at))
        parameter.grad = distribute_tensor(torch.randn(shape).double(), mesh, at)
        parameters.append(parameter)
    plain, without = nn.Parameter(torch.zeros(7).double()), nn.Parameter(torch.zeros(2).double())
    plain.grad = torch.randn(7).double()
    parameters += [plain, without]
    flat = torch.cat([whole(p.grad).flatten() for p in parameters if p.grad is not None])
    return [
        abs(float(gradient_norm(parameters, p) - torch.linalg.vector_norm(flat, p)))
        for p in (2.0, 1.0, 3.0, float("inf"))
    ]


def test_the_norm_of_any_mixture_is_that_of_one_process() -> None:
    for differences in run_ranks(4, norms):
        assert max(differences) < 1e-13


# -- several optimizers, by hand ------------------------------------------------------------------


class ByHand(Small):
    """Two optimizers that step in turn, within one training_step, after a forward each."""

    def __init__(self) -> None:
        super().__init__()
        self.model = PlainLlama(VOCAB, num_heads=4, num_kv_heads=2, layers=2)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()

    def configure_optimizers(self) -> Any:
        inner, outer = self.model.blocks, [self.model.embed, self.model.norm, self.model.head]
        return [
            torch.optim.SGD(inner.parameters(), lr=0.05, momentum=0.9),
            torch.optim.SGD(nn.ModuleList(outer).parameters(), lr=0.05),
        ]


@pytest.mark.nightly
@pytest.mark.parametrize("engine", SHARDING)
def test_optimizers_that_step_by_hand(engine: str) -> None:
    want, _ = run_ranks(1, train, None, ByHand, ())[0]
    for got, _ in run_ranks(2, train, {**RING, "data_parallel": engine}, ByHand, ()):
        close(got, want)


class Thawing(Small):
    """The embedding is frozen for two batches, the head from the fourth on."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.model.embed.requires_grad_(batch_idx >= 2)
        self.model.head.requires_grad_(batch_idx < 4)


@pytest.mark.nightly
def test_layers_that_freeze_and_thaw() -> None:
    want, _ = run_ranks(1, train, None, Thawing, ())[0]
    for got, _ in run_ranks(2, train, {**RING, "data_parallel": "fsdp"}, Thawing, ()):
        close(got, want)


class Early(Small):
    """Makes its optimizer before there is a strategy."""

    def __init__(self) -> None:
        super().__init__()
        self.made = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def configure_optimizers(self) -> Any:
        return self.made


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_an_optimizer_that_was_made_before(engine: str) -> None:
    want, _ = run_ranks(1, train, None, Early, ())[0]
    for got, _ in run_ranks(2, train, {**RING, "data_parallel": engine}, Early, ()):
        close(got, want)


# -- every target weighs the same -----------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("accumulate", [1, 3])
def test_global_token_weights_are_those_of_ddp(accumulate: int) -> None:
    options = (("accumulate_grad_batches", accumulate), ("gradient_clip_val", 0.5))
    common = {**RING, "token_weighting": "global"}
    want, _ = run_ranks(2, train, common, Small, options)[0]
    for got, _ in run_ranks(2, train, {**common, "data_parallel": "fsdp"}, Small, options):
        close(got, want)


# -- the model ------------------------------------------------------------------------------------


class Seeded(Small):
    """Another model on every rank, before the strategy has seen it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
        self.model = PlainLlama(VOCAB, num_heads=4, num_kv_heads=2, layers=2)
        self.register_buffer("seen", torch.full((2,), float(torch.initial_seed())))


def stages(rank: int, world_size: int, engine: str) -> Any:
    """Fit, predict and fit again, by one Trainer; what was sharded."""
    module = Seeded()
    trainer = trainer_of(world_size, {**RING, "data_parallel": engine})
    trainer.fit(module, loader(4))
    first = weights(module)
    outputs: Any = trainer.predict(module, loader(2))
    assert torch.equal(first, weights(module))
    trainer.fit_loop.epoch_progress.reset()
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(4))
    sharded = [n for n, p in module.named_parameters() if isinstance(p, DTensor)]
    units = [type(m).__name__ for m in module.modules() if isinstance(m, FSDPModule)]
    return first, weights(module), outputs[0], float(module.seen[0]), len(sharded), units  # type: ignore[index]


@pytest.mark.nightly
def test_ranks_begin_with_the_weights_of_the_first_and_stages_follow_each_other() -> None:
    ddp, fsdp = (run_ranks(2, stages, engine) for engine in ("ddp", "fsdp"))
    for got in (*ddp, *fsdp):
        for value, wanted in zip(got[:4], ddp[0][:4], strict=True):
            close(value, wanted)
    assert ddp[0][4] == 0
    assert fsdp[0][4] == len(list(Seeded().parameters()))
    assert fsdp[0][5] == ["FSDPSeeded", "FSDPBlock", "FSDPBlock"]


def wrap_nothing(rank: int, world_size: int) -> None:
    trainer = trainer_of(world_size, {**RING, "data_parallel": "fsdp", "wrap_modules": "Decoder"})
    trainer.fit(Small(), loader(2))


def test_wrapping_what_is_not_there() -> None:
    match = "'Decoder' is neither the class nor the name of a module of Small.*: Block"
    expect_on_every_rank(2, wrap_nothing, error=ConfigError, match=match)


def share_again(rank: int, world_size: int) -> None:
    module = Small()
    for _ in range(2):
        trainer_of(world_size, {**RING, "data_parallel": "fsdp"}).fit(module, loader(2))


@pytest.mark.nightly
def test_a_module_of_another_run() -> None:
    match = "was sharded before, by another strategy"
    expect_on_every_rank(2, share_again, error=ConfigError, match=match)


def two_models(rank: int, world_size: int, engine: str | None) -> Any:
    """Fabric: a generator of logits and a judge of them, stepped in turn."""
    fabric = fabric_of(world_size, {**RING, "data_parallel": engine} if engine else None)
    fabric.launch()
    torch.manual_seed(11)
    torch.set_default_dtype(torch.float64)
    models = [PlainLlama(VOCAB, num_heads=4, num_kv_heads=2, layers=1) for _ in range(2)]
    pairs: list[Any] = [
        fabric.setup(m, torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9)) for m in models
    ]
    for row in samples(4):
        batch = {key: x[None] for key, x in row.items()}
        for at, (model, optimizer) in enumerate(pairs):
            strategy: Any = fabric.strategy
            part = strategy.shard_batch(batch) if engine else batch
            ids = part["input_ids"]
            positions = part.get("position_ids", torch.arange(ids.shape[1])[None])
            with torch.no_grad():
                other = pairs[1 - at][0](ids, positions)
            logits = model(ids, positions) + 0.1 * other
            fabric.backward(F.cross_entropy(logits.flatten(0, 1), part["labels"].flatten()))
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([weights(m) for m in models])


@pytest.mark.nightly
def test_several_models_of_one_fabric() -> None:
    want = run_ranks(1, two_models, None)[0]
    for got in run_ranks(2, two_models, "fsdp"):
        close(got, want)

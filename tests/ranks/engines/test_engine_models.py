"""Models that are built without memory, or computed in other dtypes."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_cp.checkpoint.pretrained.meta_init import initialise
from lightning_cp.engines.fsdp import wrap_units
from lightning_cp.errors import ConfigError
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.helpers.strategies.plain_llama import PlainLlama, RMSNorm
from tests.helpers.strategies.small import VOCAB, Small, loader, samples, trainer_of, whole
from tests.ranks.strategies.test_fabric import fabric_of

RING = {"ring_size": 2, "ulysses_size": 1}


class Norm(RMSNorm):
    """Says what its values are, also of a buffer that no checkpoint holds."""

    one: torch.Tensor

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        self.register_buffer("one", torch.ones(1), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        self.one.fill_(1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.one


def built() -> PlainLlama:
    """All of its modules can set their own values."""
    torch.set_default_dtype(torch.float64)
    model = PlainLlama(VOCAB, num_heads=4, num_kv_heads=2, layers=2)
    for part in (*model.blocks, model):
        for name, child in list(part.named_children()):
            if isinstance(child, RMSNorm):
                setattr(part, name, Norm(child.weight.numel()))
    return model


def empty(rank: int, world_size: int, engine: str, offload: bool) -> Any:
    """Fabric's ``init_module(empty_init=True)``: the weights, and whether a step runs."""
    fabric = fabric_of(world_size, {**RING, "data_parallel": engine, "cpu_offload": offload})
    fabric.launch()
    torch.manual_seed(100 + rank)
    with fabric.init_module(empty_init=True):
        model = built()
    assert all(p.is_meta for p in model.parameters())
    torch.manual_seed(5 + rank)  # the first rank's counts
    wrapped: Any = fabric.setup_module(model)
    weights = {name: whole(p.detach()).clone() for name, p in model.named_parameters()}
    strategy: Any = fabric.strategy
    part = strategy.shard_batch({key: x[None] for key, x in samples(1)[0].items()})
    strategy.count_targets(part["labels"] != -100)
    loss = wrapped(part["input_ids"], part["position_ids"]).square().mean()
    fabric.backward(loss)
    return weights, bool(loss.isfinite())


@pytest.mark.nightly
@pytest.mark.parametrize(("engine", "offload"), [("fsdp", False), ("zero1", True)])
def test_what_is_built_without_memory_has_the_values_of_one_process(
    engine: str, offload: bool
) -> None:
    before = torch.get_default_dtype()
    model = built()
    torch.manual_seed(5)
    for module in model.modules():
        again: Any = getattr(module, "reset_parameters", None)
        if again is not None:
            again()
    torch.set_default_dtype(before)
    for weights, finite in run_ranks(2, empty, engine, offload):
        assert finite
        for name, parameter in model.named_parameters():
            assert torch.equal(weights[name], parameter.detach()), name


class Tied(nn.Module):
    """A head that is the embedding, and something that is drawn after it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)
        self.head.weight = self.embedding.weight
        self.last = nn.Linear(4, 3)


def tied(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = Tied()
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    torch.manual_seed(5 + rank)
    group = dist.group.WORLD
    assert group is not None
    initialise(model, torch.device("cpu"), group)
    assert model.head.weight is model.embedding.weight
    return {name: whole(p.detach()).clone() for name, p in model.named_parameters()}


def test_tied_weights_are_drawn_twice_as_in_one_process() -> None:
    torch.manual_seed(5)
    wanted = dict(Tied().named_parameters())
    for weights in run_ranks(2, tied):
        assert weights.keys() == wanted.keys()
        for name, parameter in wanted.items():
            assert torch.equal(weights[name], parameter.detach()), name


def mute(rank: int, world_size: int, engine: str) -> None:
    class Mute(Small):
        def configure_model(self) -> None:
            with torch.device("meta"):
                self.model = PlainLlama(VOCAB, num_heads=4, num_kv_heads=2, layers=1)

    trainer_of(world_size, {**RING, "data_parallel": engine}).fit(Mute(), loader(2))


@pytest.mark.parametrize(
    ("engine", "match"),
    [
        ("fsdp", r"norm1 \(RMSNorm\) was built on the meta device.*reset_parameters\(\)"),
        ("ddp", "is on the meta device, which data_parallel='ddp' cannot train.*'fsdp'"),
    ],
)
def test_values_that_nothing_sets(engine: str, match: str) -> None:
    expect_on_every_rank(2, mute, engine, error=ConfigError, match=match)


class First(pl.Callback):
    """The gradient of the first step, all of it."""

    gradient: torch.Tensor | None = None

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self.gradient is None:
            parts = [p.grad for p in pl_module.parameters() if p.grad is not None]
            self.gradient = torch.cat([whole(x).flatten().float() for x in parts])


def first_gradient(rank: int, world_size: int) -> torch.Tensor | None:
    """Of one process, in float32."""
    module = Small()
    module.float()
    torch.set_default_dtype(torch.float32)
    trainer_of(1, None, callbacks=[first := First()]).fit(module, loader(4))
    return first.gradient


def lower(rank: int, world_size: int, more: Any, precision: str | None) -> Any:
    """Dtypes while computing, and of what the optimizer steps; and the first gradient."""
    module = Small()
    module.float()
    torch.set_default_dtype(torch.float32)
    seen: list[torch.dtype] = []
    projection: Any = module.model.blocks[0].q
    projection.register_forward_hook(lambda m, a, out: seen.append(out.dtype))
    settings = {**RING, "data_parallel": "fsdp", **more}
    trainer = trainer_of(world_size, settings, precision=precision, callbacks=[first := First()])
    trainer.fit(module, loader(4))
    return seen[0], {p.dtype for p in module.parameters()}, first.gradient


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("more", "precision", "stored"),
    [
        ({"mixed_precision": "bfloat16"}, None, torch.float32),
        ({}, "bf16-mixed", torch.float32),
        ({}, "bf16-true", torch.bfloat16),
    ],
)
def test_computing_in_bfloat16(more: Any, precision: str | None, stored: torch.dtype) -> None:
    want: Any = run_ranks(1, first_gradient)[0]
    for computed, kept, gradient in run_ranks(2, lower, more, precision):
        assert computed == torch.bfloat16
        assert kept == {stored}
        error = (gradient - want).norm() / want.norm()
        assert 1e-4 < error < 0.02, "what rounding to 8 bits does, and nothing else"


# -- what is wrapped ------------------------------------------------------------------------------


def test_blocks_are_found_and_lists_within_them_are_not() -> None:
    model: Any = PlainLlama(layers=3)
    for block in model.blocks:
        block.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))
    assert wrap_units(model, None) == list(model.blocks)
    assert wrap_units(nn.ModuleList(nn.Linear(2, 2) for _ in range(3)), None) == []
    model.head.weight = model.blocks[
        0
    ].q.weight  # gathered with the model, or they would come apart
    assert wrap_units(model, None) == list(model.blocks)[1:]
    with pytest.raises(
        ConfigError, match=r"'blocks\.0' shares 'head\.weight' with a module outside"
    ):
        wrap_units(model, "blocks.0")
    model: Any = PlainLlama(layers=3)
    wrapped = wrap_units(model, ["blocks.1", "Linear"])
    assert wrapped.index(model.blocks[1]) > wrapped.index(model.blocks[1].q)  # innermost first


def test_blocks_are_found_in_a_list_within_a_dict() -> None:
    """As nanoGPT and LitGPT hold them, beside embeddings; the list itself has no forward."""
    model: Any = nn.Module()
    blocks: Any = PlainLlama(layers=3).blocks
    model.transformer = nn.ModuleDict({"wte": nn.Embedding(5, 4), "h": blocks})
    assert wrap_units(model, None) == list(blocks)

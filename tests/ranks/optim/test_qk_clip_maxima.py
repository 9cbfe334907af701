"""The largest scores that a step collects are those of the whole sequence in one process, on every mesh."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric

from lightning_cp.attention.checkpointing import keep_attention
from lightning_cp.errors import ConfigError
from lightning_cp.fabric import UlyssesRingStrategy
from tests.helpers.optim.qk_models import LAYERS, ClippedSGD, Watched, llama, maxima_by_hand
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.helpers.pool.environment import PoolEnvironment
from tests.helpers.strategies.small import HYBRID, RING, ULYSSES, Batch, Settings, samples

LLAMA3 = {"mode": "zigzag_llama3", "context_parallel_size": 2}
MESHES: dict[str, tuple[int, Settings]] = {
    "one rank": (1, {}),
    "ring": (2, RING),
    "ulysses": (2, ULYSSES),
    "hybrid": (4, HYBRID),
    "ring 4": (4, {"ring_size": 4, "ulysses_size": 1}),
    "ulysses of more ranks than key heads": (4, {"ring_size": 1, "ulysses_size": 4}),
    "zigzag_llama3": (2, LLAMA3),
    "contiguous": (2, {**RING, "layout": "contiguous"}),
    "data": (2, {"context_parallel_size": 1, "data_parallel_size": 2}),
    "data and ring": (4, {**RING, "data_parallel_size": 2}),
    "tp": (2, {"context_parallel_size": 1, "tensor_parallel_size": 2, "data_parallel": "fsdp"}),
    "tp and ulysses": (4, {**ULYSSES, "tensor_parallel_size": 2, "data_parallel": "fsdp"}),
    "fsdp and hybrid": (4, {**HYBRID, "data_parallel": "fsdp"}),
    "hsdp": (4, {**RING, "data_parallel": "hsdp", "data_parallel_size": 2,
                 "data_parallel_replicate_size": 2}),
    "zero1": (2, {**RING, "data_parallel": "zero1"}),
    "blocks again": (2, {**RING, "activation_checkpointing": "blocks"}),
    "attention kept": (4, {**HYBRID, "activation_checkpointing": "keep_attention"}),
    "its own pass": (4, {**HYBRID, "kernel": "aten"}),
    "its own pass, gathered": (2, {**LLAMA3, "kernel": "aten"}),
    "its own pass, attention kept": (
        4,
        {**HYBRID, "kernel": "aten", "activation_checkpointing": "keep_attention"},
    ),
}  # fmt: skip
DOCUMENTS = torch.tensor([[0] * 7 + [1] * 13 + [2] * 9, [0] * 20 + [1] * 8 + [2]])


def batch_of(at: int, packed: bool = False) -> Batch:
    """Two rows of a length that divides by nothing; documents are told by segments and positions.

    Made after the model, which sets the dtype that is drawn in.
    """
    some = samples(8)[2 * at : 2 * at + 2]
    batch: Batch = {name: torch.stack([x[name] for x in some]) for name in some[0]}
    if packed:
        starts = torch.cat([torch.ones(2, 1), DOCUMENTS.diff(dim=1)], 1) > 0
        count = torch.arange(DOCUMENTS.shape[1]).expand(2, -1)
        batch["position_ids"] = count - torch.where(starts, count, 0).cummax(1).values
        batch["segment_ids"] = DOCUMENTS
    return batch


class Loop:
    """A loop of Fabric whose optimizer clips."""

    def __init__(
        self,
        world_size: int,
        settings: Settings,
        clip: Watched,
        lr: float = 0.0,
        layers: int = LAYERS,
    ) -> None:
        strategy = UlyssesRingStrategy(**{"labels": "aligned", **settings})
        plugins: Any = [PoolEnvironment()]
        self.fabric = Fabric(
            accelerator="cpu", devices=world_size, strategy=strategy, plugins=plugins
        )
        self.fabric.launch()
        plain = llama(layers)
        setup: Any = self.fabric.setup(plain, ClippedSGD(plain.named_parameters(), clip, lr))
        self.model, self.optimizer = setup
        self.strategy: Any = self.fabric.strategy

    def run(self, batch: Batch, call: Any = None) -> None:
        """A micro-batch, without a step."""
        batch = self.strategy.shard_batch(dict(batch))
        self.fabric.backward(self.loss(batch, call or self.model))

    def loss(self, batch: Batch, call: Any) -> torch.Tensor:
        ids = batch["input_ids"]
        logits = call(ids, batch.get("position_ids", torch.arange(ids.shape[1])[None]))
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.strategy.end_step()


def collected(
    rank: int, world_size: int, settings: Settings, packed: bool, own_pass: bool
) -> list[dict[str, list[float]]]:
    """Of a step with two micro-batches, then of one with a third."""
    clip = Watched(tau=1e9, extra_pass=own_pass)
    loop = Loop(world_size, settings, clip)
    data_rank = loop.strategy.data_rank
    for group in ((0, 1), (2,)):
        for at in group:
            loop.run(batch_of((at + data_rank) % 4, packed))
        with torch.no_grad():  # counts for nothing
            batch = loop.strategy.shard_batch(batch_of(3, packed), training=False)
            loop.loss(batch, loop.model)
            loop.strategy.end_step()
        loop.step()
    return clip.steps


def by_hand(packed: bool, data: int) -> list[dict[str, torch.Tensor]]:
    model = llama()
    found: list[dict[str, torch.Tensor]] = []
    for group in ((0, 1), (2,)):
        every = {(at + rank) % 4 for at in group for rank in range(data)}
        each = [maxima_by_hand(model, batch_of(at, packed)) for at in every]
        found.append({name: torch.stack([x[name] for x in each]).amax(0) for name in each[0]})
    return found


@pytest.fixture(autouse=True)
def _default_dtype() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.quick(
    "one rank-packed", "ring-one document", "ulysses-one document", "hybrid-one document"
)
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("mesh", MESHES)
def test_those_of_the_whole_sequence(mesh: str, packed: bool) -> None:
    ranks, settings = MESHES[mesh]
    want = by_hand(packed, settings.get("data_parallel_size", 1))
    for found in run_ranks(ranks, collected, settings, packed, mesh.startswith("its own")):
        assert [list(step) for step in found] == [list(step) for step in want]
        for step, wanted in zip(found, want, strict=True):
            for layer, largest in wanted.items():
                got = torch.tensor(step[layer], dtype=torch.float64)
                torch.testing.assert_close(got, largest, rtol=1e-7, atol=0)


def repeated(rank: int, world_size: int, settings: Settings) -> list[dict[str, list[float]]]:
    """The model is checkpointed by hand, and what is repeated is told again, or replayed."""
    from torch.utils.checkpoint import checkpoint

    clip = Watched(tau=1e9)
    loop = Loop(world_size, settings, clip)

    def call(*inputs: torch.Tensor) -> torch.Tensor:
        return checkpoint(loop.model, *inputs, use_reentrant=False, context_fn=keep_attention)

    loop.run(batch_of(0), call)
    loop.step()
    return clip.steps


def test_attention_that_is_replayed() -> None:
    want = maxima_by_hand(llama(), batch_of(0))
    for (step,) in run_ranks(4, repeated, HYBRID):
        for layer, largest in want.items():
            got = torch.tensor(step[layer], dtype=torch.float64)
            torch.testing.assert_close(got, largest, rtol=1e-7, atol=0)


def aside(rank: int, world_size: int) -> list[dict[str, list[float]]]:
    """The parity check goes through the model on other batches: nothing of it stays."""
    clip = Watched(tau=1e9)
    loop = Loop(world_size, RING, clip)
    loop.strategy.check_parity(batch_of(1), lambda batch: loop.loss(batch, loop.model))
    assert not clip._maxima._noted
    loop.run(batch_of(0))
    loop.step()
    return clip.steps


def test_parity_checks_leave_nothing() -> None:
    want = maxima_by_hand(llama(), batch_of(0))
    for (step,) in run_ranks(2, aside):
        for layer, largest in want.items():
            got = torch.tensor(step[layer], dtype=torch.float64)
            torch.testing.assert_close(got, largest, rtol=1e-7, atol=0)


def test_a_kernel_without_them_is_refused() -> None:
    expect_on_every_rank(
        *(2, collected, {**RING, "kernel": "aten"}, False, False),
        error=ConfigError,
        match=r"QK-clip wants the largest scores.*aten_cpu_flash has no max_logits.*extra_pass=True",
    )


def no_attention(rank: int, world_size: int) -> None:
    """A step without a forward pass."""
    loop = Loop(world_size, RING, Watched(tau=1.0))
    before = [p.detach().clone() for p in loop.model.parameters()]
    for p in loop.model.parameters():
        p.grad = torch.ones_like(p)
    try:
        loop.optimizer.optimizer.step()
    finally:
        assert all(map(torch.equal, before, loop.model.parameters()))


def test_a_step_without_scores_is_refused() -> None:
    expect_on_every_rank(
        *(2, no_attention),
        error=ConfigError,
        match=r"no largest scores of blocks.0, blocks.1 since the last step \(2 layers\)",
    )

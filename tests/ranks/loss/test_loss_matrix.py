"""Losses of whole rows and of drawn targets in Trainer and Fabric, by engines and features: one process's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from lightning_cp import ContextParallelMixin
from lightning_cp.fabric import UlyssesRingStrategy
from tests.helpers.pool import run_ranks
from tests.helpers.pool.environment import PoolEnvironment
from tests.helpers.strategies.small import (
    HYBRID,
    LENGTH,
    LET_EMPTY,
    RING,
    RING3,
    ULYSSES,
    Batch,
    Settings,
    Small,
    close,
    samples,
    trainer_of,
    weights,
)
from tests.helpers.suites import pairwise_cells

pytestmark = [
    LET_EMPTY,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

DOCUMENTS = [(0, 0, 11), (0, 11, LENGTH), (1, 0, LENGTH)]
"""Row, first token and end of each document of a packed batch."""


class Model(ContextParallelMixin, Small):
    """Its loss is one of ``KINDS``.

    Args:
        kind: name of the loss.
        feature: one of ``FEATURES``.
        data: ranks that have the same rows again; the model of one process repeats them.
    """

    def __init__(self, kind: str, feature: str, data: int = 1) -> None:
        super().__init__()
        self.kind, self.data = kind, data
        self.automatic_optimization = feature != "manual"  # type: ignore[assignment]

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        torch.manual_seed(batch_idx)
        loss = KINDS[self.kind](self, batch)
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def logps(self, batch: Batch) -> torch.Tensor:
        """[B, L]: of each token's own id."""
        logits = self.logits(batch).log_softmax(-1)
        return logits.gather(-1, batch["input_ids"][..., None]).squeeze(-1)

    def gathered(self, rows: torch.Tensor) -> torch.Tensor:
        return self.gather_data(rows).repeat(self.data, 1)


def preferred(module: Model, batch: Batch) -> torch.Tensor:
    chosen, rejected = module.sequence_sum(module.logps(batch), batch.get("real"))[:2]
    return -F.logsigmoid(0.1 * (chosen - rejected) + 0.3)


def chosen(batch: Batch) -> torch.Tensor:
    """bool [B, L]: some tokens, without padding of one process's rows of documents."""
    return (batch["input_ids"] % 3 > 0) & batch.get("real", torch.ones((), dtype=torch.bool))


def pooled(module: Model, batch: Batch) -> torch.Tensor:
    means = module.sequence_mean(module.logits(batch), chosen(batch))
    return (means[:, :4].tanh() - 0.2).square().mean()


def rewarded(module: Model, batch: Batch) -> torch.Tensor:
    logits = module.logits(batch)
    last = module.sequence_pick(logits, batch["real"].sum(1) - 1 if "real" in batch else -1)
    first = module.sequence_pick(logits, 0)
    return -F.logsigmoid(last[0, 0] - last[1, 0]) + F.cross_entropy(first, first.argmin(1))


def denoised(module: Model, batch: Batch) -> torch.Tensor:
    x = module.logits(batch)
    levels = torch.rand(len(x), 1, 1, dtype=torch.float64)
    noise = module.draw_whole(torch.randn_like, x.double())  # in any precision the same numbers
    return module.sequence_mean((x - levels * noise).square()).mean()


def contrasted(module: Model, batch: Batch) -> torch.Tensor:
    means = module.sequence_mean(module.logits(batch).tanh(), batch.get("real"))
    every = module.gathered(means)
    return F.cross_entropy(every @ every.T, torch.arange(len(every)))


def counted(module: Model, batch: Batch) -> torch.Tensor:
    """As masked language modelling and masked diffusion."""
    mask = chosen(batch)
    mask = mask & module.token_mask(mask)
    return -(module.logps(batch) * mask).sum() / module.count_targets(mask)


def mixed(module: Model, batch: Batch) -> torch.Tensor:
    return module.loss(batch) + 0.3 * preferred(module, batch)


KINDS: dict[str, Callable[[Model, Batch], torch.Tensor]] = {
    "sum": preferred,
    "mean": pooled,
    "pick": rewarded,
    "noise": denoised,
    "gather": contrasted,
    "count": counted,
    "mixed": mixed,
}
GRIDS: dict[str, tuple[int, Settings]] = {
    "ring2": (2, RING),
    "ring3": (3, RING3),
    "ring4": (4, {"ring_size": 4, "ulysses_size": 1}),
    "ulysses2": (2, ULYSSES),
    "hybrid4": (4, HYBRID),
    "llama3 2": (2, {**RING, "mode": "zigzag_llama3"}),
    "llama3 3": (3, {**RING3, "mode": "zigzag_llama3"}),
    "llama3 4": (4, {"ring_size": 4, "ulysses_size": 1, "mode": "zigzag_llama3"}),
}
ENGINES: dict[str, tuple[int, Settings]] = {
    "ddp": (1, {}),
    "fsdp": (1, {"data_parallel": "fsdp"}),
    "hsdp": (
        2,
        {
            "data_parallel": "hsdp",
            "data_parallel_size": 2,
            "data_parallel_replicate_size": 2,
        },
    ),
    "zero1": (1, {"data_parallel": "zero1"}),
}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"accumulate_grad_batches": 2},
    "clipped": {"gradient_clip_val": 0.01},
    "manual": {},
    "bf16": {"precision": "bf16-mixed"},
    "recomputed": {},
    "compiled": {},
    "packed": {},
}
LOOPED = ("plain", "accumulated", "clipped", "bf16", "recomputed", "packed")
"""Features of loops of Fabric."""
worst: dict[tuple[str, str, str, str], float] = defaultdict(float)
"""Largest error of a weight's change, relative to the largest change: by program, loss, grid and engine."""


def batches(feature: str, labels: str, *, alone: bool) -> list[Batch]:
    """Four batches of two rows; one process has packed documents as rows, padded to one length."""
    rows = samples(8)
    found: list[Batch] = []
    for at in range(0, 8, 2):
        batch: Batch = {
            key: torch.stack([row[key] for row in rows[at : at + 2]]) for key in rows[0]
        }
        if labels == "none":
            del batch["labels"]
        if feature == "packed":
            batch = documents(batch) if alone else packed(batch)
        found.append(batch)
    return found


def packed(batch: Batch) -> Batch:
    segments = torch.zeros(2, LENGTH, dtype=torch.int64)
    positions = torch.arange(LENGTH).repeat(2, 1)
    segments[0, 11:], positions[0, 11:] = 1, torch.arange(LENGTH - 11)
    return {**batch, "segment_ids": segments, "position_ids": positions}


def documents(batch: Batch) -> Batch:
    found: Batch = {}
    for key, x in batch.items():
        found[key] = torch.full((len(DOCUMENTS), LENGTH), -100 if key == "labels" else 0)
        for at, (row, start, end) in enumerate(DOCUMENTS):
            found[key][at, : end - start] = x[row, start:end]
    lengths = torch.tensor([end - start for _, start, end in DOCUMENTS])
    found["real"] = torch.arange(LENGTH) < lengths[:, None]
    return found


def trained(
    rank: int,
    world_size: int,
    settings: Settings | None,
    kind: str,
    feature: str,
    data: int = 1,
    wide: bool = False,
) -> torch.Tensor:
    """The change of all weights; ``wide`` leaves mixed precision out."""
    labels = "aligned" if kind == "mixed" else "none"
    module = Model(kind, feature, data if settings is None else 1)
    options = {} if feature == "bf16" and wide else FEATURES[feature]
    rows: Any = batches(feature, labels, alone=settings is None)
    if feature == "bf16" and not wide:
        module.float()
        torch.set_default_dtype(torch.float32)
    if settings is not None:
        settings = {"labels": labels, "parity_check": "off", **settings}
        if feature == "recomputed":
            settings["activation_checkpointing"] = "blocks"
        if feature == "compiled":
            torch._dynamo.reset()
            for block in module.model.blocks:
                block.compile(backend="aot_eager")
    before = weights(module).double()
    try:
        trainer = trainer_of(world_size, settings, **options)
        trainer.fit(module, DataLoader(rows, batch_size=None))
    finally:
        if feature == "compiled":
            torch._dynamo.reset()
    return weights(module).double() - before


def looped(rank: int, world_size: int, settings: Settings, kind: str, feature: str) -> torch.Tensor:
    """The change of all weights in a loop of Fabric."""
    labels = "aligned" if kind == "mixed" else "none"
    module, options = Model(kind, "plain"), FEATURES[feature]
    rows = batches(feature, labels, alone=False)  # in float64, as those of one process
    if feature == "bf16":
        module.float()
        torch.set_default_dtype(torch.float32)
    if feature == "recomputed":
        settings = {**settings, "activation_checkpointing": "blocks"}
    before = weights(module).double()
    strategy = UlyssesRingStrategy(**{"labels": labels, **settings})
    fabric = Fabric(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy,
        plugins=[PoolEnvironment()],
        precision=options.get("precision"),
    )
    fabric.launch()
    model, optimizer = fabric.setup(module, module.configure_optimizers())
    window = options.get("accumulate_grad_batches", 1)
    for at, batch in enumerate(rows):
        waits = (at + 1) % window > 0
        with fabric.no_backward_sync(model, enabled=waits):
            loss = model.training_step(strategy.shard_batch(batch), at)
            fabric.backward(loss / window)
        if waits:
            continue
        if "gradient_clip_val" in options:
            fabric.clip_gradients(model, optimizer, max_norm=options["gradient_clip_val"])
        optimizer.step()
        optimizer.zero_grad()
    strategy.end_step()
    return weights(module).double() - before


@lru_cache(maxsize=64)
def alone(kind: str, feature: str, data: int, wide: bool = False) -> torch.Tensor:
    return run_ranks(1, trained, None, kind, feature, data, wide)[0]


def is_possible(kind: str, grid: str, engine: str, feature: str) -> bool:
    """False for noise of a packed batch, which one process draws in another shape; and for 8 ranks."""
    return not (kind == "noise" and feature == "packed") and GRIDS[grid][0] * ENGINES[engine][0] < 8


CELLS = [cell for cell in product(KINDS, GRIDS, ENGINES, FEATURES) if is_possible(*cell)]
QUICK = [
    ("sum", "ring2", "ddp", "accumulated"),
    ("count", "ring3", "ddp", "packed"),
    ("mixed", "llama3 2", "fsdp", "clipped"),
]
QUICK_LOOPS = [("pick", "llama3 3", "ddp", "accumulated"), ("mean", "ulysses2", "zero1", "clipped")]


def cells_of(cells: list[tuple[str, ...]], quick: list[tuple[str, ...]]) -> list[Any]:
    """The quick cells, and with them every pair of values, nightly."""
    more = [cells[at] for at in sorted(pairwise_cells(cells, {cells.index(x) for x in quick}))]
    return [
        *(pytest.param(*cell) for cell in quick),
        *(pytest.param(*cell, marks=pytest.mark.nightly) for cell in more),
    ]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("kind", "grid", "engine", "feature"), cells_of(CELLS, QUICK))
def test_weights_are_those_of_one_process(kind: str, grid: str, engine: str, feature: str) -> None:
    (shared, mode), (data, of_engine) = GRIDS[grid], ENGINES[engine]
    settings = {**mode, **of_engine}
    found = run_ranks(shared * data, trained, settings, kind, feature, timeout=200)
    check(found, "Trainer", kind, grid, engine, feature)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("kind", "grid", "engine", "feature"),
    cells_of([cell for cell in CELLS if cell[3] in LOOPED], QUICK_LOOPS),
)
def test_weights_of_a_loop(kind: str, grid: str, engine: str, feature: str) -> None:
    (shared, mode), (data, of_engine) = GRIDS[grid], ENGINES[engine]
    settings = {**mode, **of_engine}
    found = run_ranks(shared * data, looped, settings, kind, feature, timeout=200)
    check(found, "Fabric", kind, grid, engine, feature)


def check(
    found: list[torch.Tensor], program: str, kind: str, grid: str, engine: str, feature: str
) -> None:
    data = ENGINES[engine][0]
    if feature != "bf16":
        want = alone(kind, feature, data)
        assert want.norm() > 1e-4
        for got in found:
            close(got, want)
            error = float((got - want).abs().max() / want.abs().max())
            key = (program, kind, grid, engine)
            worst[key] = max(worst[key], error)
        return
    # As near to float64 as one process is in the same precision, which rounds as often.
    exact = alone(kind, feature, data, True)
    bound = 2 * (alone(kind, feature, data) - exact).norm()
    assert bound < 0.1 * exact.norm()
    for got in found:
        assert (got - exact).norm() <= bound

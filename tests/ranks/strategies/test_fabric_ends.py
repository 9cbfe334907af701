"""Steps of Fabric end with their loop, and when another strategy begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_cp.errors import ConfigError
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.helpers.strategies.plain_llama import PlainLlama
from tests.helpers.strategies.small import (
    LENGTH,
    RING,
    RING3,
    ULYSSES,
    VOCAB,
    Batch,
    Settings,
    Small,
    close,
    loader,
    samples,
    trainer_of,
    weights,
)
from tests.ranks.strategies.test_fabric import Loop, fabric_of, model_of, sgd

LENGTHS = range(5, LENGTH + 1)
"""Of rows that a plain model is called with; a rank's share of a row is among them."""
SHARDING: Settings = {**RING, "shard_dataloaders": True}


class Ending(Loop):
    """Steps of one batch, in loops that are left in one way or the other."""

    def __init__(self, world_size: int, settings: Settings | None) -> None:
        super().__init__(world_size, settings)
        self.shards = bool((settings or {}).get("shard_dataloaders"))
        torch.manual_seed(5)
        self.stranger = PlainLlama(VOCAB, num_heads=4, num_kv_heads=4, layers=1)  # never set up

    def local(self, batch: Batch) -> Batch:
        return batch if self.shards else self.shard(batch)

    def step(self, batch: Batch) -> None:
        self.step_of(self.loss(self.local(batch)))

    def step_of(self, loss: torch.Tensor) -> None:
        self.fabric.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def plain_calls(self) -> list[torch.Tensor]:
        """Outputs of a model that was never set up, and of the trained one, for whole rows."""
        (row,) = loader(2)
        found = self.calls_of_stranger(row)
        if self.core_is_left():
            self.end()  # a call of the trained one would be the step's
        with torch.no_grad():
            return [*found, self.logits(row)]

    def core_is_left(self) -> bool:
        strategy: Any = self.fabric.strategy
        return self.parallel and strategy.runtime.step.is_left

    def calls_of_stranger(self, row: Batch) -> list[torch.Tensor]:
        with torch.no_grad():
            return [
                self.stranger(row["input_ids"][:, :length], torch.arange(length)[None])
                for length in LENGTHS
            ]


def over(run: Ending) -> None:
    for batch in run.batches(6):
        run.step(batch)


def broken(run: Ending) -> None:
    for index, batch in enumerate(run.batches(6)):
        run.step(batch)
        if index:
            break


def raised(run: Ending) -> None:
    """An error between forward and backward."""
    with suppress(ValueError):
        for batch in run.batches(6):
            run.loss(run.local(batch))
            raise ValueError("enough")


def evaluated(run: Ending) -> None:
    run.model.eval()
    with torch.no_grad():
        for batch in run.batches(6):
            run.loss(run.local(batch))
    run.model.train()


def evaluated_once(run: Ending) -> None:
    run.model.eval()
    with torch.no_grad():
        for batch in run.batches(6):
            run.loss(run.local(batch))
            break
    run.model.train()


def peeked(run: Ending) -> None:
    """The batch that was given last is not used; afterwards another loop begins, and is left at once."""
    for index, batch in enumerate(run.batches(6)):
        if index:
            break
        run.step(batch)
    for batch, _ in zip(run.batches(6), (1,), strict=False):
        run.step(batch)
    for _ in run.batches(2):
        break


WAYS = (over, peeked, broken, raised, evaluated, evaluated_once)


def left(rank: int, world_size: int, settings: Settings | None) -> list[list[torch.Tensor]]:
    run = Ending(world_size, settings)
    found: list[list[torch.Tensor]] = []
    for way in WAYS:
        way(run)
        found.append(run.plain_calls())
    return found


@lru_cache(maxsize=1)
def left_by_one() -> list[list[torch.Tensor]]:
    return run_ranks(1, left, None)[0]


@pytest.mark.quick("ring")
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [(2, RING), (2, ULYSSES), (3, RING3), (2, SHARDING)],
    ids=["ring", "ulysses", "ring3", "sharding"],
)
def test_models_are_plain_after_a_loop(ranks: int, settings: Settings) -> None:
    for got in run_ranks(ranks, left, settings):
        close(got, left_by_one())


# -- loops that are not over --------------------------------------------------------------------------


def looks_ahead(run: Ending) -> None:
    """Reads the next batch, or that there is none, before backward."""
    batches = iter(run.batches(4))
    batch = next(batches)
    while batch is not None:
        loss = run.loss(run.local(batch))
        batch = next(batches, None)
        run.fabric.backward(loss)
        run.optimizer.step()
        run.optimizer.zero_grad()


def looks_ahead_within(run: Ending) -> None:
    """Two losses of each batch; the next one is read between them."""
    batches = iter(run.batches(4))
    batch = next(batches)
    while batch is not None:
        local = run.local(batch)
        run.fabric.backward(run.loss(local))
        batch = next(batches, None)
        run.fabric.backward(run.loss(local))
        run.optimizer.step()
        run.optimizer.zero_grad()


def evaluates_ahead(run: Ending) -> None:
    """Two forwards of each batch; the next one is read between them."""
    batches = iter(run.batches(4))
    batch = next(batches)
    run.model.eval()
    with torch.no_grad():
        while batch is not None:
            local = run.local(batch)
            run.loss(local)
            batch = next(batches, None)
            run.loss(local)
    run.model.train()


def reads_another(run: Ending) -> None:
    """Another loader has no batch left within a step, after a backward; the step goes on."""
    rows: Any = run.fabric.setup_dataloaders(loader(2))
    others = iter(rows)
    for batch in run.batches(4):
        local = run.local(batch)
        run.fabric.backward(run.loss(local))
        next(others, None)
        run.fabric.backward(run.loss(local))
        run.optimizer.step()
        run.optimizer.zero_grad()


def takes_one(run: Ending) -> None:
    """One batch, whose iterator is gone at once."""
    batch = run.local(next(iter(run.batches(4))))
    for _ in range(2):
        run.fabric.backward(run.loss(batch))
        run.optimizer.step()
        run.optimizer.zero_grad()


def labels_by_a_stranger(run: Ending) -> None:
    """One batch, whose iterator is gone at once: a model that was never set up is called with it first."""
    batch = run.local(next(iter(run.batches(4))))
    with torch.no_grad():
        positions = torch.arange(batch["input_ids"].shape[1])[None]
        ids = batch["input_ids"].detach()  # other tensors in the same memory
        logits = run.stranger(ids, batch.get("position_ids", positions))
    labels = logits.argmax(-1).where(batch["labels"] != -100, -100)
    run.step_of(run.loss({**batch, "labels": labels}))


def positions_of(batch: Batch) -> torch.Tensor:
    return batch.get("position_ids", torch.arange(batch["input_ids"].shape[1])[None])


class Weighs(nn.Module):
    """Looks at a tensor of the batch that no rank shares."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale).sum()


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.text = PlainLlama(VOCAB, num_heads=4, num_kv_heads=2, layers=1)
        self.image = Weighs()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.image(x)


def image_first(rank: int, world_size: int, settings: Settings | None) -> list[torch.Tensor]:
    """A part of the model is called first, with a tensor that ranks hold whole, by name, too."""
    fabric = fabric_of(world_size, settings)
    fabric.launch()
    plain = Several().double()
    model, _ = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    image = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    rows: Any = [{**row, "image": image} for row in samples(2)]
    strategy: Any = fabric.strategy
    found: list[torch.Tensor] = []
    for call in (plain.image, lambda x: model(x=x)):
        loaded: Any = fabric.setup_dataloaders(DataLoader(rows, batch_size=2))
        batch = next(iter(loaded))
        of_image = call(batch["image"])
        logits = plain.text(batch["input_ids"], positions_of(batch))
        found += [of_image, strategy.unshard(logits) if world_size > 1 else logits]
        if world_size > 1:
            strategy.end_step()
    return [x.detach().double() for x in found]


def calls_with_keywords(run: Ending) -> None:
    """One batch, of which the model is called with other tensors: in the same memory, by name."""
    batch = run.local(next(iter(run.batches(4))))
    positions = torch.arange(batch["input_ids"].shape[1])[None]
    given = {
        "tokens": batch["input_ids"][:, :],
        "positions": batch.get("position_ids", positions).clone(),
    }
    logits = run.model(**given)
    run.step_of(F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()))


def validates_within(run: Ending) -> None:
    """A whole evaluation after each step."""
    for batch in run.batches(4):
        run.step(batch)
        evaluated(run)


Way = Callable[[Ending], None]


def trained(
    rank: int, world_size: int, settings: Settings | None, ways: Sequence[Way]
) -> list[torch.Tensor]:
    run = Ending(world_size, settings)
    found: list[torch.Tensor] = []
    for way in ways:
        way(run)
        found.append(run.weights())
    run.end()
    return found


@pytest.mark.quick("sharding")
@pytest.mark.parametrize(
    ("settings", "ways"),
    [
        (
            RING,
            (
                looks_ahead,
                looks_ahead_within,
                evaluates_ahead,
                reads_another,
                takes_one,
                validates_within,
            ),
        ),
        (SHARDING, (takes_one, labels_by_a_stranger, calls_with_keywords, validates_within)),
    ],
    ids=["ring", "sharding"],
)
def test_a_step_is_not_ended_early(settings: Settings, ways: Sequence[Way]) -> None:
    (want,) = run_ranks(1, trained, None, ways)
    for got in run_ranks(2, trained, settings, ways):
        close(got, want)


@pytest.mark.nightly
def test_a_part_that_is_given_another_tensor_of_the_batch_first() -> None:
    (want,) = run_ranks(1, image_first, None)
    for got in run_ranks(2, image_first, {**SHARDING, "sequence_dims": {"image": None}}):
        close(got, want)


def counting(sizes: list[int]) -> Any:
    """A backend of the compiler that notes how many calls each graph has."""

    def compiled(graph: Any, _: object) -> Any:
        sizes.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return graph.forward

    return compiled


def compiles(rank: int, world_size: int, waits: bool) -> tuple[list[int], list[int], list[int]]:
    """Sizes of the graphs of the model, of another one by then, and of that with ``fullgraph``."""
    torch._dynamo.reset()
    fabric = fabric_of(world_size, SHARDING)
    fabric.launch()
    plain, graphs, others, full = model_of(), list[int](), list[int](), list[int]()
    whole: Any = torch.compile(plain, backend=counting(graphs))
    model, optimizer = fabric.setup(whole, sgd(plain))
    loaded: Any = fabric.setup_dataloaders(loader(2), use_distributed_sampler=False)
    batches = iter(loaded)
    batch = next(batches)
    if waits:
        del batches
    other = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    torch.compile(other, backend=counting(full), fullgraph=True)(torch.ones(3))
    compiled = torch.compile(other, backend=counting(others))
    for _ in range(2):
        logits = model(batch["input_ids"], positions_of(batch))
        fabric.backward(F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()))
        optimizer.step()
        compiled(torch.ones(3))
    strategy: Any = fabric.strategy
    strategy.end_step()
    torch._dynamo.reset()
    return graphs, others, full


@pytest.mark.nightly
@pytest.mark.filterwarnings(
    # PyTorch's compiler asks every tensor for its gradient that one graph hands to the next.
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
    "ignore:.*should not be instantiated:DeprecationWarning",
    "ignore:Using .torch.compile.module.. when there are global hooks:UserWarning",
)
def test_a_step_that_waits_leaves_the_compiler_alone() -> None:
    want = run_ranks(2, compiles, False)[0]
    assert len(want[0]) > 2
    assert want[1:] == ([2], [2])
    assert run_ranks(2, compiles, True) == [want, want]


# -- whole rows where a batch waits for its call ------------------------------------------------------


def skips_its_last(run: Ending) -> None:
    """The loop is over, and its last batch was not used."""
    for index, batch in enumerate(run.batches(6)):
        if index < 2:
            run.step(batch)


def has_one(run: Ending) -> None:
    """The only batch is not used."""
    for _ in run.batches(2):
        pass


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except ConfigError as error:
        return str(error)
    return ""


def whole_rows(
    rank: int, world_size: int, settings: Settings | None, way: Way
) -> tuple[list[str], list[torch.Tensor]]:
    """The errors of a model that was set up, for rows of each length, and outputs once the step has ended."""
    run = Ending(world_size, settings)
    way(run)
    tokens = samples_of()["input_ids"]
    given = [
        {"tokens": tokens[:, :length], "positions": torch.arange(length)[None]}
        for length in LENGTHS
    ]
    with torch.no_grad():
        strangers = [run.stranger(**each) for each in given]
        errors = [refused(partial(run.model, **each)) for each in given] if run.parallel else []
        run.end()
        return errors, [*strangers, *(run.model(**each) for each in given)]


@pytest.mark.quick("sharding-peeked")
@pytest.mark.parametrize("way", [peeked, skips_its_last, has_one])
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (2, SHARDING),
        (2, {**ULYSSES, "shard_dataloaders": True}),
        (3, {**RING3, "shard_dataloaders": True}),
    ],
    ids=["sharding", "ulysses", "ring3"],
)
def test_whole_rows_after_a_batch_that_was_not_used(
    ranks: int, settings: Settings, way: Way
) -> None:
    want = run_ranks(1, whole_rows, None, way)[0][1]
    for errors, got in run_ranks(ranks, whole_rows, settings, way):
        assert all("PlainLlama is called with no tensor of the batch" in error for error in errors)
        close(got, want)


# -- what begins ends what was left open --------------------------------------------------------------


class CallsFirst(Small):
    """Calls its model, with whole rows, before its first step."""

    def on_fit_start(self) -> None:
        self.at_start = self.logits(samples_of()).detach()


def in_turn(rank: int, world_size: int, settings: Settings | None, engine: str) -> Any:
    """Loops over the user's own loader, before and after a Trainer, and of two Fabrics, batch by batch."""
    found: list[torch.Tensor] = []
    first = Ending(world_size, settings)
    for batch in loader(4):  # nobody sees its end
        first.step(batch)
    found += [first.weights()]
    module = CallsFirst()
    trainer = trainer_of(world_size, settings and {**settings, "data_parallel": engine})
    trainer.fit(module, loader(6))
    strategy: Any = trainer.strategy
    assert settings is None or (strategy.parity.report and not strategy.parity.skip_reason)
    found += [weights(module), module.at_start, *first.plain_calls()]
    second = Ending(world_size, settings)
    for batch, other in zip(loader(4), DataLoader(samples(4, 21), batch_size=2), strict=True):  # type: ignore[arg-type]
        first.step(batch)
        second.step(other)
    found += [first.weights(), second.weights()]
    second.end()
    return found


@lru_cache(maxsize=1)
def in_turn_by_one() -> Any:
    return run_ranks(1, in_turn, None, "")[0]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("engine", "ranks", "settings"),
    [("ddp", 2, ULYSSES), ("fsdp", 2, RING), ("fsdp", 3, RING3), ("zero1", 2, RING)],
    ids=["ddp-ulysses", "fsdp-ring", "fsdp-ring3", "zero1-ring"],
)
def test_runs_in_turn(engine: str, ranks: int, settings: Settings) -> None:
    for got in run_ranks(ranks, in_turn, settings, engine):
        close(got, in_turn_by_one())


# -- what comes too late ------------------------------------------------------------------------------


def too_late(rank: int, world_size: int, how: str) -> None:
    run = Ending(world_size, RING)
    local, loss = {}, torch.zeros(())
    for batch in run.batches(2):
        local = run.local(batch)
        loss = run.loss(local)
        break
    if how == "model":
        run.logits(local)
    if how == "another Fabric":
        run.loss(run.shard(samples_of()))
        other = Ending(world_size, RING)
        other.loss(other.shard(samples_of()))
    run.fabric.backward(loss)


def samples_of() -> Batch:
    (batch,) = loader(2)
    return batch


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ("model", r"PlainLlama is called with this rank's part of a batch outside of the step"),
        ("loss", r"without a sharded batch.*Go backward before the step ends"),
        ("another Fabric", r"without a sharded batch.*when another strategy is set up"),
    ],
)
def test_too_late(how: str, match: str) -> None:
    expect_on_every_rank(2, too_late, how, error=ConfigError, match=match)


class CallsWithParts(Small):
    """Calls its model with the part of a batch before its step begins; and a table, which does not attend."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, 1).requires_grad_(False)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        self.table(batch["input_ids"])
        self.logits(batch)


def calls_with_parts(rank: int, world_size: int) -> None:
    trainer_of(world_size, RING).fit(CallsWithParts(), loader(2))


@pytest.mark.nightly
def test_a_hook_with_a_part_of_a_batch() -> None:
    match = "PlainLlama is called with this rank's part of a batch outside of the step"
    expect_on_every_rank(2, calls_with_parts, error=ConfigError, match=match)

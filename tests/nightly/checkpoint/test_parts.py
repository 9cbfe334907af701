"""What a load does not need is not read: no rank holds the whole of what is spread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric

from lightning_cp.checkpoint import reshard
from lightning_cp.fabric import UlyssesRingStrategy as FabricStrategy
from tests.helpers.pool import run_ranks
from tests.helpers.pool.environment import PoolEnvironment
from tests.helpers.strategies.engine_runs import Adam, Cell
from tests.helpers.strategies.small import loader, trainer_of

CELL = Cell("fsdp", cp=2)
SMALL = 20_000
"""Elements: steps and the state of random numbers have fewer, a model or its optimizer has more."""


@contextmanager
def read_whole() -> Iterator[list[int]]:
    """Elements of each tensor that is read whole meanwhile."""
    found: list[int] = []
    own = reshard.StoredTensor.whole

    def whole(stored: reshard.StoredTensor) -> torch.Tensor:
        found.append(torch.Size(stored.shape).numel())
        return own(stored)

    patch = pytest.MonkeyPatch()
    patch.setattr(reshard.StoredTensor, "whole", whole)
    try:
        yield found
    finally:
        patch.undo()


class Validated(Adam):
    """Has a loss to validate, and notes what its checkpoint has."""

    keys: tuple[str, ...] = ()

    def validation_step(self, *given: Any) -> Any:
        return self.training_step(*given)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.keys = tuple(checkpoint)


def validates(rank: int, world: int, form: str) -> None:
    settings = {**CELL.settings, "checkpoint": form}
    trainer = trainer_of(world, settings, max_epochs=-1, max_steps=1)
    trainer.fit(Adam(), loader(1, rows=1))
    trainer.save_checkpoint("a")
    module = Validated()
    with read_whole() as found:
        trainer_of(world, settings).validate(
            module, loader(1, rows=1), ckpt_path="a", verbose=False
        )
    assert sum(x.numel() for x in module.parameters()) > SMALL
    assert "state_dict" in module.keys
    assert "optimizer_states" not in module.keys
    assert sum(found) < SMALL, found


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_validation_reads_no_optimizers(form: str) -> None:
    run_ranks(2, validates, form)


def loads_parts(rank: int, world: int, form: str) -> None:
    strategy = FabricStrategy(**CELL.settings, checkpoint=form)
    fabric: Any = Fabric(
        accelerator="cpu", devices=world, strategy=strategy, plugins=[PoolEnvironment()]
    )
    fabric.launch()
    module = Adam()
    model, optimizer = fabric.setup(module.model, module.configure_optimizers())
    (batch,) = loader(1, rows=1)
    local = fabric.strategy.shard_batch(dict(batch))
    counts = local["labels"] != -100
    fabric.strategy.count_targets(counts)
    logits = model(local["input_ids"], local["position_ids"])
    fabric.backward(logits[counts].square().mean())
    optimizer.step()
    fabric.strategy.end_step()
    fabric.save("a", {"model": model, "optimizer": optimizer, "step": 2, "own": {"x": [1, 2.5]}})
    fabric.save("raw", model.state_dict())
    with read_whole() as found:
        rest = fabric.load("a", {"model": model})
        assert (list(rest), rest["step"], rest["own"]) == (
            ["optimizer", "step", "own"],
            2,
            {"x": [1, 2.5]},
        )
        fabric.load_raw("raw", model)
        assert sum(found) < SMALL, found
        state = rest["optimizer"]["state"]  # and yet it is there
        assert len(state) == len(list(module.parameters()))
        assert sum(found) > SMALL


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_fabric_reads_what_is_asked_for(form: str) -> None:
    run_ranks(2, loads_parts, form)

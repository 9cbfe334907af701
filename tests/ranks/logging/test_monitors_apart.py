"""Values that are logged without ``sync_dist`` differ between data ranks: the first one's decides."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_cp.checkpoint.read import open_checkpoint
from lightning_cp.errors import CheckpointError
from tests.helpers.pool import run_ranks
from tests.helpers.strategies.logs import RING_TWICE
from tests.helpers.strategies.small import Batch, Small, loader, trainer_of, weights

SCORES = ([1.0, 0.9, 0.8, 0.7], [0.9, 1.0, 0.6, 0.7])
"""Of each data rank, by epoch: another one is the worst, and the best."""
ROUNDED = ([0.512, 0.511, 0.3, 0.2], [0.534, 0.512, 0.4, 0.1])
"""The first two have one name on the first rank, and two on the other."""
RISING = ([5.0, 4.0, 3.0, 2.0], [5.0, 6.0, 7.0, 8.0])
"""Falls on one, rises on the other."""
pytestmark = pytest.mark.filterwarnings(
    "ignore:It is recommended to use .*sync_dist=True:UserWarning"
)


class Apart(Small):
    """Each data rank has its own score; ``only``: the first rank alone has one."""

    def __init__(self, scores: Any, *, only: bool = False) -> None:
        super().__init__()
        self.scores, self.only = scores, only

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.loss(batch)
        strategy: Any = self.trainer.strategy
        score = self.scores[strategy.mesh.data_rank][min(self.current_epoch, 3)]
        if self.trainer.is_global_zero or not self.only:
            self.log("score", score, batch_size=1)


class Plateau(Apart):
    """A learning rate that falls when the score does not."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
        scheduler = {"scheduler": plateau, "monitor": "score", "interval": "epoch"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def fitted(
    rank: int, world: int, module: Apart, settings: dict[str, Any], **options: Any
) -> dict[str, Any]:
    """What a rank has in the end."""
    checkpoint = ModelCheckpoint("kept", monitor="score", **options)
    trainer = trainer_of(
        world,
        {**RING_TWICE, **settings},
        max_epochs=len(SCORES[0]),
        callbacks=[checkpoint],
        enable_checkpointing=True,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, loader(4), loader(4))
        best = checkpoint.best_model_path
        rates = [group["lr"] for x in trainer.optimizers for group in x.param_groups]
        trainer.validate(module, loader(4), ckpt_path="best")
    read = open_checkpoint(Path(best)).read() if not rank else {}
    states: Any = read.get("callbacks", {})
    return {
        "found": sorted(x.name for x in Path("kept").glob("*.ckpt")),
        "saved": [{Path(path).name for path in x["best_k_models"]} for x in states.values()],
        "best": Path(best).name,
        "weights": weights(module).tolist(),
        "rates": rates,
        "said": [str(x.message) for x in caught if "monitored" in str(x.message)],
    }


def kept(rank: int, world: int, form: str, scores: Any, options: dict[str, Any]) -> dict[str, Any]:
    return fitted(rank, world, Apart(scores), {"checkpoint": form}, **options)


TWO = ["epoch=2-step=6.ckpt", "epoch=3-step=8.ckpt"]


@pytest.mark.quick("full", "a name of its own")
@pytest.mark.parametrize(
    ("form", "scores", "options", "found"),
    [
        ("full", SCORES, {"save_top_k": 2}, TWO),
        ("sharded", SCORES, {"save_top_k": 2}, TWO),
        ("full", ROUNDED, {"save_top_k": 1, "filename": "{score:.2f}"}, ["score=0.20.ckpt"]),
        ("full", SCORES, {"save_top_k": 2, "filename": "best"}, ["best-v1.ckpt", "best.ckpt"]),
    ],
    ids=["full", "sharded", "names that are the same once rounded", "a name of its own"],
)
def test_checkpoints_are_those_of_the_first(
    form: str, scores: Any, options: dict[str, Any], found: list[str]
) -> None:
    first, *others = run_ranks(4, kept, form, scores, options, timeout=60)
    assert first["found"] == found
    assert first["saved"] == [set(found)]
    for other in others:
        assert other["best"] == first["best"]
        assert other["weights"] == first["weights"]
    (said,) = first["said"]
    assert "other values of 'score'" in said
    values = f"{scores[0][0]:g} on rank 0, {scores[1][0]:g} on rank 2"
    assert values in said
    assert "sync_dist=True" in said


def stepped(rank: int, world: int, engine: str) -> dict[str, Any]:
    return fitted(rank, world, Plateau(RISING), {"data_parallel": engine})


@pytest.mark.quick("fsdp")
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_learning_rates_are_the_same_on_all_ranks(engine: str) -> None:
    first, *others = run_ranks(4, stepped, engine)
    assert first["rates"] == [0.05], "its score fell"
    for other in others:
        assert other["rates"] == first["rates"]
        assert other["weights"] == first["weights"]


def logged_by_one(rank: int, world: int) -> dict[str, Any]:
    return fitted(rank, world, Apart(SCORES, only=True), {}, save_top_k=2)


def test_a_value_that_one_rank_alone_has_logged_is_monitored() -> None:
    every = run_ranks(4, logged_by_one)
    assert [found["found"] for found in every] == [TWO] * 4
    (said,) = every[0]["said"]
    assert "on rank 0, none on rank 1" in said
    assert "log it on all of them" in said


class Remembers(Small):
    """Has a tensor to save on one rank only."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.global_rank == 1:
            checkpoint["memory"] = {"bank": torch.ones(2)}


def saves_more(rank: int, world: int) -> None:
    trainer = trainer_of(world, RING_TWICE)
    trainer.fit(Remembers(), loader(4))
    with pytest.raises(CheckpointError, match="rank 1 also has 'memory'"):
        trainer.save_checkpoint("a.ckpt")


def test_what_one_rank_alone_has_is_not_dropped() -> None:
    run_ranks(4, saves_more)


class Seen(Callback):
    """Keeps a tensor by a name that only its rank has."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> dict[str, Any]:
        return {"seen": {f"by rank {self.rank}": torch.ones(1)}}


def saves_callbacks(rank: int, world: int) -> list[str]:
    trainer = trainer_of(world, RING_TWICE, callbacks=[Seen(rank)])
    trainer.fit(Apart(SCORES), loader(4), loader(4))
    trainer.save_checkpoint("a.ckpt")
    (state,) = open_checkpoint(Path("a.ckpt")).read()["callbacks"].values()
    return list(state["seen"])


def test_callbacks_that_have_seen_other_things_are_saved_as_the_first_ones() -> None:
    assert run_ranks(4, saves_callbacks) == [["by rank 0"]] * 4

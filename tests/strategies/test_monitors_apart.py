"""Values that are logged without ``sync_dist`` differ between data ranks: checkpoints are the first one's."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_cp.checkpoint.read import open_checkpoint
from tests.pool import run_ranks
from tests.strategies.logs import RING_TWICE
from tests.strategies.small import Batch, Small, loader, trainer_of, weights

SCORES = ([1.0, 0.9, 0.8, 0.7], [0.9, 1.0, 0.6, 0.7])
"""Of each data rank, by epoch: all of them agree when to save, and not which one is the worst then."""


class Apart(Small):
    """Each data rank has its own score."""

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.loss(batch)
        strategy: Any = self.trainer.strategy
        score = SCORES[strategy.mesh.data_rank][min(self.current_epoch, 3)]
        self.log("score", score, batch_size=1)


def kept(rank: int, world: int, form: str, filename: str | None) -> dict[str, Any]:
    checkpoint = ModelCheckpoint("kept", monitor="score", filename=filename, save_top_k=2)
    module = Apart()
    trainer = trainer_of(
        world,
        {**RING_TWICE, "checkpoint": form},
        max_epochs=len(SCORES[0]),
        callbacks=[checkpoint],
        enable_checkpointing=True,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, loader(4), loader(4))
        own_best = Path(checkpoint.best_model_path).name
        trainer.validate(module, loader(4), ckpt_path="best")
    found = sorted(x.name for x in Path("kept").glob("*.ckpt"))
    best = (
        open_checkpoint(Path("kept", Path(checkpoint.best_model_path).name)) if not rank else None
    )
    own: Any = next(iter(best.read()["callbacks"].values())) if best is not None else {}
    return {
        "found": found,
        "best": {Path(path).name for path in own.get("best_k_models", ())},
        "own best": own_best,
        "weights": weights(module).tolist(),
        "said": [str(x.message) for x in caught if "other names" in str(x.message)],
    }


@pytest.mark.filterwarnings("ignore:It is recommended to use .*sync_dist=True:UserWarning")
@pytest.mark.parametrize("form", ["full", "sharded"])
def test_each_has_its_own_worst_and_the_first_ones_goes(form: str) -> None:
    first, *others = run_ranks(4, kept, form, None)
    assert first["found"] == ["epoch=2-step=6.ckpt", "epoch=3-step=8.ckpt"]
    assert first["best"] == set(first["found"])
    assert others[1]["own best"] == "epoch=2-step=6.ckpt" != first["own best"], "ranks disagree"
    assert all(other["weights"] == first["weights"] for other in others)
    (said,) = first["said"]
    assert "epoch=3-step=8.ckpt on rank 0, epoch=2-step=6.ckpt on rank 2" in said


@pytest.mark.filterwarnings("ignore:It is recommended to use .*sync_dist=True:UserWarning")
def test_names_are_those_of_the_first_and_that_is_said_once() -> None:
    first, *_ = run_ranks(4, kept, "full", "{epoch}-{score:.2f}")
    assert first["found"] == ["epoch=2-score=0.80.ckpt", "epoch=3-score=0.70.ckpt"]
    said = first["said"][0]
    assert "epoch=0-score=1.00.ckpt on rank 0" in said
    assert "epoch=0-score=0.90.ckpt on rank 2" in said
    assert "sync_dist=True" in said

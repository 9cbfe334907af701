"""The Trainer saves and resumes: in both forms, in the background, and from one to the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_cp.checkpoint.read import latest_checkpoint, open_checkpoint
from tests.helpers.checkpoint.cases import cases
from tests.helpers.checkpoint.states import same
from tests.helpers.pool import run_ranks
from tests.helpers.strategies.small import RING, Small, loader, trainer_of, weights

# A run that is resumed here need not save again.
pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
WAYS = [("full", False), ("full", True), ("sharded", False), ("sharded", True)]


class Trained(Small):
    """With an optimizer that has a state worth keeping."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"size": 3})

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def settings(form: str = "full", background: bool = False, **more: Any) -> dict[str, Any]:
    return {**RING, "checkpoint": form, "async_save": background, **more}


def fit(
    world_size: int, strategy: dict[str, Any] | None, steps: int, resume: Any = None, **options: Any
) -> Trained:
    module = Trained()
    callbacks = options.pop("callbacks", [])
    trainer = trainer_of(
        world_size,
        strategy,
        max_epochs=-1,
        max_steps=steps,
        callbacks=callbacks,
        enable_checkpointing=bool(callbacks),
        **options,
    )
    trainer.fit(module, loader(2), ckpt_path=resume)  # one step an epoch
    return module


def saving(**options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(
        dirpath="saved", every_n_epochs=1, save_on_train_epoch_end=True, **options
    )


def saves_and_resumes(rank: int, world_size: int, form: str, background: bool) -> None:
    own = settings(form, background)
    through = fit(world_size, own, 4)
    keep = saving(save_last="link", save_top_k=1)
    stopped = fit(world_size, own, 2, callbacks=[keep])
    names = sorted(x.name for x in Path("saved").iterdir())
    assert names == ["epoch=1-step=2.ckpt", "last.ckpt"]
    assert Path("saved/last.ckpt").is_symlink()
    assert latest_checkpoint(Path("saved")) == Path("saved/epoch=1-step=2.ckpt")
    opened = open_checkpoint(Path("saved/last.ckpt"))
    assert opened.manifest is not None
    assert (opened.manifest.form, opened.manifest.about.step) == (form, 2)
    assert opened.manifest.about.mesh["ring"] == world_size
    checkpoint = opened.read()
    assert same(checkpoint["state_dict"], dict(stopped.state_dict()))
    resumed = fit(world_size, own, 4, resume="saved/last.ckpt")
    assert torch.equal(weights(resumed), weights(through))
    assert not torch.equal(weights(resumed), weights(stopped))


@pytest.mark.quick("sharded-True")
@pytest.mark.parametrize(("form", "background"), cases(WAYS, [("full", False), ("sharded", True)]))
def test_saves_and_resumes(form: str, background: bool) -> None:
    run_ranks(2, saves_and_resumes, form, background)


def full_for_others(rank: int, world_size: int) -> None:
    fit(world_size, settings(), 2, callbacks=[saving()])
    path = Path("saved/epoch=1-step=2.ckpt")
    plain = fit(1, None, 3, resume=path)  # plain Lightning resumes in one process
    module = Trained.load_from_checkpoint(path)
    assert module.hparams["size"] == 3
    loaded = torch.load(path, weights_only=True)
    assert same(loaded["state_dict"], dict(module.state_dict()))
    optimizer = module.configure_optimizers()
    optimizer.load_state_dict(loaded["optimizer_states"][0])
    assert not torch.equal(weights(plain), weights(module))


@pytest.mark.nightly
def test_plain_lightning_goes_on_with_the_full_form() -> None:
    run_ranks(2, full_for_others)

"""A checkpoint of another model, or of Fabric, is refused as that, and nobody is sent to the optimizer; so is
a model that is sharded already, where every rank is to have it whole."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_cp.errors import CheckpointError, ConfigError
from lightning_cp.launch import preemption as signals
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.helpers.strategies.plain_llama import PlainLlama
from tests.helpers.strategies.small import RING, VOCAB, Small, loader, trainer_of
from tests.ranks.strategies.test_fabric import Loop, fabric_of

SAYS = "checkpoint is of another model"


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


class Deeper(Small):
    """Saved with one layer more, or without."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.model = PlainLlama(VOCAB, num_heads=4, num_kv_heads=2, layers=layers)

    def configure_optimizers(self) -> Any:
        return adamw(self.model)


def by_both(rank: int, world: int, form: str, folder: Path) -> None:
    settings = {**RING, "data_parallel": "fsdp", "checkpoint": form}
    loop = Loop(world, settings, make_optimizer=adamw)
    loop.fabric.save(folder / "fabric", {"model": loop.model, "optimizer": loop.optimizer})
    deeper: Any = PlainLlama(VOCAB, num_heads=4, num_kv_heads=2, layers=2)
    model, optimizer = loop.fabric.setup(deeper, adamw(deeper))
    with pytest.raises(CheckpointError, match=SAYS):
        loop.fabric.load(folder / "fabric", {"optimizer": optimizer, "model": model})
    loop.end()
    trainer = trainer_of(world, settings, max_steps=1)
    trainer.fit(Deeper(1), loader(2))
    trainer.save_checkpoint(folder / "trainer")
    for path, match in (("trainer", SAYS), ("fabric", r"was not saved by a Trainer.*fabric\.load")):
        with pytest.raises(CheckpointError, match=match):
            trainer_of(world, settings, max_steps=2).fit(
                Deeper(2), loader(4), ckpt_path=folder / path
            )


@pytest.mark.nightly
@pytest.mark.parametrize("form", ["full", "sharded"])
def test_another_model_is_refused_as_that(form: str, tmp_path: Path) -> None:
    run_ranks(2, by_both, form, tmp_path)


def test_a_signals_checkpoint_says_that_it_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else Lightning says that it has chosen ``weights_only=False``, which loads refuse."""
    said: list[Any] = []

    class Saving:
        checkpoint_callbacks: tuple[Any, ...] = ()
        default_root_dir = "runs"

        def save_checkpoint(self, path: str, **options: Any) -> None:
            said.append(options)

    monkeypatch.setattr(signals, "_wait_for_saves", lambda trainer: None)
    signals.save_last(Saving())  # type: ignore[arg-type]
    assert said == [{"weights_only": False}]


def test_a_save_that_fails_leaves_the_callback_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise OSError("no space left on device")

    keep = ModelCheckpoint("kept", save_last="link")
    monkeypatch.setattr(keep, "_save_last_checkpoint", fails)
    monkeypatch.setattr(keep, "_monitor_candidates", lambda trainer: {})
    trainer: Any = SimpleNamespace(checkpoint_callbacks=[keep])
    with pytest.raises(OSError, match="no space left"):
        signals.save_last(trainer)
    assert keep.save_last == "link"


def given_sharded(rank: int, world: int, how: str, use: str) -> None:
    """The error is the one that ends the Trainer's run: its teardown moves nothing."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    module: Any = Small()
    if how == "fully_shard":
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (world,))
        fully_shard(module.model, mesh=mesh)
    elif how == "FSDP":
        device = torch.device("cpu")
        module.model = FullyShardedDataParallel(module.model, device_id=device)
    else:
        trainer_of(world, {**RING, "data_parallel": how}).fit(module, loader(2))
    if use == "fabric":
        fabric = fabric_of(world, RING)
        fabric.launch()
        fabric.setup_module(module.model)
    elif use == "fits":
        trainer_of(world, RING).fit(module, loader(2))
    else:
        trainer_of(world, RING).predict(module, loader(2))


@pytest.mark.quick("fsdp-fits", "fully_shard-predicts", "FSDP-fabric")
@pytest.mark.parametrize("use", ["fits", "predicts", "fabric"])
@pytest.mark.parametrize("how", ["fsdp", "zero1", "fully_shard", "FSDP"])
def test_a_sharded_model_is_refused_where_ranks_keep_it_whole(how: str, use: str) -> None:
    match = "is sharded already.*data_parallel='ddp' keeps it whole.*Use data_parallel='fsdp'"
    expect_on_every_rank(2, given_sharded, how, use, error=ConfigError, match=match)

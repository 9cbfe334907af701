"""``pretrained=`` of both strategies: training begins with the weights of the files."""

from __future__ import annotations

import copy
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

from lightning_cp import UlyssesRingStrategy
from lightning_cp.checkpoint import export_pretrained
from lightning_cp.checkpoint.pretrained.export import guard_save_pretrained
from lightning_cp.checkpoint.pretrained.strategy_argument import Pretrained
from lightning_cp.errors import CheckpointError, ConfigError
from lightning_cp.fabric import UlyssesRingStrategy as FabricStrategy
from tests.helpers.checkpoint.cases import cases
from tests.helpers.checkpoint.pretrained.models import make, save, whole
from tests.helpers.pool import run_ranks
from tests.helpers.pool.environment import PoolEnvironment


class Module(pl.LightningModule):
    """A network under ``self.model``, as modules have it; its learning rate is 0."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.model = make(device=device)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def batches() -> list[dict[str, torch.Tensor]]:
    """Two of one row, which is the same: whichever a rank gets, its loss is known."""
    ids = torch.arange(16)[None]
    return [{"input_ids": ids, "labels": ids}] * 2


def trainer_of(world: int, pretrained: Any, **settings: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=UlyssesRingStrategy(pretrained=pretrained, **settings),
        plugins=[PoolEnvironment()],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


ENGINES: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"data_parallel": "ddp"}),
    "zero1": (2, {"data_parallel": "zero1"}),
    "fsdp": (2, {"data_parallel": "fsdp"}),
    "offloaded": (2, {"data_parallel": "fsdp", "cpu_offload": True}),
    "hsdp": (
        4,
        {"data_parallel": "hsdp", "data_parallel_size": 2, "data_parallel_replicate_size": 2},
    ),
    "fsdp-tp": (4, {"data_parallel": "fsdp", "tensor_parallel_size": 2}),
}
"""Ranks and settings; what is left of the ranks shares a sequence, two of them."""
Found = tuple[float, dict[str, Any]]
"""The loss of the last batch, and all weights."""


def require_as_one_process(found: list[Found], wanted: dict[str, torch.Tensor]) -> None:
    """The files' weights to the last bit on every rank, and the loss that one process has with them."""
    with torch.no_grad():
        loss = float(make(seed=6)(**batches()[-1]).loss)
    for shown, weights in found:
        assert weights.keys() == wanted.keys()
        assert all(torch.equal(weights[name], x) for name, x in wanted.items())
        assert shown == pytest.approx(loss, rel=1e-5)  # also of buffers that no file holds


def fit(rank: int, world: int, path: Path, device: str, **settings: Any) -> Found:
    """By the Trainer."""
    module = Module(device)
    loader: Any = torch.utils.data.DataLoader(batches(), batch_size=None)  # type: ignore[arg-type]
    trainer = trainer_of(world, {"path": path, "progress": False}, **settings)
    trainer.fit(module, loader)
    return float(trainer.callback_metrics["loss"]), whole(module.model)


def set_up(rank: int, world: int, path: Path, device: str, **settings: Any) -> Found:
    """By Fabric."""
    strategy = FabricStrategy(pretrained={"path": str(path), "progress": False}, **settings)
    fabric = Fabric(
        accelerator="cpu", devices=world, strategy=strategy, plugins=[PoolEnvironment()]
    )
    fabric.launch()
    model = make(device=device)
    wrapped = fabric.setup_module(model)
    loss = wrapped(**strategy.shard_batch(batches()[-1])).loss
    return float(strategy.average(loss.detach())), whole(model)


QUICK = [(fit, "fsdp", "meta"), (set_up, "ddp", "cpu")]
EVERY = product((fit, set_up), ENGINES, ("cpu", "meta"))


@pytest.mark.parametrize(("way", "engine", "device"), cases(EVERY, QUICK))
def test_training_begins_with_the_weights_of_the_files(
    way: Any, engine: str, device: str, tmp_path: Path
) -> None:
    wanted = save(tmp_path, seed=6)
    world, settings = ENGINES[engine]
    require_as_one_process(run_ranks(world, way, tmp_path, device, **settings), wanted)


def test_offloaded_parameters_are_loaded_where_they_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what is asked for: there need be no other device."""
    homes = []
    monkeypatch.setattr(
        "lightning_cp.checkpoint.pretrained.load.load_pretrained",
        lambda *_, device, **__: homes.append(device),
    )
    for offload in (False, True):
        Pretrained("somewhere", offload=offload).load(nn.Linear(1, 1), torch.device("cuda", 0))
    assert homes == [torch.device("cuda", 0), torch.device("cpu")]


def fit_twice(rank: int, world: int, path: Path) -> tuple[str, bool, bool]:
    """A file that is damaged at first; then training goes on with the weights that were trained."""
    file = path / "model-00001-of-00003.safetensors"
    good = file.read_bytes()
    torch.distributed.barrier()
    if rank == 0:
        file.write_bytes(good[:-4])
    torch.distributed.barrier()
    module = Module()
    loader: Any = torch.utils.data.DataLoader(batches(), batch_size=None)  # type: ignore[arg-type]
    trainer = trainer_of(world, {"path": path, "progress": False})
    with pytest.raises(CheckpointError, match="truncated") as raised:
        trainer.fit(module, loader)
    torch.distributed.barrier()
    if rank == 0:
        file.write_bytes(good)
    torch.distributed.barrier()
    trainer.fit(module, loader)
    after_retry = whole(module.model)
    with torch.no_grad():
        module.model.lm_head.weight.fill_(3.0)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader)
    from safetensors.torch import load_file

    stored = {key: x for part in path.glob("*.safetensors") for key, x in load_file(part).items()}
    right = all(torch.equal(after_retry[key], x) for key, x in stored.items())
    return str(raised.value), right, bool((module.model.lm_head.weight == 3.0).all())


@pytest.mark.nightly
def test_a_failed_load_is_tried_again_and_a_good_one_is_not(tmp_path: Path) -> None:
    save(tmp_path, seed=6)
    for message, right, kept in run_ranks(2, fit_twice, tmp_path):
        assert "model-00001-of-00003.safetensors" in message
        assert right
        assert kept


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("nowhere", "'nowhere' does not exist"),
        (3, "must be a path, or a mapping"),
        ({"dtype": "bfloat16"}, "must be a path, or a mapping"),
        ({"path": ".", "dtyp": "bfloat16"}, "unknown option.*dtyp"),
        ({"path": ".", "dtype": "int8"}, "floating-point dtype"),
        ({"path": ".", "strict": 1}, "strict must be True or False"),
        ({"path": ".", "allow_missing": "x"}, "list of patterns"),
        ({"path": ".", "keys": {"a + b": "c + d"}}, "one side only"),
        ({"path": ".", "keys": {"a.*": "b"}}, "as many stars"),
        ({"path": ".", "prefix": 3}, "prefix must be text"),
    ],
)
@pytest.mark.parametrize("strategy", [UlyssesRingStrategy, FabricStrategy])
def test_what_cannot_be_is_refused_before_processes_start(
    strategy: Any, given: Any, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        strategy(pretrained=given)


def saved_after_fit(rank: int, world: int, folder: Path) -> tuple[str, Any]:
    """What ``save_pretrained`` says, and what the weights are; both kinds of saving are tried."""
    module = Module()
    trainer = trainer_of(world, None, data_parallel="fsdp", parity_check="off")
    trainer.fit(module, DataLoader(batches(), batch_size=None))  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as refused:
        module.model.save_pretrained(folder / "refused")
    export_pretrained(module.model, folder / "made")
    export_pretrained(module.model, folder / "made", overwrite=True)
    return str(refused.value), whole(module.model)


def test_save_pretrained_of_what_is_sharded_names_the_export(tmp_path: Path) -> None:
    for says, weights in run_ranks(2, saved_after_fit, tmp_path):
        assert "export_pretrained(model, path) on all ranks" in says
        found = load_file(tmp_path / "made" / "model.safetensors")
        assert found.keys() == weights.keys()
        assert all(torch.equal(x, weights[n]) for n, x in found.items())
    assert not (tmp_path / "refused").exists()


def test_save_pretrained_of_what_is_whole_again(tmp_path: Path) -> None:
    model = make()
    guard_save_pretrained(model)
    copy.deepcopy(model).save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == model.state_dict().keys()

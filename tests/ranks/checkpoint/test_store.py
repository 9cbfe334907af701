"""Full checkpoints in a store, and through CheckpointIO plugins: as DDP's, with our promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import lightning as L
import pytest
import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_cp.checkpoint.checkpoint_io import open_anywhere
from lightning_cp.checkpoint.full import manifest_of_file
from lightning_cp.checkpoint.manager import CheckpointManager
from lightning_cp.checkpoint.manifest import SaveInfo
from lightning_cp.checkpoint.read import latest_checkpoint
from lightning_cp.checkpoint.store import put_in_store, remove_from_store
from lightning_cp.errors import CheckpointError
from lightning_cp.fabric import UlyssesRingStrategy
from tests.helpers.checkpoint.states import same, state_of
from tests.helpers.pool import run_ranks
from tests.helpers.pool.environment import PoolEnvironment
from tests.ranks.checkpoint.test_as_ddp import BOTH, boring_trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")
URL = "memory://saves/a.ckpt"


@pytest.fixture(autouse=True)
def _empty() -> Any:
    """The store is the process's."""
    MemoryFileSystem.store.clear()
    yield
    MemoryFileSystem.store.clear()


def save(step: int, path: str = URL, form: str = "full", **options: Any) -> None:
    elsewhere = lambda tree, about: put_in_store(tree, about, path, options)  # noqa: E731
    CheckpointManager(form, in_background=False).save(
        state_of(step), path, SaveInfo(step), {}, elsewhere=elsewhere
    )


def opened(path: str = URL) -> Any:
    return open_anywhere(None, path, None)


def names() -> list[str]:
    return sorted(MemoryFileSystem.store)


def test_what_is_saved_is_read_and_replaced() -> None:
    for step in (1, 2):
        save(step)
        found = opened()
        assert found.manifest.about.step == step
        assert same(found.read(), state_of(step))
    assert names() == ["/saves/a.ckpt"]
    remove_from_store(URL)
    remove_from_store(URL)
    assert names() == []


def fails(*_: Any, **__: Any) -> None:
    raise OSError("the store is gone")


@pytest.mark.parametrize("call", ["put_file", "cp_file"])
def test_a_save_that_fails_leaves_the_one_before(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(1)
    monkeypatch.setattr(MemoryFileSystem, call, fails)
    with pytest.raises(CheckpointError, match=r"cannot save memory.*a\.ckpt: .*the store is gone"):
        save(2)
    monkeypatch.undo()
    assert names() == ["/saves/a.ckpt"]
    assert same(opened().read(), state_of(1))


def test_a_store_that_has_not_all_of_it_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    save(1)
    monkeypatch.setattr(MemoryFileSystem, "size", lambda self, path: 7)
    with pytest.raises(CheckpointError, match="the store has 7 bytes of"):
        save(2)
    monkeypatch.undo()
    assert names() == ["/saves/a.ckpt"]
    assert same(opened().read(), state_of(1))


def test_what_is_damaged_missing_or_a_folder_is_refused() -> None:
    save(1)
    with fsspec.open(URL, "rb") as file:
        data = bytearray(file.read())  # type: ignore[attr-defined]
    data[len(data) // 2] ^= 1
    MemoryFileSystem().pipe_file("/saves/a.ckpt", bytes(data))
    with pytest.raises(CheckpointError, match=r"a\.ckpt is damaged"):
        opened()
    with pytest.raises(FileNotFoundError, match=r"not found: memory://saves/b\. Give the URL"):
        opened("memory://saves/b")
    with pytest.raises(CheckpointError, match=r"memory://saves is a folder\. A sharded"):
        opened("memory://saves")
    with pytest.raises(CheckpointError, match=r"cannot save memory://saves/b\. A sharded"):
        save(1, "memory://saves/b", form="sharded")
    with pytest.raises(CheckpointError, match="memory://saves is in a store"):
        latest_checkpoint("memory://saves")


class Shared(LocalFileSystem):
    """A store that all ranks of a test reach; notes the options that it is given."""

    protocol = "shared"
    given: list[dict[str, Any]] = []  # noqa: RUF012

    def __init__(self, *args: Any, **options: Any) -> None:
        Shared.given.append(options)
        super().__init__(*args, auto_mkdir=True)

    @classmethod
    def _strip_protocol(cls, path: Any, *args: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("shared://"), *args)


def in_ranks(rank: int, world_size: int) -> None:
    fsspec.register_implementation("shared", Shared, clobber=True)
    path = f"shared://{Path.cwd()}/a.ckpt"
    sizes: Any = {"context_parallel_size": 1, "data_parallel_size": world_size}
    strategy = UlyssesRingStrategy(**sizes, data_parallel="fsdp")
    plugins: Any = [PoolEnvironment()]
    fabric = L.Fabric(accelerator="cpu", devices=world_size, strategy=strategy, plugins=plugins)
    fabric.launch()
    torch.manual_seed(0)
    model: Any = fabric.setup_module(torch.nn.Linear(8, 4))
    want = {name: x.full_tensor() for name, x in model.state_dict().items()}
    state = {"model": model, "step": 3}
    strategy.save_checkpoint(path, state, storage_options={"key": "a"})
    assert rank or {"key": "a"} in Shared.given
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert fabric.load(path, {"model": model})["step"] == 3
    assert same({name: x.full_tensor() for name, x in model.state_dict().items()}, want)
    assert [x.name for x in Path().iterdir()] == ["a.ckpt"]
    with pytest.raises(FileNotFoundError, match="Checkpoint file not found: shared:"):
        fabric.load(f"{path}.not", {"model": model})
    with pytest.raises(CheckpointError, match="storage_options are for stores"):
        strategy.save_checkpoint("b.ckpt", {"step": 3}, storage_options={"key": "a"})


def test_ranks_save_and_load_spread_parameters() -> None:
    run_ranks(2, in_ranks)


class Asked(TorchCheckpointIO):
    """A user's plugin."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.calls.append("save")
        super().save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, path: Any, *args: Any, **options: Any) -> Any:
        self.calls.append("load")
        return super().load_checkpoint(path, *args, **options)

    def remove_checkpoint(self, path: Any) -> None:
        self.calls.append("remove")
        super().remove_checkpoint(path)


def runs(world_size: int, name: str, folder: str, io: Any) -> Any:
    """Two epochs of two batches, each saved; and one more from there."""
    keep = ModelCheckpoint(folder, save_top_k=1, save_last=True)
    first: Any = {"max_epochs": 2, "enable_checkpointing": True, "callbacks": [keep]}
    trainer = boring_trainer(world_size, name, **first, io=io)
    trainer.fit(BoringModel())
    again = boring_trainer(world_size, name, max_epochs=3, io=io)
    again.fit(BoringModel(), ckpt_path=keep.best_model_path)
    assert again.global_step == 6
    system, place = url_to_fs(folder)
    return sorted(x.rpartition("/")[2] for x in system.ls(place, detail=False))


def as_ddp(rank: int, world_size: int) -> None:
    left: list[Any] = []
    for name in BOTH:
        io = Asked()
        left.append((runs(world_size, name, f"{name}-local", io), io.calls))
        if world_size == 1:  # a store of this process alone
            left[-1] = (*left[-1], runs(1, name, f"memory://{name}", None))
    assert left[1] == left[0]
    assert ("save" in left[0][1]) == (rank == 0)
    if world_size == 1:
        runs(1, "ours", "wrapped", AsyncCheckpointIO())
        saved = Path("wrapped/last.ckpt")
        assert manifest_of_file(saved) is not None
        assert opened(str(saved)).read()["global_step"] == 4


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_plugins_and_stores_are_used_as_ddp_uses_them(world_size: int) -> None:
    run_ranks(world_size, as_ddp)

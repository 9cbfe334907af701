"""A load that is refused leaves the model and the optimizer as they were; no file runs code."""

from __future__ import annotations

import copy
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_cp import UlyssesRingStrategy
from lightning_cp.checkpoint.atomic import local_path
from lightning_cp.checkpoint.checkpoint_io import PlainCheckpointIO
from lightning_cp.checkpoint.full import load_file
from lightning_cp.checkpoint.manager import CheckpointManager
from lightning_cp.checkpoint.read import open_checkpoint
from lightning_cp.checkpoint.restore import check_same_tensors, load_module
from lightning_cp.checkpoint.save import save_checkpoint
from lightning_cp.errors import CheckpointError, ConfigError
from lightning_cp.fabric import UlyssesRingStrategy as FabricStrategy
from lightning_cp.strategies.fabric_checkpoints import _restore
from tests.helpers.checkpoint.states import same, state_of


def model(width: int = 3, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(width)
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2)).to(dtype)


def stepped(module: nn.Module, **groups: Any) -> torch.optim.Optimizer:
    parameters = [*module.parameters()]
    optimizer = torch.optim.AdamW(groups.get("groups", parameters), lr=0.1)
    sum((p.sum() for p in parameters), torch.zeros(())).backward()
    optimizer.step()
    return optimizer


def other_names() -> nn.Module:
    return nn.Sequential(model()[0], nn.Identity(), model()[1])  # type: ignore[index]


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (
            lambda: model(5),
            r"0.weight has shape \[5, 4\] in the checkpoint and \[3, 4\] in this model",
        ),
        (
            lambda: model(3, torch.float64),
            "0.weight is float64 in the checkpoint and float32 in this model",
        ),
        (
            other_names,
            "another model: it has no 1.weight, 1.bias and this run has no 2.weight, 2.bias",
        ),
    ],
    ids=["shape", "dtype", "names"],
)
def test_another_model_is_refused(other: Any, match: str) -> None:
    module = model()
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(CheckpointError, match=match):
        load_module(module, other().state_dict())
    assert same(dict(module.state_dict()), dict(before))


def test_names_that_both_have_can_be_loaded() -> None:
    module, found = model(), other_names()
    with torch.no_grad():
        found[0].weight.fill_(7)  # type: ignore[index]
    load_module(module, found.state_dict(), strict=False)
    assert torch.equal(module[0].weight, torch.full((3, 4), 7.0))  # type: ignore[index]
    with pytest.raises(CheckpointError, match="shape"):
        load_module(module, {"0.weight": torch.zeros(9)}, strict=False)


def test_long_lists_of_names_are_cut() -> None:
    many = {f"layer{at}": torch.zeros(1) for at in range(1000)}
    with pytest.raises(CheckpointError, match="layer0, layer1, layer2 and 997 more") as raised:
        check_same_tensors({}, many, what="model")
    assert len(str(raised.value)) < 300


def other_groups(module: nn.Module) -> torch.optim.Optimizer:
    first, *rest = module.parameters()
    return stepped(module, groups=[{"params": [first]}, {"params": rest}])


def frozen(module: nn.Module) -> torch.optim.Optimizer:
    *some, _ = module.parameters()
    other = next(iter(nn.Linear(1, 1).parameters()))
    return stepped(module, groups=[*some, other])


@pytest.mark.parametrize(
    ("optimizer", "match"),
    [
        (other_groups, r"groups of \[1, 3\] parameters, this one of \[4\]"),
        (frozen, "of other parameters"),
    ],
    ids=["groups", "parameters"],
)
def test_another_optimizer_is_refused_before_the_model_is_loaded(
    optimizer: Any, match: str
) -> None:
    from lightning_cp.checkpoint.restore import names_of

    theirs = model(3)
    theirs[0].bias.data += 1  # type: ignore[index]
    saved = optimizer(theirs)
    checkpoint = {"model": theirs.state_dict(), "optimizer": saved.state_dict(), "step": 5}
    names = {
        "optimizer": [x or "stranger" for x in names_of(saved, dict(theirs.named_parameters()))]
    }
    module = model(3)
    own = stepped(module)
    before = copy.deepcopy((dict(module.state_dict()), own.state_dict()))
    state = {"model": module, "optimizer": own, "step": 1}
    with pytest.raises(CheckpointError, match=match):
        _restore(state, checkpoint, names, {}, strict=True)
    assert same((dict(module.state_dict()), own.state_dict()), before)
    assert state["step"] == 1


def test_optimizers_are_loaded_by_name() -> None:
    """Parameters in another order get their own state."""
    module = model(3)
    reordered = stepped(module, groups=[*module.parameters()][::-1])
    from lightning_cp.checkpoint.restore import fit_state, names_of

    named = dict(module.named_parameters())
    saved, own = names_of(reordered, named), list(named)
    plain = torch.optim.AdamW(module.parameters(), lr=0.1)
    plain.load_state_dict(fit_state(reordered.state_dict(), plain, saved, own))
    for parameter in module.parameters():
        assert same(plain.state[parameter], reordered.state[parameter])


class Planted:
    """Leaves a trace if it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


def planted(place: str, folder: Path, trace: Path) -> Path:
    """A checkpoint with a pickle that would run."""
    path = folder / place
    payload = pickle.dumps({"w": Planted(trace)}, protocol=2)  # torch.save's own
    if place == "plain pickle":
        path.write_bytes(payload)
    elif place == "in a file of torch.save":
        torch.save({"state_dict": {"w": torch.ones(1)}, "x": Planted(trace)}, path)
    elif place == "in our file":
        save_checkpoint(state_of(1), folder / "ours")
        with zipfile.ZipFile(folder / "ours") as old, zipfile.ZipFile(path, "w") as new:
            for name in old.namelist():
                new.writestr(name, payload if name.endswith("data.pkl") else old.read(name))
            new.comment = old.comment
    else:
        save_checkpoint(state_of(1), path, form="sharded")
        for name in (
            ".metadata",
            "meta.pt",
            "state.json",
        ):  # where PyTorch and Lightning would look
            (path / name).write_bytes(payload)
    return path


PLACES = ["plain pickle", "in a file of torch.save", "in our file", "in our folder"]


@pytest.mark.parametrize("place", PLACES)
def test_no_file_runs_code(place: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    path = planted(place, tmp_path, trace)
    pickle.loads(pickle.dumps(Planted(tmp_path / "fires")))
    assert (tmp_path / "fires").exists()
    with pytest.raises(CheckpointError):
        open_checkpoint(path).read()
    if path.is_file():
        with pytest.raises(CheckpointError):
            load_file(path)
        with pytest.raises(CheckpointError):
            PlainCheckpointIO().load_checkpoint(path)
    assert not trace.exists()


def test_a_foreign_file_says_what_it_would_take(tmp_path: Path) -> None:
    path = planted(PLACES[1], tmp_path, tmp_path / "trace")
    with pytest.raises(CheckpointError, match="would run code from the file, so it is refused"):
        open_checkpoint(path)


def test_other_storage_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"local or mounted folders, got s3://"):
        local_path("s3://bucket/a")
    assert local_path("file:///a/b") == Path("/a/b")


@pytest.mark.parametrize("kind", [UlyssesRingStrategy, FabricStrategy])
def test_settings_are_checked(kind: Any) -> None:
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

    class Own(TorchCheckpointIO):
        pass

    with pytest.raises(ConfigError, match="checkpoint must be one of full, sharded, got 'both'"):
        kind(checkpoint="both")
    with pytest.raises(ConfigError, match="async_save must be True or False, got 'yes'"):
        kind(async_save="yes")
    with pytest.raises(
        ConfigError, match="written by all ranks, and Own writes what one process has"
    ):
        kind(checkpoint="sharded", checkpoint_io=Own())
    with pytest.raises(
        ConfigError, match="written by all ranks, and Own writes what one process has"
    ):
        kind(checkpoint="sharded").checkpoint_io = Own()


def test_only_checkpoints_are_removed(tmp_path: Path) -> None:
    saver = CheckpointManager("sharded", in_background=False)
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "data").write_text("x")
    with pytest.warns(UserWarning, match=r"precious is not removed: it has no manifest.json"):
        saver.remove(tmp_path / "precious")
    assert (tmp_path / "precious" / "data").exists()
    save_checkpoint(state_of(1), tmp_path / "old", form="sharded")
    (tmp_path / "last").symlink_to("old")
    saver.remove(tmp_path / "old")
    assert (tmp_path / "last").exists()  # what a link still names has to wait
    save_checkpoint(state_of(2), tmp_path / "new", form="sharded")
    saver.link(tmp_path / "new", tmp_path / "last")
    assert same(open_checkpoint(tmp_path / "last").read(), state_of(2))
    assert not (tmp_path / "old").exists()
    saver.remove(tmp_path / "old")  # it is gone already

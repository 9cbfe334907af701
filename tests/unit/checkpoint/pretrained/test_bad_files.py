"""Damaged and hostile checkpoints: each is named and refused, and the model is what it was."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_cp.checkpoint import export_pretrained, load_pretrained
from lightning_cp.checkpoint.__main__ import main
from lightning_cp.checkpoint.pretrained.files import HEADER_LIMIT, read_header
from lightning_cp.checkpoint.save import save_checkpoint
from lightning_cp.errors import CheckpointError
from tests.helpers.checkpoint.pretrained.bad_files import FILES, FOLDERS, pickle_only
from tests.helpers.checkpoint.pretrained.files import GOOD, made_of


class Tiny(nn.Module):
    """What GOOD holds."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.a = nn.Parameter(torch.full((2, 2), 7.0, device=device))
        self.b = nn.Parameter(torch.full((2,), 7.0, device=device))


Tensor: Any = torch.Tensor
WHERE = (Tensor.is_meta.__get__, Tensor.device.__get__)
"""Where the model is, it may be asked."""


class NoTensors(TorchFunctionMode):
    """Nothing is computed or allocated by PyTorch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), *_: Any) -> Any:
        if func is torch.device or func in WHERE:
            return func(*args)
        raise AssertionError(f"{func.__name__} was called")


@contextmanager
def nothing_allocated(at_most: int = 2**21) -> Iterator[None]:
    """No tensor is made, and Python takes no more than what a small header is parsed into."""
    tracemalloc.start()
    try:
        with NoTensors():
            yield
        assert tracemalloc.get_traced_memory()[1] < at_most
    finally:
        tracemalloc.stop()


def test_an_allocation_would_be_noticed() -> None:
    with pytest.raises(AssertionError, match=r"empty was called"), nothing_allocated():
        torch.empty(1)
    with pytest.raises(AssertionError), nothing_allocated():
        bytes(2**22)


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_refused_before_anything_is_allocated(name: str, tmp_path: Path) -> None:
    content, says = FILES[name]
    (tmp_path / "model.safetensors").write_bytes(content)
    model = Tiny("meta")
    says = r"model\.safetensors is refused: .*" + says
    with nothing_allocated(), pytest.raises(CheckpointError, match=says):
        load_pretrained(model, tmp_path, progress=False)
    assert model.a.is_meta


def test_the_file_that_they_are_made_of_is_good(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(made_of(GOOD))
    model = Tiny("meta")
    load_pretrained(model, tmp_path, progress=False)
    assert model.a.eq(0).all()
    assert model.b.eq(0).all()


def test_a_header_within_the_limit_is_no_reason_to_read_more_than_it(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    with file.open("wb") as stream:
        stream.write(HEADER_LIMIT.to_bytes(8, "little"))
        stream.truncate(2**40)  # a terabyte of holes, of which none is read
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="not valid JSON"):
        read_header(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * HEADER_LIMIT


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_leads_elsewhere_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, says = FOLDERS[name]
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    make(folder)
    monkeypatch.chdir(tmp_path)
    model = Tiny("meta")
    with nothing_allocated(), pytest.raises(CheckpointError, match=says) as raised:
        load_pretrained(model, folder, progress=False)
    assert model.a.is_meta
    assert str(tmp_path) not in str(raised.value)
    assert not (tmp_path / "pwned").exists()


def test_links_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    folder = tmp_path / "models--x--y" / "snapshots" / "123"
    blobs = tmp_path / "models--x--y" / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "abc").write_bytes(made_of(GOOD))
    (folder / "model.safetensors").symlink_to("../../blobs/abc")
    model = Tiny("meta")
    load_pretrained(model, folder, progress=False)
    assert model.a.eq(0).all()


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt", ".pkl"])
def test_a_pickle_given_by_its_path_is_refused(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"weights{suffix}"
    pickle_only(tmp_path)
    file.write_bytes((tmp_path / "pytorch_model.bin").read_bytes())
    with pytest.raises(
        CheckpointError, match=f"weights{suffix} is refused: such files are pickles"
    ):
        load_pretrained(Tiny(), file, progress=False)


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_a_checkpoint_of_a_run_says_how_its_weights_become_those_of_another(
    form: str, tmp_path: Path
) -> None:
    """The ways it names are taken here."""
    module, run = Tiny(), tmp_path / "run.ckpt"
    torch.nn.init.ones_(module.a)
    save_checkpoint({"state_dict": module.state_dict()}, run, form=form)
    advice = r"resumed with ckpt_path=.*load_from_checkpoint.*lightning_cp\.checkpoint.*export_pretrained"
    with pytest.raises(CheckpointError, match=advice) as raised:
        load_pretrained(Tiny(), run, progress=False)
    assert str(tmp_path) not in str(raised.value)
    if form == "sharded":
        assert main([str(run), str(tmp_path / "file.ckpt")]) == 0
        run = tmp_path / "file.ckpt"
    module.load_state_dict(torch.load(run, weights_only=True)["state_dict"])
    export_pretrained(module, tmp_path / "weights")
    other = Tiny()
    load_pretrained(other, tmp_path / "weights", progress=False)
    assert other.a.eq(1).all()


def test_a_path_that_is_not_there_is_named_without_where_it_is(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint at .*nowhere") as raised:
        load_pretrained(Tiny(), tmp_path / "nowhere", progress=False)
    assert str(tmp_path) not in str(raised.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused_if_asked_for(value: float, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    weights = {"a": torch.zeros(2, 2), "b": torch.tensor([1.0, value])}
    save_file(weights, tmp_path / "model.safetensors")
    model = Tiny()
    load_pretrained(model, tmp_path, progress=False)
    with pytest.raises(CheckpointError, match=r"b in model.safetensors has 1 values that are NaN"):
        load_pretrained(model, tmp_path, progress=False, check_finite=True)

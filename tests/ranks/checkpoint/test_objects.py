"""Hyperparameters that are objects: there for who says weights_only=False, and for nobody else."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import enum
import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from lightning_cp.checkpoint.__main__ import convert
from lightning_cp.checkpoint.objects import whole
from lightning_cp.checkpoint.read import open_checkpoint
from lightning_cp.checkpoint.save import BackgroundSave, plan_save, save_checkpoint
from lightning_cp.errors import CheckpointError
from tests.helpers.checkpoint.states import same, state_of
from tests.unit.checkpoint.test_refused import Planted

KEYS = ("hyper_parameters", "hparams_type")


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    HIGH = 3


@dataclasses.dataclass
class Conf:
    lr: float = 0.1


Pair = collections.namedtuple("Pair", "a b")

OBJECTS: dict[str, Any] = {
    "namespace": argparse.Namespace(a=1),
    "colour": Colour.RED,
    "level": Level.HIGH,
    "keys": {Colour.RED: 1},
    "conf": Conf(0.2),
    "pair": Pair(1, 2),
    "partial": functools.partial(torch.optim.SGD, lr=0.1),
    "class": torch.optim.SGD,
    "day": datetime.date(2020, 1, 1),
    "deque": collections.deque([1]),
    "by_default": collections.defaultdict(list, x=[1]),
    "array": np.arange(3),
    "path": Path("a/b"),
}
PLAIN: dict[str, Any] = {
    "lr": 0.1,
    "sizes": [1, 2],
    "weight": torch.ones(2),
    "nested": {"a": (1, None)},
}


def state(**parameters: Any) -> dict[str, Any]:
    return {**state_of(1), "hyper_parameters": {**PLAIN, **parameters}}


def alike(got: Any, want: Any) -> bool:
    """Of the same kinds, and equal; a partial has no equality of its own."""
    if isinstance(want, functools.partial):
        return (got.func, got.args, got.keywords) == (want.func, want.args, want.keywords)
    if isinstance(want, np.ndarray):
        return isinstance(got, np.ndarray) and np.array_equal(got, want)
    return (
        same(got, want)
        if isinstance(want, torch.Tensor)
        else type(got) is type(want) and got == want
    )


def unpickled(path: Path) -> Any:
    """As any program does that trusts a file."""
    return torch.load(path, weights_only=False)


def test_who_trusts_the_file_gets_what_torch_save_would_give(tmp_path: Path) -> None:
    torch.save(state(**OBJECTS), tmp_path / "torch")
    assert save_checkpoint(state(**OBJECTS), tmp_path / "ours", may_lack=KEYS) == []
    want = unpickled(tmp_path / "torch")["hyper_parameters"]
    opened = open_checkpoint(tmp_path / "ours", weights_only=False)
    assert opened.manifest is not None
    for got in (unpickled(tmp_path / "ours"), opened.read()):
        found = got.pop("hyper_parameters")
        assert list(found) == list(want)
        assert [name for name in want if not alike(found[name], want[name])] == []
        got.pop("lightning_cp", None)
        assert same(got, state_of(1))


def test_nobody_else_makes_an_object(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    save_checkpoint(state(bad=Planted(trace), lr=0.2), tmp_path / "a", may_lack=KEYS)
    want = {**PLAIN, "lr": 0.2}
    assert same(torch.load(tmp_path / "a", weights_only=True)["hyper_parameters"], want)
    assert same(open_checkpoint(tmp_path / "a").read()["hyper_parameters"], want)
    convert(tmp_path / "a", tmp_path / "b")
    assert same(unpickled(tmp_path / "b")["hyper_parameters"], want)
    assert not trace.exists()
    unpickled(tmp_path / "a")
    assert trace.exists()


def test_plain_ones_need_no_pickle_and_no_package(tmp_path: Path) -> None:
    """Nothing in the file names anything of ours."""
    assert save_checkpoint(state(), tmp_path / "a", may_lack=KEYS) == []
    assert b"WithObjects" not in (tmp_path / "a").read_bytes()
    assert whole.__module__.encode() not in (tmp_path / "a").read_bytes()
    assert same(unpickled(tmp_path / "a")["hyper_parameters"], PLAIN)


@pytest.mark.nightly
def test_a_program_that_never_imports_the_package_reads_the_plain_ones(tmp_path: Path) -> None:
    save_checkpoint(state(bad=Planted(tmp_path / "trace")), tmp_path / "a", may_lack=KEYS)
    program = "import sys, torch; print(sorted(torch.load(sys.argv[1])['hyper_parameters']))"
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "a")], capture_output=True, text=True
    )
    assert done.stdout.strip() == str(sorted(PLAIN)), done.stderr
    assert not (tmp_path / "trace").exists()


def test_configurations_are_what_they_were(tmp_path: Path) -> None:
    config = OmegaConf.create({"size": 3, "twice": "${size}"})
    parameters = {"hyper_parameters": config, "hparams_type": DictConfig}
    save_checkpoint(parameters, tmp_path / "a", may_lack=KEYS)
    for got in (
        unpickled(tmp_path / "a"),
        open_checkpoint(tmp_path / "a", weights_only=False).read(),
        open_checkpoint(tmp_path / "a").read(),
    ):
        assert isinstance(got["hyper_parameters"], DictConfig)
        assert got["hyper_parameters"].twice == 3
        assert got["hparams_type"] is DictConfig
    assert torch.load(tmp_path / "a", weights_only=True)["hyper_parameters"] == config


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_what_cannot_be_pickled_is_left_out_and_the_rest_is_not(form: str, tmp_path: Path) -> None:
    given = state(bad=lambda: 3, conf=Conf())
    left_out = save_checkpoint(given, tmp_path / "a", form=form, may_lack=KEYS)
    sharded = [] if form == "full" else ["hyper_parameters.conf"]  # has no pickles
    assert left_out == ["hyper_parameters.bad", *sharded]
    got = open_checkpoint(tmp_path / "a", weights_only=False).read()["hyper_parameters"]
    assert same(got.pop("weight"), PLAIN["weight"])
    assert got == {k: v for k, v in PLAIN.items() if k != "weight"} | (
        {"conf": Conf()} if form == "full" else {}
    )


def test_a_save_in_the_background_has_them_as_they_were(tmp_path: Path) -> None:
    conf = Conf()
    running = BackgroundSave(plan_save(state(conf=conf), tmp_path / "a", may_lack=KEYS)[0])
    conf.lr = 9.0
    assert running.wait(30)
    assert running.error is None
    assert unpickled(tmp_path / "a")["hyper_parameters"]["conf"] == Conf()


def test_an_object_that_cannot_be_made_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(state(conf=Conf()), tmp_path / "a", may_lack=KEYS)
    monkeypatch.delattr(f"{__name__}.Conf")
    with pytest.raises(CheckpointError, match="a holds an object that cannot be made here"):
        open_checkpoint(tmp_path / "a", weights_only=False)
    assert same(open_checkpoint(tmp_path / "a").read()["hyper_parameters"], PLAIN)

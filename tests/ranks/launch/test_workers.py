"""``ulysses_ring_fork`` and ``ulysses_ring_spawn``: a program whose Trainer starts its ranks as workers."""

from __future__ import annotations

import pickle
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_cp import ContextParallelCallback, ContextParallelMixin, UlyssesRingStrategy
from lightning_cp.errors import LightningCPError, UndeclaredError
from lightning_cp.launch.worker_results import _raise_written_error, _WorkerFunction, _write_error
from lightning_cp.watchdog.attribution import FOLDER
from tests.helpers.launch.expected import came_to_the_same, expected, expected_of_two_fits
from tests.helpers.launch.scripts.model import QUIET, Tiny
from tests.helpers.launch.scripts.notebook import CELLS
from tests.helpers.launch.start import SCRIPTS, all_succeeded, finish, program, ranks


class Declared(ContextParallelMixin, Tiny):
    """Says something about itself."""

    context_parallel_labels = "aligned"


def weights_came_back(folder: Path) -> dict[str, Any]:
    """What the process that the user works in has after a fit, and perhaps more."""
    first: Any = torch.load(folder / "0.pt")
    assert torch.equal(first["weights"], expected()["weights"])
    assert torch.equal(first["saved"], first["weights"])
    assert first["loss"] == expected()["losses"][-1]
    return first


def so_did_those_of_a_second_trainer(folder: Path) -> None:
    """Lightning leaves predictions in the workers."""
    second: Any = torch.load(folder / "1.pt")
    assert torch.equal(second["weights"], expected_of_two_fits())
    assert second["predictions"] is None


def kinds_of(kind: type[LightningCPError]) -> list[type[LightningCPError]]:
    return [kind, *(one for below in kind.__subclasses__() for one in kinds_of(below))]


@pytest.mark.parametrize("kind", kinds_of(LightningCPError), ids=lambda kind: kind.__name__)
def test_each_error_of_a_worker_is_raised_by_the_program(
    kind: type[LightningCPError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = (["heads are not declared."], {"num_heads": 4})
    error = kind(*asked) if kind is UndeclaredError else kind("it is odd")
    monkeypatch.setenv(FOLDER, str(tmp_path))
    _write_error(error, rank=1)
    with pytest.raises(kind) as found:
        _raise_written_error(tmp_path)
    assert type(found.value) is kind
    assert str(found.value) == str(error)
    assert vars(found.value) == vars(error)


@pytest.mark.nightly
def test_spawn(tmp_path: Path) -> None:
    all_succeeded(ranks(tmp_path, [{}], SCRIPTS / "workers.py", tmp_path, "spawn"))
    weights_came_back(tmp_path)


@pytest.mark.nightly
def test_fork_in_a_notebook(tmp_path: Path) -> None:
    """Two fits and a predict from code that is in no file."""
    all_succeeded(ranks(tmp_path, [{}], "-c", CELLS))
    weights_came_back(tmp_path)
    so_did_those_of_a_second_trainer(tmp_path)


def test_workers_of_fabric(tmp_path: Path) -> None:
    all_succeeded(ranks(tmp_path, [{}], SCRIPTS / "fabric_workers.py", tmp_path, "fork"))
    came_to_the_same(tmp_path)


@pytest.mark.parametrize("late", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_forked_worker_that_ends_before_the_others_is_not_taken_for_killed(
    late: int, tmp_path: Path
) -> None:
    """Python calls nothing of ``atexit`` there."""
    all_succeeded(ranks(tmp_path, [{}], SCRIPTS / "fabric_workers.py", tmp_path, "fork", late))
    came_to_the_same(tmp_path)


@pytest.mark.parametrize("callbacks", [[], [ContextParallelCallback()]], ids=["ours", "the user's"])
def test_what_spawned_workers_are_sent_can_be_pickled(callbacks: list[Any]) -> None:
    settings: Any = {"mode": "ring", "sequence_dims": {"a": 1}, "token_weighting": "global"}
    strategy = UlyssesRingStrategy(start_method="spawn", **settings)
    trainer = pl.Trainer(strategy=strategy, devices=2, callbacks=callbacks, **QUIET)
    sent: Any = pickle.loads(pickle.dumps((trainer, Declared())))[0]
    assert sent.strategy.runtime.settings == strategy.runtime.settings
    assert sum(isinstance(one, ContextParallelCallback) for one in sent.callbacks) == len(callbacks)


@pytest.mark.nightly
def test_spawned_workers_of_fabric(tmp_path: Path) -> None:
    all_succeeded(ranks(tmp_path, [{}], SCRIPTS / "fabric_workers.py", tmp_path, "spawn"))
    came_to_the_same(tmp_path)


@pytest.mark.nightly
def test_predict_with_spawn(tmp_path: Path) -> None:
    all_succeeded(ranks(tmp_path, [{}], SCRIPTS / "workers.py", tmp_path, "spawn", "predict"))
    assert weights_came_back(tmp_path)["predictions"] is None


@pytest.mark.nightly
def test_fork_in_an_interactive_interpreter(tmp_path: Path) -> None:
    """Where Lightning refuses what is not compatible with notebooks."""
    with program(tmp_path, "-i", "-c", f"import lightning_cp\n{CELLS}") as started:
        finish(started)
    weights_came_back(tmp_path)
    so_did_those_of_a_second_trainer(tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["fork", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_what_a_function_of_fabric_returns(how: str, tmp_path: Path) -> None:
    script = SCRIPTS / "fabric_returns.py"
    all_succeeded(ranks(tmp_path, [{}], script, tmp_path, how, "whole"))
    got, network = torch.load(tmp_path / "0.pt"), Tiny().network
    for name, weight in network.named_parameters():
        assert torch.equal(got[name], weight)


@pytest.mark.nightly
def test_parts_are_no_result_of_fabric(tmp_path: Path) -> None:
    (done,) = ranks(tmp_path, [{}], SCRIPTS / "fabric_returns.py", tmp_path, "fork", "parts")
    assert done.status == 1
    assert "lightning_cp.checkpoint.whole(x) of each" in done.output


def order_of(folder: Path, strategy: str, devices: int) -> dict[str, list[str]]:
    """The rows of each batch, by rank."""
    (done,) = all_succeeded(ranks(folder, [{}], SCRIPTS / "shuffled.py", strategy, devices))
    found: dict[str, list[str]] = {}
    for rank, rows in re.findall(r"rank (\d) batch \d rows (\[[\d, ]+\])", done.output):
        found.setdefault(rank, []).append(rows)
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["ulysses_ring_fork", "ulysses_ring_spawn", "ulysses_ring"])
def test_shuffled_samples_come_in_one_processs_order(strategy: str, tmp_path: Path) -> None:
    want = order_of(tmp_path, "auto", 1)["0"]
    assert len(want) == 3
    assert want != ["[0, 1]", "[2, 3]", "[4, 5]"]
    assert order_of(tmp_path, strategy, 2) == {"0": want, "1": want}


def test_workers_draw_from_the_programs_random_state() -> None:
    """Python seeds its generator again in every process that is forked."""
    before = random.getstate()
    random.seed(7)
    strategy = SimpleNamespace(set_worker_rank=lambda: None)
    worker = _WorkerFunction(lambda: (random.random(), torch.rand(()).item()), strategy)
    want = random.random(), torch.rand(()).item()
    random.seed(8)
    torch.manual_seed(8)
    assert worker() == want
    random.setstate(before)

"""SIGTERM: every rank stops after the same step, having saved it, and the run goes on from there exactly."""

from __future__ import annotations

import hashlib
import os
import re
import signal
from contextlib import nullcontext
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning import Trainer
from torch.multiprocessing.spawn import ProcessExitedException

from lightning_cp.fabric import UlyssesRingStrategy
from lightning_cp.launch import preemption as signals
from lightning_cp.launch import worker_results as launchers
from lightning_cp.launch.worker_results import FabricLauncher, ReportingFabricLauncher
from lightning_cp.utils import subprocess as jobs
from lightning_cp.utils.signals import signal_handler
from tests.helpers.launch.start import (
    SCRIPTS,
    Done,
    all_succeeded,
    free_port,
    ranks,
    torchrun_variables,
)
from tests.helpers.pool import run_ranks
from tests.helpers.strategies.small import RING, Small, loader, trainer_of

SCRIPT, LOOP = SCRIPTS / "stopped.py", SCRIPTS / "stopped_fabric.py"
AT = 2
"""The step in which the signal comes; there are six."""


def stopped(who: str) -> str:
    """After which step, as a pattern: a signal that is passed on may come a step later."""
    return f"after step {f'[{AT}-5]' if who == 'parent' else AT}"


def run(folder: Path, how: str, *arguments: object, script: Path = SCRIPT) -> list[Done]:
    """Two ranks, started by Lightning (``lightning``, ``spawn``, ``fork``), or as torchrun would."""
    folder.mkdir(exist_ok=True)
    told = torchrun_variables(2) if how == "torchrun" else [{}]
    if how in ("spawn", "fork"):
        told = [{"START_METHOD": how}]
    return ranks(folder, told, script, folder, 2, *arguments)


def left(folder: Path) -> list[str]:
    """Digests of what each rank has at the end."""
    return [digest(torch.load(folder / f"rank{rank}.pt")) for rank in range(2)]


def digest(result: Any) -> str:
    """Of weights and the optimizer's state, bit by bit."""
    made = hashlib.sha256(result["weights"].numpy().tobytes())
    for index in sorted(result["state"]):
        for name in sorted(result["state"][index]):
            made.update(result["state"][index][name].numpy().tobytes())
    made.update(str(result["steps"]).encode())
    return made.hexdigest()


@lru_cache(maxsize=2)
def uninterrupted(folder: Path, script: Path = SCRIPT) -> list[str]:
    own = folder.with_name(f"{folder.name}-{script.stem}")
    all_succeeded(run(own, "torchrun", "none", 0, 0, "none", script=script))
    return left(own)


def goes_on(folder: Path, how: str, saves: str, whole: Path, script: Path = SCRIPT) -> None:
    """From what was saved, to the end of a run that was left alone."""
    assert not list(folder.glob(".*"))  # nothing half-written
    how = "lightning" if how == "lightning" else "torchrun"  # who spawns ranks has no results
    done = run(folder, how, "none", 0, 0, saves, folder / "last.ckpt", script=script)
    all_succeeded(done)
    assert left(folder) == uninterrupted(whole / "uninterrupted", script)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("how", "who", "saves"),
    [
        ("torchrun", "1", "file"),
        pytest.param("lightning", "0,1", "none", marks=pytest.mark.nightly),
        pytest.param("lightning", "1", "file", marks=pytest.mark.nightly),
        pytest.param("torchrun", "0", "link", marks=pytest.mark.nightly),
        pytest.param("torchrun", "0,1", "sharded", marks=pytest.mark.nightly),
        pytest.param("spawn", "1", "file", marks=pytest.mark.nightly),
        pytest.param("spawn", "parent", "file", marks=pytest.mark.nightly),
        pytest.param("fork", "parent", "none", marks=pytest.mark.nightly),
    ],
)
def test_every_rank_saves_the_same_step(
    how: str, who: str, saves: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path / "run"
    done = run(folder, how, "SIGTERM", who, AT, saves)
    assert [one.status for one in done] == [143] * len(done), done[0].output[-3000:]
    said = "".join(one.output for one in done)
    assert said.count("SIGNAL SENT") == len(who.split(","))
    assert re.search(rf"stopped by a signal {stopped(who)}, saved as \S*last.ckpt", said), said[
        -3000:
    ]
    goes_on(folder, how, saves, tmp_path_factory.getbasetemp())


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("how", "who"),
    [
        ("torchrun", "1"),
        pytest.param("lightning", "1", marks=pytest.mark.nightly),
        pytest.param("lightning", "0,1", marks=pytest.mark.nightly),
        pytest.param("fork", "parent", marks=pytest.mark.nightly),
    ],
)
def test_a_loop_is_told_by_should_stop(
    how: str, who: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path / "run"
    done = run(folder, how, "SIGTERM", who, AT, "none", script=LOOP)
    assert [one.status for one in done] == [143] * len(done), done[0].output[-3000:]
    said = "".join(one.output for one in done)
    assert said.count("SIGNAL SENT") == len(who.split(","))
    assert len(re.findall(f"stopped {stopped(who)}", said)) == 1
    goes_on(folder, how, "none", tmp_path_factory.getbasetemp(), LOOP)


@pytest.mark.nightly
@pytest.mark.parametrize("who", ["0,1", pytest.param("1", marks=pytest.mark.nightly)])
def test_workers_that_are_interrupted_leave_nobody_waiting(who: str, tmp_path: Path) -> None:
    """PyTorch takes them for done, and what they were to send back would never come."""
    (done,) = run(tmp_path, "fork", "SIGINT", who, AT, "none")
    assert done.status == 1
    assert "Detected KeyboardInterrupt" in done.output or "was interrupted" in done.output
    assert not list(tmp_path.glob("rank*.pt"))


@pytest.mark.nightly
@pytest.mark.parametrize("script", [SCRIPT, LOOP], ids=["trainer", "fabric"])
def test_the_agent_of_torchrun_passes_it_on(
    script: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    agent = ("-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}")
    command = (*agent, script, tmp_path, 2, "SIGTERM", "parent", AT, "file")
    (done,) = ranks(tmp_path, [{}], *command)
    assert done.status != 0
    assert done.output.count("SIGNAL SENT") == 1
    assert re.search(stopped("parent"), done.output), done.output[-3000:]
    goes_on(tmp_path, "torchrun", "file", tmp_path_factory.getbasetemp(), script)


def test_a_program_that_sets_received_sigterm_is_heard() -> None:
    """As schedulers' callbacks do, and Lightning's own tests."""
    sent = signals.ReceivedSignals()
    connector = signals.StepSignals(Trainer(accelerator="cpu", devices=1, logger=False), sent)
    assert (sent.wish(), connector.received_sigterm) == (0, False)
    connector.received_sigterm = True
    assert (sent.wish(), connector.received_sigterm) == (1, True)


def test_sigterm_is_left_to_loops_that_do_not_ask() -> None:
    """And one that asks keeps a handler of its own."""
    before, called = signal.getsignal(signal.SIGTERM), []
    strategy = UlyssesRingStrategy()
    assert signal.getsignal(signal.SIGTERM) == before
    signal.signal(signal.SIGTERM, lambda number, frame: called.append(number))
    try:
        assert not strategy.should_stop
        os.kill(os.getpid(), signal.SIGTERM)
        assert called == [signal.SIGTERM]
        assert not strategy.should_stop  # nobody has stepped since
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    "within",
    [
        partial(signal_handler, signal.SIG_IGN, signal.SIGTERM),
        partial(launchers._forward_sigterm, []),
        jobs._signals_raise,
    ],
    ids=["an error", "a launcher", "a sweep"],
)
def test_a_handler_of_a_library_in_c_is_no_error(
    within: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python does not know it: it reads as None, which cannot be set."""
    last: dict[int, Any] = {}

    def set_handler(number: int, handler: Any) -> None:
        if handler is None:
            raise TypeError("signal handler must be signal.SIG_IGN, signal.SIG_DFL, or a callable")
        last[number] = handler

    monkeypatch.setattr(signal, "signal", set_handler)
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    with within():
        assert last[signal.SIGTERM] is not signal.SIG_DFL
    assert set(last.values()) == {signal.SIG_DFL}


@pytest.mark.parametrize("status", [143, 1])
def test_a_worker_that_was_stopped_ends_its_parent_as_it_ended(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(*args: Any, **kwargs: Any) -> None:
        raise ProcessExitedException("ended", error_index=0, error_pid=1, exit_code=status)

    monkeypatch.setattr(FabricLauncher, "launch", launch)
    error = SystemExit if status == 143 else ProcessExitedException
    strategy: Any = SimpleNamespace(num_processes=2)
    with pytest.raises(error) as ended:
        ReportingFabricLauncher(strategy, "spawn").launch(print)
    assert error is ProcessExitedException or getattr(ended.value, "code", None) == 143


class Fitted(Small):
    """Notes at the first batch if the loop's broadcast is replaced; fails there if it should."""

    def __init__(self, *, fails: bool) -> None:
        super().__init__()
        self.fails, self.is_replaced = fails, False

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.is_replaced = signals._BROADCAST in vars(self.trainer.fit_loop.epoch_loop)
        if self.fails:
            raise ValueError("no more")


def fit(rank: int, world_size: int, *, fails: bool) -> tuple[bool, bool]:
    """If the broadcast was replaced during a fit, and after it."""
    module = Fitted(fails=fails)
    trainer = trainer_of(world_size, {**RING, "parity_check": "off"})
    with pytest.raises(ValueError, match="no more") if fails else nullcontext():
        trainer.fit(module, loader(2))
    return module.is_replaced, signals._BROADCAST in vars(trainer.fit_loop.epoch_loop)


@pytest.mark.parametrize("fails", [False, True])
def test_lightning_s_broadcast_before_each_batch_is_back_after_a_fit(fails: bool) -> None:
    assert run_ranks(2, fit, fails=fails) == [(True, False)] * 2

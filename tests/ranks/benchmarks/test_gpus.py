"""The lines of ``lightning_cp.bench.gpus`` on standing ranks: right ones pass, wrong results fail them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks.gpus import attention, cells, command, communication, faults, training
from benchmarks.gpus.line import Place, WrongResultError
from lightning_cp.attention import ring
from lightning_cp.bench import gpus
from lightning_cp.comm.transfer import Transfer
from lightning_cp.kernels import select
from lightning_cp.kernels.auto import Order
from lightning_cp.optim import QKClip
from tests.helpers.pool import run_ranks
from tests.nightly.faults.run import Outcome

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
NAMES = {line.name for line in command.lines(2)}
Spoil = Callable[[], AbstractContextManager[None]]


@contextmanager
def nothing_arrives() -> Iterator[None]:
    """Keys and gradients of other ranks are zeros."""

    def transfer(
        send: Any, dest: int, receive_shape: Any, source: int, like: torch.Tensor, group: Any
    ) -> Transfer:
        received = None if receive_shape is None else like.new_zeros(tuple(receive_shape))
        return Transfer(received, send, [])

    with mock.patch.object(ring, "start_transfer", transfer):
        yield


@contextmanager
def nothing_adds_up() -> Iterator[None]:
    """Sums over groups are a rank's own part."""
    with mock.patch.object(dist, "all_reduce", return_value=None):
        yield


@contextmanager
def other_weights_are_saved() -> Iterator[None]:
    """The checkpoint has other weights than the run that goes on."""

    def save(self: Any, trainer: Any, *_: object, **__: object) -> None:
        if trainer.global_step != training.SAVED_AFTER:
            return
        parameters = [p.detach() for p in trainer.lightning_module.parameters()]
        before = [p.clone() for p in parameters]
        for p in parameters:
            p.mul_(1.001)
        trainer.save_checkpoint(self.path)
        for p, own in zip(parameters, before, strict=True):
            p.copy_(own)

    with mock.patch.object(training._Save, "on_train_batch_end", save):
        yield


@contextmanager
def a_mode_has_an_obstacle() -> Iterator[None]:
    own = communication.measure_modes

    def measured(*arguments: Any) -> Any:
        first, *rest = own(*arguments)
        return [replace(first, obstacle="fails: no memory"), *rest]

    with mock.patch.object(communication, "measure_modes", measured):
        yield


@contextmanager
def nothing_is_scaled_back() -> Iterator[None]:
    """Scores are checked, and weights stay."""
    with mock.patch.object(QKClip, "_scale", return_value=[]):
        yield


@contextmanager
def no_score_is_large() -> Iterator[None]:
    with mock.patch.object(cells, "TAU", 1e6):
        yield


@contextmanager
def no_other_kernel_can() -> Iterator[None]:
    with mock.patch.object(select, "auto_order", return_value=Order(("reference",))):
        yield


def run_line(rank: int, world_size: int, name: str, spoil: Spoil) -> str:
    """The line's figure, or the error in words."""
    line = next(line for line in command.lines(world_size) if line.name == name)
    with command._fresh_state(), spoil():
        try:
            return line.run(Place("cpu", world_size, Path.cwd()))
        except WrongResultError as error:
            return f"wrong: {error}"


def verdicts(name: str, spoil: Spoil) -> list[str]:
    return run_ranks(2, run_line, name, spoil, timeout=100.0)


TRAIN = "train, ddp ring, data 1 x cp 2, dense, sgd, float64"
SAVE = "async save and reshard, fsdp ring cp 2 tp 1 to fsdp ring cp 1 tp 2"
FABRIC = "train, zero1 ring, data 1 x cp 2, dense, sgd, float64, Fabric"
CLIP = "train, fsdp ring, data 1 x cp 2, dense, muonclip, float64"
NARROW = "train, ddp ring, data 1 x cp 2, dense, sgd, bfloat16"
MIXED = "train, fsdp ring, data 1 x cp 2, dense, sgd, 16-mixed"
OFFLOADS = (
    "train, ddp ring, data 1 x cp 2, dense, sgd, float64, activation_offload",
    "train, fsdp ring, data 1 x cp 2, dense, sgd, float64, cpu_offload",
)
RIGHT = (
    "oracle, ring 2 zigzag",
    "oracle, ulysses 2",
    "mesh twice, data 1 x ring 1 x ulysses 1 x tp 2",
    TRAIN,
    FABRIC,
    CLIP,
    "train, ddp zigzag_llama3, data 1 x cp 2, dense, sgd, bfloat16",
    MIXED,
    *OFFLOADS,
    "exposed communication, ulysses",
    SAVE,
)


@pytest.mark.quick("oracle, ring *", FABRIC, CLIP, "*zigzag_llama3*", MIXED, *OFFLOADS)
@pytest.mark.parametrize("name", RIGHT)
def test_a_line_passes(name: str) -> None:
    """The others of the short list are rehearsed by ``.ci/run``."""
    for said in verdicts(name, nullcontext):
        assert not said.startswith("wrong"), said
        assert any(character.isdigit() for character in said)


WRONG: tuple[tuple[str, Spoil, str], ...] = (
    ("oracle, ring 2 zigzag", nothing_arrives, "out of .* is off by"),
    ("mesh twice, data 1 x ring 1 x ulysses 1 x tp 2", nothing_adds_up, "adds up"),
    (TRAIN, nothing_arrives, "a loss is off by"),
    (FABRIC, nothing_arrives, "a loss is off by"),
    (CLIP, nothing_is_scaled_back, "a loss is off by"),
    (CLIP, no_score_is_large, "no score passes tau"),
    (NARROW, nothing_arrives, "a loss is off by .*, and 0.02 is allowed"),
    (NARROW, no_other_kernel_can, "attention was computed by reference"),
    (MIXED, nothing_arrives, "a loss is off by .*, and 0.005 is allowed"),
    (SAVE, other_weights_are_saved, "after the resume is off by"),
    ("exposed communication, ulysses", a_mode_has_an_obstacle, "not measured: fails: no memory"),
)


@pytest.mark.parametrize(("name", "spoil", "message"), WRONG)
def test_a_wrong_result_fails_the_line(name: str, spoil: Spoil, message: str) -> None:
    for said in verdicts(name, spoil):
        assert said.startswith("wrong: "), said
        assert re.search(message, said), said


def test_ranks_end_as_they_have_to_or_the_line_fails() -> None:
    said = "rank 1 (cp_rank 1 of 2, data_rank 0) lost at step 3, in forward: no message"
    good = Outcome(2.0, said, (1, -9), (said, ""))
    faults.check_end("kill", 2, good)
    faults.check_end("sleep", 2, replace(good, statuses=(1, 1)))
    wrong = {
        "took 99 s": replace(good, seconds=99.0),
        "ended with": replace(good, statuses=(0, -9)),
        "did not say": replace(good, outputs=("rank 0 lost at step 3, in forward", "")),
    }
    for message, outcome in wrong.items():
        with pytest.raises(WrongResultError, match=message):
            faults.check_end("kill", 2, outcome)
    hung = replace(good, statuses=(1, 1))
    with pytest.raises(WrongResultError, match=r"not say: rank 1 .*, whose device cuda:1"):
        faults.check_end("device", 2, hung)


@pytest.mark.nightly
def test_a_device_that_hangs_is_named(tmp_path: Path) -> None:
    """A stand-in, whose events are never complete."""
    said = faults.fault_line("device", Place("cpu", 2, tmp_path))
    assert "first to stop: rank 1 (cp_rank 1 of 2, data_rank 0), whose device cuda:1" in said


@pytest.mark.parametrize("count", range(2, 9))
def test_lines_of_every_number_of_gpus(count: int) -> None:
    """Names are unique, sizes multiply to the ranks, and every engine, mode and kind of run is there."""
    names = [line.name for line in command.lines(count)]
    assert len(set(names)) == len(names)
    assert all(grid.world_size == count for grid in attention.grids(count))
    found = cells.cells(count)
    assert all(cell.cp * cell.data * cell.tp == count for cell in found)
    wanted = {"ddp", "fsdp", "zero1", *(["hsdp"] if count % 2 == 0 else [])}
    assert {cell.engine for cell in found} == wanted
    modes = {"ulysses", "ring", "zigzag_llama3"}
    modes |= {"hybrid"} if count >= 4 and count % 2 == 0 else set()
    assert {cell.mode for cell in found} == modes
    assert {cell.mode for cell in found if cell.precision == "bf16-true"} == modes
    assert {cell.precision for cell in found} == set(cells.LIMITS)
    assert {cell.optimizer for cell in found} == {"sgd", "muon", "muonclip"}
    every = {(engine, mode) for engine in wanted - {"hsdp"} for mode in modes}
    for driver in ("trainer", "fabric"):
        assert {(cell.engine, cell.mode) for cell in found if cell.driver == driver} >= every
    if count >= 4 and count % 2 == 0:
        of_copies = {cell.mode for cell in found if cell.engine == "hsdp"}
        assert of_copies == (modes if count == 8 else modes - {"hybrid"})
    assert {"activation_offload", "cpu_offload"} <= {k for cell in found for k, _ in cell.more}
    assert any(cell.packed for cell in found)
    assert any(cell.tp > 1 for cell in found) == (count % 2 == 0)
    kinds = {
        "oracle",
        "mesh twice",
        "train",
        "async save",
        "exposed communication",
        "a rank is killed",
    }
    short = [line.name for line in command.lines(count) if line.is_short]
    assert all(any(name.startswith(kind) for name in short) for kind in kinds - {"async save"})


def test_only_the_first_process_of_torchrun_starts_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
    }
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(command, "torchrun_rank", lambda: gpu_rank(own))
    assert command.main([]) == 0


def test_ranks_do_not_meet_at_torchrun_s_store(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "1")
    command._forget_torchrun()
    assert gpu_rank(dict(os.environ)) is None
    assert "TORCHELASTIC_USE_AGENT_STORE" not in os.environ


def gpu_rank(own: dict[str, str]) -> Any:
    from lightning_cp.bench.processes import torchrun_rank

    return torchrun_rank(own)


def test_a_number_of_ranks_that_nothing_can_run_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--rehearse", "--devices", "9"]) == command.NO_GPU
    assert "for 2 to 8 ranks" in capsys.readouterr().err


def test_a_name_that_no_line_has() -> None:
    with pytest.raises(SystemExit, match="no line has 'nonsense' in its name"):
        command.main(["--rehearse", "--only", "nonsense"])


def test_without_a_checkout_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpus, "find_spec", lambda name: None)
    assert gpus.main() == 2
    assert "runs in a checkout" in capsys.readouterr().err


def test_the_report_is_written_after_each_line(tmp_path: Path) -> None:
    report = command.Report(tmp_path, {"device": "CPU"})
    report.add(command.Verdict("one", True, "off by 1e-12", 1.0))
    assert "- passed  one: off by 1e-12" in (tmp_path / "gpus.md").read_text()
    report.add(command.Verdict("two", False, "WrongResultError: no", 1.0))
    assert "- FAILED  two: WrongResultError: no" in (tmp_path / "gpus.md").read_text()


@pytest.mark.nightly
def test_a_line_that_fails_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.helpers.bench import gpu_lines

    monkeypatch.setattr(command, "GRACE", 1.0)
    monkeypatch.setattr(command, "LINE_SECONDS", {"cpu": 60.0})
    place = Place("cpu", 2, tmp_path)
    every = gpu_lines.lines(2)
    found = {each.line: each for each in command.verdicts(every, place, gpu_lines.__name__)}
    assert list(found) == [line.name for line in every]
    assert {name for name, each in found.items() if each.passed} == {
        name for name in found if name.startswith("right")
    }
    assert found["right"].what == "2 ranks"
    assert "rank 1: WrongResultError: a loss is off by 1" in found["wrong_on_one_rank"].what
    assert "rank 0 is wrong" in found["wrong_on_all"].what
    assert "rank 1 ended: an illegal memory access" in found["dies"].what
    assert "no answer in time" in found["hangs"].what
    assert "illegal memory access" in (tmp_path / "gpus.log").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["gpus.log"]


def test_python_dash_m_is_this_command() -> None:
    assert gpus.__name__ in sys.modules
    assert "benchmarks.gpus.command" in Path(str(gpus.__file__)).read_text()

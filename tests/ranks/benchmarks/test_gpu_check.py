"""The one command for GPUs: what it asks for, its sections and parts, and a rehearsal in small."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import count as count_up
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks import (
    gpu_check,
    gpu_sections,
    gpu_synchronisations,
    gpu_training,
    kernel_rates,
    launch_sweep,
    long_step,
)
from benchmarks.gpu_check import GpuReport, Section
from benchmarks.gpu_sections import CHECKS, Check
from benchmarks.step_overhead import Job
from lightning_cp.bench.kernels import KernelRow
from lightning_cp.bench.methods import AttentionCase
from lightning_cp.bench.timers import Samples
from lightning_cp.kernels.triton.blocks import BlockConfigs, Key
from lightning_cp.utils.tensors import has_infinite_norm
from tests.helpers.pool import call_on_ranks

XML = """<testsuites><testsuite name="pytest" tests="4">
<testcase classname="tests.unit.x.test_x" name="test_cells[a]"/>
<testcase classname="tests.unit.x.test_x" name="test_cells[b]"><failure message="no">x</failure></testcase>
<testcase classname="tests.unit.x.test_x" name="test_cells[c]"><skipped message="needs 9.0"/></testcase>
<testcase classname="tests.unit.x.test_x" name="test_other"><error message="no">x</error></testcase>
</testsuite></testsuites>"""
SMALL = gpu_sections.sizes_of("cpu")


def section(name: str, failure: str | None = None) -> Section:
    return Section(name, name, failure=failure)


def test_without_a_gpu_it_ends_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "has_nvidia_gpu", lambda: False)
    assert gpu_check.main(["--folder", str(tmp_path / "here")]) == gpu_check.NO_GPU != 0
    assert "needs an NVIDIA GPU" in capsys.readouterr().err
    assert not (tmp_path / "here").exists()


def test_missing_packages_are_named_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def found(package: str) -> object:
        return None if package in ("hypothesis", "pytest_timeout") else find_spec(package)

    monkeypatch.setattr(gpu_check, "find_spec", found)
    monkeypatch.setattr(gpu_check, "has_nvidia_gpu", lambda: True)
    assert gpu_check.main(["--folder", str(tmp_path / "here")]) == gpu_check.MISSING
    said = capsys.readouterr().err
    assert f"{sys.executable} -m pip install pytest-timeout hypothesis" in said
    assert "hypothesis is needed by tests-matrix, tests-gpu, tests-triton" in said
    assert "--only versions,training,losses,features,synchronisations,memory,kernels," in said
    assert not (tmp_path / "here").exists()


@pytest.mark.nightly
def test_a_rehearsal_keeps_what_has_passed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rehearse = ["--device", "cpu", "--folder", str(tmp_path), "--only", "kernels"]
    assert gpu_check.main(rehearse) == 0
    (kernels,) = json.loads((tmp_path / "report.json").read_text())["sections"]
    assert [row["kernel"] for row in kernels["rows"]] == ["reference", "aten_cpu_flash"]
    assert all(row["forward_tflops"] > 0 and row["backward_tflops"] > 0 for row in kernels["rows"])
    capfd.readouterr()
    assert gpu_check.main(rehearse) == 0
    assert capfd.readouterr().out.count("has passed already") == 1


@pytest.mark.nightly
def test_a_rehearsal_in_parts_measures_and_writes_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # which users do not set
    rehearse = ["--device", "cpu", "--folder", str(tmp_path)]
    for part in ("1/3", "2/3", "3/3"):
        assert gpu_check.main([*rehearse, "--part", part]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    rows = {section["name"]: section["rows"] for section in report["sections"]}
    assert [row["calls"] for row in rows["replay-dense"]] == ["ours", "ring-flash-attention"]
    assert rows["replay-packed"][0]["documents"] == 4
    assert {row["engine"] for row in rows["training"]} == {*gpu_training.ENGINES, "hsdp"}
    assert rows.keys() == {check.name for check in CHECKS if "cpu" in check.devices}
    assert {"date", "device", "torch", "triton", "code"} <= report["facts"].keys()
    text = (tmp_path / "report.md").read_text()
    assert "say nothing of a GPU" in text
    assert sum(line.startswith("|---|") for line in text.splitlines()) == len(rows)
    assert sum(" passed: " in line for line in text.splitlines()) == len(rows)
    found = {path.name for path in tmp_path.iterdir()}
    assert found == {"report.md", "report.json", gpu_sections.LAUNCH_TABLE}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "kernel"], "has no section kernel. The sections are versions, training, "),
        (["--part", "4/3"], "--part 4/3 names no part. Write --part 1/3"),
        (["--part", "3"], "--part 3 names no part"),
    ],
)
def test_arguments_that_name_nothing(arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        gpu_check.main(["--device", "cpu", *arguments])


def test_parts_hold_every_section_once_and_fit_their_time() -> None:
    for count in (2, 3):
        dealt = gpu_check.parts(CHECKS, count)
        names = [check.name for part in dealt for check in part]
        assert sorted(names) == sorted(check.name for check in CHECKS)
    assert max(sum(check.minutes for check in part) for part in gpu_check.parts(CHECKS, 3)) <= 9


def test_a_whole_check_leaves_at_most_eight_files() -> None:
    """Two reports, one of earlier code, the launch table, an XML of each section of tests, one to read."""
    tests = [check for check in CHECKS if check.name.startswith("tests-")]
    assert (
        len({"report.md", "report.json", "report.before.json", "blocks.json", "a.section.json"})
        + (len(tests))
        <= 8
    )


QUICK_SECTIONS = (
    "versions",
    "losses",
    "memory",
    "kernels",
    "replay-dense",
    "replay-packed",
    "long-step",
)
"""Those that a rehearsal runs in seconds; the others are in the nightly rehearsals."""


@pytest.mark.parametrize("name", QUICK_SECTIONS)
def test_a_section_rehearses(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def on_ranks(count: int, function: Any, *arguments: Any, device_type: str) -> Any:
        return call_on_ranks(count, function, *arguments)

    def growing(step: Callable[[], object], **_: Any) -> Samples:
        step()
        return Samples([float(next(numbers))], [float(next(numbers))])

    numbers = count_up(1)
    monkeypatch.setattr(long_step, "measure", growing)  # noise could take less time for more layers
    monkeypatch.setattr(gpu_sections, "on_ranks", on_ranks)
    check = next(check for check in CHECKS if check.name == name)
    found = Section.of(name, check.title, lambda: check.run(SMALL, tmp_path))
    assert found.failure is None
    assert found.rows
    assert found.verdict.startswith("passed: ")
    assert found.headline in found.verdict
    found.write(tmp_path / "section.json")  # rows are plain
    head, line, *rows = found.table.splitlines()
    assert {row.count("|") for row in rows} == {head.count("|")} == {line.count("|")}


def test_a_launch_section_writes_the_table_and_its_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds(case: AttentionCase, configs: BlockConfigs, kernel: str) -> float:
        return 1.0 + getattr(configs, kernel).own

    monkeypatch.setattr(launch_sweep, "seconds_of", seconds)
    sizes = replace(SMALL, launch_seconds=None)
    found = Section.of("launch-64", "L", lambda: gpu_sections._launch(64, sizes, tmp_path))
    assert found.failure is None
    written = launch_sweep.load(tmp_path / gpu_sections.LAUNCH_TABLE)
    assert {blocks.own for blocks in written[Key(80, "single", 32)]} == {32}
    assert "forward " in found.verdict


def test_a_failure_is_the_verdict() -> None:
    assert section("bad", "Traceback\nRuntimeError: no memory\n").verdict == (
        "FAILED: RuntimeError: no memory"
    )


def test_one_rank_trains_with_the_packages_attention_and_wrong_losses_fail() -> None:
    good, again, packed, spoilt, joined, refused = call_on_ranks(1, training_rows)[0]
    assert [row for row in (good, again, packed) if row.failed] == []
    assert good.batch == "dense, deterministic"
    assert (good.calls, good.kernels) == (1.0, "aten_cpu_flash")
    assert (again.batch, again.calls) == ("dense, activation offload", 2.0)
    assert spoilt.failed
    assert joined.failed
    assert not refused.failed
    assert "hsdp" in refused.refusal


def training_rows() -> list[gpu_training.TrainingRow]:
    """Features that change nothing and packed rows; then a feature that changes losses, packed rows whose
    documents are joined, and the engine that one rank cannot have.
    """
    cell, features = ("ddp", "bf16-mixed", SMALL.job, "cpu"), gpu_training.FEATURES
    packed = ("ddp", "32-true", replace(SMALL.job, packed=4), "cpu")
    dist.destroy_process_group()  # each run makes its own
    rows = [gpu_training._training_row(*cell, features["deterministic"])]
    assert not torch.are_deterministic_algorithms_enabled()
    rows.append(gpu_training._training_row(*cell, features["activation offload"]))
    rows.append(gpu_training._training_row(*packed))
    spoilt = gpu_training.Feature("spoilt", around=spoiling)
    rows.append(gpu_training._training_row(*cell, spoilt))
    with mock.patch.object(gpu_training, "one_row", one_document):
        rows.append(gpu_training._training_row(*packed))
    return [*rows, gpu_training.refused_row(SMALL.job, "cpu")]


def one_document(job: Job) -> gpu_training.Loader:
    """The rows without the positions that tell documents apart."""
    rows = [{name: row[name] for name in ("input_ids", "labels")} for row in job.rows(1)]
    return gpu_training.DataLoader(rows * gpu_training.STEPS, batch_size=1)  # type: ignore[arg-type]


@contextmanager
def spoiling(device_type: str) -> Iterator[None]:
    """An optimizer that does nothing."""
    with mock.patch.object(torch.optim.AdamW, "step", lambda self, closure: closure()):
        yield


def test_wrong_exchanges_of_losses_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import gpu_losses

    rows = call_on_ranks(1, wrong_losses)[0]
    assert {row.exchange for row in rows if row.failed} == {row.exchange for row in rows}
    assert len(gpu_losses.loss_cells(rows[0])) == len(gpu_losses.LOSS_HEAD)


def wrong_losses() -> Any:
    """Collectives that bring nothing."""
    from benchmarks import gpu_losses

    def nothing(x: torch.Tensor, group: Any) -> torch.Tensor:
        return torch.zeros_like(x)

    with (
        mock.patch("lightning_cp.loss.sequence.all_sum", nothing),
        mock.patch.object(gpu_losses, "all_gather", lambda x, group: [x * 0]),
    ):
        return gpu_losses.loss_rows("cpu")


def test_a_wrong_prediction_of_memory_fails() -> None:
    from benchmarks.gpu_memory import MemoryRow

    row = MemoryRow("ddp", "none", 512, 100, "backward", 100, kernels=3)
    assert not row.failed
    assert replace(row, predicted=120).failed
    assert replace(row, predicted=0).failed
    assert replace(row, kernels=0).failed


def test_the_long_step_is_scaled_from_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import long_step

    def row(sizes: Any, layers: int) -> Any:
        return long_step.LayersRow(layers, 1.0 + 2.0 * layers, 100 + 10 * layers)

    monkeypatch.setattr(long_step, "layers_row", row)
    published, planner, scaled, *_ = long_step.long_rows(long_step.LongSizes())
    assert scaled.seconds == 1.0 + 2.0 * 36
    kinds = long_step.planned(long_step.LongSizes()).memory.by_kind
    assert planner.bytes - scaled.bytes == kinds["activations"] - (100 + 10 * 36)
    assert 250 < planner.seconds < published.seconds == 380.0
    assert 50 < planner.bytes / long_step.GIB < 65


@pytest.mark.parametrize(
    ("device", "machine"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GH200 480GB", "h100"),  # the planner does not know it
    ],
)
def test_the_long_step_is_planned_for_the_device(
    device: str, machine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: device)
    row = long_step.LayersRow(1, 1.0, 100)
    layers = {1: row, 2: replace(row, layers=2, seconds=2.0)}
    monkeypatch.setattr(long_step, "layers_row", lambda sizes, count: layers[count])
    found = gpu_sections._long(replace(SMALL, long=None), tmp_path)
    assert f"planner, {machine} " in found.headline


def test_missing_kernels_are_named_in_the_verdict() -> None:
    row = KernelRow("ours", "bfloat16", 128, 8, 8, "causal", 64, both_tflops=3.0)
    told = gpu_sections.kernel_headline([row, replace(row, kernel="fa3", obstacle="not installed")])
    assert "ours 3" in told
    assert "missing: fa3 (not installed)" in told


@pytest.mark.nightly
def test_a_section_that_breaks_its_process_is_a_failure_of_that_section(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check = Check("gone", "Gone", 1, lambda sizes, folder: gpu_sections.Result([], ""))
    (failed,) = [gpu_check._run_in_process(check, "cpu", tmp_path, None)]
    assert "ended with status 1 and left no result" in str(failed.failure)
    late = gpu_check._run_in_process(check, "cpu", tmp_path, end=0.0)
    assert "not begun" in str(late.failure)
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert "cut after 1 s" in gpu_check._wait(command, 1.0)


def test_a_report_keeps_what_passed_on_the_same_device_and_code(tmp_path: Path) -> None:
    facts = {"date": "today", "device": "one", "code": "a"}
    report = GpuReport.open(tmp_path, facts)
    report.add(section("good"))
    report.add(section("bad", "out of memory"))
    later = GpuReport.open(tmp_path, {**facts, "date": "tomorrow"})
    assert later.has_passed("good")
    assert not later.has_passed("bad")
    assert "out of memory" in (tmp_path / "report.md").read_text()
    other = GpuReport.open(tmp_path, {**facts, "code": "b"})
    assert not other.has_passed("good")
    assert (tmp_path / "report.before.json").exists()


def test_an_error_and_a_missing_figure_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("an illegal memory access")

    assert "illegal memory" in str(Section.of("x", "X", lambda: broken() or ([], "")).failure)
    monkeypatch.setattr(kernel_rates, "with_times", broken)
    failed = Section.of("kernels", "K", lambda: gpu_sections._kernels(SMALL, Path()))
    assert str(failed.failure).count("an illegal memory access") == 2
    assert "| aten_cpu_flash | 64 | RuntimeError: an illegal" in failed.table


def test_training_that_differs_is_a_failure() -> None:
    row = gpu_training.TrainingRow(
        "ddp", "32-true", "dense", (3.0,) * 5 + (2.0,), (3.0,) * 5 + (2.0,), (), calls=1.0
    )
    good = replace(row, resumed=row.losses[gpu_training.SAVED_AFTER :])
    assert not good.failed
    assert replace(good, plain=(3.0,) * 5 + (2.1,)).failed
    assert replace(good, resumed=(3.0, 3.0, 2.1)).failed
    assert replace(good, losses=(3.0,) * 6, plain=(3.0,) * 6, resumed=(3.0,) * 3).failed
    assert replace(good, losses=(float("nan"),) * 6).failed
    assert replace(row, obstacle="no").failed
    assert replace(good, calls=0.0).failed
    assert replace(good, calls=2.0).failed


def test_synchronisations_are_counted_by_place() -> None:
    with gpu_synchronisations.synchronisations() as places:
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    ((place, count),) = places.items()
    assert (count, place.is_ours) == (2, False)
    assert "no file of the package" in place.shown


def test_more_waits_than_a_step_has_are_a_failure() -> None:
    row = gpu_synchronisations.SynchronisationRow("ddp", "the package", 1.0, limit=1, kernels=12)
    assert not row.failed
    assert replace(row, per_step=1.25).failed
    assert replace(row, kernels=0).failed
    assert not replace(row, per_step=9.0, limit=None, kernels=None).failed


def test_synchronisations_of_the_later_steps_are_counted() -> None:
    ((modes, rows),) = call_on_ranks(1, synchronisations)
    assert modes == ["warn", "default"]
    (at_vote, *_, ours, every), steps = rows, gpu_training.STEPS - gpu_synchronisations.WARM_UP
    assert "consistency/step_vote.py" in at_vote.place
    # Warnings before the mode was set are counted here, too.
    assert (ours.place, ours.per_step) == ("the package", gpu_training.STEPS / steps)
    assert (every.place, every.per_step) == ("all", (gpu_training.STEPS + 2) / steps)
    assert ours.kernels == gpu_training.STEPS * SMALL.job.layers
    assert ours.failed


def synchronisations() -> tuple[list[str], list[gpu_synchronisations.SynchronisationRow]]:
    """A rehearsal in which each change of the mode waits, and each vote of the package."""
    modes: list[str] = []
    wait = partial(warnings.warn, "called a synchronizing CUDA operation")
    here: dict[str, Any] = {"wait": wait, "has_infinite_norm": has_infinite_norm}
    vote = "def norm(tensors):\n    wait()\n    return has_infinite_norm(tensors)"
    exec(
        compile(vote, str(gpu_synchronisations.OURS / "consistency" / "step_vote.py"), "exec"), here
    )

    def set_mode(mode: str, device_type: str) -> None:
        modes.append(mode)
        wait()

    dist.destroy_process_group()
    with (
        mock.patch("lightning_cp.consistency.step_vote.has_infinite_norm", here["norm"]),
        mock.patch.object(gpu_synchronisations, "_set_debug_mode", set_mode),
        mock.patch.object(gpu_synchronisations, "ENGINES", ("ddp",)),
    ):
        return modes, gpu_synchronisations.synchronisation_rows(SMALL.job, "cpu")


def test_a_file_of_which_all_is_skipped_tests_nothing() -> None:
    rows = [
        {"test": "tests.unit.x.test_x.test_a", "passed": 0, "skipped": 3},
        {"test": "tests.unit.x.test_x.test_b", "passed": 1, "skipped": 0},
        {"test": "tests.unit.x.test_y.test_a", "passed": 0, "skipped": 2},
    ]
    assert gpu_sections.files_without_a_pass(rows) == ["tests.unit.x.test_y"]


def test_outcomes_of_tests(tmp_path: Path) -> None:
    (tmp_path / "tests.xml").write_text(XML)
    cells, other = gpu_sections.outcomes(tmp_path / "tests.xml")
    name = "tests.unit.x.test_x.test_cells"
    assert list(cells.values()) == [name, 1, 1, 1, "needs 9.0"]
    assert (other["passed"], other["failed"]) == (0, 1)


def test_tests_are_run_from_the_repository(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError, match="Run gpu-check from the repository"):
        gpu_sections.run_tests("test_on_gpu.py", tmp_path / "tests.xml")


@pytest.mark.nightly
def test_a_pytest_that_does_not_start_shows_what_it_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "tests" / "unit" / "kernels").mkdir(parents=True)
    (tmp_path / "tests" / "unit" / "kernels" / "test_on_gpu.py").write_text("")
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\naddopts = --strict-config\nno_such_option = 1\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu_sections, "find_spec", lambda package: None)  # without xdist
    with pytest.raises(
        RuntimeError, match=r"(?s)pytest did not start \(status \d\).*no_such_option"
    ):
        gpu_sections.run_tests("test_on_gpu.py", tmp_path / "tests.xml")


def test_every_section_of_tests_finds_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        found.extend(command)
        return SimpleNamespace(returncode=2, stdout="")

    monkeypatch.setattr(gpu_sections.subprocess, "run", run)
    for check in CHECKS:
        if check.name.startswith("tests-"):
            with pytest.raises(RuntimeError, match="did not start"):
                check.run(SMALL, Path("nowhere"))
    names = {Path(word).name for word in found if word.endswith(".py")}
    assert {"test_on_gpu.py", "test_gpu_matrix.py", "test_triton.py"} <= names


def test_ratios_are_to_the_flash_kernel_of_the_same_length() -> None:
    row = KernelRow("flash", "bfloat16", 128, 8, 8, "causal", 64, spread=0.1)
    rows = [
        replace(row, forward_tflops=2.0, backward_tflops=4.0),
        replace(row, kernel="ours", forward_tflops=1.0, backward_tflops=3.0),
        replace(row, kernel="other", obstacle="has none"),
    ]
    flash, ours, other = kernel_rates.cells(rows, "flash")
    assert flash[-2:] == ["1.000", "1.000"]
    assert ours[-2:] == ["0.500", "0.750"]
    assert other[2] == "has none"
    assert len(ours) == len(other) == len(kernel_rates.HEAD)

"""The one command for GPUs: what it asks for, its sections and parts, and a rehearsal in small."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import gpu_check, gpu_sections, gpu_training, kernel_rates
from benchmarks.gpu_check import GpuReport, Section
from benchmarks.gpu_sections import CHECKS, Check
from lightning_cp.bench.kernels import KernelRow

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
    assert "--only training,synchronisations,kernels,replay-dense,replay-packed" in said
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
def test_a_rehearsal_in_parts_measures_and_writes_everything(tmp_path: Path) -> None:
    rehearse = ["--device", "cpu", "--folder", str(tmp_path)]
    assert gpu_check.main([*rehearse, "--part", "1/2"]) == 0
    assert gpu_check.main([*rehearse, "--part", "2/2"]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    rows = {section["name"]: section["rows"] for section in report["sections"]}
    assert [row["calls"] for row in rows["replay-dense"]] == ["ours", "ring-flash-attention"]
    assert rows["replay-packed"][0]["documents"] == 4
    assert {row["engine"] for row in rows["training"]} == set(gpu_training.ENGINES)
    assert {"date", "device", "torch", "triton", "code"} <= report["facts"].keys()
    text = (tmp_path / "report.md").read_text()
    assert "say nothing of a GPU" in text
    assert sum(line.startswith("|---|") for line in text.splitlines()) == 4
    assert {path.name for path in tmp_path.iterdir()} == {"report.md", "report.json"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "kernel"], "has no section kernel. The sections are training, "),
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
        assert max(sum(check.minutes for check in part) for part in dealt) <= 9


@pytest.mark.nightly
def test_a_section_that_breaks_its_process_is_a_failure_of_that_section(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check = Check("gone", "Gone", 1, lambda sizes, folder: ([], ""))
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
        "ddp", "32-true", "dense", (3.0,) * 5 + (2.0,), (3.0,) * 5 + (2.0,), ()
    )
    good = replace(row, resumed=row.losses[gpu_training.SAVED_AFTER :])
    assert not good.failed
    assert replace(good, plain=(3.0,) * 5 + (2.1,)).failed
    assert replace(good, resumed=(3.0, 3.0, 2.1)).failed
    assert replace(good, losses=(3.0,) * 6, plain=(3.0,) * 6, resumed=(3.0,) * 3).failed
    assert replace(good, losses=(float("nan"),) * 6).failed
    assert replace(row, obstacle="no").failed


def test_synchronisations_are_counted_by_place() -> None:
    import warnings

    with gpu_training._synchronisations() as places:
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    ((place, count),) = places.items()
    assert (count, "no file of ours" in place) == (2, True)


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

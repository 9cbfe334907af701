"""The one command for GPUs: refuses without one, and its measurements and its report work in small."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_cp.bench import gpu_check, kernel_rates
from lightning_cp.bench.kernels import KernelRow

XML = """<testsuites><testsuite name="pytest" tests="4">
<testcase classname="tests.kernels.test_x" name="test_cells[a]"/>
<testcase classname="tests.kernels.test_x" name="test_cells[b]"><failure message="no">x</failure></testcase>
<testcase classname="tests.kernels.test_x" name="test_cells[c]"><skipped message="needs 9.0"/></testcase>
<testcase classname="tests.kernels.test_x" name="test_other"><error message="no">x</error></testcase>
</testsuite></testsuites>"""


def test_without_a_gpu_it_ends_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "has_nvidia_gpu", lambda: False)
    assert gpu_check.main(["--folder", str(tmp_path / "here")]) == gpu_check.NO_GPU != 0
    assert "needs an NVIDIA GPU" in capsys.readouterr().err
    assert not (tmp_path / "here").exists()


def test_a_rehearsal_measures_and_writes_everything(tmp_path: Path) -> None:
    assert gpu_check.main(["--device", "cpu", "--folder", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    kernels, dense, packed = (section["rows"] for section in report["sections"])
    assert [row["kernel"] for row in kernels] == ["reference", "aten_cpu_flash"]
    assert [row["calls"] for row in dense] == ["ours", "ring-flash-attention"]
    assert packed[0]["documents"] == 4
    assert all(row["forward_tflops"] > 0 and row["backward_tflops"] > 0 for row in kernels)
    assert {"date", "device", "torch", "triton"} <= report["facts"].keys()
    text = (tmp_path / "report.md").read_text()
    assert "say nothing of a GPU" in text
    assert sum(line.startswith("|---|") for line in text.splitlines()) == 3


def test_a_failure_is_reported_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(gpu_check.replay, "all_dense", broken)
    assert gpu_check.main(["--device", "cpu", "--folder", str(tmp_path)]) == 1
    text = (tmp_path / "report.md").read_text()
    assert "FAILED" in text
    assert "out of memory" in text
    assert "of dense, fwd" in text


def test_a_kernel_that_fails_is_no_kernel_that_refuses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(kernel_rates, "timed", broken)
    assert gpu_check.main(["--device", "cpu", "--folder", str(tmp_path)]) == 1
    text = (tmp_path / "report.md").read_text()
    assert text.index("FAILED") < text.index("aten_cpu_flash, 64 tokens: RuntimeError: an illegal")


def test_a_file_of_which_all_is_skipped_tests_nothing() -> None:
    rows = [
        {"test": "tests.kernels.test_x.test_a", "passed": 0, "skipped": 3},
        {"test": "tests.kernels.test_x.test_b", "passed": 1, "skipped": 0},
        {"test": "tests.kernels.test_y.test_a", "passed": 0, "skipped": 2},
    ]
    assert gpu_check._untested(rows) == ["tests.kernels.test_y"]


def test_outcomes_of_tests(tmp_path: Path) -> None:
    (tmp_path / "tests.xml").write_text(XML)
    cells, other = gpu_check.outcomes(tmp_path / "tests.xml")
    name = "tests.kernels.test_x.test_cells"
    assert list(cells.values()) == [name, 1, 1, 1, "needs 9.0"]
    assert (other["passed"], other["failed"]) == (0, 1)


def test_tests_are_run_from_the_repository(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError, match="run this from the repository"):
        gpu_check.run_tests(tmp_path / "tests.xml")


def test_every_listed_test_file_is_there() -> None:
    here = Path(__file__).parents[1] / "kernels"
    assert all(list(here.glob(pattern)) for pattern in gpu_check.TESTS)


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

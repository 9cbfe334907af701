"""What a run leaves behind, of rows that were not measured."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_cp.bench.hardware_json import MachineInfo
from lightning_cp.bench.links import LinkRow
from lightning_cp.bench.modes import ModeRow
from lightning_cp.bench.suites import BenchReport
from tests.helpers.bench.configured import TINY, settings_of

MACHINE = MachineInfo("cpu", "a CPU", 2, 2, 2, 1 << 30, "2.13.0", None, None, "gloo", None)
LINKS = [
    LinkRow("ring", "p2p", 1, 2, 0, 256, 1e-4, 0.1, 0.0),
    LinkRow("ring", "p2p", 1, 2, 4096, 4096, 2e-4, 1.0, 0.0),
]
MODE = ModeRow("ulysses", 2, 64, 0, "float32", 8, 4, 2, False)
MODES = [replace(MODE, both=1.0, compute=0.5, comm=0.5, exposed=0.5, tflops=1e-3, spread=0.1)]


@pytest.fixture
def report(tmp_path: Path) -> BenchReport:
    return BenchReport(MACHINE, settings_of(*TINY), tmp_path)


def told(folder: Path, output: str) -> set[str]:
    """The names of the files that the run says it has left."""
    lines = (line.strip() for line in output.splitlines())
    return {Path(line).name for line in lines if line.startswith(str(folder))}


def test_without_matplotlib_all_but_pictures(
    report: BenchReport,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "links.png").touch()  # of a run before, which would be taken for this one's
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    report.take("links", LINKS)
    report.take("modes", MODES)
    report.finish()
    output = capsys.readouterr().out
    assert output.count("No picture of ") == 2
    assert "pip install matplotlib" in output
    assert "## modes" in output
    names = {"bench.json", "hardware.json"}
    assert {path.name for path in tmp_path.iterdir()} == told(tmp_path, output) == names


def test_no_hardware_file_of_modes_alone(
    report: BenchReport, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would have neither kernels nor links, and might overwrite one that has."""
    (tmp_path / "hardware.json").write_text("of a run before")
    report.take("modes", MODES)
    report.finish()
    assert told(tmp_path, capsys.readouterr().out) == {"bench.json", "modes.png"}
    assert (tmp_path / "hardware.json").read_text() == "of a run before"

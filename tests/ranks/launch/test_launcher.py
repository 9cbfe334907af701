"""The launcher of sweeps, with applications that are not the main job and know nothing of torch."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.launch.programs import OURS, program, run

RAISES_AT_2 = "if config.x == 2: raise ValueError('two is too many')"


def said(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """What each job has said."""
    lines = [line for line in done.stdout.splitlines() if line.startswith("SAID ")]
    return [json.loads(line.removeprefix("SAID ")) for line in lines]


def test_every_job_is_a_single_run_in_a_process_of_its_own(tmp_path: Path) -> None:
    done = run(tmp_path, program(tmp_path), "-m", OURS, "+x=1,2", "hydra.sweep.dir=tree")
    assert done.returncode == 0, done.stderr
    jobs = said(done)
    assert [job["config"] for job in jobs] == [{"x": 1}, {"x": 2}]
    assert [(job["mode"], job["num"], job["id"]) for job in jobs] == [
        ("RUN", 0, "0"),
        ("RUN", 1, "1"),
    ]
    assert [job["folder"] for job in jobs] == [f"{tmp_path}/tree/0", f"{tmp_path}/tree/1"]
    assert {job["sweep"] for job in jobs} == {f"{tmp_path}/tree"}
    assert len({job["pid"] for job in jobs}) == 2


@pytest.mark.nightly
def test_there_is_one_output_tree(tmp_path: Path) -> None:
    folder = "hydra.sweep.subdir=${hydra:job.override_dirname}"
    done = run(tmp_path, program(tmp_path), "-m", OURS, "+x=1,2", "+y='a=b, \"c\\''", folder)
    assert done.returncode == 0, done.stderr
    assert [job["config"]["y"] for job in said(done)] == ["a=b, \"c'"] * 2
    (tree,) = (tmp_path / "multirun").glob("*/*")
    jobs = [path for path in tree.iterdir() if path.is_dir()]
    assert sorted(map(str, jobs)) == sorted(job["folder"] for job in said(done))
    assert all((job / ".hydra" / "config.yaml").is_file() for job in jobs)
    assert {path.name for path in tmp_path.iterdir()} == {"app.py", "multirun"}


@pytest.mark.nightly
def test_no_job_takes_itself_for_a_rank_of_another_run(tmp_path: Path) -> None:
    stale = {
        "LOCAL_RANK": "3",
        "NODE_RANK": "1",
        "WORLD_SIZE": "8",
        "MASTER_ADDR": "nowhere",
        "MASTER_PORT": "1",
    }
    done = run(tmp_path, program(tmp_path), "-m", OURS, "+x=1,2", timeout=60, **stale)
    assert [job["ranks"] for job in said(done)] == [{}, {}], done.stderr


@pytest.mark.nightly
def test_a_job_that_fails_in_the_middle_stops_no_other(tmp_path: Path) -> None:
    done = run(tmp_path, program(tmp_path, RAISES_AT_2), "-m", OURS, "+x=1,2,3")
    assert [job["config"]["x"] for job in said(done)] == [1, 2, 3]
    assert done.returncode == 1
    assert done.stderr.count("ValueError: two is too many") == 1
    assert "1 of 3 jobs failed:\n\t#1 : +x=2" in done.stdout
    assert "Job #1 (+x=2) failed with exit status 1; its error is printed above." in done.stderr
    assert "launcher.py" not in done.stderr  # no traceback of ours


@pytest.mark.nightly
def test_a_job_ended_by_a_signal_is_a_job_that_failed(tmp_path: Path) -> None:
    killed = "os.kill(os.getpid(), 9)"
    done = run(tmp_path, program(tmp_path, killed), "-m", OURS, "+x=1")
    assert done.returncode == 1
    assert "Job #0 (+x=1) failed with signal SIGKILL" in done.stderr


SWEEPER = """
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobStatus

class Downhill(BasicSweeper):
    "Goes on from the better of two values."
    def __init__(self):
        super().__init__(max_batch_size=None)
    def sweep(self, arguments):
        best = 8
        for step in (4, 2, 1):
            jobs = [[f"+x={x}"] for x in (best - step, best + step)]
            done = self.launcher.launch(jobs, initial_job_idx=0)
            values = [d.return_value if d.status == JobStatus.COMPLETED else 1e9 for d in done]
            best += -step if values[0] < values[1] else step
            print("BEST", best, values, done[0].cfg, flush=True)

node = {"_target_": "hydra_plugins.downhill.sweeper.Downhill"}
ConfigStore.instance().store(group="hydra/sweeper", name="downhill", node=node)
"""


@pytest.mark.nightly
def test_what_jobs_return_reaches_an_optimising_sweeper(tmp_path: Path) -> None:
    plugin = tmp_path / "site" / "hydra_plugins" / "downhill"  # another part of the namespace
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").touch()
    (plugin / "sweeper.py").write_text(SWEEPER)
    app = program(tmp_path, "assert config.x <= 11; return (config.x - 5) ** 2")
    done = run(
        tmp_path,
        app,
        "-m",
        OURS,
        "hydra/sweeper=downhill",
        PYTHONPATH=f"{tmp_path}/site:{Path(__file__).parents[3]}",
    )
    best = [line for line in done.stdout.splitlines() if line.startswith("BEST")]
    assert best == [
        "BEST 4 [1, 1000000000.0] {'x': 4}",
        "BEST 6 [9, 1] {'x': 2}",
        "BEST 5 [0, 4] {'x': 5}",
    ], done.stderr
    assert done.returncode == 0


@pytest.mark.nightly
def test_a_value_that_cannot_be_pickled_is_none_and_said(tmp_path: Path) -> None:
    done = run(tmp_path, program(tmp_path, "return lambda: 1"), "-m", OURS, "+x=1")
    assert done.returncode == 0, done.stderr
    assert "The sweep gets None of this job: what it returned cannot be pickled" in done.stderr


@pytest.mark.nightly
def test_where_configs_are_is_kept(tmp_path: Path) -> None:
    for folder, name, text in (
        ("given", "chosen.yaml", "defaults: [_self_, part: one]\nplace: given\n"),
        ("more/part", "one.yaml", "answer: 42\n"),
        ("searched/extra", "two.yaml", "found: true\n"),
    ):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / name).write_text(text)
    done = run(
        tmp_path,
        program(tmp_path),
        *("-m", OURS, "+x=1", "+extra=two", f"hydra.searchpath=[file://{tmp_path}/searched]"),
        *("--config-path", "given", "--config-name", "chosen", "--config-dir", "more"),
    )
    (job,) = said(done)
    assert job["config"] == {
        "x": 1,
        "place": "given",
        "part": {"answer": 42},
        "extra": {"found": True},
    }


@pytest.mark.nightly
def test_settings_of_hydra_hold_in_the_jobs(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        program(tmp_path, "print('AT', os.getcwd())"),
        "-m",
        OURS,
        "+x=1",
        "hydra.job.chdir=true",
    )
    (job,) = said(done)
    assert f"AT {job['folder']}" in done.stdout


@pytest.mark.nightly
def test_a_module_is_run_again_as_a_module(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("BESIDE = 7\n")
    app = program(package, "from . import BESIDE; print('BESIDE', BESIDE)", name="__main__.py")
    assert app.is_file()
    done = run(tmp_path, "-m", "package", "-m", OURS, "+x=1,2")
    assert done.stdout.count("BESIDE 7") == 2, done.stderr


@pytest.mark.nightly
def test_a_program_without_a_file_is_refused(tmp_path: Path) -> None:
    app = program(tmp_path)
    code = f"import sys; sys.argv[0] = '-c'; exec(open({str(app)!r}).read())"
    done = run(tmp_path, "-c", code, "-m", OURS, "+x=1")
    assert done.returncode == 1
    assert "every job runs the program again, but '-c' is not a file" in done.stderr


@pytest.mark.nightly
def test_a_sweep_under_torchrun_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, program(tmp_path), "-m", OURS, "+x=1", TORCHELASTIC_RUN_ID="1")
    assert done.returncode == 1
    assert "ConfigError: a sweep under torchrun would start every job once per rank" in done.stderr
    assert said(done) == []

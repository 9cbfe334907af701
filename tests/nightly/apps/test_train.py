"""The main job from the command line: what it prints and leaves, and that ranks do not change it."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_cp.apps.train.report import draw_losses, read_points
from tests.helpers.launch.start import all_succeeded, ranks, torchrun_variables

REPOSITORY = Path(__file__).resolve().parents[3]
SMALL = (
    "experiment=smoke",
    "model.network.config.hidden_size=64",
    "model.network.config.intermediate_size=128",
)
COLUMNS = {
    "epoch",
    "peak_memory_mib",
    "step",
    "tokens",
    "train/bits_per_byte",
    "train/grad_norm",
    "train/learning_rate",
    "train/loss",
    "train/perplexity",
    "train/tokens_per_second",
    "val/bits_per_byte",
    "val/loss",
    "val/perplexity",
}


def command(
    cwd: Path, *overrides: str, full_error: bool = True, launcher: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run the main job in ``cwd``, without what a test session has put into the environment.

    Args:
        cwd: working directory.
        overrides: settings, as on the command line.
        full_error: errors are shown with their tracebacks.
        launcher: a module that starts it, with that one's options.
    """
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {
        key: value
        for key, value in os.environ.items()
        if key
        not in {"MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK"}
    }
    return subprocess.run(
        [sys.executable, *launcher, "-m", "lightning_cp.train", *SMALL, *overrides],
        cwd=cwd,
        env={**environment, "PYTHONPATH": path, "HYDRA_FULL_ERROR": str(int(full_error))},
        capture_output=True,
        text=True,
        timeout=280,
    )


def launched(cwd: Path, *overrides: str) -> tuple[Path, str]:
    """The folder of a run that must succeed and starts its other processes, and what they printed."""
    done = command(cwd, *overrides)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder_in(cwd), done.stdout + done.stderr


def trained(cwd: Path, *overrides: str, processes: int = 0) -> tuple[Path, str]:
    """The same of one process, or of as many as torchrun would start, which need not import all again."""
    variables = torchrun_variables(processes) if processes else [{}]
    done = ranks(cwd, variables, "-m", "lightning_cp.train", *SMALL, *overrides)
    printed = "".join(one.output for one in all_succeeded(done))
    return folder_in(cwd), printed


def folder_in(cwd: Path) -> Path:
    """That of the only run."""
    (config,) = cwd.rglob(".hydra/config.yaml")
    return config.parents[1]


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics" / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The job in one process."""
    return trained(tmp_path_factory.mktemp("single"), "strategy=single")


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The job in four processes that somebody else has started."""
    return trained(tmp_path_factory.mktemp("hybrid"), processes=4)


@pytest.fixture(scope="module")
def default(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The job as it is by default: it starts four processes."""
    return launched(tmp_path_factory.mktemp("default"))


RUNS = ["alone", "hybrid", "default"]


@pytest.mark.parametrize("run", RUNS)
def test_what_a_run_leaves(run: str, request: pytest.FixtureRequest) -> None:
    folder, _ = request.getfixturevalue(run)
    files = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    hydra = {f".hydra/{name}.yaml" for name in ("config", "hydra", "overrides")}
    assert files == hydra | {
        "metrics/metrics.csv",
        "loss.png",
        "checkpoints/last.ckpt",
        "checkpoints/best.ckpt",
    }
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("run", RUNS)
def test_every_step_and_every_validation_is_in_the_csv(
    run: str, request: pytest.FixtureRequest
) -> None:
    folder, _ = request.getfixturevalue(run)
    rows = table(folder)
    assert set(rows[0]) == COLUMNS
    steps = [row for row in rows if row["train/loss"]]
    assert [int(row["step"]) for row in steps] == [0, 1, 2, 3]
    assert [float(row["tokens"]) for row in steps] == [512, 1024, 1536, 2048]
    validations = [row for row in rows if row["val/bits_per_byte"]]
    assert [float(row["tokens"]) for row in validations] == [0, 1024, 2048]
    assert float(validations[0]["val/bits_per_byte"]) == pytest.approx(8, abs=0.3)
    assert [bool(row["peak_memory_mib"]) for row in rows] == [not row["train/loss"] for row in rows]
    assert (
        100 < float(validations[-1]["peak_memory_mib"]) < 10_000
    )  # a process that has loaded torch
    for row in steps:
        filled = [name for name in COLUMNS if row[name] and not name.startswith("val/")]
        assert len(filled) == 9


@pytest.mark.parametrize("run", RUNS)
def test_a_run_ends_with_a_table_and_no_warnings(run: str, request: pytest.FixtureRequest) -> None:
    folder, printed = request.getfixturevalue(run)
    assert re.search(r"validation +[78]\.\d+ -> \d\.\d+ bits per byte", printed)
    assert re.search(r"byte-unigram entropy +4\.\d+ bits per byte", printed)
    assert re.search(r"trained +4 steps, 2,048 tokens", printed)
    shared = run != "alone"
    assert re.search(r"mesh +\w+ \d" if shared else r"mesh +none\n", printed)
    checked = r"parity +one process and context parallel agree on 512 tokens"
    assert re.search(checked if shared else r"parity +not checked: no sample is shared", printed)
    for name in ("metrics/metrics.csv", "loss.png", "checkpoints/last.ckpt"):
        assert str(folder / name) in printed
    assert "Warning" not in printed


@pytest.mark.parametrize("run", RUNS[1:])
def test_four_processes_train_as_one_does(
    run: str, alone: tuple[Path, str], request: pytest.FixtureRequest
) -> None:
    folder, _ = request.getfixturevalue(run)
    costs = {"train/tokens_per_second", "peak_memory_mib"}
    for one, four in zip(table(alone[0]), table(folder), strict=True):
        assert {k for k in COLUMNS if one[k]} == {k for k in COLUMNS if four[k]}
        for name in {k for k in COLUMNS if one[k]} - costs:
            assert float(four[name]) == pytest.approx(float(one[name]), rel=1e-5), name


@pytest.mark.parametrize(
    "overrides",
    [
        ["strategy=fsdp"],
        ["strategy=zero1"],
        ["strategy=fsdp", "strategy.tensor_parallel_size=2"],
        ["strategy=ring", "strategy.chunked_loss=true"],
    ],
    ids=" ".join,
)
def test_other_settings_train_as_one_process_does(
    tmp_path: Path, alone: tuple[Path, str], overrides: list[str]
) -> None:
    folder, _ = launched(tmp_path, "trainer.devices=2", *overrides)
    for name in ("train/loss", "train/grad_norm", "val/bits_per_byte"):
        found = [[float(row[name]) for row in table(at) if row[name]] for at in (alone[0], folder)]
        assert found[1] == pytest.approx(found[0], rel=1e-5), name
        assert found[0]


MUON = ("optim=muon", "model.optimizer.ns_dtype=float32")


@pytest.fixture(scope="module")
def muon_alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The job with Muon in one process."""
    return trained(tmp_path_factory.mktemp("muon"), "strategy=single", *MUON)


def muon_table(printed: str) -> list[str]:
    """The lines that say what steps the layers' parameters."""
    return [line for line in printed.splitlines() if line.startswith("model.layers.*.")]


@pytest.mark.parametrize("strategy", ["ring", "ulysses", "fsdp", "zero1"])
def test_muon_on_two_processes_trains_as_on_one(
    tmp_path: Path, alone: tuple[Path, str], muon_alone: tuple[Path, str], strategy: str
) -> None:
    folder, printed = launched(tmp_path, f"strategy={strategy}", "trainer.devices=2", *MUON)
    losses: dict[Path, list[float]] = {}
    for name in ("train/loss", "train/grad_norm", "val/bits_per_byte"):
        for at in (alone[0], muon_alone[0], folder):
            losses[at] = [float(row[name]) for row in table(at) if row[name]]
        assert losses[folder] == pytest.approx(losses[muon_alone[0]], rel=1e-5), name
        assert losses[folder] != pytest.approx(losses[alone[0]], rel=1e-3), name  # it is not AdamW
    assert muon_table(printed) == muon_table(muon_alone[1])
    by = {line.split()[0].split(".")[-2]: line.split("  ")[-2] for line in muon_table(printed)}
    assert by["down_proj"].strip() == "Muon"
    assert by["input_layernorm"].strip() == "AdamW"


def test_muonclip_logs_the_largest_logit_and_the_heads_it_has_clipped(tmp_path: Path) -> None:
    tau = "model.optimizer.qk_clip.tau=1e-3"
    folder, _ = launched(tmp_path, "strategy=ring", "trainer.devices=2", "optim=muonclip", tau)
    steps = [row for row in table(folder) if row["train/loss"]]
    largest = [float(row["train/max_logit"]) for row in steps]
    clipped = [float(row["train/clipped_heads"]) for row in steps]
    assert len(steps) == 4
    assert clipped[0] == 2 * 8  # every head of both layers
    assert largest[0] > 0.1
    assert all(1e-3 < one < 2e-3 for one in largest[1:])  # back at tau, and one update away
    assert all(1 <= one <= 2 * 8 for one in clipped)


def test_a_run_is_resumed(tmp_path: Path, alone: tuple[Path, str]) -> None:
    checkpoint = alone[0] / "checkpoints" / "last.ckpt"
    folder, printed = trained(
        tmp_path, "strategy=single", f"resume={checkpoint}", "trainer.max_steps=6"
    )
    rows = [row for row in table(folder) if row["train/loss"]]
    assert [(int(row["step"]), float(row["tokens"])) for row in rows] == [(4, 2560), (5, 3072)]
    end = float(table(alone[0])[-1]["val/bits_per_byte"])
    assert float(table(folder)[0]["val/bits_per_byte"]) == pytest.approx(end, rel=1e-5)
    assert "trained               6 steps, 3,072 tokens" in printed


def test_bad_text_is_refused_before_other_processes_start(tmp_path: Path) -> None:
    settings = ("data=text_files", "data.paths=[nothing.txt]")
    (done,) = ranks(tmp_path, [{}], "-m", "lightning_cp.train", *SMALL, *settings, apart=True)
    assert done.status != 0
    assert "data.paths names 'nothing.txt', which matches no file" in done.errors
    assert "Initializing distributed" not in done.errors


def test_the_picture_is_drawn_from_the_csv(tmp_path: Path) -> None:
    metrics, picture = tmp_path / "metrics.csv", tmp_path / "loss.png"
    metrics.write_text(
        "tokens,train/bits_per_byte,val/bits_per_byte\n0,,8.0\n512,7.5,\n1024,6.5,\n1024,,6.25\n"
    )
    assert read_points(metrics, "train/bits_per_byte") == ([512.0, 1024.0], [7.5, 6.5])
    assert read_points(metrics, "val/bits_per_byte") == ([0.0, 1024.0], [8.0, 6.25])
    assert read_points(metrics, "absent") == ([], [])
    draw_losses(metrics, picture, entropy=4.5)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_single_process_in_a_sweep_over_devices(tmp_path: Path) -> None:
    asked = ("trainer.devices=2", "+trainer.num_nodes=2")
    _, printed = trained(tmp_path, "strategy=single", *asked)
    for setting in asked:
        name = setting.removeprefix("+")
        assert f"strategy=single is one process: {name} is ignored" in printed
    assert re.search(r"processes +1,", printed)

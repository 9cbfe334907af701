"""What the terminal shows when the main job fails: the error, once, and status 1; nothing hangs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from lightning_cp.apps.train.resume import checkpoint_to_resume
from lightning_cp.apps.train.run import check_extras
from lightning_cp.errors import CheckpointError, ConfigError
from tests.nightly.apps.test_train import command

TWO = ("trainer.devices=2", "strategy=ring", "data.validation_sequences=4")


def failed(cwd: Path, *overrides: str, full: bool = False) -> str:
    """What a run that must fail printed as its error.

    Its output is read until every process that shares it has ended, so this would time out with a rank
    left behind.
    """
    done = command(cwd, *overrides, full_error=full)
    assert done.returncode == 1, done.stderr[-4000:]
    return done.stderr


SETUP = ("strategy=ulysses", "model.network.config.num_attention_heads=2")
AT_SETUP = "ConfigError: ulysses_size=4 does not divide the model's 2 attention heads"
FIRST_BATCH = (*TWO, "strategy.padding=false", "data.seq_len=511")
AT_FIRST_BATCH = "ShapeError: padding=False"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        pytest.param(SETUP, AT_SETUP, id="setup"),
        pytest.param(FIRST_BATCH, AT_FIRST_BATCH, id="batch"),
    ],
)
def test_an_error_of_every_rank_is_shown_once(
    tmp_path: Path, overrides: tuple[str, ...], match: str
) -> None:
    printed = failed(tmp_path, *overrides)
    assert printed.count(match) == 1
    assert "Traceback" not in printed
    assert "RankFailure" not in printed
    assert match in printed.rstrip().splitlines()[-1]
    assert "LIGHTNING_CP_FULL_ERROR=1 shows where this was raised" in printed


@pytest.mark.nightly
def test_the_traceback_is_shown_on_request(tmp_path: Path) -> None:
    printed = failed(tmp_path, *FIRST_BATCH, full=True)
    assert printed.count(AT_FIRST_BATCH) == printed.count("Traceback") == 2


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_an_error_of_one_rank_is_not_hidden_by_the_others(tmp_path: Path, rank: int) -> None:
    data = ("data._target_=tests.helpers.apps.failing_data.failing_on", f"+data.rank={rank}")
    printed = failed(tmp_path, *TWO, *data, "+data.kind=refused")
    assert printed.count("UndeclaredError: no tensor of the batch is known") == 1
    assert "RankFailure" not in printed
    assert "Traceback" not in printed


@pytest.mark.nightly
def test_ranks_that_wait_for_one_that_failed_are_ended(tmp_path: Path) -> None:
    data = (
        "data._target_=tests.helpers.apps.failing_data.failing_on",
        "+data.rank=0",
        "+data.kind=raises",
    )
    printed = failed(tmp_path, *TWO, *data)
    assert printed.count("Traceback") == 1
    assert printed.count("RuntimeError: the disk is gone") == 1


@pytest.mark.nightly
def test_no_checkpoint_is_noticed_before_processes_start(tmp_path: Path) -> None:
    printed = failed(tmp_path, "resume=nope.ckpt")
    assert (
        "CheckpointError: resume=nope.ckpt is not a checkpoint: Checkpoint file not found"
        in printed
    )
    assert "resume=auto with hydra.run.dir=FOLDER" in printed
    assert "Initializing distributed" not in printed
    assert "Traceback" not in printed


def test_a_file_that_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "text.ckpt").write_text("no weights in here")
    with pytest.raises(CheckpointError, match=r"resume=.*text\.ckpt is not a checkpoint"):
        checkpoint_to_resume(str(tmp_path / "text.ckpt"), tmp_path)
    real = str(tmp_path / "real.ckpt")
    torch.save({}, real)
    assert checkpoint_to_resume(real, tmp_path) == real


@pytest.mark.nightly
def test_auto_needs_a_folder_of_its_own(tmp_path: Path) -> None:
    printed = failed(tmp_path, "resume=auto")
    assert "ConfigError: resume=auto continues in the run's own folder" in printed
    assert "hydra.run.dir=outputs/NAME" in printed


@pytest.mark.nightly
def test_missing_paths_are_asked_for(tmp_path: Path) -> None:
    printed = failed(tmp_path, "data=text_files")
    assert "ConfigError: data.paths must be a list of files" in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_one_stage_are_refused(method: str) -> None:
    """By the main job and the doctor, which both look."""
    config = OmegaConf.create(
        {"model": {"network": {}}, "strategy": {"mode": "ring", "start_method": method}}
    )
    with pytest.raises(ConfigError, match=rf"strategy\.start_method={method} makes workers"):
        check_extras(config)
    config.strategy.start_method = "popen"
    check_extras(config)
    config.strategy = "auto"
    check_extras(config)

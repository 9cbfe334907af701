"""``resume=auto``: the newest checkpoint that is whole, or a new run; and the lines that are kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from lightning_cp.apps.train.resume import (
    ContinuedCSV,
    check_folder_named,
    newest_whole,
    run_folder,
)
from lightning_cp.checkpoint import save_checkpoint
from lightning_cp.checkpoint.read import open_checkpoint
from lightning_cp.errors import CheckpointError, ConfigError
from lightning_cp.utils.run_folder import FOLDER_OF_FIRST, one_folder
from tests.helpers.checkpoint.states import same
from tests.helpers.launch.start import free_port
from tests.nightly.apps.test_train import COLUMNS, command, launched, table


def saved(folder: Path, name: str, age: int, step: int = 1) -> Path:
    """A checkpoint that is so many seconds old."""
    path = folder / name
    save_checkpoint({"global_step": step, "x": torch.ones(3) * step}, path)
    when = 1_700_000_000 - age
    os.utime(path, (when, when))
    return path


def test_the_newest_one_is_taken(tmp_path: Path) -> None:
    assert newest_whole(tmp_path / "nothing") is None
    assert newest_whole(tmp_path) is None
    saved(tmp_path, "last.ckpt", age=20)
    best = saved(tmp_path, "best.ckpt", age=10)
    (tmp_path / ".half.ckpt").write_text("a save that was killed")
    (tmp_path / "notes.txt").write_text("something else")
    assert newest_whole(tmp_path) == best


def test_a_damaged_one_is_passed_over_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = saved(tmp_path, "last.ckpt", age=20)
    best = saved(tmp_path, "best.ckpt", age=10)
    data = bytearray(best.read_bytes())
    data[len(data) // 2] ^= 1
    best.write_bytes(data)
    (tmp_path / "text.ckpt").write_text("no checkpoint")
    assert newest_whole(tmp_path) == last
    said = capsys.readouterr().out
    assert said.count("is passed over") == 2
    assert "best.ckpt is passed over" in said
    last.write_bytes(last.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match=r"3 checkpoints in .*, and none is complete"):
        newest_whole(tmp_path)


def test_one_of_another_strategy_is_taken_if_its_archive_is_whole(tmp_path: Path) -> None:
    torch.save({"global_step": 3}, tmp_path / "plain.ckpt")
    assert newest_whole(tmp_path) == tmp_path / "plain.ckpt"


def test_auto_wants_a_folder() -> None:
    check_folder_named("auto", ["hydra.run.dir=outputs/mine"])
    check_folder_named(None, [])
    with pytest.raises(ConfigError, match=r"Name it: resume=auto hydra\.run\.dir"):
        check_folder_named("auto", ["hydra.verbose=true"])


def test_ranks_of_a_cluster_look_in_the_first_ones_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv(FOLDER_OF_FIRST, "")
    with one_folder(["train", f"hydra.run.dir={tmp_path}/mine"]):
        assert run_folder(tmp_path / "thrown away") == tmp_path / "mine"


def test_lines_of_steps_that_come_again_are_left_out(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, "last.ckpt", age=1, step=2)
    file = tmp_path / "metrics" / "metrics.csv"
    file.parent.mkdir()
    file.write_text("loss,step,val/x\n,0,8.0\n1.5,0,\n1.25,1,\n,1,7.0\n1.0,2,\n")
    logger = ContinuedCSV(tmp_path, "metrics", str(checkpoint))
    logger.log_metrics({"loss": 0.5}, step=2)
    logger.save()
    assert file.read_text().split() == [
        "loss,step,val/x",
        ",0,8.0",
        "1.5,0,",
        "1.25,1,",
        ",1,7.0",
        "0.5,2,",
    ]
    assert logger.first_with("val/x") == {"step": 0.0, "val/x": 8.0}


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", ["ring", "single"])
def test_an_interrupted_run_is_the_run(tmp_path: Path, strategy: str) -> None:
    mine = ("trainer.devices=2", f"strategy={strategy}", "trainer.val_check_interval=2")
    mine = (*mine, "model.warmup_steps=6")  # what follows on it depends on max_steps
    whole, _ = launched(tmp_path, *mine, "trainer.max_steps=6")
    folder = tmp_path / "mine"
    auto = (*mine, "resume=auto", f"hydra.run.dir={folder}")
    first = command(tmp_path, *auto, "trainer.max_steps=4")
    assert "yet, so this is a new run" in first.stdout, first.stderr[-2000:]
    (folder / "checkpoints" / "later.ckpt").write_text("half a checkpoint")
    second = command(tmp_path, *auto, "trainer.max_steps=6")
    assert second.stdout.count("later.ckpt is passed over") == 1, second.stderr[-2000:]
    assert second.stdout.count("resume=auto: continues from checkpoints/") == 1
    same_lines(folder, whole)


@pytest.mark.nightly
@pytest.mark.timeout(600)  # seven starts of the main job, on a machine that may be busy
@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_that_torchrun_starts_again_is_the_run(tmp_path: Path, rank: int) -> None:
    mine = ("trainer.devices=2", "strategy=ring", "trainer.val_check_interval=2")
    mine = (*mine, "trainer.max_steps=4")
    whole, _ = launched(tmp_path, *mine)
    folder, mark = tmp_path / "mine", tmp_path / "killed"
    data = ("data._target_=tests.helpers.apps.failing_data.killed_once", f"+data.rank={rank}")
    auto = (*mine, *data, "+data.at=4", f"+data.mark={mark}")
    agent = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=2")
    done = command(
        tmp_path,
        *(*auto, "resume=auto", f"hydra.run.dir={folder}"),
        launcher=(*agent, f"--master-port={free_port()}"),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert mark.exists()
    assert f"rank {rank} (cp_rank {rank} of 2, data_rank 0) lost" in done.stderr, done.stderr
    assert done.stdout.count("yet, so this is a new run") == 1
    assert done.stdout.count("resume=auto: continues from checkpoints/") == 1
    same_lines(folder, whole)
    got, want = (open_checkpoint(x / "checkpoints" / "last.ckpt").read() for x in (folder, whole))
    for key in ("state_dict", "optimizer_states", "global_step"):
        assert same(got[key], want[key])


def same_lines(folder: Path, whole: Path) -> None:
    """But for what depends on the machine, or on when the run began."""
    costs = {"train/tokens_per_second", "peak_memory_mib", "epoch"}
    rows, want = table(folder), table(whole)
    assert len(rows) == len(want)
    for one, other in zip(rows, want, strict=True):
        assert {k: one[k] for k in COLUMNS - costs} == {k: other[k] for k in COLUMNS - costs}

"""What has the name of a checkpoint already: it is replaced if it is one, and left alone if it is not."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pytest

from lightning_cp.checkpoint.manager import CheckpointManager
from lightning_cp.checkpoint.read import latest_checkpoint, open_checkpoint
from lightning_cp.checkpoint.save import save_checkpoint
from lightning_cp.errors import CheckpointError, ConfigError
from lightning_cp.fabric import UlyssesRingStrategy
from tests.helpers.checkpoint.states import same, state_of
from tests.helpers.pool import run_ranks

FORMS = ("full", "sharded")
MANIFESTS = {"none": None, "another program's": '{"name": "page", "icons": []}', "no text": "\0\1"}


def folder_with(name: str, folder: Path, manifest: str | None = None) -> Path:
    """A folder that somebody needs."""
    made = folder / name
    made.mkdir()
    (made / "thesis").write_text("years")
    if manifest is not None:
        (made / "manifest.json").write_text(manifest)
    return made


@pytest.mark.parametrize("manifest", MANIFESTS)
@pytest.mark.parametrize("form", FORMS)
def test_a_folder_that_is_no_checkpoint_is_not_replaced(
    form: str, manifest: str, tmp_path: Path
) -> None:
    folder = folder_with("results", tmp_path, MANIFESTS[manifest])
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(
        CheckpointError, match=r"results is a folder .* not a checkpoint of lightning_cp"
    ):
        save_checkpoint(state_of(1), folder, form=form)
    assert sorted(tmp_path.rglob("*")) == before


def save_by_fabric(rank: int, world_size: int, folder: Path) -> None:
    fabric = L.Fabric(accelerator="cpu", devices=1, strategy=UlyssesRingStrategy())
    fabric.launch()
    with pytest.raises(CheckpointError, match="results is a folder"):
        fabric.save(folder, {"step": 1})


def test_nor_by_fabric(tmp_path: Path) -> None:
    folder = folder_with("results", tmp_path)
    run_ranks(1, save_by_fabric, folder)
    assert (folder / "thesis").read_text() == "years"


def test_nor_by_a_link(tmp_path: Path) -> None:
    folder = folder_with("last.ckpt", tmp_path)
    save_checkpoint(state_of(1), tmp_path / "new")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=r"last\.ckpt is a folder"):
        CheckpointManager("full", in_background=False).link(tmp_path / "new", folder)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("form", FORMS)
def test_checkpoints_files_and_empty_folders_are_replaced(form: str, tmp_path: Path) -> None:
    target = tmp_path / "a"
    target.mkdir()
    for step, other in enumerate((*FORMS, form)):
        save_checkpoint(state_of(step), target, form=other)
        assert same(open_checkpoint(target).read(), state_of(step))
    (tmp_path / "b").write_text("a file, as torch.save would replace it")
    save_checkpoint(state_of(4), tmp_path / "b", form=form)
    assert latest_checkpoint(tmp_path) == tmp_path / "b"


@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_saved_below_a_file(form: str, tmp_path: Path) -> None:
    (tmp_path / "weights.pt").write_text("a file")
    for name in ("weights.pt/a", "weights.pt/deeper/a"):
        with pytest.raises(
            CheckpointError, match=r"cannot save \S*a: .*weights\.pt is a file, and"
        ):
            save_checkpoint(state_of(1), tmp_path / name, form=form)
    assert (tmp_path / "weights.pt").read_text() == "a file"


def of_no_dictionary(rank: int, world_size: int) -> None:
    fabric = L.Fabric(accelerator="cpu", devices=1, strategy=UlyssesRingStrategy())
    fabric.launch()
    for state in ([1], 3, None):
        with pytest.raises(ConfigError, match=r"fabric.save takes a dictionary .*\"model\": model"):
            fabric.save("a", state)  # type: ignore[arg-type]


def test_fabric_saves_dictionaries() -> None:
    run_ranks(1, of_no_dictionary)

"""What is damaged, incomplete, mixed or foreign is refused and named, before anything of it is used."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cp.checkpoint import full as full_file
from lightning_cp.checkpoint.manifest import FileEntry, Manifest, SaveInfo, parse_manifest
from lightning_cp.checkpoint.read import open_checkpoint
from lightning_cp.checkpoint.save import save_checkpoint
from lightning_cp.errors import CheckpointError
from tests.helpers.checkpoint.states import state_of

FORMS = ("full", "sharded")
SHARD = "shard-00000-of-00001.safetensors"


def refused(path: Path, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        open_checkpoint(path)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("name", [SHARD, "index.json", "state.json", "manifest.json"])
def test_a_flipped_byte_of_any_file_is_found(name: str, tmp_path: Path) -> None:
    save_checkpoint(state_of(1), tmp_path / "a", form="sharded")
    flip(tmp_path / "a" / name, 40)
    refused(tmp_path / "a", rf"a/{re.escape(name)} is (damaged|not a manifest)")


def test_a_flipped_byte_of_the_one_file_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    save_checkpoint(state_of(1), path)
    flip(path, path.stat().st_size // 2)
    refused(path, "a.ckpt is damaged: its sha256 is not its manifest's. Nothing was loaded")


@pytest.mark.parametrize("at", [0, 7, len(full_file.MAGIC) - 1])
def test_a_manifest_that_is_not_recognised_is_no_file_of_another_program(
    at: int, tmp_path: Path
) -> None:
    path = tmp_path / "a.ckpt"
    save_checkpoint(state_of(1), path)
    flip(path, path.read_bytes().rindex(full_file.MAGIC) + at)
    refused(path, "a.ckpt is damaged: it ends in a comment that is not a manifest")


@pytest.mark.parametrize("lacks", [1, 200, 0.02, 0.5, 0.95, 1.0])
def test_a_truncated_file_is_refused(lacks: float, tmp_path: Path) -> None:
    """By bytes or by its share, down to nothing."""
    path = tmp_path / "a.ckpt"
    save_checkpoint({**state_of(1), "more": torch.zeros(50_000)}, path)
    size = path.stat().st_size
    os.truncate(path, size - (lacks if isinstance(lacks, int) else int(lacks * size)))
    refused(
        path, "a.ckpt is (not a complete checkpoint: it is )?truncated( or damaged: .*manifest)?"
    )


def test_a_truncated_shard_is_refused(tmp_path: Path) -> None:
    save_checkpoint(state_of(1), tmp_path / "b", form="sharded")
    os.truncate(tmp_path / "b" / SHARD, 1000)
    refused(
        tmp_path / "b", rf"b/{SHARD} is damaged: it has 1000 bytes, and had \d+ when it was saved"
    )


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_checkpoint(state_of(1), tmp_path / "a", form="sharded")
    (tmp_path / "a" / SHARD).unlink()
    refused(tmp_path / "a", f"a/{SHARD} is missing")


def test_a_shard_of_another_step_is_named(tmp_path: Path) -> None:
    """What PyTorch's own format loads without a word: old metadata, a shard of the next save."""
    for step in (1, 2):
        save_checkpoint(state_of(step), tmp_path / f"{step}", form="sharded", about=SaveInfo(step))
    shutil.copy(tmp_path / "2" / SHARD, tmp_path / "1" / SHARD)
    refused(
        tmp_path / "1",
        f"1/{SHARD} belongs to another save, of step 2: this checkpoint is of step 1",
    )


def test_a_folder_without_a_manifest_is_refused(tmp_path: Path) -> None:
    save_checkpoint(state_of(1), tmp_path / "a", form="sharded")
    (tmp_path / "a" / "manifest.json").unlink()
    refused(
        tmp_path / "a", "a has no manifest.json: its save did not end, or it is not a checkpoint"
    )
    (tmp_path / "a" / "manifest.json").write_text('{"format": "something else"}')
    refused(tmp_path / "a", "a/manifest.json is not a manifest of a checkpoint of lightning_cp")


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    for step in range(7):
        save_checkpoint(state_of(1), tmp_path / f"step-{step}.ckpt")
        os.utime(tmp_path / f"step-{step}.ckpt", (step, step))
    (tmp_path / "notes.txt").write_text("not one of them")
    newest = (
        "step-6.ckpt, step-5.ckpt, step-4.ckpt, step-3.ckpt, step-2.ckpt and 2 more. Give the path"
    )
    for missing in ("step-7.ckpt", "step-7"):
        refused(
            tmp_path / missing, f"Checkpoint file not found: .*{missing}. That folder has: {newest}"
        )
    refused(
        tmp_path / "none" / "x.ckpt",
        "Checkpoint file not found: .*none/x.ckpt. Give the path of one that was saved.$",
    )
    (tmp_path / "text.ckpt").write_text("hello")
    refused(tmp_path / "text.ckpt", "text.ckpt is not a complete checkpoint")


def test_another_format_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as other:
        other.setattr("lightning_cp.checkpoint.manifest.VERSION", 7)
        for form in FORMS:
            save_checkpoint(state_of(1), tmp_path / form, form=form)
    for form in FORMS:
        refused(
            tmp_path / form, "has format version 7; this release of lightning_cp reads version 1"
        )


def test_a_manifest_does_not_lead_out_of_its_folder(tmp_path: Path) -> None:
    save_checkpoint(state_of(1), tmp_path / "a", form="sharded")
    manifest = Manifest("sharded", "x", SaveInfo(), {"../b": FileEntry("0", 1)})
    (tmp_path / "a" / "manifest.json").write_text(manifest.render())
    refused(tmp_path / "a", "names '../b', which is outside its folder")


def test_any_changed_character_of_a_manifest_is_found() -> None:
    text = Manifest(
        "sharded", "x", SaveInfo(1, {"ring": 2}, "ddp"), {"a": FileEntry("0", 1)}
    ).render()
    for at, character in enumerate(text):
        for other in {"0", "1", " ", "b"} - {character}:
            with pytest.raises(CheckpointError):
                parse_manifest(text[:at] + other + text[at + 1 :], "manifest.json")
    assert parse_manifest(text, "manifest.json").about.step == 1


SAVED: dict[str, bytes] = {}


@given(data=st.data())
@settings(max_examples=200)
def test_any_changed_byte_is_found(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "changed"
    small = {"state_dict": {"w": torch.arange(3.0)}, "step": 1}
    if not SAVED:
        for form in FORMS:
            save_checkpoint(small, folder / form, form=form, about=SaveInfo(1, {"ring": 2}, "ddp"))
        files = [folder / "full", *(folder / "sharded").iterdir()]
        SAVED.update({str(path): path.read_bytes() for path in files})
    name = data.draw(st.sampled_from(sorted(SAVED)))
    at = data.draw(st.integers(0, len(SAVED[name]) - 1))
    other = data.draw(st.integers(1, 255))
    changed = bytearray(SAVED[name])
    changed[at] ^= other
    path = Path(name)
    path.write_bytes(bytes(changed))
    try:
        refused(path if path.name == "full" else path.parent, ".")
    finally:
        path.write_bytes(SAVED[name])

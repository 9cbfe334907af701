"""Ctrl-C in a save, links whose target was set aside, and folders whose index leads elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_cp.checkpoint.atomic import BEFORE, temporary_path
from lightning_cp.checkpoint.manifest import FileEntry, Manifest, read_manifest, sha256_of
from lightning_cp.checkpoint.read import open_checkpoint
from lightning_cp.checkpoint.save import save_checkpoint
from lightning_cp.errors import CheckpointError
from tests.helpers.checkpoint.states import same, state_of

FORMS = ("full", "sharded")


def interrupted(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "place", ["pathlib.Path.replace", "lightning_cp.checkpoint.atomic.os.fsync"]
)
@pytest.mark.parametrize("form", FORMS)
def test_ctrl_c_leaves_what_was_there(
    form: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "last.ckpt"
    save_checkpoint(state_of(1), target, form=form)
    before = sorted(tmp_path.rglob("*"))
    with monkeypatch.context() as keyboard:
        keyboard.setattr(place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(state_of(2), target, form=form)
    assert sorted(tmp_path.rglob("*")) == before
    assert same(open_checkpoint(target).read(), state_of(1))


def test_a_link_leads_to_what_a_kill_has_set_aside(tmp_path: Path) -> None:
    target, link = tmp_path / "step-1.ckpt", tmp_path / "last.ckpt"
    save_checkpoint(state_of(1), target, form="sharded")
    link.symlink_to(target.name)
    target.rename(temporary_path(target, BEFORE))  # and there the process ended
    assert same(open_checkpoint(link).read(), state_of(1))


@pytest.mark.parametrize("to", ["step-1.ckpt", "last.ckpt"])
def test_a_link_to_nothing_is_named(to: str, tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").symlink_to(to)
    with pytest.raises(CheckpointError, match=rf"Checkpoint file not found: .*{to}"):
        open_checkpoint(tmp_path / "last.ckpt")


def change_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change what is said of each tensor, and have the manifest agree."""
    index = json.loads((folder / "index.json").read_text())
    for tensor in index["tensors"].values():
        change(tensor)
    (folder / "index.json").write_text(json.dumps(index))
    old = read_manifest(folder)
    own = FileEntry(sha256_of(folder / "index.json"), (folder / "index.json").stat().st_size)
    made = Manifest(old.form, old.save, old.about, {**old.files, "index.json": own})
    (folder / "manifest.json").write_text(made.render())


@pytest.mark.parametrize("file", ["../outside", "/etc/passwd", "more.safetensors"])
def test_tensors_are_read_from_files_that_were_verified(file: str, tmp_path: Path) -> None:
    save_checkpoint(state_of(1), tmp_path / "a", form="sharded")
    change_index(tmp_path / "a", lambda tensor: tensor["chunks"][0].update(file=file))
    with pytest.raises(CheckpointError, match=rf"a/index.json says that .* is in '{file}'"):
        open_checkpoint(tmp_path / "a")


CHANGES: dict[str, tuple[Any, str]] = {
    "no block": (lambda x: x["chunks"].clear(), "are not all of its shape"),
    "a larger shape": (lambda x: x["shape"].__setitem__(0, 38), "are not all of its shape"),
    "another dimension": (lambda x: x["shape"].append(1), "are not all of its shape"),
    "twice": (lambda x: x["chunks"].append(x["chunks"][0]), "are not all of its shape"),
    "moved": (lambda x: x["chunks"][0]["offsets"].__setitem__(0, 1), "are not all of its shape"),
    "negative": (lambda x: x["chunks"][0]["offsets"].__setitem__(0, -1), "are not all of its"),
    "before its file": (
        lambda x: x["chunks"][0].update(begin=-8),
        "a block of w is outside shard-",
    ),
    "after its file": (
        lambda x: x["chunks"][0].update(begin=10**6),
        "a block of w is outside shard-",
    ),
}


@pytest.mark.parametrize(("change", "says"), CHANGES.values(), ids=CHANGES)
def test_blocks_have_to_be_the_tensor(change: Any, says: str, tmp_path: Path) -> None:
    """What no block fills would be uninitialised memory."""
    save_checkpoint({"w": torch.ones(37, 2)}, tmp_path / "a", form="sharded")
    change_index(tmp_path / "a", change)
    with pytest.raises(CheckpointError, match=f"a/index.json says that .*{says}"):
        open_checkpoint(tmp_path / "a").read()


@pytest.mark.parametrize("function", ["read_manifest", "decode", "verify"])
def test_what_cannot_be_read_is_said_without_where_it_is(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(state_of(1), tmp_path / "a", form="sharded")

    def fails(*_: Any) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path / "a" / "index.json"))

    monkeypatch.setattr(f"lightning_cp.checkpoint.read.{function}", fails)
    says = r"a cannot be read \(Permission denied \(index.json\)\)"
    with pytest.raises(CheckpointError, match=says) as raised:
        open_checkpoint(tmp_path / "a")
    assert str(tmp_path.parent) not in str(raised.value)

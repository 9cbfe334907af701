"""What a load leaves: a dictionary whose tensors are read when somebody looks at them."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_utilities.core.apply_func import apply_to_collection

from lightning_cp.checkpoint.read import LazyEntries, open_checkpoint
from lightning_cp.checkpoint.save import save_checkpoint
from lightning_cp.errors import CheckpointError
from tests.helpers.checkpoint.states import same, state_of
from tests.nightly.checkpoint.test_parts import read_whole

KEYS = ("state_dict", "nested", "global_step")
FORMS = pytest.mark.parametrize("form", ["full", "sharded"])


def left_of(target: Path, form: str) -> LazyEntries:
    save_checkpoint(state_of(1), target, form=form)
    return LazyEntries.of(open_checkpoint(target), KEYS)


def wanted() -> dict[str, Any]:
    return {key: state_of(1)[key] for key in KEYS}


@FORMS
def test_it_is_a_dictionary_of_what_was_saved(form: str, tmp_path: Path) -> None:
    rest = left_of(tmp_path / "a", form)
    assert isinstance(rest, dict)
    with read_whole() as found:
        assert rest.pop("global_step") == 1
        assert (list(rest), len(rest), "state_dict" in rest) == (["state_dict", "nested"], 2, True)
        assert same(rest["nested"], wanted()["nested"])
        assert rest.get("nothing") is None
        assert "state_dict" in repr(rest)
        assert list(reversed(rest)) == ["nested", "state_dict"]
        assert found == []
        assert same(rest["state_dict"], wanted()["state_dict"])
        assert rest["state_dict"] is rest["state_dict"]
        rest["new"] = 1
        assert dict(rest)["new"] == 1
        with pytest.raises(KeyError, match="optimizer_states"):
            rest["optimizer_states"]
        assert rest.popitem() == ("new", 1)


WAYS: dict[str, Callable[[LazyEntries], Any]] = {
    "dict": dict,
    "**": lambda rest: {**rest},
    "keywords": lambda rest: (lambda **given: given)(**rest),
    "items": lambda rest: dict(rest.items()),
    "values": lambda rest: dict(zip(rest, rest.values(), strict=True)),
    "get": lambda rest: {key: rest.get(key) for key in rest},
    "setdefault": lambda rest: {key: rest.setdefault(key, 1) for key in rest},
    "pop": lambda rest: {key: rest.pop(key) for key in list(rest)},
    "popitem": lambda rest: dict(reversed([rest.popitem() for _ in range(len(rest))])),
    "update": lambda rest: _updated({}, rest),
    "|": lambda rest: {} | rest,
    "| after": lambda rest: rest | {},
    "copy": lambda rest: rest.copy(),
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "pickle": lambda rest: pickle.loads(pickle.dumps(rest)),
    "for each tensor": lambda rest: apply_to_collection(rest, torch.Tensor, torch.clone),
}


def _updated(own: dict[str, Any], rest: LazyEntries) -> dict[str, Any]:
    own.update(rest)
    return own


@FORMS
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_whoever_takes_all_of_it_gets_values(
    way: Callable[[LazyEntries], Any], form: str, tmp_path: Path
) -> None:
    """Much of Python looks into a dictionary past its methods, and would find what stands for a value."""
    made = way(left_of(tmp_path / "a", form))
    assert isinstance(made, dict)
    assert same(made, wanted())


def test_copies_are_apart_and_read_no_more_than_they_are_asked_for(tmp_path: Path) -> None:
    rest = left_of(tmp_path / "a", "full")
    with read_whole() as found:
        other = rest.copy()
        more = rest | {"new": 1}
        rest |= {"own": 2}
        del other["nested"]
        assert (list(other), list(more), list(rest)) == (
            ["state_dict", "global_step"],
            [*KEYS, "new"],
            [*KEYS, "own"],
        )
        rest.clear()
        assert (len(rest), found) == (0, [])
    assert same(other["state_dict"], wanted()["state_dict"])


def test_what_is_equal_and_what_json_writes(tmp_path: Path) -> None:
    save_checkpoint({"a": {"x": [1, 2]}, "b": 3}, tmp_path / "a")
    rest = LazyEntries.of(open_checkpoint(tmp_path / "a"), ["a", "b"])
    assert rest == {"a": {"x": [1, 2]}, "b": 3}
    assert rest != {"a": 1}
    assert json.dumps(rest) == '{"a": {"x": [1, 2]}, "b": 3}'


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


@FORMS
def test_what_has_no_tensors_is_there_whatever_happens_to_the_checkpoint(
    form: str, tmp_path: Path
) -> None:
    rest = left_of(tmp_path / "a", form)
    remove(tmp_path / "a")
    assert rest["global_step"] == 1
    assert same(rest["nested"], wanted()["nested"])


@pytest.mark.parametrize("then", ["removed", "replaced", "a folder"])
def test_a_file_is_held(then: str, tmp_path: Path) -> None:
    rest = left_of(tmp_path / "a", "full")
    if then == "replaced":
        save_checkpoint(state_of(2), tmp_path / "a")
    else:
        remove(tmp_path / "a")
        if then == "a folder":
            save_checkpoint(state_of(2), tmp_path / "a", form="sharded")
    assert same(rest["state_dict"], wanted()["state_dict"])


@pytest.mark.parametrize("then", ["removed", "sharded", "full"])
def test_a_folder_that_is_not_there_any_more_is_not_mixed(then: str, tmp_path: Path) -> None:
    rest = left_of(tmp_path / "a", "sharded")
    if then != "sharded":
        remove(tmp_path / "a")
    if then != "removed":
        save_checkpoint(state_of(2), tmp_path / "a", form=then)
    what = "removed" if then == "removed" else "replaced"
    with pytest.raises(
        CheckpointError, match=f"a was {what} after it was opened, so 'state_dict' cannot be read"
    ):
        rest["state_dict"]

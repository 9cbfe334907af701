"""What a load says to its user: of what it did not load, of names from ``keys``, of files given alone."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from lightning_cp.checkpoint import load_pretrained
from lightning_cp.errors import CheckpointError, ConfigError
from tests.helpers.checkpoint.pretrained.files import write_index
from tests.helpers.checkpoint.pretrained.models import Wrapped, load, make, refuse, save, without
from tests.helpers.pool import run_ranks


def told_of(model: nn.Module, path: Path, **options: Any) -> list[str]:
    """What this process is told by a load."""
    said: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(f"{record.levelname}: {record.getMessage()}")

    log, handler = logging.getLogger("lightning_cp"), Handler()
    log.addHandler(handler)
    try:
        load(model, path, **options)
    finally:
        log.removeHandler(handler)
    return said


def logged(rank: int, world: int, path: Path) -> list[str]:
    """What a rank is told that loads into a network with something beside it."""
    return told_of(Wrapped(make()), path, strict=False)


def others(path: Path) -> None:
    """A checkpoint that lacks what a model has, and has what that lacks."""
    without(path, "lm_head.weight", "model.norm.weight")


def test_what_was_not_loaded_is_told_once(tmp_path: Path) -> None:
    others(tmp_path)
    first, second = run_ranks(2, logged, tmp_path)
    assert first == [
        "WARNING: strict=False: 4 of 23 parameters of the model are not in the checkpoint, and keep the "
        "values they had or are initialised: model.norm.weight, lm_head.weight, metric.weight, metric.bias"
    ]
    assert second == []


def test_what_was_left_unread_is_told_and_how_much_more_there_is(tmp_path: Path) -> None:
    save_file({"net.weight": torch.ones(2, 2), **{f"x{at}": torch.ones(1) for at in range(8)}},
              tmp_path / "model.safetensors")  # fmt: skip
    (said,) = told_of(nn.ModuleDict({"net": nn.Linear(2, 2, bias=False)}), tmp_path, strict=False)
    assert said == (
        "WARNING: strict=False: 8 of 9 tensors of the checkpoint were left unread: "
        "x0, x1, x2, x3, x4 and 3 more"
    )


def test_what_was_asked_for_by_name_is_not_told(tmp_path: Path) -> None:
    others(tmp_path)
    listed = ["lm_head.*", "model.norm.*", "metric.*"]
    for strict in (True, False):
        assert told_of(Wrapped(make()), tmp_path, strict=strict, allow_missing=listed) == []
    (said,) = told_of(Wrapped(make()), tmp_path, strict=False, allow_missing=listed[:2])
    assert said.endswith("initialised: metric.weight, metric.bias")


def elsewhere(rank: int, world: int, paths: list[Path]) -> list[str]:
    return told_of(nn.Linear(2, 2), paths[rank])


def test_ranks_that_load_from_different_places_are_told(tmp_path: Path) -> None:
    """Machines have copies of their own; what is in their headers is compared, values are not."""
    paths = [tmp_path / name for name in "ab"]
    for at, path in enumerate(paths):
        path.mkdir()
        save_file(
            {name: torch.full_like(x, at) for name, x in nn.Linear(2, 2).state_dict().items()},
            path / "model.safetensors",
        )
    first, second = run_ranks(2, elsewhere, paths)
    assert len(first) == 1
    assert first[0].startswith("WARNING: ranks load from different paths: ")
    assert "/a on rank 0, " in first[0]
    assert "/b on rank 1. " in first[0]
    assert second == []
    assert run_ranks(2, elsewhere, [paths[0]] * 2) == [[], []]


def test_a_name_that_keys_say_is_named_where_it_is_missing(tmp_path: Path) -> None:
    save(tmp_path)
    refuse(
        make(),
        tmp_path,
        r"lacks 1 parameters of the model \(lm_head.weight, of which keys= says that it is made of 'foo'\)",
        keys={"lm_head.weight": "foo"},
        allow_unexpected=["lm_head.*"],
    )
    norms = "model.layers.*.input_layernorm.weight"
    refuse(
        make(),
        tmp_path,
        r"lacks 2 .*0.input_layernorm.weight, of which keys= says that it is made of 'n.0.a' and 'n.0.b', ",
        keys={norms: "n.*.a + n.*.b"},
        prefix="",
    )


def test_one_file_of_several_is_named(tmp_path: Path) -> None:
    save(tmp_path)
    file = sorted(tmp_path.glob("*.safetensors"))[1]
    with pytest.raises(CheckpointError) as raised:
        load(make(), file)
    assert f"the file {file.name!r} alone is not of this model: it lacks " in str(raised.value)
    assert (
        "Its folder has model.safetensors.index.json: give the folder, to load all of its files."
        in str(raised.value)
    )
    index, other = tmp_path / "model.safetensors.index.json", tmp_path / "other.safetensors"
    with pytest.raises(CheckpointError, match=r"the checkpoint .* is not of this model") as raised:
        load(make(), index, keys={"lm_head.weight": "x"})
    assert "give the folder" not in str(raised.value)
    save_file({"a": torch.ones(2)}, other)
    with pytest.raises(CheckpointError, match=r"'other\.safetensors' alone and the model have no"):
        load(make(), other, strict=False)


@pytest.mark.parametrize(("text", "says"), [("{", "not valid JSON"), ("[]", "not a JSON object")])
def test_an_index_is_called_that(text: str, says: str, tmp_path: Path) -> None:
    write_index(tmp_path, {})
    (tmp_path / "model.safetensors.index.json").write_text(text)
    refuse(make(), tmp_path, f"index.json is refused: the index is {says}")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"mesh": 5}, "mesh must be a ContextParallelMesh .* got 5"),
        ({"device": 5}, "device must be a torch.device .* got 5"),
        ({"device": "gpu"}, "device must be a torch.device .* got 'gpu'"),
        ({"model": {"weight": torch.ones(1)}}, "model must be a module of torch.nn, got dict"),
    ],
)
def test_arguments_of_other_kinds_are_refused(
    given: dict[str, Any], says: str, tmp_path: Path
) -> None:
    without(tmp_path)
    with pytest.raises(ConfigError, match=says):
        load_pretrained(**{"model": make(), "path": tmp_path, "progress": False, **given})

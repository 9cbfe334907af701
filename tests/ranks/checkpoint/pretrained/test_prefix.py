"""Which part of a model files are of: found where their names say it, and never guessed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from lightning_cp.checkpoint.pretrained import matching as prefix
from lightning_cp.errors import CheckpointError
from tests.helpers.checkpoint.pretrained.models import load, make, refuse

NO_NAME = "have no name in common"


def linear(bias: bool = False) -> nn.Module:
    return nn.Linear(4, 4, bias=bias)


def block(*names: str) -> nn.Module:
    return nn.ModuleDict({name: linear() for name in names or ("first", "second", "third")})


def model_of(**modules: nn.Module) -> nn.Module:
    return nn.ModuleDict(modules)


def write(path: Path, *names: str) -> None:
    """A file of these weights; the first one is 1, the next 2."""
    made = {name: torch.full((4, 4), 1.0 + at) for at, name in enumerate(names)}
    save_file(made, path / "model.safetensors")


def values(model: nn.Module) -> dict[str, float]:
    return {name: float(x.detach().flatten()[0]) for name, x in model.named_parameters()}


BLOCK = ("first.weight", "second.weight", "third.weight")


def below(prefix: str, *names: str) -> list[str]:
    return [prefix + name for name in names or BLOCK]


@pytest.mark.parametrize(
    ("model", "keys"),
    [
        (model_of(in_proj=linear(), out=linear()), ["c.weight"]),
        (model_of(embed=linear()), ["c.weight"]),
        (model_of(a=nn.Sequential(linear(), linear())), below("c.", "0.weight", "1.weight")),
        (model_of(a=block("first", "x", "y", "z")), below("c.", "first.weight", "p.weight")),
        (model_of(a=block("first", "x"), b=linear()), ["weight", "second.weight"]),
        (block("first", "second"), ["c.weight", "d.weight"]),
    ],
)
def test_a_last_part_that_happens_to_be_the_same_is_no_common_name(
    model: nn.Module, keys: list[str], tmp_path: Path
) -> None:
    write(tmp_path, *keys)
    refuse(model, tmp_path, NO_NAME, strict=False)
    refuse(model, tmp_path, r"it lacks \d parameters of the model .*; it has \d tensors that the")


@pytest.mark.parametrize(
    ("model", "keys", "wanted"),
    [
        (model_of(net=block()), below(""), below("net.")),
        (model_of(net=model_of(inner=block())), below(""), below("net.inner.")),
        (block(), below("model."), below("")),
        (model_of(net=block()), below("model."), below("net.")),
        (model_of(net=block("first", "second", "head")), below("model."), below("net.")[:2]),
        (model_of(net=block()), below("model.", *BLOCK[:2], "pooler"), below("net.")[:2]),
        (model_of(net=linear()), ["weight"], ["net.weight"]),
        (linear(), ["c.weight"], ["weight"]),
        (model_of(student=block(), teacher=block()), below("student."), below("student.")),
        (model_of(block=block(), teacher=block()), below("block.x."), []),
    ],
)
def test_names_that_differ_by_what_is_in_front(
    model: nn.Module, keys: list[str], wanted: list[str], tmp_path: Path
) -> None:
    write(tmp_path, *keys)
    if not wanted:
        refuse(model, tmp_path, NO_NAME, strict=False)
        return
    before = values(model)
    loaded = load(model, tmp_path, strict=False)
    changed = {name: 1.0 + at for at, name in enumerate(wanted)}
    assert values(model) == before | changed
    assert len(loaded.missing) == len(before) - len(wanted)
    assert len(loaded.unexpected) == len(keys) - len(wanted)


TWO = "fits several parts of the model equally well: 'student.', 'teacher.'. Say .* prefix="


def two() -> nn.Module:
    return model_of(student=block(), teacher=block())


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("put", ["", "model."])
def test_two_modules_of_which_the_files_may_be(put: str, strict: bool, tmp_path: Path) -> None:
    write(tmp_path, *below(put))
    refuse(two(), tmp_path, TWO, strict=strict)
    for options in ({"prefix": "teacher."}, {"allow_missing": ["student.*"], "strict": strict}):
        model = two()
        load(model, tmp_path, **options)
        found = values(model)
        assert [found[f"teacher.{name}"] for name in BLOCK] == [1.0, 2.0, 3.0]
        assert not {1.0, 2.0, 3.0} & {found[f"student.{name}"] for name in BLOCK}


def test_lists_that_allow_both_decide_nothing(tmp_path: Path) -> None:
    write(tmp_path, *BLOCK)
    refuse(two(), tmp_path, TWO, allow_missing=["student.*", "teacher.*"])


@pytest.mark.parametrize("strict", [True, False])
def test_two_parts_of_the_files_that_the_model_may_be(strict: bool, tmp_path: Path) -> None:
    write(tmp_path, *below("student."), *below("teacher."))
    says = "several parts of the checkpoint .* fit .*: 'student.', 'teacher.'. .* allow_unexpected="
    refuse(block(), tmp_path, says, strict=strict)
    model = block()
    load(model, tmp_path, allow_unexpected=["student.*"], strict=strict)
    assert list(values(model).values()) == [4.0, 5.0, 6.0]


def test_one_network_at_two_places_is_one(tmp_path: Path) -> None:
    inner = make(seed=6)
    inner.save_pretrained(tmp_path)
    network = make()
    model = nn.ModuleDict({"encoder": network.model, "net": network})
    assert load(model, tmp_path).missing == ()
    wanted = inner.state_dict()
    assert all(torch.equal(x, wanted[name]) for name, x in network.state_dict().items())


PROGRAM = """
import sys, torch
from lightning_cp.checkpoint import load_pretrained
from torch import nn

names = [f"part{at}" for at in range(12)]
model = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in names})
model["part3"] = nn.ModuleDict({"weight": nn.Linear(4, 4)})
try:
    load_pretrained(model, sys.argv[1], progress=False, strict=False)
except Exception as error:
    print(error)
"""


@pytest.mark.nightly
def test_what_is_found_does_not_hang_on_the_seed_of_hashes(tmp_path: Path) -> None:
    write(tmp_path, "weight")
    said: set[Any] = set()
    for seed in ("0", "1", "2"):
        run = [sys.executable, "-c", PROGRAM, str(tmp_path)]
        seeded = os.environ | {"PYTHONHASHSEED": seed}
        made = subprocess.run(run, env=seeded, capture_output=True, check=True)
        said.add(made.stdout)
    assert len(said) == 1
    assert b"'part0.', 'part1.', 'part2.', 'part4.', 'part5.', ..." in said.pop()


def test_the_error_is_raised_before_anything_changes(tmp_path: Path) -> None:
    write(tmp_path, "weight")
    with torch.device("meta"):
        model = model_of(a=linear(), b=linear())
    with pytest.raises(CheckpointError, match="equally well"):
        load(model, tmp_path, strict=False)
    assert all(x.is_meta for x in model.parameters())


def experts(count: int) -> nn.Module:
    """Many modules with the same names in them."""
    return model_of(net=nn.ModuleList(block("up", "down") for _ in range(count)))


@pytest.mark.parametrize(
    ("make_model", "most"),
    [
        (lambda count: nn.Sequential(*(linear() for _ in range(count))), 3),
        (lambda count: model_of(**{f"m{at}": linear() for at in range(count)}), 3),
        (experts, 4),
    ],
    ids=["a sequence", "names of their own", "experts"],
)
def test_a_model_of_many_modules_is_not_compared_with_itself(
    make_model: Any, most: int, tmp_path: Path
) -> None:
    """As many pairs are tried as there are modules, not the square of that."""
    count = 150
    with torch.device("meta"):
        model = make_model(count)
    write(tmp_path, *(name for name, _ in model.named_parameters()))
    with mock.patch.object(prefix, "_Pair", wraps=prefix._Pair) as tried:
        load(model, tmp_path)
    assert tried.call_count <= most * count
    assert list(values(model).values()) == [1.0 + at for at in range(len(values(model)))]

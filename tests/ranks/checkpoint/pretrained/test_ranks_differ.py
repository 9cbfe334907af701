"""Ranks that would load different things find out before anything is allocated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from lightning_cp.checkpoint import load_pretrained
from lightning_cp.errors import CheckpointError
from tests.helpers.pool import run_ranks

FIRST, SECOND = torch.zeros(4, 2), torch.zeros(4)


def loads(rank: int, world: int, path: Path, way: str) -> tuple[str, bool]:
    """What a rank raises, and whether its model is as it was; the last rank has something else."""
    odd, folder = rank == world - 1, path / str(rank)
    folder.mkdir()
    held = {"net.weight": FIRST, "net.bias": SECOND}
    options: dict[str, Any] = {}
    if odd and way == "dtype":
        held["net.bias"] = SECOND.half()
    if odd and way == "one more":
        held["other.bias"] = SECOND.clone()
    if odd and way == "keys":
        options["keys"] = {"bias": "net.bias"}
    if odd and way == "prefix":
        options["prefix"] = "b."
    if odd and way == "option":
        options["dtype"] = "bfloat16"
    save_file(held, folder / "model.safetensors")
    with torch.device("meta"):
        model = nn.ModuleDict({name: nn.Linear(2, 4) for name in "ab"})
        if odd and way == "names":
            model["a"].more = nn.Linear(2, 4)
        if way == "head":
            model["a"].head = nn.Linear(2, 3 if odd else 2)
        if way == "order":
            model["a"].one, model["a"].two = (nn.Linear(2, 2) for _ in range(2))
            model["a"]._modules = dict(sorted(model["a"]._modules.items(), reverse=odd))
    options = {"prefix": "a.", "strict": False, **options}
    try:
        load_pretrained(model, folder, progress=False, **options)
    except CheckpointError as error:
        return str(error), all(x.is_meta for x in model.parameters())
    return "loaded", False


SAYS = {
    "dtype": r"the files are not the same on ranks 0 and 2: 'net.bias' is torch.float32 \[4\] on rank 0 and "
    r"torch.float16 \[4\] on rank 2",
    "one more": r"the files .*: 'other.bias' is not there on rank 0 and torch.float32 \[4\] on rank 2",
    "option": r"the option dtype is not .* 2: it is None on rank 0 and torch.bfloat16 on rank 2",
    "head": r"no file holds a.head.weight, which is \[2, 2\] torch.float32 on rank 0 and \[3, 2\] .* rank 2",
    "order": "no file holds the same on all ranks, but in another order",
    "prefix": "the part of the model is not .* 2: it is 'a.' on rank 0 and 'b.' on rank 2",
    "names": "the names in the files are not .* 2: 'a.more.bias' is not there on rank 0 and missing on",
}


@pytest.mark.parametrize("way", list(SAYS))
def test_ranks_that_would_load_different_things_are_refused(way: str, tmp_path: Path) -> None:
    found = run_ranks(3, loads, tmp_path, way)
    assert len({said for said, _ in found}) == 1
    with pytest.raises(CheckpointError, match=SAYS[way]):
        raise CheckpointError(found[0][0])
    assert all(untouched for _, untouched in found)


def test_ranks_with_copies_of_the_same_files_load_them(tmp_path: Path) -> None:
    for said, _ in run_ranks(2, loads, tmp_path, "keys"):
        assert said == "loaded"  # other words for the same

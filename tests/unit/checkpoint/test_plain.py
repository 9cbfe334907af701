"""What is no plain container becomes one, or is refused by its place."""

from __future__ import annotations

from enum import Enum, IntEnum
from pathlib import Path

import numpy as np
import pytest

from lightning_cp.checkpoint.read import open_checkpoint
from lightning_cp.checkpoint.save import save_checkpoint
from lightning_cp.checkpoint.tree import make_plain
from lightning_cp.errors import CheckpointError
from tests.helpers.checkpoint.states import same

FORMS = ("full", "sharded")


class Colour(str, Enum):  # noqa: UP042 - whose str() is not its value
    RED = "red"


class Level(IntEnum):
    HIGH = 3


class Half(float, Enum):
    HALF = 0.5


class Shouted(str):
    __slots__ = ()

    def __str__(self) -> str:
        return self.upper()


@pytest.mark.parametrize("form", FORMS)
def test_subclasses_are_saved_as_their_values(form: str, tmp_path: Path) -> None:
    values = {"colour": Colour.RED, "level": Level.HIGH, "half": Half.HALF, "own": Shouted("a")}
    save_checkpoint(
        {"hyper_parameters": values, "by": {"x": [Colour.RED]}}, tmp_path / "a", form=form
    )
    got = open_checkpoint(tmp_path / "a").read()
    assert same(got["hyper_parameters"], {"colour": "red", "level": 3, "half": 0.5, "own": "a"})
    assert same(got["by"], {"x": ["red"]})


@pytest.mark.parametrize("form", FORMS)
def test_arrays_that_are_no_tensors(form: str, tmp_path: Path) -> None:
    """They come back as the arrays that they were."""
    arrays = {
        "names": np.array([["a", "bc"], ["d", "e"]]),
        "raw": np.array([b"a", b"bc"]),
        "none": np.array([], dtype=str),
        "big": np.array([1, 2], dtype=">i4"),
    }
    save_checkpoint({"hyper_parameters": dict(arrays)}, tmp_path / "a", form=form)
    got = open_checkpoint(tmp_path / "a").read()["hyper_parameters"]
    for name in arrays:
        assert isinstance(got[name], np.ndarray)
        assert np.array_equal(got[name], arrays[name]), name


ODD = {
    "NumPy array of datetime64": np.array(["2026-01-31"], dtype="datetime64[D]"),
    r"NumPy array of \[\('a', ": np.array([(1, 2.5)], dtype=[("a", int), ("b", float)]),
    "numpy.longdouble": np.longdouble(1.5),
}


@pytest.mark.parametrize(("says", "odd"), ODD.items(), ids=str)
def test_numbers_that_cannot_be_saved_are_named(says: str, odd: object) -> None:
    with pytest.raises(CheckpointError, match=rf"hyper_parameters\.odd is a {says}"):
        make_plain({"hyper_parameters": {"odd": odd}})
    made = make_plain({"hyper_parameters": {"odd": odd, "x": 1}}, may_lack=("hyper_parameters",))
    assert made.tree == {"hyper_parameters": {"x": 1}}
    assert made.unwritable == ["hyper_parameters.odd"]

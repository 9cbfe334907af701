"""Boxes of tensors of any shape, against indexing; buffers so small that everything has to be cut."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from lightning_cp.checkpoint.pretrained import reader as reader_module
from lightning_cp.checkpoint.pretrained.files import read_header
from lightning_cp.checkpoint.pretrained.reader import SliceReader
from lightning_cp.errors import CheckpointError

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@st.composite
def boxes(draw: Any) -> tuple[list[int], list[int], list[int]]:
    """A shape, and offsets and lengths within it; seldom of nothing, or of a single number."""
    sizes = st.integers(2, 6)
    shape = draw(st.lists(sizes, min_size=2, max_size=4) | st.lists(sizes | st.just(0), max_size=1))
    offsets = [draw(st.integers(0, max(0, size - 1))) for size in shape]
    least = draw(st.sampled_from([1, 1, 1, 0]))
    lengths = [
        draw(st.integers(min(least, size - at), size - at))
        for size, at in zip(shape, offsets, strict=True)
    ]
    return shape, offsets, lengths


def at_most(count: int) -> Callable[..., int]:
    """``preadv`` that reads no more than so many bytes at a time, as signals and other systems have it."""

    def preadv(fd: int, views: list[memoryview], start: int) -> int:
        room, some = count, []
        for view in views:
            some.append(view[:room])
            room -= len(some[-1])
        return real(fd, some, start)

    real = os.preadv
    return preadv


@settings(max_examples=300)
@given(
    box=boxes(),
    stored=st.sampled_from(DTYPES),
    wanted=st.sampled_from(DTYPES),
    limits=st.fixed_dictionaries(
        {
            "DIRECT_BYTES": st.integers(8, 64),
            "BUFFER_BYTES": st.integers(8, 64),
            "READ_THROUGH_BYTES": st.integers(0, 64),
            "MAX_VIEWS": st.integers(2, 9),
        }
    ),
    short=st.integers(1, 64),
    apart=st.booleans(),
)
def test_a_box_is_what_indexing_gives(
    box: Any, stored: Any, wanted: Any, limits: dict[str, int], short: int, apart: bool
) -> None:
    shape, offsets, lengths = box
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape).to(stored)
    with pytest.MonkeyPatch.context() as patch, _folder() as folder:
        for name, limit in limits.items():
            patch.setattr(reader_module, name, limit)
        patch.setattr(os, "preadv", at_most(short))
        save_file({"before": torch.ones(3), "x": whole}, folder / "x.safetensors")
        counted: list[int] = []
        into = torch.full(lengths, -1.0, dtype=wanted)
        if apart and lengths:  # a part of something larger
            into = torch.full([2 * n for n in lengths], -1.0, dtype=wanted)
            into = into[tuple(slice(0, n) for n in lengths)]
        with SliceReader(counted.append) as reader:
            reader.read(read_header(folder / "x.safetensors")["x"], offsets, into)
        place = tuple(slice(at, at + n) for at, n in zip(offsets, lengths, strict=True))
        assert torch.equal(into, whole[place].to(wanted))
        assert sum(counted) == into.numel() * stored.itemsize
        assert max(counted, default=0) <= max(limits["DIRECT_BYTES"], limits["BUFFER_BYTES"])


def _folder() -> Any:
    import tempfile

    class Folder(tempfile.TemporaryDirectory[str]):
        def __enter__(self) -> Any:
            return Path(super().__enter__())

    return Folder()


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"x": torch.ones(100), "y": torch.ones(100)}, file)
    entries = read_header(file)
    with SliceReader() as reader:
        reader.read(entries["x"], (0,), torch.empty(100))
        os.truncate(file, file.stat().st_size - 10)
        with pytest.raises(CheckpointError, match=r"model.safetensors ends within 'y'"):
            reader.read(entries["y"], (0,), torch.empty(100))


@pytest.mark.parametrize("how", ["replaced", "written to"])
def test_another_file_of_that_name_is_not_read(how: str, tmp_path: Path) -> None:
    file, other = tmp_path / "model.safetensors", tmp_path / "other"
    save_file({"x": torch.ones(100)}, file)
    entry = read_header(file)["x"]
    save_file({"x": torch.zeros(100)}, other)
    if how == "replaced":
        os.utime(other, ns=(0, file.stat().st_mtime_ns))
        other.rename(file)
    else:
        file.write_bytes(other.read_bytes())
    with SliceReader() as reader, pytest.raises(CheckpointError, match=r"not the file any more"):
        reader.read(entry, (0,), torch.empty(100))

"""Boxes of tensors of any shape, against indexing; buffers so small that everything has to be cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from lightning_cp.checkpoint.pretrained import reader as reader_module
from lightning_cp.checkpoint.pretrained.header import read_header
from lightning_cp.checkpoint.pretrained.reader import SliceReader

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@st.composite
def boxes(draw: Any) -> tuple[list[int], list[int], list[int]]:
    """A shape, and offsets and lengths within it."""
    shape = draw(st.lists(st.integers(0, 6), min_size=0, max_size=4))
    offsets = [draw(st.integers(0, size)) for size in shape]
    lengths = [draw(st.integers(0, size - at)) for size, at in zip(shape, offsets, strict=True)]
    return shape, offsets, lengths


@settings(max_examples=150)
@given(
    box=boxes(),
    stored=st.sampled_from(DTYPES),
    wanted=st.sampled_from(DTYPES),
    straight=st.integers(1, 64),
    buffer=st.integers(8, 64),
    seek=st.integers(0, 64),
    apart=st.booleans(),
)
def test_a_box_is_what_indexing_gives(
    box: Any, stored: Any, wanted: Any, straight: int, buffer: int, seek: int, apart: bool
) -> None:
    shape, offsets, lengths = box
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape).to(stored)
    with pytest.MonkeyPatch.context() as patch, _folder() as folder:
        patch.setattr(reader_module, "STRAIGHT", straight)
        patch.setattr(reader_module, "BUFFER", buffer)
        patch.setattr(reader_module, "SEEK", seek)
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
        assert max(counted, default=0) <= max(straight, buffer)


def _folder() -> Any:
    import tempfile

    class Folder(tempfile.TemporaryDirectory[str]):
        def __enter__(self) -> Any:
            return Path(super().__enter__())

    return Folder()


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path: Path) -> None:
    from lightning_cp.errors import CheckpointError

    file = tmp_path / "model.safetensors"
    save_file({"x": torch.ones(100)}, file)
    entry = read_header(file)["x"]
    file.write_bytes(file.read_bytes()[:-10])
    with (
        SliceReader() as reader,
        pytest.raises(CheckpointError, match=r"model.safetensors ends within 'x'"),
    ):
        reader.read(entry, (0,), torch.empty(100))

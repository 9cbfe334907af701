"""Saves from a device: through one pinned buffer, on a stream of its own, with the bytes of the CPU's."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_cp.checkpoint import save
from lightning_cp.checkpoint.full import manifest_of_file
from lightning_cp.checkpoint.pinned_buffer import PinnedBuffer
from tests.helpers.pretended.streams import StreamedDevice, Streams

HALF = 64
NUMBERS = torch.arange(40)
TENSORS = {
    "float64": NUMBERS.double().sin().view(5, 8),
    "bfloat16": NUMBERS.bfloat16(),
    "bool": NUMBERS % 3 == 0,
    "complex": torch.complex(NUMBERS.float(), -NUMBERS.float()),
    "one number": torch.tensor(7, dtype=torch.int32),
    "no number": torch.empty(0, 3),
    "a half": NUMBERS[: HALF // 8].clone(),
    "transposed": NUMBERS.double().view(5, 8).t(),
    "a column": NUMBERS.view(5, 8)[:, 2],
    "a part": NUMBERS[7:23],
    "expanded": torch.tensor([3.0]).expand(4),
}


@contextmanager
def device(monkeypatch: pytest.MonkeyPatch | None = None) -> Iterator[Streams]:
    """A device with streams; saves have small halves."""
    if monkeypatch is not None:
        init = PinnedBuffer.__init__
        monkeypatch.setattr(PinnedBuffer, "__init__", lambda self: init(self, HALF))
    with StreamedDevice(0).with_streams(1.0) as streams:
        yield streams


def there(x: torch.Tensor) -> torch.Tensor:
    """A tensor with the same strides on the device."""
    whole = torch.empty(x.untyped_storage().nbytes() // x.itemsize, dtype=x.dtype)
    whole.set_(x.untyped_storage())
    return whole.to("cuda").as_strided(x.size(), x.stride(), x.storage_offset())


@pytest.mark.parametrize("name", TENSORS)
def test_copies_are_those_of_pytorch(name: str) -> None:
    want = TENSORS[name]
    buffer = PinnedBuffer(HALF)
    with device() as streams:
        x = there(want)
        copy = buffer.copy(x)
        values = b"".join(bytes(piece) for piece in buffer.values(x))
        pageable = [wait.kind for wait in streams.waits if wait.kind == "copy to host"]
    assert copy.stride() == want.clone().stride()
    assert type(copy) is torch.Tensor
    torch.testing.assert_close(copy, want, rtol=0, atol=0)
    assert values == want.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    # PyTorch copies what is not its memory, or not in order.
    direct = {"a column": 2, "expanded": 2, "no number": 2, "transposed": 1}
    assert len(pageable) == direct.get(name, 0)


def test_the_next_piece_travels_while_this_one_is_used() -> None:
    """And not into the same half: what is used stays, though the next piece may arrive at any time."""
    x = torch.arange(100)
    buffer = PinnedBuffer(HALF)
    with device():
        moved = x.to("cuda")
        seen: list[int] = []
        places = set[int]()
        for number, piece in enumerate(buffer.values(moved)):
            (stream,) = buffer._streams.values()
            begun: Any = stream
            assert begun.given == min(number + 2, 13)
            values = torch.frombuffer(piece, dtype=torch.int64)
            places.add(values.data_ptr())
            seen += values.tolist()
    assert seen == x.tolist()
    assert len(places) == 2


def test_the_stream_waits_for_what_computes_the_values() -> None:
    """The harness refuses a copy that could begin before."""
    with device() as streams:
        x = torch.ones(30).to("cuda") * 2
        streams.compute(5.0)
        buffer = PinnedBuffer(HALF)
        assert buffer.copy(x).tolist() == [2.0] * 30
        (stream,) = buffer._streams.values()
        beside: Any = stream
        assert beside is not streams.computing
        assert beside.clock == pytest.approx(streams.computing.clock + 120)


def test_tensors_of_the_cpu_are_not_copied() -> None:
    x, buffer = torch.arange(9), PinnedBuffer()
    assert buffer.copy(x).data_ptr() == x.data_ptr()
    (values,) = buffer.values(x)
    assert torch.frombuffer(values, dtype=torch.int64).data_ptr() == x.data_ptr()
    assert buffer._halves == ()


def state() -> dict[str, Any]:
    torch.manual_seed(1)
    return {
        "weights": {"a": torch.randn(9, 11), "b": torch.randn(3)},
        "step": torch.tensor(4),
        "n": 2,
    }


def on_device(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: on_device(x) for key, x in tree.items()}
    return tree.to("cuda") if isinstance(tree, torch.Tensor) else tree


@pytest.mark.parametrize("background", [False, True], ids=["at once", "background"])
@pytest.mark.parametrize("form", ["full", "sharded"])
def test_files_are_those_of_the_cpu(
    form: str, background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda size: "0" * 2 * size)
    save.save_checkpoint(state(), tmp_path / "cpu", form=form)
    with device(monkeypatch) as streams:
        tree = on_device(state())
        streams.waits.clear()
        planned, _ = save.plan_save(tree, tmp_path / "device", form=form)
        if background:
            running = save.BackgroundSave(planned)
            copied = [wait.kind for wait in streams.waits]
            tree["weights"]["a"].zero_()  # training goes on
            running.wait()
            assert running.error is None
            assert [wait.kind for wait in streams.waits] == copied, "writing needs no device"
        else:
            save.finish_save(planned)
        assert "copy to host" not in [wait.kind for wait in streams.waits]
    if form == "full":
        want, got = (manifest_of_file(tmp_path / name) for name in ("cpu", "device"))
        assert want is not None
        assert got is not None
        assert got.files == want.files, "sha256 of the archive"
    else:
        (shard,) = (tmp_path / "cpu").glob("*.safetensors")
        assert (tmp_path / "device" / shard.name).read_bytes() == shard.read_bytes()


def test_a_write_that_fails_leaves_no_copy_under_way(tmp_path: Path) -> None:
    buffer = PinnedBuffer(HALF)
    with device():
        x = torch.arange(100).to("cuda")
        for _ in buffer.values(x):
            break
        (stream,) = buffer._streams.values()
        beside: Any = stream
        assert beside.given == beside.done == 2
        assert buffer.copy(x * 2).tolist() == (torch.arange(100) * 2).tolist()

"""Parcels: any object arrives as it was, its tensors included, without what they are views of."""

from __future__ import annotations

import collections
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_cp.comm.consensus import broadcast_packed, pack
from lightning_cp.utils.containers import tensors_of
from tests.helpers.pool import run_ranks
from tests.unit.utils.test_containers import CONTAINERS, tensor

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
    torch.complex64,
]
SENDABLE = [name for name in CONTAINERS if name != "read-only"]


def of_all_dtypes() -> list[torch.Tensor]:
    values = torch.arange(-3, 9).view(3, 4)
    found = [values.to(dtype) for dtype in DTYPES]
    return [*found, values[0, 0], values[:0], values.t(), found[-1].conj(), values[:, ::2]]


class Whole:
    """What nobody but its owner can look into."""

    def __init__(self, x: torch.Tensor) -> None:
        self.inside = {"x": x, "same": x}


def sent(rank: int, world_size: int, name: str) -> Any:
    value = CONTAINERS[name][0]() if name in CONTAINERS else of_all_dtypes()
    got = broadcast_packed(pack(value) if rank == 0 else None, dist.group.WORLD)  # type: ignore[arg-type]
    assert type(got) is type(value)
    for (at, x), (other, y) in zip(tensors_of(got), tensors_of(value), strict=True):
        assert at == other
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        assert torch.equal(x.to(torch.complex128), y.to(torch.complex128))
        x.zero_() if x.dtype != torch.float8_e4m3fn else None  # memory of its own
    return True


@pytest.mark.parametrize("name", [*SENDABLE, "all dtypes"])
def test_everything_arrives(name: str) -> None:
    assert run_ranks(2, sent, name) == [True, True]


def shared(rank: int, world_size: int) -> bool:
    got = broadcast_packed(pack(Whole(tensor())) if rank == 0 else None, dist.group.WORLD)  # type: ignore[arg-type]
    assert got.inside["x"] is got.inside["same"]
    return torch.equal(got.inside["x"], tensor())


def test_what_is_one_tensor_stays_one() -> None:
    assert run_ranks(2, shared) == [True, True]


def test_a_view_does_not_take_all_of_its_memory_along() -> None:
    view = torch.zeros(1_000_000)[:4]
    parcel = pack({"x": view})
    assert len(parcel.rest) < 1000
    assert len(pickle.dumps(view)) > 4_000_000
    assert sum(x.numel() for x in parcel.tensors) == 4


def test_what_cannot_be_sent_is_said_before_anything_is() -> None:
    with pytest.raises(Exception, match=r"(?i)pickle"):
        pack(collections.defaultdict(lambda: 0, x=tensor()))

"""The pretended device: what a GPU would do, and what it notes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.pretended.device import MixedDevicesError, PretendedDevice

CUDA = "cuda:1"


@pytest.fixture
def device() -> Iterator[PretendedDevice]:
    """The second device."""
    with PretendedDevice(1).use() as used:
        yield used


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(3, 4, device="cuda"),
        lambda: torch.randn(3, 4).to(CUDA),
        lambda: torch.randn(3, 4).cuda(),
        lambda: torch.tensor([[1.0]], device="cuda"),
        lambda: torch.as_tensor([1.0], dtype=torch.float64, device="cuda"),
        lambda: torch.as_tensor(torch.ones(2), device="cuda"),
        lambda: torch.ones(3).to(torch.ones(3, device=CUDA)),
        lambda: torch.ones(3, device=CUDA).new_tensor([1.0]),
        lambda: torch.ones(3, device=CUDA)[1:].view(2, 1),
        lambda: torch.ones(2, 3, device=CUDA).norm(),
        lambda: nn.Linear(3, 4).to("cuda").weight,
    ],
)
def test_tensors_say_that_they_are_on_it(
    device: PretendedDevice, make: Callable[[], torch.Tensor]
) -> None:
    x = make()
    assert x.device == torch.device(CUDA)
    assert x.is_cuda
    assert not x.cpu().is_cuda


def test_as_tensor_of_a_tensor_keeps_its_place_and_its_graph(device: PretendedDevice) -> None:
    x = torch.ones(2, device=CUDA)
    torch.as_tensor(x, dtype=None, device=CUDA).zero_()
    assert x.cpu().tolist() == [0.0, 0.0]
    own = torch.ones(2, requires_grad=True)
    torch.as_tensor(own, device=CUDA).sum().backward()
    assert own.grad is not None
    assert not own.grad.is_cuda


def test_gradients_and_optimizers_stay_on_it(device: PretendedDevice) -> None:
    model = nn.Sequential(nn.Embedding(5, 8), nn.LayerNorm(8), nn.Linear(8, 5)).to(CUDA)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.tensor([1, 2, 3]).to(CUDA)
    F.cross_entropy(model(ids), ids).backward()
    optimizer.step()
    state = [x for of in optimizer.state.values() for x in of.values() if x.dim()]
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert {x.device for x in (*grads, *state)} == {torch.device(CUDA)}


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x + torch.ones(3),
        lambda x: torch.cat([x, torch.ones(3)]),
        lambda x: torch.where(torch.tensor([True, False, True]), x, 0.0),
        lambda x: F.linear(x, torch.ones(2, 3)),
        lambda x: x.mul_(torch.ones(3)),
        lambda x: torch.ones(3).mul_(x),
    ],
)
def test_operators_of_both_devices_are_refused(
    device: PretendedDevice, mix: Callable[[torch.Tensor], Any]
) -> None:
    with pytest.raises(MixedDevicesError, match="test_pretended_device"):
        mix(torch.ones(3, device=CUDA))


def test_scalars_of_the_host_are_taken(device: PretendedDevice) -> None:
    x = torch.ones(3, device=CUDA)
    assert (x * 2.0 + torch.tensor(1.0)).tolist() == [3.0, 3.0, 3.0]


WAITS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "item": (lambda x: x.sum().item(), "_local_scalar_dense"),
    "float": (lambda x: float(x[0]), "_local_scalar_dense"),
    "bool": (lambda x: bool((x > 0).all()), "_local_scalar_dense"),
    "tolist": (lambda x: x.tolist(), "copy to host"),
    "cpu": (lambda x: x.cpu(), "copy to host"),
    "equal": (lambda x: torch.equal(x, x), "equal"),
    "nonzero": (lambda x: x.nonzero(), "nonzero"),
    "mask": (lambda x: x[x > 0], "index by a mask"),
    "index": (lambda x: x[torch.tensor([0, 2])], "index from the host"),
    "tensor": (lambda x: torch.tensor([1, 2], device=x.device), "copy to device"),
    "to": (lambda x: torch.ones(3).to(x.device), "copy to device"),
    "pageable": (
        lambda x: torch.ones(3).to(x.device, non_blocking=True),
        "copy to device, of memory that is not pinned",
    ),
    "copy_": (lambda x: torch.empty(3).copy_(x), "copy to host"),
    "synchronize": (lambda x: torch.cuda.synchronize(), "cuda.synchronize"),
    "event": (lambda x: torch.cuda.Event().synchronize(), "event.synchronize"),
}


@pytest.mark.parametrize("name", WAITS)
def test_waits_are_noted_with_their_place(device: PretendedDevice, name: str) -> None:
    x = torch.ones(3, device=CUDA)
    wait, kind = WAITS[name]
    device.phase = "now"
    wait(x)
    (noted,) = device.waits
    assert (noted.kind, noted.phase) == (kind, "now")
    assert noted.place.startswith("unit/helpers/test_pretended_device.py:")
    assert not noted.is_ours


@pytest.mark.parametrize(
    "work",
    [
        lambda x: (x * 2).sum(),
        lambda x: x[1:].clone(),
        lambda x: x.gather(0, torch.zeros(3, dtype=torch.int64, device=x.device)),
        lambda x: torch.ones(3).pin_memory().to(x.device, non_blocking=True),
        lambda x: torch.empty(3, pin_memory=True).copy_(x, non_blocking=True),
        lambda x: torch.cuda.Event().record(),
    ],
)
def test_work_of_the_device_is_no_wait(
    device: PretendedDevice, work: Callable[[torch.Tensor], Any]
) -> None:
    work(torch.ones(3, device=CUDA))
    assert device.waits == []


def test_bytes_are_counted(device: PretendedDevice) -> None:
    device.phase = "now"
    torch.ones(3).to(CUDA).cpu()
    assert device.copied == {("now", "to device"): 12, ("now", "to host"): 12}


def test_all_is_as_before_afterwards() -> None:
    before = torch.cuda.is_available(), torch.cuda.Event
    with PretendedDevice(0).use():
        assert torch.cuda.is_available()
    assert (torch.cuda.is_available(), torch.cuda.Event) == before
    assert not torch.__future__.get_overwrite_module_params_on_conversion()

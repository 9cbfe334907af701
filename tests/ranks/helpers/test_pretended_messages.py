"""Messages of a pretended device: the package sends tensors of the host over groups of the host only."""

from __future__ import annotations

import pytest
import torch

from lightning_cp.comm.reduce import all_sum
from lightning_cp.layout.axes import Flat
from lightning_cp.mesh import ContextParallelMesh
from tests.helpers.pool import run_ranks
from tests.helpers.pretended.device import MixedDevicesError, PretendedDevice


def sums(rank: int, world_size: int) -> list[float]:
    with PretendedDevice(rank).use() as device:
        mesh = ContextParallelMesh(device_type="cuda", ring_size=1, ulysses_size=world_size)
        here, there = torch.ones(1), torch.ones(1, device=device.device)
        with pytest.raises(MixedDevicesError, match="of the host over a group of cuda:"):
            all_sum(here, mesh.group(Flat.CP))
        with pytest.raises(TypeError, match="NCCL takes no <"):
            all_sum(there.to(torch.int16), mesh.group(Flat.CP))
        by_device = all_sum(there, mesh.group(Flat.CP))
        by_host = all_sum(here, mesh.control_group(Flat.CP))
        assert by_device.is_cuda
        assert by_host.is_cpu
        return [float(by_device), float(by_host)]


def test_tensors_of_the_host_do_not_travel_over_groups_of_the_device() -> None:
    assert run_ranks(2, sums) == [[2.0, 2.0]] * 2

"""Meshes for cases that share a process: PyTorch's DTensor remembers those of earlier cases."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor.debug import _clear_sharding_prop_cache


def mesh_of(*sizes: int) -> DeviceMesh:
    """A mesh over all ranks, whose groups no cache mistakes for others."""
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    _clear_sharding_prop_cache()
    return init_device_mesh("cpu", sizes)

"""Meshes for cases that share a process: PyTorch's DTensor remembers those of earlier cases."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_cp.utils.dtensor import forget_meshes


def mesh_of(*sizes: int) -> DeviceMesh:
    """A mesh over all ranks, whose groups no cache mistakes for others."""
    forget_meshes()
    return init_device_mesh("cpu", sizes)

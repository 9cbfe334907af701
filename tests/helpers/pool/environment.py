"""Lightning on ranks that run already."""

from __future__ import annotations

import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from typing_extensions import override


class PoolEnvironment(ClusterEnvironment):
    """The cluster of the pool's default group, for use inside a case only.

    ``Trainer(accelerator="cpu", devices=world_size, plugins=[PoolEnvironment()], strategy=...)``
    then starts nothing and uses the group that stands.
    """

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_address(self) -> str:
        return "127.0.0.1"

    @property
    @override
    def main_port(self) -> int:
        raise RuntimeError("the group of the pool stands already; nobody should rendezvous.")

    @staticmethod
    @override
    def detect() -> bool:
        return False

    @override
    def world_size(self) -> int:
        return dist.get_world_size()

    @override
    def set_world_size(self, size: int) -> None:
        if size != dist.get_world_size():
            raise RuntimeError(f"the Trainer wants {size} ranks, the case has {self.world_size()}.")

    @override
    def global_rank(self) -> int:
        return dist.get_rank()

    @override
    def set_global_rank(self, rank: int) -> None:
        if rank != dist.get_rank():
            raise RuntimeError(f"the Trainer says rank {rank}, the case has {self.global_rank()}.")

    @override
    def local_rank(self) -> int:
        return dist.get_rank()

    @override
    def node_rank(self) -> int:
        return 0

"""Tensors of a checkpoint: stored in blocks, read into shards of a run, or whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint import StorageReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.tensor import DTensor
from torch.futures import Future

from lightning_cp.watchdog.phase import sign_of_life


@dataclass(frozen=True)
class Chunk:
    """A block of a tensor that is stored in one place.

    Args:
        offsets: of its first element in the tensor.
        sizes: its shape.
        read: returns it on the CPU, mapped from the file, so that unused values are not read.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    read: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint that was not read yet."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    def whole(self) -> torch.Tensor:
        """The whole tensor on the CPU, in new memory."""
        made = torch.empty(self.shape, dtype=self.dtype)
        for chunk in self.chunks:
            _block(made, chunk.offsets, chunk.sizes).copy_(chunk.read())
            sign_of_life()
        return made


def as_stored(tensor: torch.Tensor) -> StoredTensor:
    """A tensor in memory, as if stored in one block."""
    chunk = Chunk((0,) * tensor.dim(), tuple(tensor.shape), lambda: tensor)
    return StoredTensor(tensor.dtype, tuple(tensor.shape), (chunk,))


def whole(tensor: torch.Tensor, *, keep: bool = True) -> torch.Tensor | None:
    """A whole tensor on the CPU, assembled if it is distributed.

    Collective for a ``DTensor``: all ranks of its mesh call it with the same one. Shards that were offloaded
    to the CPU of a CUDA mesh travel through the device, one tensor at a time.

    Args:
        tensor: any; shape and dtype stay.
        keep: True on ranks that need it; the others only send, and get ``None``.
    """
    made = assemble(tensor)
    return made.cpu() if keep else None


def assemble(tensor: torch.Tensor) -> torch.Tensor:
    """A whole tensor on its device, assembled if it is distributed: the communication of ``whole``."""
    made = tensor.detach()
    if isinstance(made, DTensor):
        local, mesh = made.to_local(), made.device_mesh
        if local.device.type != mesh.device_type:
            made = DTensor.from_local(
                local.to(mesh.device_type),
                mesh,
                made.placements,
                run_check=False,
                shape=made.shape,
                stride=made.stride(),
            )
        made = made.full_tensor()
    sign_of_life()
    return made


def read_into(targets: Mapping[str, torch.Tensor], stored: Mapping[str, StoredTensor]) -> None:
    """Read into tensors of the same keys and shapes; for ``DTensor`` only this rank's shards.

    There is no communication. Only the needed values are read, for any division of the checkpoint.
    """
    reader = StoredTensorReader({key: stored[key] for key in targets})
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(targets), reader.read_metadata(), is_coordinator=True)
    plan = planner.finish_plan(planner.create_local_plan())
    reader.read_data(plan, planner).wait()


def empty_like(template: torch.Tensor, stored: StoredTensor) -> torch.Tensor:
    """An empty tensor with the checkpoint's dtype, and the distribution and device of ``template``."""
    return torch.empty_like(template.detach(), dtype=stored.dtype)


class StoredTensorReader(StorageReader):
    """A reader for ``torch.distributed.checkpoint``: blocks of tensors, no pickles."""

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        self._stored = stored

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: there is no state between loads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Shapes and blocks of every tensor."""
        return Metadata({key: _metadata_of(item) for key, item in self._stored.items()})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy every block of the plan."""
        for item in plan.items:
            self._read(item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, item: ReadItem, planner: LoadPlanner) -> None:
        offset = tuple(item.storage_index.offset or ())
        chunks = self._stored[item.storage_index.fqn].chunks
        chunk = next(x for x in chunks if x.offsets == offset)
        source = _block(chunk.read(), item.storage_offsets, item.lengths)
        target = planner.resolve_tensor(item).detach()
        target.copy_(source)
        planner.commit_tensor(item, target)
        sign_of_life()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Accept any id: readers are constructed directly."""
        return False


def _metadata_of(item: StoredTensor) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(x.offsets), torch.Size(x.sizes)) for x in item.chunks]
    return TensorStorageMetadata(TensorProperties(item.dtype), torch.Size(item.shape), chunks)


def _block(x: torch.Tensor, offsets: Any, sizes: Any) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        x = x.narrow(dim, offset, size)
    return x

"""Our checks and bounded reading behind PyTorch's interface, for code that calls ``dcp.load`` itself."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from lightning_cp.checkpoint.pretrained.files import open_weight_files
from lightning_cp.checkpoint.pretrained.reader import SliceReader


class CheckedStorageReader(HuggingFaceStorageReader):
    """PyTorch's reader of safetensors files, which also follows the index, refuses bad files and maps none.

    ``torch.distributed.checkpoint.load(state_dict, storage_reader=CheckedStorageReader(path))``

    Args:
        path: as for ``load_pretrained``.

    Raises:
        CheckpointError: see ``open_weight_files``.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._checkpoint = open_weight_files(path)
        super().__init__(str(self._checkpoint.path))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Names, shapes and dtypes of the checked headers."""
        entries = self._checkpoint.entries
        described = {
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=entry.dtype),
                size=torch.Size(entry.shape),
                chunks=[
                    ChunkStorageMetadata(
                        torch.Size([0] * len(entry.shape)), torch.Size(entry.shape)
                    )
                ],
            )
            for name, entry in entries.items()
        }
        stored = {
            MetadataIndex(name, torch.Size([0] * len(entry.shape))): entry
            for name, entry in entries.items()
        }
        return Metadata(
            state_dict_metadata=described,  # type: ignore[arg-type]
            storage_data=stored,
            storage_meta=StorageMeta(load_id=self.load_id),
        )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read every item straight into the tensor that the planner names."""
        entries = self._checkpoint.entries
        items = sorted(
            plan.items, key=lambda x: (_at(entries[x.storage_index.fqn]), tuple(x.storage_offsets))
        )
        with torch.no_grad(), SliceReader() as reader:
            for item in items:
                target = planner.resolve_tensor(item).detach()
                reader.read(entries[item.storage_index.fqn], tuple(item.storage_offsets), target)
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _at(entry: Any) -> tuple[str, int]:
    return entry.file.name, entry.start

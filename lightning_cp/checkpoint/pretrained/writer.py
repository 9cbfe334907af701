"""Writer of safetensors files, one tensor at a time: the header comes first, since all sizes are known."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from lightning_cp.checkpoint.pretrained.files import DTYPES, SINGLE
from lightning_cp.errors import ConfigError
from lightning_cp.watchdog.phase import PIECE, sign_of_life

FOR_PYTORCH = {"format": "pt"}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorSpec:
    """A file's entry for a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def split_into_files(tensors: Mapping[str, TensorSpec], limit: int) -> dict[str, list[str]]:
    """File names and the keys in each, in order; a file has at most ``limit`` bytes, or one tensor."""
    files: list[list[str]] = [[]]
    size = 0
    for key, tensor in tensors.items():
        if files[-1] and size + tensor.nbytes > limit:
            files.append([])
            size = 0
        files[-1].append(key)
        size += tensor.nbytes
    if len(files) == 1:
        return {SINGLE: files[0]}
    total = len(files)
    return {
        f"model-{number:05d}-of-{total:05d}.safetensors": keys
        for number, keys in enumerate(files, start=1)
    }


def index_text(tensors: Mapping[str, TensorSpec], files: Mapping[str, Sequence[str]]) -> str:
    """The index text, with the file of each key, as transformers writes it."""
    where = {key: name for name, keys in files.items() for key in keys}
    total = sum(tensor.nbytes for tensor in tensors.values())
    return json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2) + "\n"


class TensorFile:
    """A new file, whose tensors are written in the order of ``tensors``.

    Args:
        path: must not exist.
        tensors: entries of its tensors.
    """

    def __init__(self, path: Path, tensors: Mapping[str, TensorSpec]) -> None:
        self.order = aligned_order(tensors)
        self._stream: BinaryIO = path.open("xb", buffering=0)
        self._put(memoryview(header_bytes({key: tensors[key] for key in self.order})))

    def write(self, x: torch.Tensor) -> None:
        """Append the next tensor, on the CPU."""
        flat: Any = x.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        self._put(memoryview(flat))

    def _put(self, rest: memoryview) -> None:
        while rest:
            rest = rest[self._stream.write(rest[:PIECE]) :]
            sign_of_life()

    def sync(self) -> None:
        """Flush the file to disk."""
        self._stream.flush()
        os.fsync(self._stream.fileno())

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def aligned_order(tensors: Mapping[str, TensorSpec]) -> list[str]:
    """Keys with the largest elements first, so that each tensor is aligned for its dtype."""
    return sorted(tensors, key=lambda key: -tensors[key].dtype.itemsize)


def header_bytes(
    tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str] = FOR_PYTORCH, multiple: int = 8
) -> bytes:
    """The length and the header.

    Args:
        tensors: in the order of writing.
        metadata: strings in the header's metadata.
        multiple: alignment of the first tensor in bytes.

    Raises:
        ConfigError: a dtype that the format does not have.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for key, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise ConfigError(
                f"{key} has dtype {tensor.dtype}, which safetensors does not hold. "
                "Export with dtype=, or convert it before."
            )
        entries[key] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % multiple)
    return len(text).to_bytes(8, "little") + text

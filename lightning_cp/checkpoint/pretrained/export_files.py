"""The files of an export: every rank takes part in having tensors whole, and one of them writes."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor, Shard

from lightning_cp.checkpoint.failures import shown
from lightning_cp.checkpoint.pretrained.export_plan import Export, Joined
from lightning_cp.checkpoint.pretrained.write import Shape, TensorFile, aligned
from lightning_cp.checkpoint.tensors import assembled
from lightning_cp.comm.objects import told
from lightning_cp.comm.outcome import share_outcome
from lightning_cp.errors import CheckpointError, ConfigError

WHAT = "exporting weights"
"""For messages."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Writer:
    """The rank that writes, or (without a folder) one that takes part in gathering only.

    An error is kept until all ranks come to know it: before they gather the next tensor, or at the end.

    Args:
        folder: where files are written; on one rank.
        target: what it is to be called, for messages.
        device_type: of the default group's tensors.
    """

    def __init__(self, folder: Path | None, target: Path, device_type: str) -> None:
        self.error: Exception | None = None
        self._folder, self._target, self._device_type = folder, target, device_type
        self._file: TensorFile | None = None

    def try_to(self, act: Callable[[Path], object]) -> None:
        """Do something with the folder, if all went well so far."""
        if self._folder is None or self.error is not None:
            return
        try:
            with told_as_failed(self._target):
                act(self._folder)
        except (CheckpointError, ConfigError) as raised:
            self.error = raised

    def write(self, made: Export) -> None:
        """All files of tensors; every rank comes here.

        Raises:
            CheckpointError: this rank cannot write, or cannot have a tensor whole.
            RankFailure: another rank cannot.
        """
        for name, keys in made.files.items():
            shapes = {key: made.shapes[key] for key in keys}
            self.try_to(partial(self._begin, name, shapes))
            try:
                for key in aligned(shapes):
                    self._add_all(key, made.parts[key], shapes[key].dtype)
                self.try_to(lambda _: self._file and self._file.sync())
            finally:
                if self._file is not None:
                    self._file.close()
                self._file = None

    def gathered(self, made: Export) -> dict[str, torch.Tensor]:
        """All tensors at once, on the rank that writes, empty on others; every rank comes here.

        Raises:
            CheckpointError: this rank cannot have a tensor whole.
            RankFailure: another rank cannot.
        """
        whole: dict[str, torch.Tensor] = {}
        for key, joined in made.parts.items():
            parts = [self._whole(key, x) for x in joined.tensors]
            if self._folder is not None:
                made_of = _side_by_side([x.detach().cpu() for x in parts], joined.dim)
                whole[key] = made_of.to(made.shapes[key].dtype)
        return whole

    def _begin(self, name: str, shapes: Mapping[str, Shape], folder: Path) -> None:
        self._file = TensorFile(folder / name, shapes)

    def _add_all(self, key: str, joined: Joined, dtype: torch.dtype) -> None:
        if joined.dim == 0:  # then they follow each other in the file
            for x in joined.tensors:
                self._add([self._whole(key, x)], 0, dtype)
        else:
            self._add([self._whole(key, x) for x in joined.tensors], joined.dim, dtype)

    def _whole(self, key: str, x: torch.Tensor) -> torch.Tensor:
        """Once all ranks can have it: who fails while it is gathered leaves the others waiting."""
        if isinstance(x, DTensor):
            try:
                if self.error is None:
                    _require_room(key, x)
            except CheckpointError as raised:
                self.error = raised
            share_outcome(self.error, self._device_type, what=WHAT)
        return assembled(x)

    def _add(self, parts: list[torch.Tensor], dim: int, dtype: torch.dtype) -> None:
        file = self._file
        if file is not None:
            self.try_to(
                lambda _: file.write(_side_by_side([x.cpu() for x in parts], dim).to(dtype))
            )


@contextmanager
def told_as_failed(target: Path) -> Iterator[None]:
    """Of an export that has not got its name; what fails after that is told as it is.

    Args:
        target: the name.

    Raises:
        ConfigError: it is that.
        CheckpointError: whatever else was raised.
    """
    try:
        yield
    except (CheckpointError, ConfigError):
        raise
    except OSError as raised:
        advice = "Name a folder that can be written"
        if raised.errno in _FULL:
            advice = "Free some space or name another folder"
        raise CheckpointError(
            f"the export could not be written to {shown(target)} ({told(raised)}), and nothing of it is "
            f"left. {advice}, and call it again: the model is as it was."
        ) from None
    except Exception as raised:  # of the configuration's own save_pretrained, say
        raise CheckpointError(
            f"the export could not be written to {shown(target)}, and nothing of it is left: {told(raised)}. "
            "The model is as it was: call the export again when that is mended."
        ) from raised


def _require_room(key: str, x: DTensor) -> None:
    """Have as much memory as it takes to gather ``x``, and give it back.

    Raises:
        CheckpointError: there is not as much.
    """
    local, device = x.to_local(), x.device_mesh.device_type
    sizes = [x.numel() * x.dtype.itemsize] * (1 if _follow_each_other(x) else 2)
    if local.device.type != device:
        sizes.append(local.nbytes)
    try:
        held = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        del held
    except Exception as raised:
        raise CheckpointError(
            f"{key} of shape {list(x.shape)} ({x.dtype}) cannot be had whole on this rank, which takes "
            f"{sum(sizes):,} bytes on {device} for a while: {told(raised)}. Nothing of the export is left, "
            "and the model is as it was."
        ) from raised


def _follow_each_other(x: DTensor) -> bool:
    """True if shards are the whole as they come, so that nothing else has to be made of them."""
    sharded = [(p, at) for at, p in enumerate(x.placements) if not p.is_replicate()]
    by_rows = all(type(p) is Shard and p.dim == 0 for p, _ in sharded)
    return by_rows and x.shape[:1].numel() % prod(x.device_mesh.size(at) for _, at in sharded) == 0


def _side_by_side(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]

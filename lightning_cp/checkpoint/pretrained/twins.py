"""Tied weights that the files have under several names: they are one parameter only if all are the same."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lightning_cp.checkpoint.pretrained.fresh import computable
from lightning_cp.checkpoint.pretrained.plan import Slice
from lightning_cp.checkpoint.pretrained.reader import STRAIGHT, SliceReader
from lightning_cp.comm.local import local_part
from lightning_cp.errors import CheckpointError


def require_same(one: Slice, tensors: Mapping[str, torch.Tensor], reader: SliceReader) -> None:
    """Compare a slice of the files with what was loaded for its parameter, some rows at a time.

    Raises:
        CheckpointError: they differ.
    """
    held = local_part(tensors[one.parameter])[one.place]
    rows = one.lengths[0] if one.lengths else 1
    each = max(1, STRAIGHT * rows // max(1, held.nbytes))
    for first in range(0, rows, each):
        part = held[first : first + each] if one.lengths else held
        offsets = (one.offsets[0] + first, *one.offsets[1:]) if one.offsets else ()
        other = torch.empty(part.shape, dtype=part.dtype, device=part.device)
        reader.read(one.entry, offsets, other)
        if not _same(computable(part), computable(other)):
            raise CheckpointError(
                f"in the files {one.entry.name!r} has other values than {one.parameter!r}, and in the model "
                "both are one parameter. Build the model without the tie (tie_word_embeddings=False), or "
                f"leave {one.entry.name!r} unread (the model then has the values of the other): "
                f"allow_unexpected=[{one.entry.name!r}]."
            )


def _same(x: torch.Tensor, y: torch.Tensor) -> bool:
    return bool(((x == y) | ((x != x) & (y != y))).all())

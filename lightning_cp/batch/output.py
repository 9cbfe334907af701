"""What a step returned, in original order and length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from lightning_cp.batch.rules import KNOWN_DIMS
from lightning_cp.comm.agreement import agree, checksum, fingerprint
from lightning_cp.containers import is_container, map_tensors, tensors_of
from lightning_cp.errors import BatchMismatchError, ConfigError
from lightning_cp.layout import SequenceLayout
from lightning_cp.mesh import ContextParallelMesh


def unshard_output(
    output: Any, mesh: ContextParallelMesh, layout: SequenceLayout, dims: Mapping[str, int | None]
) -> Any:
    """What a predict step returned, in original order and length, on every rank.

    A tensor is unsharded along its declared dimension, along a known one, or along dimension 1 if that
    is as long as the local sequence; everything else is left as it is.

    Raises:
        ConfigError: another dimension is as long as the local sequence, and nothing was declared.
    """

    def visit(name: str, x: torch.Tensor) -> torch.Tensor:
        dim = _output_dim(name, x, layout, dims)
        return x if dim is None else mesh.unshard(x, layout, dim=dim)

    return map_tensors(output, visit) if _holds_tensors(output) else output


def require_replicated(
    output: Any, layout: SequenceLayout, dims: Mapping[str, int | None], group: dist.ProcessGroup
) -> None:
    """Refuse what is neither unsharded nor the same on all ranks: each would return its own.

    Args:
        output: what a predict step returned.
        layout: of the step.
        dims: what was declared; ``None`` leaves a tensor as it is, the same or not.
        group: the context-parallel ranks; its backend moves CPU tensors.

    Raises:
        ConfigError: on every rank, naming a tensor that differs between them.
    """
    if not _holds_tensors(output):
        return
    left = {
        name: checksum(x)
        for name, x in tensors_of(output)
        if name not in dims and _output_dim(name, x, layout, dims) is None
    }
    names = list(left)
    facts = {f"{name!r}": left[name] for name in names[:20]}
    facts["further tensors"] = fingerprint([left[name] for name in names[20:]])
    try:
        agree(facts, group, what="predict_step")
    except BatchMismatchError as differs:
        raise ConfigError(
            f"predict_step returned something without a sequence dimension that is not the same on all "
            f"ranks of a group ({differs}), so it was computed from a rank's own tokens. What works: "
            "return one value per token and reduce it afterwards, compute it from self.unshard(...), or "
            "declare it with the mixin to keep each rank's own: "
            "context_parallel_output_dims = {'<name>': None}."
        ) from None


def _holds_tensors(output: Any) -> bool:
    return isinstance(output, torch.Tensor) or is_container(output)


def _output_dim(
    name: str, x: torch.Tensor, layout: SequenceLayout, dims: Mapping[str, int | None]
) -> int | None:
    if name in dims:
        return dims[name]
    places = [dim for dim, size in enumerate(x.shape) if size == layout.local_len]
    known = KNOWN_DIMS.get(name)
    if known is not None and known % max(x.dim(), 1) in places:
        return known
    if 1 in places:
        return 1
    if places:
        raise ConfigError(
            f"predict_step returned {name!r} of shape {tuple(x.shape)}, which has a dimension as long as the "
            f"local sequence ({layout.local_len}), but not dimension 1. Declare it with the mixin: "
            f"context_parallel_output_dims = {{{name!r}: <dim, or None to leave it>}}."
        )
    return None

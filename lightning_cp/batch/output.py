"""Unsharding of a predict step's outputs, in original order and length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch

from lightning_cp.batch.rules import KNOWN_DIMS
from lightning_cp.comm.all_gather import all_gather
from lightning_cp.comm.consensus import check_equal, checksum, fingerprint
from lightning_cp.comm.vocab_parallel import ShardedLogits, whole_logits
from lightning_cp.errors import BatchMismatchError, ConfigError
from lightning_cp.layout import SequenceLayout
from lightning_cp.layout.axes import Flat
from lightning_cp.mesh import ContextParallelMesh
from lightning_cp.utils.containers import is_container, items_of, map_tensors, tensors_of
from lightning_cp.utils.tensors import to_list


def unshard_output(
    output: Any, mesh: ContextParallelMesh, layout: SequenceLayout, dims: Mapping[str, int | None]
) -> Any:
    """Return the outputs of a predict step in original order and length, on every rank.

    A tensor is unsharded along its declared dimension, along a known one, or along dimension 1 if that
    is as long as the local sequence. A tensor without such a dimension, or one that is not declared and
    equal on all ranks, stays as it is.

    Args:
        output: tensors in any container; other values stay.
        mesh: the process groups.
        layout: of the step.
        dims: declared dimensions; ``None`` leaves a tensor as it is, even if ranks differ.

    Raises:
        ConfigError: on every rank: tensors that are neither along the sequence nor equal on all ranks, an
            undeclared dimension as long as the local sequence, or ranks that returned different structures.
    """
    found = dict(tensors_of(output)) if _holds_tensors(output) else {}
    if any(isinstance(x, ShardedLogits) for x in found.values()):
        output = map_tensors(output, lambda _, x: whole_logits(x))
        found = dict(tensors_of(output))
    equal = _equal_on_all_ranks(output, found, mesh)
    along = {name: _output_dim(name, x, layout, dims, name in equal) for name, x in found.items()}
    own = [name for name in found if along[name] is None and name not in equal and name not in dims]
    if own:
        raise ConfigError(
            f"predict_step returned {', '.join(map(repr, own))} without a sequence dimension and not the "
            "same on all ranks of a group, so computed from a rank's own tokens. What works: "
            "return one value per "
            "token and reduce it afterwards, compute it from self.unshard(...), or declare it with the mixin "
            "to keep each rank's own: context_parallel_output_dims = {'<name>': None}."
        )

    def visit(name: str, x: torch.Tensor) -> torch.Tensor:
        dim = along[name]
        return x if dim is None else mesh.unshard(x, layout, dim=dim)

    return map_tensors(output, visit) if found else output


def _equal_on_all_ranks(
    output: Any, tensors: Mapping[str, torch.Tensor], mesh: ContextParallelMesh
) -> set[str]:
    """Return the names of tensors that are equal on all ranks of the cp group. Collective."""
    group = mesh.control_group(Flat.CP)
    shapes = [(name, tuple(x.shape), str(x.dtype)) for name, x in tensors.items()]
    facts = {
        "kind": fingerprint((type(output).__name__, shapes)),
        "values": fingerprint(list(_other_values(output))),
    }
    try:
        check_equal(facts, group, what="predict_step")
    except BatchMismatchError:
        raise ConfigError(
            "predict_step returned different things on the ranks of a group: other types, names or shapes, "
            "or values that are not tensors (numbers, text, arrays), which cannot be put together. Return "
            "tensors with one value per token, on every rank; or what was computed from self.unshard(...), "
            "which is the same on all ranks."
        ) from None
    sums = torch.tensor([checksum(x) for x in tensors.values()], dtype=torch.int64)
    every = torch.stack(all_gather(sums, group))
    same: list[bool] = to_list((every == every[0]).all(0))
    return {name for name, equal in zip(tensors, same, strict=True) if equal}


def _other_values(output: Any) -> Iterator[Any]:
    """Yield numbers, text and arrays in an output; contents of other objects are not compared."""
    if isinstance(output, np.ndarray):
        array = cast("np.ndarray[Any, Any]", output)
        yield array.shape, fingerprint(np.ascontiguousarray(array).tobytes())
    elif isinstance(output, (str, bytes, int, float, complex)):
        yield output
    for _, item in items_of(output):
        yield from _other_values(item)


def _holds_tensors(output: Any) -> bool:
    return isinstance(output, torch.Tensor) or is_container(output)


def _output_dim(
    name: str, x: torch.Tensor, layout: SequenceLayout, dims: Mapping[str, int | None], equal: bool
) -> int | None:
    if name in dims:
        return dims[name]
    places = [dim for dim, size in enumerate(x.shape) if size == layout.local_len]
    known = KNOWN_DIMS.get(name)
    if known is not None and known % max(x.dim(), 1) in places:
        return known
    if equal and not (1 in places and bool((x == x[:, :1]).all())):
        return None  # ranks have different tokens, so only a constant along tokens could be equal
    if 1 in places:
        return 1
    if places:
        raise ConfigError(
            f"predict_step returned {name!r} of shape {tuple(x.shape)}, which has a dimension as long as the "
            f"local sequence ({layout.local_len}), but not dimension 1. Declare it with the mixin: "
            f"context_parallel_output_dims = {{{name!r}: <dim, or None to leave it>}}."
        )
    return None

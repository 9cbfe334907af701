"""Styles for ``parallelize_module``: the ways in which tensor-parallel ranks share a module.

Parameters become DTensors over the ``tp`` axis; computation runs on plain local tensors, so that any module
between the sharded ones sees plain tensors too. PyTorch's own styles may be mixed with these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ParallelStyle

from lightning_cp.comm.tensor_parallel import (
    copy_to_tp_region,
    gather_for_tp_shards,
    reduce_from_tp_region,
)
from lightning_cp.comm.vocab_parallel import ShardedLogits

Forward = Callable[[torch.Tensor], torch.Tensor]


class ColwiseLinear(ParallelStyle):
    """A linear layer whose outputs are divided among the ranks: weight and bias ``Shard(0)``."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()
        _distribute(module, device_mesh, weight=Shard(0), bias=Shard(0))

        def forward(x: torch.Tensor) -> torch.Tensor:
            return F.linear(
                copy_to_tp_region(x, group), _local(module, "weight"), _local(module, "bias")
            )

        return _with_forward(module, forward)


class RowwiseLinear(ParallelStyle):
    """A linear layer whose inputs are divided among the ranks: weight ``Shard(1)``, outputs are summed."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()
        _distribute(module, device_mesh, weight=Shard(1), bias=Replicate())

        def forward(x: torch.Tensor) -> torch.Tensor:
            out = reduce_from_tp_region(F.linear(x, _local(module, "weight")), group)
            bias = _local(module, "bias")
            return out if bias is None else out + bias.to(out.dtype)

        return _with_forward(module, forward)


class FusedColwiseLinear(ParallelStyle):
    """A linear layer of several in one (queries, keys and values; gate and up): weight ``Shard(0)``.

    A rank's rows of the weight are not those of its heads, since files and optimizers do not know the parts.
    So the outputs are gathered, and each rank takes its share of every part. This is exact, with sharded
    parameters; it costs one all-gather of the outputs, and one of their gradients in backward.

    Args:
        parts: output features of each part, in order; each divides by the number of ranks.
    """

    def __init__(self, parts: Sequence[int]) -> None:
        super().__init__()
        self.parts = tuple(parts)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group, parts = device_mesh.get_group(), self.parts
        _distribute(module, device_mesh, weight=Shard(0), bias=Shard(0))

        def forward(x: torch.Tensor) -> torch.Tensor:
            own = F.linear(
                copy_to_tp_region(x, group), _local(module, "weight"), _local(module, "bias")
            )
            pieces = gather_for_tp_shards(own, group).split(parts, dim=-1)
            shares = [piece.chunk(group.size(), dim=-1)[group.rank()] for piece in pieces]
            return torch.cat(shares, dim=-1)

        return _with_forward(module, forward)


class VocabularyEmbedding(ParallelStyle):
    """An embedding whose vocabulary is divided among the ranks: weight ``Shard(0)``, outputs are summed.

    A token outside of the vocabulary raises ``IndexError`` on the CPU. On other devices, where a check would
    synchronise, its output becomes NaN.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        group, own = device_mesh.get_group(), module.forward
        rows = module.num_embeddings // group.size()
        first = rows * group.rank()
        padding = module.padding_idx
        here = padding is not None and first <= padding < first + rows
        local_padding = padding - first if here and padding is not None else None
        _distribute(module, device_mesh, weight=Shard(0))

        def forward(tokens: torch.Tensor) -> torch.Tensor:
            strange = _out_of_bounds(tokens, module.num_embeddings)
            known = (tokens >= first) & (tokens < first + rows)
            with _replaced_attributes(
                module, weight=_local(module, "weight"), padding_idx=local_padding
            ):
                out = own((tokens - first).where(known, 0))  # a subclass may scale it
            out = out.masked_fill(~known[..., None], 0)
            return reduce_from_tp_region(out.masked_fill(strange[..., None], float("nan")), group)

        return _with_forward(module, forward)


def _out_of_bounds(tokens: torch.Tensor, vocabulary: int) -> torch.Tensor:
    strange = (tokens < 0) | (tokens >= vocabulary)
    if tokens.device.type == "cpu" and bool(strange.any()):
        raise IndexError(f"a token is out of bounds of the vocabulary of {vocabulary}.")
    return strange


class VocabularyHead(ParallelStyle):
    """The layer that makes logits, divided by vocabulary; see `ShardedLogits`."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()
        ColwiseLinear()._apply(module, device_mesh)
        columns: Forward = module.forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            return ShardedLogits.of(columns(x), group)

        return _with_forward(module, forward)


class HeadNorm(ParallelStyle):
    """A norm within heads, which are divided among the ranks: the weight is replicated, its gradients are
    summed.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        own: Forward = module.forward
        names = [name for name, _ in module.named_parameters(recurse=False)]
        _distribute(module, device_mesh, **dict.fromkeys(names, Replicate()))

        def forward(x: torch.Tensor) -> torch.Tensor:
            local = {name: _local(module, name, [Partial()]) for name in names}
            with _replaced_attributes(module, **local):
                return own(x)

        return _with_forward(module, forward)


STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseLinear,
    "rowwise": RowwiseLinear,
    "vocabulary_embedding": VocabularyEmbedding,
    "vocabulary_head": VocabularyHead,
    "head_norm": HeadNorm,
}
"""Names of styles in a plan, as in a settings file."""


def _distribute(module: nn.Module, mesh: DeviceMesh, **placements: Placement) -> None:
    """Keep this rank's part of the parameters, with the values of the group's first rank."""
    for name, placement in placements.items():
        parameter = getattr(module, name, None)
        if parameter is None or isinstance(parameter.data, DTensor):
            continue
        shared = distribute_tensor(parameter.detach(), mesh, [placement])
        module.register_parameter(name, nn.Parameter(shared, requires_grad=parameter.requires_grad))


def _local(module: nn.Module, name: str, gradients: Sequence[Placement] | None = None) -> Any:
    """This rank's part of a parameter; its gradients have the placement ``gradients``, or the parameter's."""
    parameter = getattr(module, name)
    if isinstance(parameter, DTensor):
        return parameter.to_local(grad_placements=gradients)
    return parameter


def _with_forward(module: nn.Module, forward: Forward) -> nn.Module:
    module.forward = forward
    return module


@contextmanager
def _replaced_attributes(module: nn.Module, **values: Any) -> Iterator[None]:
    """Within the block, attributes of the module have these ``values``; parameters stay registered."""
    known = vars(module)
    before = {name: known[name] for name in values if name in known}
    known.update(values)
    try:
        yield
    finally:
        for name in values:
            known.pop(name)
        known.update(before)

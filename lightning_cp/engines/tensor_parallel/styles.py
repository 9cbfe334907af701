"""Ways in which tensor-parallel ranks share a module: styles for ``parallelize_module``.

Parameters become DTensors over the ``tp`` axis; what is computed runs on plain local tensors, so that any
module between the sharded ones sees plain tensors too. PyTorch's own styles may be mixed with these.
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
    """A linear layer of which each rank computes its own outputs: weight and bias ``Shard(0)``."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()
        _distribute(module, device_mesh, weight=Shard(0), bias=Shard(0))

        def forward(x: torch.Tensor) -> torch.Tensor:
            return F.linear(
                copy_to_tp_region(x, group), _local(module, "weight"), _local(module, "bias")
            )

        return _with_forward(module, forward)


class RowwiseLinear(ParallelStyle):
    """A linear layer of which each rank has its own inputs: weight ``Shard(1)``, outputs are summed."""

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

    A rank's rows of the weight are not those of its heads, as files and optimizers know nothing of parts.
    So the outputs are gathered, and each rank takes its own share of every part: exact, with parameters
    sharded, and at the price of one all-gather of the outputs, and in backward of their gradients.

    Args:
        parts: output features of each, in order; all divide by the ranks.
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
    """An embedding of which each rank has its own tokens: weight ``Shard(0)``, outputs are summed.

    Called with a token that is not in the vocabulary, it raises ``IndexError`` on the CPU. Elsewhere such a
    token becomes NaN, as nothing waits for the device to look.
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
            with _instead(module, weight=_local(module, "weight"), padding_idx=local_padding):
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
    """The layer that makes logits, each rank those of its own tokens; see `ShardedLogits`."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()
        ColwiseLinear()._apply(module, device_mesh)
        columns: Forward = module.forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            return ShardedLogits.of(columns(x), group)

        return _with_forward(module, forward)


class HeadNorm(ParallelStyle):
    """A norm within heads, of which each rank has its own: all have its weight, and gradients are summed."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        own: Forward = module.forward
        names = [name for name, _ in module.named_parameters(recurse=False)]
        _distribute(module, device_mesh, **dict.fromkeys(names, Replicate()))

        def forward(x: torch.Tensor) -> torch.Tensor:
            local = {name: _local(module, name, [Partial()]) for name in names}
            with _instead(module, **local):
                return own(x)

        return _with_forward(module, forward)


STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseLinear,
    "rowwise": RowwiseLinear,
    "vocabulary_embedding": VocabularyEmbedding,
    "vocabulary_head": VocabularyHead,
    "head_norm": HeadNorm,
}
"""What a plan may call them, as in a file of settings."""


def _distribute(module: nn.Module, mesh: DeviceMesh, **placements: Placement) -> None:
    """Have each rank keep its part of the parameters, of the values that the first rank of the group has."""
    for name, placement in placements.items():
        parameter = getattr(module, name, None)
        if parameter is None or isinstance(parameter.data, DTensor):
            continue
        shared = distribute_tensor(parameter.detach(), mesh, [placement])
        module.register_parameter(name, nn.Parameter(shared, requires_grad=parameter.requires_grad))


def _local(module: nn.Module, name: str, gradients: Sequence[Placement] | None = None) -> Any:
    """This rank's part of a parameter; its gradients are ``gradients``, or placed as the parameter is."""
    parameter = getattr(module, name)
    if isinstance(parameter, DTensor):
        return parameter.to_local(grad_placements=gradients)
    return parameter


def _with_forward(module: nn.Module, forward: Forward) -> nn.Module:
    module.forward = forward
    return module


@contextmanager
def _instead(module: nn.Module, **values: Any) -> Iterator[None]:
    """In the block, the module finds ``values`` under these names; parameters stay where they are."""
    known = vars(module)
    before = {name: known[name] for name in values if name in known}
    known.update(values)
    try:
        yield
    finally:
        for name in values:
            known.pop(name)
        known.update(before)

"""One step of all matrices: local momentum, and Newton-Schulz at their owners."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from lightning_cp.errors import ConfigError
from lightning_cp.optim.exchange import MatrixExchange
from lightning_cp.optim.newton_schulz import learning_rate_scale, orthogonalise
from lightning_cp.optim.placement import Grids
from lightning_cp.optim.work_list import Matrix, Piece, Round, plan_rounds
from lightning_cp.utils.dtensor import local_part

MOMENTUM = "momentum_buffer"
"""Key in a parameter's state, as in torch.optim.Muon."""


class ActiveParameter:
    """A parameter with a gradient, and this rank's part of both."""

    def __init__(self, name: str, parameter: torch.Tensor) -> None:
        self.name, self.parameter = name, parameter
        self.is_whole = not isinstance(parameter, DTensor)
        self.local = local_part(parameter)
        assert parameter.grad is not None
        self.gradient = local_part(parameter.grad)

    @property
    def problem(self) -> str | None:
        """The reason why its gradient cannot be used; ``None`` if it can."""
        gradient = self.parameter.grad
        assert gradient is not None
        if gradient.is_sparse or gradient.is_complex():
            return f"{self.name} has a sparse or complex gradient, which Muon does not know"
        if isinstance(gradient, DTensor) == self.is_whole:
            kinds = f"a {type(self.parameter).__name__}, its gradient a {type(gradient).__name__}"
            return f"{self.name} is {kinds}: nobody knows which part of it the gradient is of"
        return None

    def redistribute_gradient(self) -> None:
        """Redistribute the gradient to the parameter's placements, if they differ; collective then."""
        gradient = self.parameter.grad
        if isinstance(gradient, DTensor) and isinstance(self.parameter, DTensor):
            placed = gradient.redistribute(placements=self.parameter.placements)
            self.gradient = local_part(placed)


class MatrixStep:
    """The step of an optimizer's matrices; plans are reused as long as the matrices stay the same.

    Args:
        pieces: sizes of the projections in each fused parameter, by name.
        dtype: in which matrices are orthogonalised.
        chunk_bytes: limit of whole matrices that a rank holds at a time.
    """

    def __init__(
        self, pieces: Mapping[str, Sequence[int]], dtype: torch.dtype, chunk_bytes: int
    ) -> None:
        self._grids = Grids()
        self.rounds: list[Round] = []
        """The rounds of the last step."""
        self._pieces, self._dtype, self._chunk_bytes = pieces, dtype, chunk_bytes
        self._planned: object = None

    def build_grids(self, matrices: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Find the ranks that hold each matrix, with a gradient or without. Collective: it creates process
        groups.

        Raises:
            ConfigError: see ``Grids.of``; or a parameter no longer has two dimensions.
        """
        for name, parameter in matrices:
            if parameter.dim() != 2:
                raise ConfigError(
                    f"{name} was a matrix when Muon was made, and has the shape {list(parameter.shape)} now. "
                    "The older FSDP (FullyShardedDataParallel) flattens parameters; FSDP2 (fully_shard, this "
                    "package's data_parallel='fsdp') does not."
                )
            self._grids.of(parameter, name)

    def run(
        self,
        group: Mapping[str, Any],
        some: Sequence[ActiveParameter],
        states: Mapping[torch.Tensor, MutableMapping[str, Any]],
    ) -> None:
        """Step the matrices that have gradients. Collective.

        Args:
            group: settings, named as those of torch.optim.Muon.
            some: the matrices with gradients.
            states: the optimizer state of each parameter.
        """
        held = {one.name: one for one in some}
        buffers = {one.name: local_part(states[one.parameter][MOMENTUM]) for one in some}
        momentum, kept = group["momentum"], 1 - group["lr"] * group["weight_decay"]
        for one in some:
            buffers[one.name].lerp_(one.gradient, 1 - momentum)

        def update_of(x: Matrix) -> torch.Tensor:
            name = x.piece.name
            looks_on = group["nesterov"]
            return held[name].gradient.lerp(buffers[name], momentum) if looks_on else buffers[name]

        def compute(_: Matrix, whole: torch.Tensor) -> torch.Tensor:
            how = group["ns_steps"], group["ns_coefficients"], group["eps"]
            with torch.autocast(whole.device.type, enabled=False):  # matrices have their own dtype
                return orthogonalise(whole, *how)

        def take(x: Matrix, part: int, result: torch.Tensor) -> None:
            rate = group["lr"] * learning_rate_scale(*x.piece.shape, group["adjust_lr_fn"])
            for block, entries in x.parts[part].paired_blocks(held[x.piece.name].local, result):
                block.mul_(kept).add_(entries.to(block.device), alpha=-rate)

        exchange = MatrixExchange(self._dtype, update_of, compute, take)
        exchange.run(self._plan(some, group["ns_steps"]))

    def _plan(self, some: Sequence[ActiveParameter], steps: int) -> list[Round]:
        key = (steps, *((one.name, id(one.parameter)) for one in some))
        if self._planned != key:
            pieces = [x for one in some for x in _pieces_of(one, self._pieces.get(one.name, ()))]
            how = self._dtype, steps, self._chunk_bytes
            self.rounds, self._planned = plan_rounds(pieces, self._grids, *how), key
        return self.rounds


def _pieces_of(one: ActiveParameter, sizes: Sequence[int]) -> Iterator[Piece]:
    """The matrices in a parameter."""
    if not sizes:
        yield Piece(one.name, one.parameter)
        return
    dim, start = int(sum(sizes) != one.parameter.shape[0]), 0
    for size in sizes:
        yield Piece(one.name, one.parameter, dim, start, size)
        start += size

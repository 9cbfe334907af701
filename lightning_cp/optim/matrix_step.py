"""One step of all matrices: local momentum, Newton-Schulz at their owners, and the exchange around it.

Each matrix is gathered to its owner, orthogonalised there, and every rank gets its part of the result.
For c copies, each cut into n parts, in one round:

========  ==============================================  ===========================================
stage     tensors                                         collective
========  ==============================================  ===========================================
gather    parts [numel of part] -> matrix [m, n]          all-to-all among the n parts of a copy
compute   matrix [m, n] -> result [m, n]                  none; every owner its own matrices
scatter   result [m, n] -> parts [numel of part]          all-to-all among the n parts of a copy
copy      parts of one copy's results -> all copies       broadcast among the c ranks of a part, c times
========  ==============================================  ===========================================

While round k is computed, three messages are in transit: the matrices of round k + 1, the results of round
k - 1 to the parts of their copy, and those of round k - 2 (without parts k - 1) to the other copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from lightning_cp.comm.transfer import PendingMessage, post_all_to_all, post_broadcast
from lightning_cp.errors import ConfigError
from lightning_cp.optim.newton_schulz import learning_rate_scale, orthogonalise
from lightning_cp.optim.placement import Grids
from lightning_cp.optim.work_list import Matrix, Piece, Round, plan_rounds
from lightning_cp.utils.dtensor import local_part

MOMENTUM = "momentum_buffer"
"""Key in a parameter's state, as in torch.optim.Muon."""


class MatrixExchange:
    """One step of all rounds.

    Args:
        dtype: of computation, and of sent results.
        update_of: gives this rank's entries of a matrix's update: [local rows, local columns].
        compute: of a matrix [m, n] in ``dtype``, which it may overwrite.
        take: receives a matrix, this rank's part number, and its entries of the result: [numel of part].
    """

    def __init__(
        self,
        dtype: torch.dtype,
        update_of: Callable[[Matrix], torch.Tensor],
        compute: Callable[[Matrix, torch.Tensor], torch.Tensor],
        take: Callable[[Matrix, int, torch.Tensor], None],
    ) -> None:
        self._dtype = dtype
        self._update_of, self._compute, self._take = update_of, compute, take

    def run(self, rounds: Sequence[Round]) -> None:
        """Run all rounds; collective, with the same rounds on all ranks."""
        arriving = self._gather(rounds[0]) if rounds else None
        given: list[_Results] = []  # in transit to the parts of a copy
        copied: list[_Results] = []  # to be sent to the other copies
        for at, each in enumerate(rounds):
            matrices = self._assemble(each, arriving)
            arriving = self._gather(rounds[at + 1]) if at + 1 < len(rounds) else None
            for one in copied:
                one.post()
            results = {x: self._compute(x, matrices.pop(x)) for x in each.owned_here}
            posted = self._scatter(each, results)
            for one in copied:
                one.finish()
            copied = [one for one in given if one.receive()]
            one = _Results(each, self._own_parts(each, results), posted, self._dtype, self._take)
            alone = each.grid.parts_group is None  # the same on all ranks: they keep one order
            given, copied = ([], [*copied, one]) if alone else ([one], copied)
        copied += [one for one in given if one.receive()]
        for one in copied:
            one.post()
            one.finish()

    def _gather(self, each: Round) -> PendingMessage | None:
        """Send this rank's parts to the owners of the matrices."""
        grid = each.grid
        if grid.parts_group is None or not each.of_copy(grid.copy):
            return None
        to = [each.of(grid.copy, part) if part != grid.part else () for part in grid.part_at]
        sent = [sum(x.parts[grid.part].numel for x in some) for some in to]
        some = [x for of_owner in to for x in of_owner]
        message = _message(sum(sent), each.message_dtype, each)
        for x, entries in _split(message, some, [grid.part] * len(some)):
            x.parts[grid.part].pack(self._update_of(x), entries, whole=False)
        comes = [self._of_part(each.owned_here, part, grid.part) for part in grid.part_at]
        return post_all_to_all(message, sent, comes, grid.parts_group)

    def _assemble(self, each: Round, arriving: PendingMessage | None) -> dict[Matrix, torch.Tensor]:
        """The whole matrices that this rank owns."""
        grid = each.grid
        found: dict[Matrix, torch.Tensor] = {}
        for x in each.owned_here:
            found[x] = torch.empty(x.piece.shape, dtype=self._dtype, device=each.device)
            own, update = x.parts[grid.part], self._update_of(x)
            for block, into in zip(
                own.views(update, whole=False), own.views(found[x], whole=True), strict=True
            ):
                into.copy_(block)
        if arriving is not None:
            message = arriving.wait()
            parts = [part for part in grid.part_at if part != grid.part]
            some = [x for _ in parts for x in each.owned_here]
            places = [part for part in parts for _ in each.owned_here]
            for (x, entries), part in zip(_split(message, some, places), places, strict=True):
                x.parts[part].unpack(entries, found[x], whole=True)
        return found

    def _scatter(self, each: Round, results: dict[Matrix, torch.Tensor]) -> PendingMessage | None:
        """Send every rank of the copy its parts of the results of this rank."""
        grid = each.grid
        if grid.parts_group is None or not each.of_copy(grid.copy):
            return None
        sent = [self._of_part(each.owned_here, part, grid.part) for part in grid.part_at]
        parts = [part for part in grid.part_at if part != grid.part]
        some = [x for _ in parts for x in each.owned_here]
        places = [part for part in parts for _ in each.owned_here]
        message = _message(sum(sent), self._dtype, each)
        for (x, entries), part in zip(_split(message, some, places), places, strict=True):
            x.parts[part].pack(results[x], entries, whole=True)
        comes = [
            sum(x.parts[grid.part].numel for x in each.of(grid.copy, part)) * (part != grid.part)
            for part in grid.part_at
        ]
        return post_all_to_all(message, sent, comes, grid.parts_group)

    def _own_parts(
        self, each: Round, results: dict[Matrix, torch.Tensor]
    ) -> dict[Matrix, torch.Tensor]:
        """This rank's parts of its own results; the results themselves can be freed afterwards."""
        part = each.grid.part
        found: dict[Matrix, torch.Tensor] = {}
        for x in each.owned_here:
            found[x] = _message(x.parts[part].numel, self._dtype, each)
            x.parts[part].pack(results.pop(x), found[x], whole=True)
        return found

    @staticmethod
    def _of_part(matrices: Sequence[Matrix], part: int, own: int) -> int:
        """The number of entries that another rank holds of some matrices; a rank sends none to itself."""
        return 0 if part == own else sum(x.parts[part].numel for x in matrices)


class _Results:
    """This rank's results of a round, and their broadcast to the other copies.

    Args:
        each: the round.
        held: this rank's parts of its own results.
        posted: the message with its parts of the other ranks' results; ``None`` without other ranks in
            this copy.
        dtype: as in ``MatrixExchange``.
        take: as in ``MatrixExchange``.
    """

    def __init__(
        self,
        each: Round,
        held: dict[Matrix, torch.Tensor],
        posted: PendingMessage | None,
        dtype: torch.dtype,
        take: Callable[[Matrix, int, torch.Tensor], None],
    ) -> None:
        self._round, self._held, self._posted = each, held, posted
        self._dtype, self._take = dtype, take
        self._copies = [copy for copy in range(each.grid.copies) if each.of_copy(copy)]
        self._sent: list[tuple[int, PendingMessage]] = []

    def receive(self) -> bool:
        """Receive the parts of this copy; return True if there are other copies."""
        each, grid = self._round, self._round.grid
        if self._posted is not None:
            others = [p for p in grid.part_at if p != grid.part]
            some = [x for part in others for x in each.of(grid.copy, part)]
            self._held.update(_split(self._posted.wait(), some, [grid.part] * len(some)))
            self._posted = None
        if grid.copies_group is None:
            self._take_all(self._held.items())
        return grid.copies_group is not None

    def post(self) -> None:
        """Start at most two broadcasts to copies; more would need the memory of as many rounds."""
        for _ in range(2):
            self._post_next()

    def finish(self) -> None:
        """Receive the results of all copies."""
        grid = self._round.grid
        if grid.copies_group is None and self._held:
            self._take_all(self._held.items())
        while self._sent:
            copy, posted = self._sent.pop(0)
            some = self._round.of_copy(copy)
            self._take_all(_split(posted.wait(), some, [grid.part] * len(some)))
            self._post_next()

    def _post_next(self) -> None:
        each, grid = self._round, self._round.grid
        if grid.copies_group is None or not self._copies:
            return
        copy = self._copies.pop(0)
        some = each.of_copy(copy)
        size = sum(x.parts[grid.part].numel for x in some)
        message = _message(size, self._dtype, each)
        if copy == grid.copy:
            for x, entries in _split(message, some, [grid.part] * len(some)):
                entries.copy_(self._held.pop(x))
        place = grid.place_of_copy[copy]
        self._sent.append((copy, post_broadcast(message, place, grid.copies_group)))

    def _take_all(self, found: Iterable[tuple[Matrix, torch.Tensor]]) -> None:
        for x, entries in found:
            self._take(x, self._round.grid.part, entries)


def _message(size: int, dtype: torch.dtype, each: Round) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device=each.device)


def _split(
    message: torch.Tensor, matrices: Sequence[Matrix], parts: Sequence[int]
) -> Iterator[tuple[Matrix, torch.Tensor]]:
    """Each matrix with its entries in a message, in order."""
    sizes = [x.parts[part].numel for x, part in zip(matrices, parts, strict=True)]
    for x, size, end in zip(matrices, sizes, accumulate(sizes), strict=True):
        yield x, message[end - size : end]


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
            return f"{self.name} is {kinds}: the part of it that the gradient belongs to is unknown"
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

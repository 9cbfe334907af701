"""Gather each matrix to its owner, orthogonalise it there, and send every rank its part of the result.

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

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

import torch

from lightning_cp.comm.ring import PendingMessage, post_all_to_all, post_broadcast
from lightning_cp.optim.work_list import Matrix, Round


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

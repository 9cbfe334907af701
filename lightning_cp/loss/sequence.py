"""Values of whole sequences: sums, means and single tokens of rows or packed documents, equal on all ranks.

Let ``z`` be the sum over ranks of what each computes from its own tokens, and ``L(z)`` a loss. Ranks scale
their losses by weights ``w_r`` whose sum is the number of ranks, and the engine takes the mean of gradients.
If backward sums the gradients of ``z`` over ranks, each rank gets ``sum_r w_r L'(z) = ranks * L'(z)``, and
the mean is the gradient of one process. So whole-sequence terms and token means may be mixed in one loss.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, SupportsIndex, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from lightning_cp.comm.all_gather import all_gather
from lightning_cp.comm.consensus import Facts, all_equal
from lightning_cp.comm.derivatives import check_first_derivative
from lightning_cp.comm.reduce import all_sum
from lightning_cp.errors import ConfigError, ShapeError
from lightning_cp.layout import SequenceLayout
from lightning_cp.layout.documents import Intervals
from lightning_cp.utils.autograd_notes import is_frozen, note_sequence
from lightning_cp.utils.tensors import to_device, to_list

Index = int | Sequence[int] | torch.Tensor
"""A place in each sequence: one number for all, or one for each."""

SAME_ARGUMENTS = (
    "Give all of them values of one shape and dtype, with a gradient and a mask or without, and the same "
    "index: -1 is the last token that is not padding. sequence_sum(mask) - 1 counts the tokens of whole "
    "rows, mask.sum(1) - 1 those of a rank."
)
"""The fix of arguments of ``sequence_*`` that differ between ranks."""

SAME_VALUES = "Give all of them values of one shape and dtype, with a gradient or without."
"""The fix of arguments of ``unshard`` that differ between ranks."""


@dataclass(frozen=True, eq=False)
class PartialSums:
    """This rank's part of sums over sequences, and the function that makes the result of the whole sums."""

    own: torch.Tensor
    """[sequences, ...] in at least float32, or in int64."""
    finish: Callable[[torch.Tensor], torch.Tensor]
    arguments: Facts = field(default_factory=dict[str, object])
    """Arguments of the sums, equal on all ranks."""

    def facts(self) -> Facts:
        """Return what must be equal on all ranks before they exchange their parts."""
        return {**self.arguments, "a gradient": self.own.requires_grad}

    def over(self, group: dist.ProcessGroup | None) -> torch.Tensor:
        """Return the result, equal on all ranks of ``group``; ``None``: this rank has all tokens.

        One all-reduce of the size of ``own``, and one in backward.
        """
        whole = self.own
        if group is not None and group.size() > 1:
            whole = cast("torch.Tensor", _SumOverRanks.apply(whole, group))  # pyright: ignore[reportUnknownMemberType]
        return note_sequence(self.finish(whole))


@dataclass(frozen=True, eq=False)
class SequenceTokens:
    """The sequences of a batch, and the place of a rank's tokens in them.

    A sequence is a row; in a packed batch (some row has several documents) it is a document, and documents
    count in the order of rows. Padding belongs to no sequence.
    """

    owner: torch.Tensor
    """int64 [B, L]: the sequence of each local token, -1 for padding."""
    place: torch.Tensor
    """int64 [B, L]: the number of tokens before it in its sequence."""
    lengths: tuple[int, ...]
    """Tokens of each sequence."""
    is_packed: bool = False

    @classmethod
    def of(
        cls,
        layout: SequenceLayout,
        cp_rank: int,
        rows: int,
        mask: torch.Tensor | None = None,
        device: torch.device | str = "cpu",
        counted: torch.Tensor | None = None,
    ) -> SequenceTokens:
        """Find a rank's tokens in the sequences of a batch; documents of padding alone are not sequences.

        Args:
            layout: of the batch, with its documents.
            cp_rank: the rank.
            rows: rows of the batch.
            mask: [B or 1, S] on any device, 0 for padding that the documents may not know; ``None``: no more
                padding. It waits for the device.
            device: of the result.
            counted: [B, S], 0 for other tokens without a place in their sequences; as ``mask``.
        """
        positions = layout.positions(cp_rank).numpy()
        known = layout.documents
        every = [np.array([[0, layout.seq_len]])] if known is None else list(known.rows)
        every = every * rows if len(every) == 1 else every
        is_packed = any(len(spans) > 1 for spans in every)
        real, kept = (
            None if x is None else (x != 0).expand(rows, -1).cpu().numpy() for x in (mask, counted)
        )
        if real is not None:
            kept = real if kept is None else real & kept
            if is_packed:
                every = list(map(_with_tokens, every, real))
        owner, place = (np.full((rows, len(positions)), fill) for fill in (-1, 0))
        lengths: list[int] = []
        for row, spans in enumerate(every):
            # Tokens before each position: of any kind, or only those that are not padding.
            before = np.arange(layout.padded_len + 1)
            if kept is not None:
                before = np.concatenate([[0], np.cumsum(kept[row])])
                before = np.pad(before, (0, layout.padded_len + 1 - len(before)), mode="edge")
            spans = spans if len(spans) or is_packed else np.zeros((1, 2), np.int64)
            at = np.searchsorted(spans[:, 0], positions, side="right") - 1
            inside = (
                (at >= 0) & (positions < spans[np.maximum(at, 0), 1]) if len(spans) else at >= 0
            )
            inside &= before[positions + 1] > before[positions]
            owner[row, inside] = at[inside] + len(lengths)
            place[row, inside] = (
                (before[positions] - before[spans[at, 0]])[inside] if len(spans) else 0
            )
            lengths += (before[spans[:, 1]] - before[spans[:, 0]]).tolist()
        where = torch.device(device)
        own, places = (to_device(torch.as_tensor(x), where) for x in (owner, place))
        return cls(own, places, tuple(lengths), is_packed)

    @classmethod
    def whole(
        cls,
        rows: int,
        tokens: int,
        device: torch.device | str = "cpu",
        mask: torch.Tensor | None = None,
    ) -> SequenceTokens:
        """Make the sequences of rows that one process holds whole; ``mask`` [B, S] is 0 for padding.

        Raises:
            ShapeError: a mask of other tokens.
        """
        found = cls.of(SequenceLayout(tokens), 0, rows, None, device)
        if mask is None:
            return found
        found.check_mask(mask)
        return cls.of(SequenceLayout(tokens), 0, rows, None, device, mask)

    @property
    def count(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    def sum(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> PartialSums:
        """Return the sums of ``x`` over sequences, [sequences, ...]; padding never counts.

        Args:
            x: [B, L, ...], values of this rank's tokens; sums of whole numbers and flags are int64.
            mask: [B or 1, L], bool or weights of these tokens, learned or not; ``None``: all count.

        Raises:
            ShapeError: values or a mask of other tokens.
        """
        self._check_shape("sequence_sum", x)
        sums = self._local_sums(x, mask)
        dtype = sums.dtype if _is_whole(x) else x.dtype
        return PartialSums(sums, lambda whole: whole.to(dtype), _arguments(x, mask))

    def mean(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> PartialSums:
        """Return the means of ``x`` over sequences, [sequences, ...]; 0 where nothing counts.

        As ``sum``; means of whole numbers and flags have PyTorch's default dtype. The sums of a mask travel
        in the same message.
        """
        self._check_shape("sequence_mean", x)
        arguments = _arguments(x, mask)
        dtype = torch.get_default_dtype() if _is_whole(x) else x.dtype
        sums = self._local_sums(x.double() if _is_whole(x) else x, mask)
        if mask is None:
            counts = to_device(torch.tensor(self.lengths, dtype=sums.dtype), x.device)
            return PartialSums(sums, lambda whole: _divide(whole, counts).to(dtype), arguments)
        counted = self._local_sums(mask.to(sums.dtype).expand(len(self.owner), -1), None)
        joined = torch.cat([sums.reshape(self.count, -1), counted[:, None]], dim=1)

        def finish(whole: torch.Tensor) -> torch.Tensor:
            return _divide(whole[:, :-1].view_as(sums), whole[:, -1]).to(dtype)

        return PartialSums(joined, finish, arguments)

    def pick(self, x: torch.Tensor, index: Index) -> PartialSums:
        """Return the values of one token of each sequence, [sequences, ...]: sums of one term.

        Args:
            x: [B, L, ...], values of this rank's tokens.
            index: the place within the row, or within the document of a pack; -1: the last. Padding has no
                place. Waits for its device.

        Raises:
            ConfigError: a place that a sequence does not have.
            ShapeError: values of other tokens, or another number of places.
        """
        self._check_shape("sequence_pick", x)
        given = self._indices(index)
        wanted = to_device(torch.tensor(self._places(given)), x.device)
        owner, place = self.owner.flatten(), self.place.flatten()
        hit = (owner >= 0) & (place == wanted[owner.clamp(min=0)])
        # The local token of each sequence; the number of tokens where another rank has it.
        source = torch.full((self.count + 1,), len(owner), device=x.device)
        source[torch.where(hit, owner, self.count)] = torch.arange(len(owner), device=x.device)
        source = source[:-1]
        is_own = (source < len(owner)).view(-1, *[1] * (x.dim() - 2))
        values = x.flatten(0, 1)[source.clamp(max=len(owner) - 1)].to(_wide(x))
        indices = {f"the index of {self._kind} {at}": each for at, each in enumerate(given)}
        return PartialSums(
            torch.where(is_own, values, 0),
            lambda whole: whole.to(x.dtype),
            {**_arguments(x), **indices},
        )

    def _local_sums(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Return this rank's part of the sums, [sequences, ...] in at least float32, or in int64."""
        x, is_padding = x.to(_wide(x)), self.owner < 0
        more = [1] * (x.dim() - 2)
        if mask is not None:
            self.check_mask(mask)
            mask = mask.expand_as(is_padding)
            counts = mask.masked_fill(is_padding, 0).view(*mask.shape, *more)
            weighted = x if mask.dtype is torch.bool else x * counts
            # What does not count may be NaN; a learned weight of 0 has the gradient of any other.
            x = weighted if mask.requires_grad else torch.where(counts != 0, weighted, 0)
        x = torch.where(is_padding.view(*self.owner.shape, *more), 0, x)
        if not self.is_packed:
            return x.sum(1)
        sums = x.new_zeros(self.count, *x.shape[2:])
        return sums.index_add(0, self.owner.clamp(min=0).flatten(), x.flatten(0, 1))

    def check_mask(self, mask: torch.Tensor) -> None:
        """Check that a mask has a value for each of this rank's tokens, in one line for all rows or in each.

        Raises:
            ShapeError: naming both shapes.
        """
        is_one_line = mask.dim() == 2 and mask.shape[0] == 1
        self._check_shape("mask", mask.expand(len(self.owner), -1) if is_one_line else mask)
        if mask.dim() != 2:
            raise ShapeError(
                f"mask has one value for each token, {list(self.owner.shape)}, got {tuple(mask.shape)}. "
                "Sum the values over their last dimensions first, or give one mask for all of them."
            )

    def _check_shape(self, name: str, x: torch.Tensor) -> None:
        """Check that the first two dimensions of ``x`` are the rows and this rank's tokens.

        Raises:
            ShapeError: naming both shapes.
        """
        if x.shape[:2] != self.owner.shape:
            rows, tokens = self.owner.shape
            advice = (
                "Compute it from this rank's part of the batch, before unshard and with its rows, or shard "
                "it with the batch (sequence_dims)."
            )
            if x.shape[:2] == (rows, tokens - 1):
                advice = (
                    "Shifted values are one token short: take targets that are shifted before sharding, such "
                    "as batch['shift_labels'], which have one for every token."
                )
            raise ShapeError(
                f"{name} takes values [rows, tokens, ...] of this rank's tokens, [{rows}, {tokens}, ...] in "
                f"this step, got {tuple(x.shape)}. {advice}"
            )

    @property
    def _kind(self) -> str:
        return "document" if self.is_packed else "row"

    def _indices(self, index: Index) -> list[int]:
        """Return the index of each sequence, as given; waits for the device of ``index``.

        Raises:
            ShapeError: not one number, or one for each sequence.
        """
        given = to_list(index) if isinstance(index, torch.Tensor) else index
        if isinstance(given, SupportsIndex):
            given = [operator.index(given)] * self.count
        try:
            found = [operator.index(each) for each in given]
        except TypeError as error:
            raise ShapeError(
                f"sequence_pick needs whole numbers as indices, got {given!r}. Give integers: index.long()."
            ) from error
        if len(found) != self.count:
            raise ShapeError(
                f"sequence_pick needs one index for each {self._kind}, of which there are {self.count}, got "
                f"{len(found)}. An index counts the tokens of its own row or document; -1 is the last."
            )
        return found

    def _places(self, indices: Sequence[int]) -> list[int]:
        """Return the place of each sequence's index, from 0.

        Raises:
            ConfigError: a place that a sequence does not have.
        """
        pairs = list(zip(indices, self.lengths, strict=True))
        for at, (index, length) in enumerate(pairs):
            if not length:
                raise ConfigError(
                    f"sequence_pick finds no token in {self._kind} {at}: it is padding, or the mask leaves "
                    "out all of it. Give a mask with a token of each row, or leave the row out of the batch."
                )
            if not -1 <= index < length:
                raise ConfigError(
                    f"sequence_pick({index}) is not a token of {self._kind} {at}, which has {length} without "
                    f"padding. Give 0 to {length - 1}, or -1 for the last."
                )
        return [length - 1 if index < 0 else index for index, length in pairs]


def _with_tokens(spans: Intervals, real: npt.NDArray[np.bool_]) -> Intervals:
    """Return the documents [n, 2] of a row that have tokens which are not padding, given as bool [S]."""
    before = np.concatenate([[0], np.cumsum(real)])
    return spans[before[spans[:, 1]] > before[spans[:, 0]]]


def pick_positions(x: torch.Tensor, at: torch.Tensor, positions: torch.Tensor) -> PartialSums:
    """Return the values [B, ...] of the tokens at given positions of whole rows; 0 where there is none.

    Args:
        x: [B, L, ...], values of this rank's tokens.
        at: [B], a position of each row.
        positions: [L], of this rank's tokens.
    """
    hit = positions == at[:, None]
    values = x[torch.arange(len(x), device=x.device), hit.int().argmax(1)].to(_wide(x))
    is_own = hit.any(1).view(-1, *[1] * (x.dim() - 2))
    return PartialSums(torch.where(is_own, values, 0), lambda whole: whole.to(x.dtype))


def gather_rows(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the rows of all data ranks, [rows of all, ...], in the order of ranks; differentiable.

    Gradients of all ranks are summed: with the mean that an engine takes over data ranks, a loss of all rows
    has the gradient of one process with all of them.

    Args:
        x: [rows, ...], equal on ranks that share a sample, and as many rows on every rank.
        group: the data ranks; ``None``: there is one.
    """
    if group is None or group.size() == 1:
        return x
    if is_frozen(x):  # nothing needs the message that would bring its gradient
        return note_sequence(torch.cat(all_gather(x.detach(), group)))
    return torch.cat(all_gather(x, group))


def check_same_rows(x: torch.Tensor, group: dist.ProcessGroup, device_type: str = "cpu") -> None:
    """Check that all ranks of a group call ``gather_data``, with rows of one shape and dtype.

    Args:
        x: this rank's rows.
        group: the ranks that vote.
        device_type: of tensors that the group's backend moves.

    Raises:
        ShapeError: on all ranks.
    """
    has_gradient = x.requires_grad and not is_frozen(x)
    facts = "gather_data", tuple(x.shape), str(x.dtype), has_gradient
    if not all_equal(facts, group, device_type=device_type):
        how = "with" if has_gradient else "without"
        raise ShapeError(_ROWS.format(tuple(x.shape), facts[2], how))


_ROWS = (
    "gather_data was given {} of {} {} a gradient on this rank, and something else on another, or another "
    "rank did not call it. Give as many rows on every rank: pad the last batch, or leave it out "
    "(drop_last=True)."
)


def _arguments(x: torch.Tensor, mask: torch.Tensor | None = None) -> Facts:
    """Return facts that messages depend on; ranks that share a sample have equally many tokens."""
    return {"values": _text(x), "a mask": None if mask is None else _dtype_text(mask)}


def facts_of_unshard(x: torch.Tensor, dim: int) -> Facts:
    """Return what must be equal on all ranks before ``unshard`` exchanges their values."""
    has_gradient = x.requires_grad and torch.is_grad_enabled()
    return {"values": _text(x), "a dimension": dim % x.dim(), "a gradient": has_gradient}


def _text(x: torch.Tensor) -> str:
    return f"{_dtype_text(x)} {list(x.shape)}"


def _dtype_text(x: torch.Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _is_whole(x: torch.Tensor) -> bool:
    """True for whole numbers and flags."""
    return not (x.is_floating_point() or x.is_complex())


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.int64 if _is_whole(x) else torch.promote_types(x.dtype, torch.float32)


def _divide(sums: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return means [sequences, ...]; 0 where nothing counts."""
    return sums / torch.where(counts == 0, 1, counts).view(-1, *[1] * (sums.dim() - 1))


class _SumOverRanks(torch.autograd.Function):
    """Shapes over N ranks.

    ========  =============  ===========  ====================
    pass      input          collective   output
    ========  =============  ===========  ====================
    forward   x [...]        all-reduce   z [...], the sum
    backward  dz [...]       all-reduce   dx [...], the sum of dz
    ========  =============  ===========  ====================
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return all_sum(x.contiguous(), group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        check_first_derivative()
        return all_sum(gradients[0].contiguous(), ctx.group), None

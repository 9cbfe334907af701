"""The layout of a sequence: the global tokens that each context-parallel rank holds.

Each ring rank gets a *sorted* list of global segments; the Ulysses ranks of that ring rank take
contiguous, equal slices of the list. Lengths that do not divide are padded at the end of the
sequence: padded tokens have global indices from ``seq_len`` up to ``padded_len``.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch

from lightning_cp.errors import ConfigError, ShapeError
from lightning_cp.layout.balance import (
    ChunkAssignment,
    assign_chunks,
    best_assignment,
    length_divisor,
)
from lightning_cp.layout.documents import Documents
from lightning_cp.layout.mask import Mask
from lightning_cp.utils.tensors import to_device

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LayoutKind = Literal["contiguous", "zigzag", "balanced"]
CAUSAL = Mask()
LAYOUT_KINDS: tuple[str, ...] = get_args(LayoutKind)

Segments = npt.NDArray[np.int64]
"""int64 ``[segments, 2]``: (global start, length), sorted by start."""


@dataclass(frozen=True)
class SequenceLayout:
    """Distribution of one sequence over ``ring_size * ulysses_size`` context-parallel ranks.

    The context-parallel rank is ``ring_rank * ulysses_size + ulysses_rank`` (ring outside Ulysses).

    Args:
        seq_len: tokens of the sequence before padding.
        ring_size: ranks that K/V travel around.
        ulysses_size: ranks that trade sequence for heads.
        kind: ``contiguous``, ``zigzag`` (ring rank r holds chunks r and 2*ring_size-1-r), or ``balanced``
            (equal chunks, assigned so that all ring ranks compute equally much attention).
        documents: intervals that attend only to themselves; ``None`` is one document.
        mask: defines the work that ``balanced`` counts. Attention is exact under any mask.
        chunks: of each ring rank, for ``balanced``; ``None`` is the fewest with which the busiest ring rank
            is within 2% of the mean.

    Raises:
        ConfigError: an unknown kind, a size below 1, or chunks of another kind than ``balanced``.
        ShapeError: the length is not an integer or below two tokens per rank, or the documents have
            another length.
    """

    seq_len: int
    ring_size: int = 1
    ulysses_size: int = 1
    kind: LayoutKind = "zigzag"
    documents: Documents | None = None
    mask: Mask = CAUSAL
    chunks: int | None = None

    def __post_init__(self) -> None:
        for name in ("ring_size", "ulysses_size", "chunks"):
            size = getattr(self, name)
            if (name, size) != ("chunks", None) and (type(size) is not int or size < 1):
                raise ConfigError(
                    f"{name} must be an integer of at least 1, got {size!r}. Leave it out for 1."
                )
        if self.kind not in LAYOUT_KINDS:
            raise ConfigError(
                f"layout must be one of {', '.join(LAYOUT_KINDS)}, got {self.kind!r}. "
                "Choose one of these."
            )
        if self.chunks is not None and self.kind != "balanced":
            raise ConfigError(
                f"chunks={self.chunks} is for the layout balanced, got {self.kind}. Leave it out."
            )
        if not isinstance(self.seq_len, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ShapeError(
                f"seq_len must be an integer, got {self.seq_len!r}. "
                "Give the number of tokens as an int."
            )
        shortest = 1 if self.cp_size == 1 else 2 * self.cp_size
        if self.seq_len < shortest:
            raise ShapeError(
                f"a sequence of {self.seq_len} tokens is too short for ring_size={self.ring_size} x "
                f"ulysses_size={self.ulysses_size}: it must have at least {shortest} (two a rank). "
                "Use fewer context-parallel ranks or longer sequences."
            )
        if self.documents is not None and not isinstance(self.documents, Documents):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"documents must be Documents or None, got {type(self.documents).__name__}: "
                "Documents.from_cu_seqlens(...) and its siblings make them."
            )
        if self.documents is not None and self.documents.seq_len != self.seq_len:
            raise ShapeError(
                f"documents describe {self.documents.seq_len} tokens, but the layout has {self.seq_len}. "
                "Make both for the same sequence."
            )

    @cached_property
    def cp_size(self) -> int:
        """Ranks that share one sequence."""
        return self.ring_size * self.ulysses_size

    @cached_property
    def divisor(self) -> int:
        """The divisor of the padded length."""
        return length_divisor(self.ring_size, self.ulysses_size, self.chunks_per_rank)

    @cached_property
    def chunks_per_rank(self) -> int:
        """Equal chunks of a ring rank's tokens."""
        if self.kind == "contiguous" or self.ring_size == 1:
            return 1
        return 2 if self.kind == "zigzag" else self._assignment.per_rank

    @cached_property
    def padded_len(self) -> int:
        """Tokens after padding: the next multiple of ``divisor``."""
        return -(-self.seq_len // self.divisor) * self.divisor

    @cached_property
    def ring_len(self) -> int:
        """Tokens of one ring rank (all its Ulysses ranks together)."""
        return self.padded_len // self.ring_size

    @cached_property
    def local_len(self) -> int:
        """Tokens of one context-parallel rank."""
        return self.padded_len // self.cp_size

    def check_unpadded(self) -> None:
        """Check that the length needs no padding.

        Raises:
            ShapeError: ``seq_len`` is not a multiple of ``divisor``.
        """
        if self.padded_len != self.seq_len:
            raise ShapeError(
                f"padding=False, but a sequence of {self.seq_len} tokens does not divide by "
                f"{self.divisor} (ring_size={self.ring_size}, ulysses_size={self.ulysses_size}, layout "
                f"{self.kind}). The next valid length is {self.padded_len}; or set padding=True, which "
                "is exact and costs no attention."
            )

    def segments(self, ring_rank: int) -> Segments:
        """Return the sorted global (start, length) segments of a ring rank."""
        return self._segments[ring_rank]

    @cached_property
    def checksum(self) -> int:
        """A checksum of the tokens of every rank, equal across processes."""
        sizes = (self.seq_len, self.ring_size, self.ulysses_size)
        parts = [np.array(sizes, dtype=np.int64), *self._segments]
        return zlib.crc32(b"".join(part.tobytes() for part in parts))

    def positions(self, cp_rank: int) -> torch.Tensor:
        """Return int64 ``[local_len]``: global index of each local token, in order; padding is >= seq_len.

        Every call returns the same tensor: do not change it.
        """
        if cp_rank not in self._positions:
            self._positions[cp_rank] = self._make_positions(cp_rank)
        return self._positions[cp_rank]

    @torch.inference_mode(False)  # validation may ask first, and autograd saves it in training
    def _make_positions(self, cp_rank: int) -> torch.Tensor:
        self._check_rank(cp_rank)
        return torch.cat([torch.arange(*run) for run in self._runs[cp_rank]])

    @cached_property
    def _positions(self) -> dict[int, torch.Tensor]:
        """Results of ``positions`` by rank."""
        return {}

    def real_len(self, cp_rank: int) -> int:
        """Count the local tokens that are not padding; they come first."""
        if self.padded_len == self.seq_len:
            return self.local_len
        self._check_rank(cp_rank)
        runs = self._runs[cp_rank]
        return sum([max(0, min(end, self.seq_len) - start) for start, end in runs])

    def count_by_rank(self, per_token: torch.Tensor) -> tuple[int, ...]:
        """Return the sum of int64 [seq_len] on the host over the tokens of every context-parallel rank."""
        sums = np.zeros(self.padded_len + 1, dtype=np.int64)
        np.cumsum(per_token.numpy(), out=sums[1 : self.seq_len + 1])
        sums[self.seq_len + 1 :] = sums[self.seq_len]
        return tuple([int(np.diff(sums[np.array(runs)]).sum()) for runs in self._runs])

    def shard(
        self, x: torch.Tensor, cp_rank: int, dim: int = 1, pad_value: float | int | bool = 0
    ) -> torch.Tensor:
        """Return the local tokens of ``x`` along ``dim``: pure indexing, plus padding; no communication.

        Raises:
            ShapeError: ``x`` does not have ``seq_len`` entries along ``dim``.
        """
        self._check_size(x, dim, self.seq_len, "shard", "the whole sequence")
        positions = to_device(self.positions(cp_rank), x.device)
        local = x.index_select(dim, positions.clamp(max=self.seq_len - 1))
        if self.padded_len == self.seq_len or self.real_len(cp_rank) == self.local_len:
            return local
        padding = positions >= self.seq_len
        shape = [1] * x.dim()
        shape[dim] = -1
        return local.masked_fill(padding.view(shape), pad_value)

    def draw(self, path: str | Path | None = None) -> Figure:
        """Draw the tokens that each rank holds and the (query, key) pairs that it computes, with matplotlib.

        Args:
            path: a file to write, for example ``layout.svg``; ``None`` writes nothing.
        """
        from lightning_cp.layout.drawing import draw_layouts

        return draw_layouts([self], path)

    def unshard(self, shards: Sequence[torch.Tensor], dim: int = 1) -> torch.Tensor:
        """Put the shards of all ranks (in cp-rank order) back into original order and length.

        Raises:
            ShapeError: not one shard per rank, or a shard that is not ``local_len`` long.
        """
        if len(shards) != self.cp_size:
            raise ShapeError(
                f"unshard needs {self.cp_size} shards, one per rank, got {len(shards)}. "
                "Gather them from all ranks of the group first."
            )
        for x in shards:
            self.check_shard(x, dim)
        order = self._inverse.to(shards[0].device)
        return torch.cat(list(shards), dim).index_select(dim, order)

    @cached_property
    @torch.inference_mode(False)  # validation may ask first, and autograd saves it in training
    def _inverse(self) -> torch.Tensor:
        """int64 ``[seq_len]``: the place of global token i in the concatenation of all shards."""
        order = torch.cat([self.positions(rank) for rank in range(self.cp_size)])
        return torch.argsort(order)[: self.seq_len]

    @cached_property
    def _segments(self) -> tuple[Segments, ...]:
        """The segments of every ring rank."""
        size = self.ring_len // self.chunks_per_rank
        if self.kind == "balanced" and self.ring_size > 1:
            return _segments_of_chunks(self._assignment.chunks, size)
        return _regular_segments(self.chunks_per_rank, self.ring_size, size)

    @cached_property
    def _runs(self) -> tuple[list[tuple[int, int]], ...]:
        """The runs (start, end) of consecutive global tokens of each context-parallel rank, in order."""
        found: list[list[tuple[int, int]]] = []
        for ring_rank in range(self.ring_size):
            missing = 0
            for start, size in self.segments(ring_rank).tolist():
                end = start + size
                while start < end:
                    if not missing:  # the next Ulysses rank begins
                        found.append([])
                        missing = self.local_len
                    stop = min(end, start + missing)
                    found[-1].append((start, stop))
                    start, missing = stop, missing - (stop - start)
        return tuple(found)

    @cached_property
    def _assignment(self) -> ChunkAssignment:
        """The chunks of each ring rank, for ``balanced``."""
        sizes = (self.seq_len, self.ring_size, self.ulysses_size)
        documents = self.documents or Documents.single(self.seq_len)
        if self.chunks is None:
            return best_assignment(*sizes, documents, self.mask)
        return assign_chunks(*sizes, documents, self.mask, self.chunks)

    def _check_rank(self, cp_rank: int) -> None:
        if not 0 <= cp_rank < self.cp_size:
            raise ConfigError(
                f"cp_rank must be in 0..{self.cp_size - 1}, got {cp_rank}. "
                "Take the rank from the mesh: mesh.cp_rank."
            )

    def check_shard(self, x: torch.Tensor, dim: int = 1) -> None:
        """Check that a tensor has the tokens of one rank along ``dim``.

        Raises:
            ShapeError: it has not.
        """
        self._check_size(x, dim, self.local_len, "unshard", "a local shard")

    def _check_size(self, x: torch.Tensor, dim: int, want: int, verb: str, what: str) -> None:
        if not -x.dim() <= dim < x.dim():
            raise ShapeError(
                f"cannot {verb} along dim {dim}: the tensor has shape {tuple(x.shape)}. "
                "Name the dimension of the sequence."
            )
        if x.size(dim) == want:
            return
        hint = ""
        if verb == "shard" and x.size(dim) == self.local_len:
            hint = " That is the local length: was it sharded already?"
        raise ShapeError(
            f"{verb} expects {what}, {want} entries along dim {dim}, got shape {tuple(x.shape)}.{hint}"
        )


@lru_cache(maxsize=256)
def _regular_segments(per_rank: int, ring_size: int, size: int) -> tuple[Segments, ...]:
    """Segments of the layouts contiguous (one chunk per rank) and zigzag (two)."""
    last = 2 * ring_size - 1
    chunks = [(rank, last - rank)[:per_rank] for rank in range(ring_size)]
    return _segments_of_chunks(tuple(chunks), size)


def _segments_of_chunks(chunks: tuple[tuple[int, ...], ...], size: int) -> tuple[Segments, ...]:
    """Make the segments of every ring rank from its sorted chunks of ``size`` tokens; joins neighbours."""
    return tuple(_join_neighbours(np.array(of_rank, dtype=np.int64), size) for of_rank in chunks)


def _join_neighbours(chunks: npt.NDArray[np.int64], size: int) -> Segments:
    first = np.flatnonzero(np.concatenate([[True], np.diff(chunks) != 1]))
    counts = np.diff(np.append(first, chunks.size))
    out = np.stack([chunks[first] * size, counts * size], axis=1)
    out.setflags(write=False)
    return out

"""Warning about steps that shift logits against labels themselves, which is wrong at every seam.

A metric of ``logits[:, :-1]`` and ``labels[:, 1:]`` lacks each rank's last token, and crosses from one piece
of the sequence into another. The first step of each kind (with and without gradients) records the indices
that ``Tensor.__getitem__`` receives; no values are read, and later steps are not observed.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from lightning_cp import error_display as console
from lightning_cp.models.handle import SwapHandle


def watch_shifts(handle: SwapHandle, is_watched: Callable[[], bool]) -> None:
    """Warn once, on the first rank, of a step that shifts.

    Args:
        handle: signals the begin and end of steps.
        is_watched: true if the step that begins belongs to the run (and not to a probe).
    """
    mesh = handle.mesh
    seen: set[bool] = set()
    """Kinds of steps that were observed: with gradients, and without."""
    if mesh.sample_size == 1 or mesh.sample_rank or mesh.data_rank:
        return

    def enter() -> Callable[[], None]:
        kind = torch.is_grad_enabled()
        if kind in seen or not is_watched():
            return lambda: None
        assert handle.state is not None
        seen.add(kind)
        cuts = Cuts(handle.state.layout.local_len)
        _start_recording(cuts)

        def leave() -> None:
            _stop_recording(cuts)
            if sys.exc_info()[0] is not None:  # the error that ends the step says more
                return
            if cuts.shift is not None and _SHIFT_WARNING not in handle.warned:
                handle.warned.add(_SHIFT_WARNING)
                console.warn(_SHIFT_WARNING, cuts.shift)

        return leave

    handle.on_activate(enter)


class Cut(NamedTuple):
    """One slice of a tensor that cuts off its first or last token."""

    tensor: weakref.ref[torch.Tensor]
    integers: bool
    line: console.SourceLine

    def is_of(self, other: Cut) -> bool:
        """True if both cut the same tensor, and it still exists."""
        x = self.tensor()
        return x is not None and x is other.tensor()


class Cuts:
    """Slices of one step along the sequence, without the last or without the first token."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._without_last: list[Cut] = []
        self._without_first: list[Cut] = []

    def note(self, x: torch.Tensor, index: Any) -> None:
        """Record ``x[index]`` if it cuts off the first or the last token."""
        if x.dim() not in (2, 3) or x.shape[1] != self._length:
            return
        taken = _along_the_sequence(index, x.dim())
        if taken is None:
            return
        cut = Cut(weakref.ref(x), x.dim() == 2 and x.dtype in _INTEGERS, console.user_line())
        if taken.start in (None, 0) and taken.stop in (-1, self._length - 1):
            self._without_last.append(cut)
        elif taken.start == 1 and taken.stop in (None, self._length):
            self._without_first.append(cut)

    @property
    def shift(self) -> console.SourceLine | None:
        """Source line that shifts: integers without the first token, beside another tensor without the last.

        A tensor that is cut both ways is compared with itself, such as differences of positions.
        """
        last, first = self._without_last, self._without_first
        others = [one for one in last if not any(one.is_of(other) for other in first)]
        targets = [one for one in first if not any(one.is_of(other) for other in last)]
        lines = [one.line for one in targets if one.integers]
        return lines[0] if others and lines else None


_INTEGERS = (torch.int64, torch.int32)


def _along_the_sequence(index: Any, dims: int) -> slice | None:
    """Return the slice of dimension 1 in an index made of slices, or ``None``."""
    parts = index if isinstance(index, tuple) else (index,)
    at = [place for place, part in enumerate(parts) if part is ...]
    if at:
        missing = dims - len(parts) + 1
        parts = (*parts[: at[0]], *[slice(None)] * missing, *parts[at[0] + 1 :])
    if len(parts) < 2 or not all(type(part) is slice for part in parts):
        return None
    return parts[1] if parts[1].step in (None, 1) else None


_watching: list[Cuts] = []
"""Active recordings; one function replaces ``Tensor.__getitem__`` while there are any."""

_original = torch.Tensor.__getitem__


def _start_recording(cuts: Cuts) -> None:
    if not _watching:
        torch.Tensor.__getitem__ = _getitem  # type: ignore[method-assign]
    _watching.append(cuts)


def _stop_recording(cuts: Cuts) -> None:
    _watching.remove(cuts)
    if not _watching:
        del torch.Tensor.__getitem__  # inherited


def _getitem(x: torch.Tensor, index: Any) -> Any:
    if not torch.compiler.is_compiling():
        for cuts in _watching:
            cuts.note(x, index)
    return _original(x, index)


_getitem.__name__ = "__getitem__"  # tensor subclasses identify functions by name


_SHIFT_WARNING = (
    "the step cuts off the last of a rank's tokens in one tensor and the first in another ([:, :-1] against "
    "[:, 1:]), which is wrong at every seam between ranks. Compare the whole logits with "
    "batch['shift_labels'], the target of each token (there if labels='shift', or if a Hugging Face model "
    "shifts); where labels='aligned', with the labels as they are."
)

"""Steps that shift logits against labels by themselves, beside the model's own loss: wrong at every seam.

A metric of ``logits[:, :-1]`` and ``labels[:, 1:]`` lacks each rank's last token, and crosses from one piece
of the sequence into another. Its cuts are seen in the first step of each kind, by what ``Tensor.__getitem__``
is given; nothing is read of any tensor, and later steps are left alone.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from lightning_cp import console
from lightning_cp.models.handle import SwapHandle


def watch_shifts(handle: SwapHandle, is_watched: Callable[[], bool]) -> None:
    """Warn once of a step that shifts, on the first rank.

    Args:
        handle: says when steps begin and end.
        is_watched: whether a step that begins is one of the run's.
    """
    mesh = handle.mesh
    seen: set[bool] = set()
    """The kinds of steps that were looked at: with gradients, and without."""
    if mesh.sample_size == 1 or mesh.sample_rank or mesh.data_rank:
        return

    def enter() -> Callable[[], None]:
        kind = torch.is_grad_enabled()
        if kind in seen or not is_watched():
            return lambda: None
        assert handle.state is not None
        seen.add(kind)
        cuts = Cuts(handle.state.layout.local_len)
        _begin(cuts)

        def leave() -> None:
            _end(cuts)
            if sys.exc_info()[0] is not None:  # an error ends the step, and says more
                return
            if cuts.shift is not None and _SHIFTS not in handle.warned:
                handle.warned.add(_SHIFTS)
                console.warn(_SHIFTS, cuts.shift)

        return leave

    handle.on_activate(enter)


class Cut(NamedTuple):
    """A tensor, of which something was cut off."""

    tensor: weakref.ref[torch.Tensor]
    integers: bool
    line: console.Line

    def is_of(self, other: Cut) -> bool:
        """True if both are of one tensor, which is still there."""
        x = self.tensor()
        return x is not None and x is other.tensor()


class Cuts:
    """Cuts of one step along the sequence: the last token of some tensors, the first of others."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._without_last: list[Cut] = []
        self._without_first: list[Cut] = []

    def note(self, x: torch.Tensor, index: Any) -> None:
        """``x[index]`` was asked for."""
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
    def shift(self) -> console.Line | None:
        """The line that cuts off the first of integers, which stand against something else without the last.

        A tensor that lost both is compared with itself: the steps between positions, say.
        """
        last, first = self._without_last, self._without_first
        others = [one for one in last if not any(one.is_of(other) for other in first)]
        targets = [one for one in first if not any(one.is_of(other) for other in last)]
        lines = [one.line for one in targets if one.integers]
        return lines[0] if others and lines else None


_INTEGERS = (torch.int64, torch.int32)


def _along_the_sequence(index: Any, dims: int) -> slice | None:
    """The part of dimension 1 that an index made of slices takes."""
    parts = index if isinstance(index, tuple) else (index,)
    at = [place for place, part in enumerate(parts) if part is ...]
    if at:
        missing = dims - len(parts) + 1
        parts = (*parts[: at[0]], *[slice(None)] * missing, *parts[at[0] + 1 :])
    if len(parts) < 2 or not all(type(part) is slice for part in parts):
        return None
    return parts[1] if parts[1].step in (None, 1) else None


_watching: list[Cuts] = []
"""One function takes the place of PyTorch's while there is any, whoever began first."""

_original = torch.Tensor.__getitem__


def _begin(cuts: Cuts) -> None:
    if not _watching:
        torch.Tensor.__getitem__ = _getitem  # type: ignore[method-assign]
    _watching.append(cuts)


def _end(cuts: Cuts) -> None:
    _watching.remove(cuts)
    if not _watching:
        del torch.Tensor.__getitem__  # inherited


def _getitem(x: torch.Tensor, index: Any) -> Any:
    if not torch.compiler.is_compiling():
        for cuts in _watching:
            cuts.note(x, index)
    return _original(x, index)


_getitem.__name__ = "__getitem__"  # by which subclasses of tensors tell functions apart


_SHIFTS = (
    "the step cuts off the last of a rank's tokens in one tensor and the first in another ([:, :-1] against "
    "[:, 1:]), which is wrong at every seam between ranks. Compare the whole logits with "
    "batch['shift_labels'], the target of each token (there if labels='shift', or if a Hugging Face model "
    "shifts); where labels='aligned', with the labels as they are."
)

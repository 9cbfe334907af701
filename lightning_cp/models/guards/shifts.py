"""Warning of steps that shift logits against labels themselves, which is wrong at every seam.

A metric of ``logits[:, :-1]`` and ``labels[:, 1:]`` lacks each rank's last token, and crosses from one piece
of the sequence into another. The first step of each kind (with and without gradients) records what
indexing, ``narrow``, ``roll`` and ``pad`` receive, and a warning names the line; no values are read, and
later steps are not observed. Methods of tensors are replaced while a step is observed. Functions are replaced
from the swap to its undo, because compiled code is compiled again where they have changed.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from lightning_cp import error_display
from lightning_cp.models.handle import SwapHandle
from lightning_cp.utils.patching import ChainedPatch, PatchSet, ReplacedFunction


def watch_shifts(handle: SwapHandle, is_watched: Callable[[], bool]) -> None:
    """Warn once, on the first rank, of a step that shifts.

    Args:
        handle: signals the begin and end of steps.
        is_watched: true if the step that begins belongs to the run (and not to a probe).
    """
    seen: set[bool] = set()
    """Kinds of steps that were observed: with gradients, and without."""
    if not _is_observed(handle):
        return

    def enter() -> Callable[[], None]:
        kind = torch.is_grad_enabled()
        if kind in seen or not is_watched():
            return lambda: None
        assert handle.state is not None
        seen.add(kind)
        slices = SequenceSlices(handle.state.layout.local_len)
        _start_recording(slices)
        stop = weakref.finalize(handle, _stop_recording, slices)  # also if the step never ends
        stop.atexit = False

        def leave() -> None:
            stop()
            if sys.exc_info()[0] is not None:  # the error that ends the step says more
                return
            if slices.shift is not None and _SHIFT_WARNING not in handle.warned:
                handle.warned.add(_SHIFT_WARNING)
                error_display.warn(_SHIFT_WARNING, slices.shift)

        return leave

    handle.on_activate(enter)


def shift_replacements(handle: SwapHandle) -> list[ReplacedFunction]:
    """Return functions that note their calls while a step is observed; none on ranks that observe none."""
    if not _is_observed(handle):
        return []
    links = [(home, name, ChainedPatch(getattr(home, name))) for home, name in _FUNCTIONS]
    replaced = [
        ReplacedFunction(home, name, _noting(name, link), link) for home, name, link in links
    ]
    for one in replaced:
        _teach_script(one.ours, one.link.original)
    return replaced


def _teach_script(ours: Any, original: Callable[..., Any]) -> None:
    """Let TorchScript compile calls of ``ours`` as those of the original: it knows functions by identity."""
    table = torch.jit._builtins._get_builtin_table()  # type: ignore[attr-defined]
    if (operator := table.get(id(original))) is not None:
        table[id(ours)] = operator
        weakref.finalize(ours, table.pop, id(ours), None)
    else:  # as a wrapper by torch.jit.script_if_tracing
        ours.__script_if_tracing_wrapper, ours.__original_fn = True, original


def _is_observed(handle: SwapHandle) -> bool:
    mesh = handle.mesh
    return mesh.sample_size > 1 and not mesh.sample_rank and not mesh.data_rank


class SequenceSlice(NamedTuple):
    """One slice of a tensor that cuts off its first or last token."""

    tensor: weakref.ref[torch.Tensor]
    integers: bool
    line: error_display.SourceLine

    def is_of(self, other: SequenceSlice) -> bool:
        """True if both cut the same tensor, and it still exists."""
        x = self.tensor()
        return x is not None and x is other.tensor()


class SequenceSlices:
    """Slices of one step along the sequence, without the last or without the first token."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._without_last: list[SequenceSlice] = []
        self._without_first: list[SequenceSlice] = []
        self._whole: list[error_display.SourceLine] = []
        """Shifts of integers that keep the length of the logits: rolled, or padded before or after a cut."""
        self._short: list[weakref.ref[torch.Tensor]] = []
        """Integers without their first token."""

    def note(self, name: str, result: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Record a call by its name, if it shifts or cuts off the first or the last token."""
        if name == "pad":
            self._note_pad(x, *args, **kwargs)
        elif name == "roll":
            self._note_roll(x, *args, **kwargs)
        elif x.dim() in (2, 3) and x.shape[1] - self._length in (0, 1):
            index = _narrowed(x, *args, **kwargs) if name == "narrow" else args[0]
            taken = _along_the_sequence(index, x.dim())
            if taken is not None:
                self._note_slice(x, taken, result)

    def _note_pad(self, x: torch.Tensor, pad: Any, *_: Any, **__: Any) -> None:
        at_the_end = pad[0] == 0 and pad[1] > 0
        if at_the_end and any(one() is x for one in self._short):
            self._whole.append(error_display.user_line())

    def _note_roll(self, x: torch.Tensor, shifts: Any = None, dims: Any = None) -> None:
        is_sequence = x.shape[1:] == (self._length,) and x.dtype in _INTEGERS
        if is_sequence and shifts in (-1, (-1,), [-1]) and dims in (1, -1, (1,), (-1,), [1], [-1]):
            self._whole.append(error_display.user_line())

    def _note_slice(self, x: torch.Tensor, taken: slice, result: torch.Tensor) -> None:
        integers = x.dim() == 2 and x.dtype in _INTEGERS
        if x.shape[1] > self._length:
            if integers and taken.start == 1 and taken.stop in (None, x.shape[1]):
                self._whole.append(error_display.user_line())
            return
        observed = SequenceSlice(weakref.ref(x), integers, error_display.user_line())
        if taken.start in (None, 0) and taken.stop in (-1, self._length - 1):
            self._without_last.append(observed)
        elif taken.start == 1 and taken.stop in (None, self._length):
            self._without_first.append(observed)
            if integers:
                self._short.append(weakref.ref(result))

    @property
    def shift(self) -> error_display.SourceLine | None:
        """Source line that shifts: integers that keep their length; or integers without the first token
        beside another tensor without the last.

        A tensor that is cut both ways is compared with itself, such as differences of positions.
        """
        last, first = self._without_last, self._without_first
        others = [one for one in last if not any(one.is_of(other) for other in first)]
        targets = [one for one in first if not any(one.is_of(other) for other in last)]
        lines = [one.line for one in targets if one.integers]
        found = self._whole or (lines if others else [])
        return found[0] if found else None


_INTEGERS = (torch.int64, torch.int32)


def _along_the_sequence(index: Any, dims: int) -> slice | None:
    """Return the slice of dimension 1 in an index made of slices and new axes, or ``None``."""
    given = index if isinstance(index, tuple) else (index,)
    parts = tuple(part for part in given if part is not None)
    at = [place for place, part in enumerate(parts) if part is ...]
    if at:
        missing = dims - len(parts) + 1
        parts = (*parts[: at[0]], *[slice(None)] * missing, *parts[at[0] + 1 :])
    if len(parts) < 2 or not all(type(part) is slice for part in parts):
        return None
    return parts[1] if parts[1].step in (None, 1) else None


def _narrowed(x: torch.Tensor, dim: int, start: Any, length: int) -> tuple[slice, ...] | None:
    """Return the index that ``narrow`` along the sequence is."""
    if dim % x.dim() != 1 or not isinstance(start, int):
        return None
    start %= x.shape[1]
    return (slice(None), slice(start, start + length))


_METHODS = ("__getitem__", "narrow", "roll")
_FUNCTIONS = ((torch, "narrow"), (torch, "roll"), (F, "pad"))

_watching: list[SequenceSlices] = []
"""Active recordings, which share the replaced methods."""

_methods = PatchSet()


def _start_recording(slices: SequenceSlices) -> None:
    if not _watching:
        for name in _METHODS:
            link = ChainedPatch(getattr(torch.Tensor, name))
            _methods.put_value(torch.Tensor, name, _noting(name, link))
    _watching.append(slices)


def _stop_recording(slices: SequenceSlices) -> None:
    _watching.remove(slices)
    if not _watching:
        _methods.undo()


def _noting(name: str, link: ChainedPatch) -> Callable[..., Any]:
    @functools.wraps(link.original)  # tensor subclasses identify functions by name
    def call(*args: Any, **kwargs: Any) -> Any:
        if (
            torch.compiler.is_compiling()
        ):  # first: nothing else of here becomes a guard of its graphs
            return link.original(*args, **kwargs)
        result = link.original(*args, **kwargs)
        if _watching and args and _is_plain(args[0]):
            for slices in _watching:
                slices.note(name, result, *args, **kwargs)
        return result

    return call


def _is_plain(x: object) -> bool:
    return type(x) in (torch.Tensor, nn.Parameter) and not x.is_nested  # type: ignore[attr-defined]


_SHIFT_WARNING = (
    "the step cuts off the last of a rank's tokens in one tensor and the first in another ([:, :-1] against "
    "[:, 1:], or rolled or padded labels), which is wrong at every seam between ranks. Compare the whole "
    "logits with batch['shift_labels'], the target of each token (there if labels='shift', or if a Hugging "
    "Face model shifts); where labels='aligned', with the labels as they are."
)

"""Checks of training steps: shifts of logits against labels, and noise that ranks cannot draw as one process.

A step that shifts logits against labels itself is wrong at every seam: a metric of ``logits[:, :-1]`` and
``labels[:, 1:]`` lacks each rank's last token, and crosses from one piece of the sequence into another. The
first step of each kind (with and without gradients) records what indexing, ``narrow``, ``roll`` and ``pad``
receive, and a warning names the line; no values are read, and later steps are not observed.

Noise is checked before the first step. Configs and modules show attention dropout. NEFTune's noise shows by
the attribute that transformers and TRL set on an embedding for their hook; that hook scales the noise by the
length it sees.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from lightning_cp import error_display as console
from lightning_cp.errors import ConfigError
from lightning_cp.models.handle import SwapHandle, attention_modules
from lightning_cp.models.swap import config_value, hf_models
from lightning_cp.utils.patching import PatchSet
from lightning_cp.utils.tracing import is_traced

_DROPOUTS = (
    *("attention_dropout", "attn_dropout", "attn_pdrop"),
    "attention_probs_dropout_prob",
)
"""Names in Hugging Face configs."""

NEFTUNE = "neftune_noise_alpha"


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
        self._whole: list[console.SourceLine] = []
        """Shifts of integers that keep the length of the logits: rolled, or padded before or after a cut."""
        self._short: list[weakref.ref[torch.Tensor]] = []
        """Integers without their first token."""

    def note(self, name: str, result: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Record a call of one of ``_FUNCTIONS``, if it shifts or cuts off the first or the last token."""
        if name == "pad":
            if any(one() is x for one in self._short):
                self._whole.append(console.user_line())
        elif name == "roll":
            self._note_roll(x, *args, **kwargs)
        elif x.dim() in (2, 3) and x.shape[1] - self._length in (0, 1):
            index = _narrowed(x, *args, **kwargs) if name == "narrow" else args[0]
            taken = _along_the_sequence(index, x.dim())
            if taken is not None:
                self._note_cut(x, taken, result)

    def _note_roll(self, x: torch.Tensor, shifts: Any = None, dims: Any = None) -> None:
        is_sequence = x.shape[1:] == (self._length,) and x.dtype in _INTEGERS
        if is_sequence and shifts in (-1, (-1,), [-1]) and dims in (1, -1, (1,), (-1,), [1], [-1]):
            self._whole.append(console.user_line())

    def _note_cut(self, x: torch.Tensor, taken: slice, result: torch.Tensor) -> None:
        integers = x.dim() == 2 and x.dtype in _INTEGERS
        if x.shape[1] > self._length:
            if integers and taken.start == 1 and taken.stop in (None, x.shape[1]):
                self._whole.append(console.user_line())
            return
        cut = Cut(weakref.ref(x), integers, console.user_line())
        if taken.start in (None, 0) and taken.stop in (-1, self._length - 1):
            self._without_last.append(cut)
        elif taken.start == 1 and taken.stop in (None, self._length):
            self._without_first.append(cut)
            if integers:
                self._short.append(weakref.ref(result))

    @property
    def shift(self) -> console.SourceLine | None:
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


_FUNCTIONS: tuple[tuple[Any, str], ...] = (
    *((torch.Tensor, name) for name in ("__getitem__", "narrow", "roll")),
    *((torch, "narrow"), (torch, "roll"), (F, "pad")),
)
"""Functions that can shift a tensor; others replace them while a step is observed."""

_watching: list[Cuts] = []
"""Active recordings, which share the replacements."""

_replacements = PatchSet()


def _start_recording(cuts: Cuts) -> None:
    if not _watching:
        for owner, name in _FUNCTIONS:
            _replacements.put_value(owner, name, _noting(getattr(owner, name)))
    _watching.append(cuts)


def _stop_recording(cuts: Cuts) -> None:
    _watching.remove(cuts)
    if not _watching:
        _replacements.undo()


def _noting(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)  # tensor subclasses identify functions by name
    def call(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if args and not is_traced(args[0]):
            for cuts in _watching:
                cuts.note(original.__name__, result, *args, **kwargs)
        return result

    return call


_SHIFT_WARNING = (
    "the step cuts off the last of a rank's tokens in one tensor and the first in another ([:, :-1] against "
    "[:, 1:], or rolled or padded labels), which is wrong at every seam between ranks. Compare the whole "
    "logits with batch['shift_labels'], the target of each token (there if labels='shift', or if a Hugging "
    "Face model shifts); where labels='aligned', with the labels as they are."
)


def check_training_noise(model: nn.Module, local: Collection[nn.Module] = ()) -> None:
    """Check that a model trains without attention dropout and without NEFTune's noise.

    Args:
        model: everything that a step calls.
        local: modules whose attention each rank computes by itself.

    Raises:
        ConfigError: naming the setting, and what to do.
    """
    for where, rate in _attention_dropouts(model, local):
        raise ConfigError(
            f"attention dropout must be 0.0 under context parallelism, and {where} is {rate}: the ranks "
            "cannot draw the mask that one process would. Set it to 0.0 where the model is made (dropout "
            "elsewhere in the model is fine)."
        )
    for name, module in model.named_modules():
        alpha = getattr(module, NEFTUNE, None)
        if alpha:
            raise ConfigError(
                f"{name or type(module).__name__}.{NEFTUNE} is {alpha}: NEFTune scales its noise by the "
                "length that its hook sees, which is a rank's part of the sequence, so the noise would be "
                f"too large. Remove the hook and the attribute, or set {NEFTUNE} = None."
            )


def _attention_dropouts(
    model: nn.Module, local: Collection[nn.Module]
) -> Iterator[tuple[str, float]]:
    for root in hf_models(model):
        inside = [part for part in attention_modules(root) if part not in local]
        rates = {rate for part in inside for rate in _dropout_rates(part)}
        for config in (root.config, root.config.get_text_config()):
            for name in _DROPOUTS:
                rate = config_value(config, name)
                if (
                    isinstance(rate, float) and rate in rates
                ):  # the modules' rates may have changed since
                    yield f"{name} in the config of {type(root).__name__}", rate
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention) and module not in local and module.dropout:
            yield f"the dropout of {name or 'the model'} (MultiheadAttention)", module.dropout


def _dropout_rates(module: nn.Module) -> Iterator[float]:
    """Yield the dropout rates of an attention module that are not 0."""
    for name, value in vars(module).items():
        if "drop" in name and isinstance(value, float) and value:
            yield value
    for part in module.modules():
        if isinstance(part, nn.Dropout) and part.p:
            yield part.p

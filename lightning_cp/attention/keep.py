"""Keeping attention's (out, lse) through activation checkpointing.

Without it, a checkpointed block repeats attention *and its communication* when it is recomputed.
``keep_attention`` is a ``context_fn`` for ``torch.utils.checkpoint.checkpoint(use_reentrant=False)``:
each checkpointed region keeps the results of its attention calls, in order, and the recomputation
takes them from there (Li et al. 2023, arXiv 2310.03294, section 3.3). It costs
``L * H * (D * itemsize + 4)`` bytes per call, batch row and rank, and ``4 * L * H`` more for the lse and
for the largest scores, where they are asked for.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any

import torch

Kept = tuple[torch.Tensor, ...]
"""out [B, L, H, D] and lse [B, h, T] of one call, sinks included; then [B, H, L] of what else is returned."""


class InPlace:
    """Where results are kept: as they are."""

    told = ""
    """Behind what is said of how much is kept."""

    def put(self, x: torch.Tensor) -> Any:
        """A stand-in for ``x`` until it is asked for."""
        return x

    def get(self, kept: Any) -> torch.Tensor:
        """The tensor again."""
        return kept


class Stash:
    """The kept results of one checkpointed region, being recorded or replayed."""

    def __init__(self, results: list[Any], replaying: bool, place: InPlace) -> None:
        self.replaying = replaying
        self._results = results
        self._place = place
        self._next = 0

    def record(self, *results: torch.Tensor) -> None:
        """Keep what was just communicated."""
        self._results.append([self._place.put(x.detach()) for x in results])

    def replay(self) -> Kept:
        """The record of the same place."""
        results = self._results[self._next]
        self._next += 1
        # Other handles: autograd attaches the recomputed graph, and so its memory, to what it is given.
        return tuple(self._place.get(x).detach() for x in results)


# Set while a region runs, in the thread that runs it: the recomputation runs inside backward, and
# checkpoint enters its context in that very thread.
_current: ContextVar[Stash | None] = ContextVar("lightning_cp_kept_attention", default=None)


def current_stash() -> Stash | None:
    """The stash of the checkpointed region that is being run, if there is one."""
    return _current.get()


Contexts = tuple[AbstractContextManager[None], AbstractContextManager[None]]
"""For a checkpointed region's forward and for its recomputation."""


def keep_attention() -> Contexts:
    """Contexts for a checkpointed region's forward and for its recomputation.

    Use: ``checkpoint(block, x, use_reentrant=False, context_fn=keep_attention)``, or for Hugging Face
    models ``activation_checkpointing_enable({"use_reentrant": False, "context_fn": keep_attention})``
    (``gradient_checkpointing_enable`` in versions of transformers that do not have it).
    """
    return keep_attention_in(InPlace())


def keep_attention_in(place: InPlace) -> Contexts:
    """The same, with results kept in ``place``."""
    results: list[Any] = []
    return _Region(results, False, place), _Region(results, True, place)


class _Region(AbstractContextManager[None]):
    """Makes a stash current; may be entered again (a graph that is kept is recomputed again)."""

    def __init__(self, results: list[Any], replaying: bool, place: InPlace) -> None:
        self._results = results
        self._replaying = replaying
        self._place = place
        self._tokens: list[Token[Stash | None]] = []

    def __enter__(self) -> None:
        self._tokens.append(_current.set(Stash(self._results, self._replaying, self._place)))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _current.reset(self._tokens.pop())

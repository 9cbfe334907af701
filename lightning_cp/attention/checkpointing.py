"""Activation checkpointing that stores attention's (out, lse).

Without it, a checkpointed block repeats attention *and its communication* when it is recomputed.
``keep_attention`` is a ``context_fn`` for ``torch.utils.checkpoint.checkpoint(use_reentrant=False)``:
each checkpointed region stores the results of its attention calls, in order, and the recomputation
reuses them (Li et al. 2023, arXiv 2310.03294, section 3.3). It costs ``L * H * (D * itemsize + 4)`` bytes
per call, batch row and rank, and ``4 * L * H`` more each for a requested lse and requested largest scores.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any

import torch

StashedResults = tuple[torch.Tensor, ...]
"""out [B, L, H, D] and lse [B, h, T] of one call, sinks included; then [B, H, L] of other results."""


class DeviceStore:
    """Storage of results: the tensors themselves, on their device."""

    location_text = ""
    """Suffix of the report of stored bytes."""

    def put(self, x: torch.Tensor) -> Any:
        """Store ``x`` and return a handle."""
        return x

    def get(self, kept: Any) -> torch.Tensor:
        """Return the tensor of a handle."""
        return kept

    def block(self) -> AbstractContextManager[None]:
        """Return the context of a block's forward: what is stored in it is needed at the same time."""
        return nullcontext()

    def release(self) -> None:
        """Release the device memory that the store itself holds; handles stay valid."""


class Stash:
    """Stored results of one checkpointed region, for recording or replay."""

    def __init__(self, results: list[Any], replaying: bool, place: DeviceStore) -> None:
        self.replaying = replaying
        self._results = results
        self._place = place
        self._next = 0

    def record(self, *results: torch.Tensor) -> None:
        """Store the results of a call."""
        self._results.append([self._place.put(x.detach()) for x in results])

    def replay(self) -> StashedResults:
        """Return the results recorded by the same call of the forward."""
        results = self._results[self._next]
        self._next += 1
        # New tensor objects: autograd attaches the recomputed graph, and so its memory, to the returned ones.
        return tuple(self._place.get(x).detach() for x in results)


# Set during a region, in the thread that runs it: the recomputation runs inside backward, and checkpoint
# enters its context in the same thread.
_current: ContextVar[Stash | None] = ContextVar("lightning_cp_kept_attention", default=None)


current_stash = _current.get
"""Returns the stash of the current checkpointed region, if there is one."""


Contexts = tuple[AbstractContextManager[None], AbstractContextManager[None]]
"""For a checkpointed region's forward and for its recomputation."""


def keep_attention() -> Contexts:
    """Return contexts for a checkpointed region's forward and for its recomputation.

    Use: ``checkpoint(block, x, use_reentrant=False, context_fn=keep_attention)``, or for Hugging Face
    models ``activation_checkpointing_enable({"use_reentrant": False, "context_fn": keep_attention})``
    (``gradient_checkpointing_enable`` in versions of transformers that do not have it).
    """
    return keep_attention_in(DeviceStore())


def keep_attention_in(place: DeviceStore) -> Contexts:
    """Return the contexts of ``keep_attention`` with results stored in ``place``."""
    results: list[Any] = []
    return _Region(results, False, place), _Region(results, True, place)


class _Region(AbstractContextManager[None]):
    """Context that makes a stash current; reentrant, since a retained graph may be recomputed again."""

    def __init__(self, results: list[Any], replaying: bool, place: DeviceStore) -> None:
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

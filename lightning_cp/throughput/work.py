"""The tokens and the model FLOPs of training steps, as one data rank has them: the whole of each sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_cp.batch import CountedBatch
from lightning_cp.layout import visible_pairs
from lightning_cp.models.calls import AttentionCall, in_backward


@dataclass(frozen=True)
class Work:
    """Counts of the work done: integers, so that sums over ranks and steps are exact."""

    tokens: int = 0
    flops: int = 0
    unknown: int = 0
    """Batches whose FLOPs are not known."""

    def __add__(self, other: Work) -> Work:
        return Work(
            self.tokens + other.tokens, self.flops + other.flops, self.unknown + other.unknown
        )

    @property
    def state(self) -> dict[str, int]:
        """What a checkpoint keeps."""
        return {"tokens": self.tokens, "flops": self.flops, "unknown": self.unknown}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Work:
        """What a checkpoint has kept."""
        return cls(*(int(state[name]) for name in ("tokens", "flops", "unknown")))


@dataclass(eq=False)
class _MicroBatch:
    batch: CountedBatch
    flops_per_token: int | None
    forward: Counter[AttentionCall] = field(default_factory=Counter)
    backward: Counter[AttentionCall] = field(default_factory=Counter)


class StepWork:
    """Counts micro-batches; they become work when an optimizer has stepped along their gradients.

    A window of accumulation that is never finished, or that a resumed run goes through again, does not count.
    """

    def __init__(self) -> None:
        self.reason = ""
        """Why FLOPs are not known, if they are not."""
        self._open: list[_MicroBatch] = []
        self._stepped: list[_MicroBatch] = []
        self._current: _MicroBatch | None = None

    @property
    def counts(self) -> bool:
        """True if attention calls belong to a training batch."""
        return self._current is not None

    def begin(self, batch: CountedBatch, flops_per_token: int | None) -> None:
        """A micro-batch of training begins.

        Args:
            batch: the whole of it.
            flops_per_token: outside of attention, forward and backward; ``None`` if they are not known.
        """
        self._current = _MicroBatch(batch, flops_per_token)
        self._open.append(self._current)

    def note_call(self, call: AttentionCall, out: torch.Tensor) -> None:
        """An attention call was made; its backward is counted when a gradient comes to its output.

        What backward computes once more (checkpointing) is no model FLOP.
        """
        current = self._current
        if current is None:
            return
        if not in_backward():
            current.forward[call] += 1

        def passed(_: torch.Tensor) -> None:
            current.backward[call] += 1

        if out.requires_grad:
            out.register_hook(passed)

    def end_batch(self) -> None:
        """What is called from here on is no training: validation, or a callback's own."""
        self._current = None

    def abandon(self) -> None:
        """The micro-batch was not trained on after all, if one is under way."""
        if self._current is not None:
            self._open.remove(self._current)
        self._current = None

    def forget_flops(self) -> None:
        """Those outside of attention were not what was thought."""
        for micro in self._open:
            micro.flops_per_token = None

    def stepped(self) -> None:
        """Optimizers have stepped along what was accumulated."""
        self.end_batch()
        self._stepped += self._open
        self._open = []

    def take(self, *, wait: bool) -> Work:
        """The work of steps since the last time.

        Args:
            wait: for copies from the device; else what has not arrived is left for later.
        """
        done = Work()
        while self._stepped and (wait or self._stepped[0].batch.arrived):
            done += self._work_of(self._stepped.pop(0))
        return done

    def _work_of(self, micro: _MicroBatch) -> Work:
        if micro.batch.event is not None:
            micro.batch.event.synchronize()
        tokens = micro.batch.tokens
        attention = self._attention_flops(micro)
        if attention is None or micro.flops_per_token is None:
            return Work(tokens, 0, 1)
        return Work(tokens, micro.flops_per_token * tokens + attention, 0)

    def _attention_flops(self, micro: _MicroBatch) -> int | None:
        """Forward, and twice that for each backward: dQ, dK, dV and dP are four products, not two."""
        if not micro.forward:
            self.reason = _NO_CALLS
            return None
        total = 0
        for passes, factor in ((micro.forward, 1), (micro.backward, 2)):
            for call, count in passes.items():
                flops = self._flops_of(call, micro.batch)
                if flops is None:
                    return None
                total += factor * count * flops
        return total

    def _flops_of(self, call: AttentionCall, batch: CountedBatch) -> int | None:
        documents = batch.documents
        one_for_all = documents.num_rows == 1
        fits = call.length == batch.seq_len and (one_for_all or call.rows == documents.num_rows)
        if call.mask is None or not fits:
            self.reason = _OTHER_MASK if call.mask is None else _OTHER_TOKENS
            return None
        return call.flops(visible_pairs(documents, call.mask) * (call.rows if one_for_all else 1))


_NO_CALLS = (
    "no attention call was seen (Hugging Face models and scaled_dot_product_attention are; compiled ones "
    "under context parallelism only)"
)
_OTHER_MASK = (
    "attention was given a mask of its own, so that the visible pairs are not known; causality, windows, "
    "packed documents and padding are"
)
_OTHER_TOKENS = "attention runs over other tokens than the batch's"

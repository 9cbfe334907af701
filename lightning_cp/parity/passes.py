"""One step of a model, forward and backward, and what of it can be compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_cp.layout import SequenceLayout
from lightning_cp.utils.containers import tensors_of
from lightning_cp.utils.module_hooks import add_hook

# Events in a model, in order: inputs and outputs of its modules, and its calls of attention.


@dataclass
class Event:
    """A tensor that went into a module, or came out of it; or a call of attention, without one."""

    kind: str
    """``input``, ``output`` or ``attention``."""
    name: str
    module: str
    """Its class."""
    turn: int = 0
    """How many of the same kind and name came before."""
    tensor: torch.Tensor | None = None
    source: torch.Tensor | None = None
    """The tensor itself, of outputs that have a gradient, until the pass ends."""
    trains: bool = False
    """An output that has a gradient."""
    parent: str = ""
    """The class of the module that called it, as far as names tell."""

    @property
    def key(self) -> tuple[str, str, int]:
        """The same in two runs of one step."""
        return self.kind, self.name, self.turn


@dataclass
class Recording:
    """The events of one forward."""

    events: list[Event] = field(default_factory=list)
    everything: bool = True
    """Or only the last output that may be logits; of those with a gradient, if there are any: a teacher has
    none."""
    dtypes: set[torch.dtype] = field(default_factory=set)
    """Of what went into modules and came out of them."""
    _turns: Counter[tuple[str, str]] = field(default_factory=Counter)

    def note(self, kind: str, name: str, module: str, tensor: Any, parent: str = "") -> None:
        """One event more; a tensor is copied, since a model may change its own."""
        if isinstance(tensor, torch.Tensor):
            self.dtypes.add(tensor.dtype)
        turn = self._turns[kind, name]
        self._turns[kind, name] += 1
        if not self.everything:
            if kind != "output" or not isinstance(tensor, torch.Tensor) or tensor.dim() < 3:
                return
            if self.events and self.events[0].trains and not tensor.requires_grad:
                return
            self.events.clear()
        kept = source = None
        if isinstance(tensor, torch.Tensor):  # on the host: there may be many
            kept = tensor.detach().to("cpu", copy=True)
            source = tensor if tensor.requires_grad and kind == "output" else None
        trains = source is not None
        self.events.append(Event(kind, name, module, turn, kept, source, trains, parent))

    def last_output(self) -> torch.Tensor | None:
        """Of the last module whose output [B, L, any] has a gradient."""
        outputs = (event.source for event in reversed(self.events))
        return next((x for x in outputs if x is not None and x.dim() == 3), None)

    def follow_last(self) -> None:
        """Have backward leave the gradient that comes to the last output."""
        last = self.last_output() if self.everything else None
        if last is not None:
            last.retain_grad()

    def end(self) -> torch.Tensor | None:
        """Let go of the graph; the gradient that came to the last output."""
        last = self.last_output() if self.everything else None
        for event in self.events:
            event.source = None
        return None if last is None or last.grad is None else last.grad.to("cpu")

    def note_attention(self, *_: Any) -> None:
        """A call of attention: a listener of the swap."""
        self.note("attention", "", "", None)


@contextmanager
def recording(
    model: nn.Module,
    listen: Callable[[Callable[..., None]], Callable[[], None]],
    *,
    everything: bool,
) -> Iterator[Recording]:
    """Record what passes through the modules of ``model`` in the calls within.

    Args:
        model: all of whose modules are looked at.
        listen: begins to tell of attention calls; returns what ends that.
        everything: or only the last output [B, L, any].
    """
    found = Recording(everything=everything)
    kinds = {
        name: type(module).__name__.removeprefix("FSDP") for name, module in model.named_modules()
    }
    hooks = [listen(found.note_attention)]
    for name, module in model.named_modules():
        kind, parent = kinds[name], _caller(name, kinds)

        enter = partial(_note_input, found, name, kind, parent)
        leave = partial(_note_output, found, name, kind, parent)
        options = {"with_kwargs": True, "prepend": True}
        hooks.append(add_hook(module.register_forward_pre_hook, enter, **options))
        hooks.append(add_hook(module.register_forward_hook, leave))
    try:
        yield found
    finally:
        for end in hooks:
            end()


def _note_input(
    found: Recording, name: str, kind: str, parent: str, _: nn.Module, args: Any, kwargs: Any
) -> None:
    found.note("input", name, kind, _first_tensor((args, kwargs)), parent)


def _note_output(
    found: Recording, name: str, kind: str, parent: str, _: nn.Module, args: Any, output: Any
) -> None:
    found.note("output", name, kind, _first_tensor(output), parent)


def _caller(name: str, kinds: Mapping[str, str]) -> str:
    """The class of the module around it that is no list."""
    while name:
        name = name.rpartition(".")[0]
        if kinds.get(name, "") not in ("ModuleList", "ModuleDict"):
            return kinds.get(name, "")
    return ""


def _first_tensor(value: Any) -> torch.Tensor | None:
    return next((x for _, x in tensors_of(value) if x.dim()), None)


@dataclass
class StepPass:
    """A step on one process, or a rank's part of a context-parallel one."""

    loss: torch.Tensor
    """float64 []: one process's, of this data rank."""
    gradients: dict[str, torch.Tensor]
    """By parameter: what an optimizer would read, of this rank's part of it."""
    events: list[Event] = field(default_factory=list)
    part: LocalTokens | None = None
    """Of a context-parallel one."""
    share: float = 1.0
    """Of its group's targets, this rank's."""
    positions_ignored: bool = False
    """Nothing in the step asked for the positions of its tokens."""
    documents_isolated: bool = False
    """Of one process: as the batch declares them, since the model alone does not know them."""
    at_output: torch.Tensor | None = None
    """The gradient that came to the last output [B, L, any], where everything is recorded."""
    drawn: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """Where the CPU's source of random numbers stood at its end."""
    drawn_on_cuda: bool = False
    """Random numbers were drawn there."""
    dtypes: frozenset[torch.dtype] = frozenset()
    """Of the loss, and of what passed through modules."""


@dataclass(frozen=True)
class LocalTokens:
    """The tokens of a row that a rank has."""

    layout: SequenceLayout
    cp_rank: int
    rows: int
    real: torch.Tensor | None = None
    """[B, S], 0 for padding of the batch's own, which nobody looks at."""

    def of_whole(
        self, whole: torch.Tensor, local: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Numbers of real tokens of a whole tensor and of this rank's, flat.

        Returns:
            ``None`` if the shapes are not those of one tensor of the sequence.
        """
        pair = self.by_token(whole, local)
        return None if pair is None else (pair[0].flatten(), pair[1].flatten())

    def by_token(
        self, whole: torch.Tensor, local: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The same, of which the first dimension, or two, are real tokens."""
        whole, local = self._by_rows(whole, local)
        dim = self._sequence_dim(whole, local)
        if dim is None:
            return None
        mine = self.layout.shard(whole, self.cp_rank, dim=dim).movedim(dim, 0)
        keep = self._real(whole, dim)
        return _rows(mine, keep), _rows(local.movedim(dim, 0), keep)

    def plain_loss(self, local: torch.Tensor) -> torch.Tensor:
        """This rank's part of the mean square of [B, L, any], so that the mean over ranks is all of it."""
        positions = self.layout.positions(self.cp_rank).to(local.device)
        inside = (positions < self.layout.seq_len).view(1, -1, 1)
        if self.real is not None:
            mine = self.layout.shard(self.real.to(local.device), self.cp_rank, dim=1)
            inside = inside & (mine != 0)[..., None]
        return plain_loss(local, inside, self.real, self.layout.seq_len) * self.layout.cp_size

    def _by_rows(
        self, whole: torch.Tensor, local: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts see all rows' tokens in one dimension."""
        sizes = (self.rows * self.layout.seq_len, self.rows * self.layout.local_len)
        if self.rows > 1 and (whole.shape[0], local.shape[0]) == sizes:
            return whole.unflatten(0, (self.rows, -1)), local.unflatten(0, (self.rows, -1))
        return whole, local

    def _sequence_dim(self, whole: torch.Tensor, local: torch.Tensor) -> int | None:
        if whole.dim() != local.dim():
            return None
        differing = [
            i for i, (a, b) in enumerate(zip(whole.shape, local.shape, strict=True)) if a != b
        ]
        if not differing and self.layout.cp_size == 1 and self.layout.seq_len in whole.shape:
            return whole.shape.index(self.layout.seq_len)
        if len(differing) != 1:
            return None
        (dim,) = differing
        sizes = self.layout.seq_len, self.layout.local_len
        return dim if (whole.shape[dim], local.shape[dim]) == sizes else None

    def _real(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """bool [L] or [L, B]: local tokens that are no padding."""
        positions = self.layout.positions(self.cp_rank).to(whole.device)
        inside = positions < self.layout.seq_len
        if self.real is None or dim == 0 or whole.shape[0] != self.real.shape[0]:
            return inside
        mine = self.layout.shard(self.real.to(whole.device), self.cp_rank, dim=1)
        return inside[:, None] & (mine != 0).t()


def plain_loss(
    x: torch.Tensor, inside: torch.Tensor | None, real: torch.Tensor | None, seq_len: int
) -> torch.Tensor:
    """The sum of squares of ``x`` [B, any, any] where it counts, over how many tokens of the whole do.

    Args:
        x: of the whole sequence or a part of it.
        inside: bool, [B or 1, any, 1]: what counts of ``x``; ``None``: what ``real`` says.
        real: [B, S] of the whole, 0 for padding.
        seq_len: of the whole.
    """
    count = real.ne(0).sum() if real is not None else x.shape[0] * seq_len
    if inside is None and real is not None:
        inside = real.ne(0)[..., None].to(x.device)
    kept = x if inside is None else torch.where(inside, x, 0)
    wide = kept.to(torch.promote_types(kept.dtype, torch.float32))
    return wide.square().mean(-1).sum() / count


def _rows(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Of [L, any] or [L, B, any] the tokens to be kept."""
    return x[keep].double()

"""Events in a model, in order: inputs and outputs of its modules, and its calls of attention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_cp.containers import tensors_of
from lightning_cp.module_hooks import add_hook


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

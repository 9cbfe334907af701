"""One step of a model, forward and backward, with the tensors to compare."""

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
from lightning_cp.utils.patching import add_hook

# Events in a model, in order: inputs and outputs of its modules, and its calls of attention.


@dataclass
class Event:
    """A tensor that a module received or returned; or a call of attention, without a tensor."""

    kind: str
    """``input``, ``output`` or ``attention``."""
    name: str
    module: str
    """Class of the module."""
    turn: int = 0
    """Number of earlier events of the same kind and name."""
    tensor: torch.Tensor | None = None
    source: torch.Tensor | None = None
    """The tensor itself, of outputs with a gradient, until the pass ends."""
    trains: bool = False
    """True for an output that has a gradient."""
    parent: str = ""
    """Class of the calling module, inferred from names."""

    @property
    def key(self) -> tuple[str, str, int]:
        """The key of the same event in another run of the step."""
        return self.kind, self.name, self.turn


@dataclass
class Recording:
    """The events of one forward."""

    events: list[Event] = field(default_factory=list)
    everything: bool = True
    """False to record only the last output that may be logits; preferably with a gradient, which a teacher
    has none of.
    """
    dtypes: set[torch.dtype] = field(default_factory=set)
    """Dtypes of inputs and outputs of modules."""
    _turns: Counter[tuple[str, str]] = field(default_factory=Counter)

    def note(self, kind: str, name: str, module: str, tensor: Any, parent: str = "") -> None:
        """Append an event; its tensor is copied, since a model may change it in place."""
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
        if isinstance(tensor, torch.Tensor) and not _is_of_rows(
            tensor
        ):  # on the host: there may be many
            kept = tensor.detach().to("cpu", copy=True)
            source = tensor if tensor.requires_grad and kind == "output" else None
        trains = source is not None
        self.events.append(Event(kind, name, module, turn, kept, source, trains, parent))

    def last_output(self) -> torch.Tensor | None:
        """The last module output [B, L, any] with a gradient."""
        outputs = (event.source for event in reversed(self.events))
        return next((x for x in outputs if x is not None and x.dim() == 3), None)

    def retain_last_gradient(self) -> None:
        """Retain the gradient of the last output."""
        last = self.last_output() if self.everything else None
        if last is not None:
            last.retain_grad()

    def end(self) -> torch.Tensor | None:
        """Release the graph; return the gradient of the last output."""
        last = self.last_output() if self.everything else None
        for event in self.events:
            event.source = None
        return None if last is None or last.grad is None else last.grad.to("cpu")

    def note_attention(self, *_: Any) -> None:
        """Record a call of attention; a listener of the swap."""
        self.note("attention", "", "", None)


@contextmanager
def recording(
    model: nn.Module,
    listen: Callable[[Callable[..., None]], Callable[[], None]],
    *,
    everything: bool,
) -> Iterator[Recording]:
    """Record the inputs and outputs of the modules of ``model`` within the block.

    Args:
        model: all of its modules are recorded.
        listen: registers a listener of attention calls; returns the function that removes it.
        everything: False to record only the last output [B, L, any].
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


def _is_of_rows(x: torch.Tensor) -> bool:
    """True if all tokens of a row share one value, as what a head with one value per row is given."""
    return x.dim() > 2 and x.shape[1] > 1 and x.stride(1) == 0


def _caller(name: str, kinds: Mapping[str, str]) -> str:
    """Class of the enclosing module that is not a list."""
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
    """float64 []: one process's loss of this data rank."""
    gradients: dict[str, torch.Tensor]
    """By parameter: this rank's part of the gradient that an optimizer would read."""
    events: list[Event] = field(default_factory=list)
    part: LocalTokens | None = None
    """The rank's tokens; ``None`` for one process."""
    share: float = 1.0
    """This rank's share of its group's targets."""
    positions_ignored: bool = False
    """True if the step did not read the positions of its tokens."""
    documents_isolated: bool = False
    """For one process: True if documents were isolated as the batch declares them, which the model alone does
    not.
    """
    at_output: torch.Tensor | None = None
    """Gradient of the last output [B, L, any], if everything is recorded."""
    drawn: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """State of the CPU's random generator at the end."""
    drew_on_cuda: bool = False
    """True if random numbers were drawn on CUDA."""
    dtypes: frozenset[torch.dtype] = frozenset()
    """Dtypes of the loss and of the recorded tensors."""


@dataclass(frozen=True)
class LocalTokens:
    """The tokens of a row that a rank has."""

    layout: SequenceLayout
    cp_rank: int
    rows: int
    real: torch.Tensor | None = None
    """[B, S], 0 for padding of the batch itself, which is not compared."""

    def real_values(
        self, whole: torch.Tensor, local: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Elements of real tokens of a whole tensor and of this rank's, flattened.

        Returns:
            ``None`` if the shapes are not those of one tensor of the sequence.
        """
        pair = self.by_token(whole, local)
        return None if pair is None else (pair[0].flatten(), pair[1].flatten())

    def by_token(
        self, whole: torch.Tensor, local: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Both tensors with real tokens in the first dimension, or the first two."""
        whole, local = self._by_rows(whole, local)
        dim = self._sequence_dim(whole, local)
        if dim is None:
            return None
        mine = self.layout.shard(whole, self.cp_rank, dim=dim).movedim(dim, 0)
        keep = self._real(whole, dim)
        return _rows(mine, keep), _rows(local.movedim(dim, 0), keep)

    def plain_loss(self, local: torch.Tensor) -> torch.Tensor:
        """This rank's part of the mean square of [B, L, any]; the mean over ranks is the whole."""
        positions = self.layout.positions(self.cp_rank).to(local.device)
        inside = (positions < self.layout.seq_len).view(1, -1, 1)
        if self.real is not None:
            mine = self.layout.shard(self.real.to(local.device), self.cp_rank, dim=1)
            inside = inside & (mine != 0)[..., None]
        return plain_loss(local, inside, self.real, self.layout.seq_len) * self.layout.cp_size

    def _by_rows(
        self, whole: torch.Tensor, local: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The two tensors where all rows' tokens share one dimension, as in experts."""
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
        """bool [L] or [L, B]: local tokens that are not padding."""
        positions = self.layout.positions(self.cp_rank).to(whole.device)
        inside = positions < self.layout.seq_len
        if self.real is None or dim == 0 or whole.shape[0] != self.real.shape[0]:
            return inside
        mine = self.layout.shard(self.real.to(whole.device), self.cp_rank, dim=1)
        return inside[:, None] & (mine != 0).t()


def plain_loss(
    x: torch.Tensor, inside: torch.Tensor | None, real: torch.Tensor | None, seq_len: int
) -> torch.Tensor:
    """The sum of squares of ``x`` [B, any, any] where it counts, divided by the number of counted tokens of
    the whole.

    Args:
        x: the whole sequence or a part of it.
        inside: bool [B or 1, any, 1]: counted entries of ``x``; ``None``: those of ``real``.
        real: [B, S] of the whole sequence, 0 for padding.
        seq_len: of the whole sequence.
    """
    count = real.ne(0).sum() if real is not None else x.shape[0] * seq_len
    if inside is None and real is not None:
        inside = real.ne(0)[..., None].to(x.device)
    kept = x if inside is None else torch.where(inside, x, 0)
    wide = kept.to(torch.promote_types(kept.dtype, torch.float32))
    return wide.square().mean(-1).sum() / count


def _rows(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """The kept tokens of [L, any] or [L, B, any], in the order of rows if these keep different ones."""
    return (x[keep] if keep.dim() == 1 else x.transpose(0, 1)[keep.t()]).double()

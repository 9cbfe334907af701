"""The largest scores of a model's attention calls, told by the modules that made them.

A call does not say where it comes from, so modules tell when they are entered and left (see ``scope``). While
somebody collects, every call that a gradient may come back through is made by a kernel that gives its
largest scores, or is followed by a pass for these alone; in backward, where blocks are computed again
without the modules around them, as well, so that the same kernel computes both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_cp.attention.attend import largest_scores
from lightning_cp.attention.exchange import Exchange
from lightning_cp.attention.keep import current_stash
from lightning_cp.attention.plan import AttentionPlan, make_plan
from lightning_cp.attention.spec import AttentionSpec
from lightning_cp.errors import ConfigError
from lightning_cp.kernels.api import declares
from lightning_cp.layout import SequenceLayout
from lightning_cp.mesh import ContextParallelMesh
from lightning_cp.module_hooks import add_hook
from lightning_cp.untraced import untraced


class MaxLogits(NamedTuple):
    """Of one attention call."""

    largest: torch.Tensor
    """float32 [H]: the largest score of each query head over this rank's queries and all of their keys, as it
    enters the softmax; -inf for heads of other Ulysses ranks."""
    head_dim: int
    """Of queries and keys."""
    tp_rank: int
    """The call has the heads of this tensor-parallel rank, or all heads."""
    tp_size: int


Tell = Callable[[MaxLogits], None]


class Inputs(NamedTuple):
    """Of a call: q [B, L, H, D], k and v [B, L, K, D]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    spec: AttentionSpec


class Collector:
    """Listeners to the attention of modules.

    Args:
        modules: the modules, and who is told.
        extra_pass: calls whose kernel gives no largest scores are followed by a pass that does.
    """

    def __init__(self, modules: Mapping[nn.Module, Tell], *, extra_pass: bool = False) -> None:
        self._modules = dict(modules)
        self._extra_pass = extra_pass
        self._inside: list[nn.Module] = []
        self._undo: list[Callable[[], None]] = []

    @property
    def wants(self) -> bool:
        """True if a call that is made now is collected: not where no gradients are wanted."""
        return bool(self._modules) and torch.is_grad_enabled()

    def by_kernel(self, kernel: str, exchange: Exchange) -> bool:
        """True if calls have to give their largest scores themselves; the same on every rank."""
        if not self.wants:
            return False
        gives = exchange.name != "ring_flash_attn" and declares(kernel, "max_logits")
        return gives or not self._extra_pass

    def forget_calls(self) -> None:
        """A step is over, or failed."""
        self._inside.clear()

    def note(
        self,
        inputs: Inputs,
        largest_H: torch.Tensor | None,
        mesh: ContextParallelMesh,
        plan_of_pass: Callable[[], AttentionPlan] | None,
    ) -> None:
        """A call was made.

        Args:
            inputs: its own.
            largest_H: if the call gave them.
            mesh: where it was made.
            plan_of_pass: how they are computed if it did not.
        """
        stash, tell = current_stash(), self._modules.get(self._inside[-1]) if self._inside else None
        if tell is None or not self.wants or (stash is not None and stash.replaying):
            return  # nobody's; or recorded when what is repeated now was called
        if largest_H is None and plan_of_pass is not None:
            largest_H = largest_scores(*inputs[:3], plan_of_pass())
        if largest_H is not None:
            tell(MaxLogits(largest_H, inputs.q.shape[3], mesh.tp_rank, mesh.tp_size))

    def follow(self, is_active: Callable[[], bool]) -> None:
        """Have modules tell when they are called, until ``end``."""

        @untraced
        def enter(module: nn.Module, args: Any) -> None:
            if is_active():
                self._inside.append(module)

        @untraced
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if self._inside and self._inside[-1] is module:
                self._inside.pop()

        for module in self._modules:
            self._undo.append(add_hook(module.register_forward_pre_hook, enter))
            self._undo.append(add_hook(module.register_forward_hook, leave, always_call=True))

    def end(self) -> None:
        """Nobody is told any more."""
        self._modules.clear()
        self._inside.clear()
        while self._undo:
            self._undo.pop()()


def plan_by_kernel(make: Callable[[bool], AttentionPlan]) -> AttentionPlan:
    """A plan whose kernel gives the largest scores.

    Args:
        make: a plan, with or without them.

    Raises:
        ConfigError: that kernel gives none, and what would; or another reason, which ``make`` has.
    """
    try:
        return make(True)
    except ConfigError as refused:
        make(False)  # it may be refused either way
        raise ConfigError(
            f"QK-clip wants the largest scores of every attention call: {refused} Or have them computed in "
            "a forward pass of their own, by another kernel: QKClip(extra_pass=True)."
        ) from None


def plan_of_pass(
    inputs: Inputs, mesh: ContextParallelMesh, layout: SequenceLayout, exchange: Exchange
) -> AttentionPlan:
    """The plan of a pass for the largest scores alone.

    Raises:
        ConfigError: no kernel gives them.
    """
    how = Exchange() if exchange.name == "ring_flash_attn" else exchange
    q, k, v, spec = inputs
    return make_plan(q, k, v, mesh, layout, spec, "auto", exchange=how, max_logits=True)

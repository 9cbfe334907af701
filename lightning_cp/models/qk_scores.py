"""Largest scores of a model's attention calls, reported per module (for QK-clip).

An attention call does not name its module, so hooks track which module is being called, as in
``lightning_cp.models.swap``. While scores are collected, every call that needs a gradient runs on a
kernel that returns its largest scores, or is followed by a pass for these alone. That includes recomputation
in backward, which runs blocks without the modules around them, so that the same kernel computes both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_cp.attention.checkpointing import current_stash
from lightning_cp.attention.function import largest_scores
from lightning_cp.attention.plan import AttentionPlan, make_plan
from lightning_cp.attention.spec import AttentionSpec
from lightning_cp.errors import ConfigError
from lightning_cp.kernels.select import has_feature
from lightning_cp.layout import SequenceLayout
from lightning_cp.layout.exchange import Exchange
from lightning_cp.mesh import ContextParallelMesh
from lightning_cp.utils.patching import PatchSet, add_hook
from lightning_cp.utils.tracing import exclude_from_compile


class MaxLogits(NamedTuple):
    """Largest scores of one attention call."""

    largest: torch.Tensor
    """float32 [H]: the largest score of each query head over this rank's queries and all of their keys, as it
    enters the softmax; -inf for heads of other Ulysses ranks."""
    head_dim: int
    """Head dim of queries and keys."""
    tp_rank: int
    """The call has the heads of this tensor-parallel rank, or all heads."""
    tp_size: int


ScoreCallback = Callable[[MaxLogits], None]


class AttentionInputs(NamedTuple):
    """Inputs of a call: q [B, L, H, D], k and v [B, L, K, D]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    spec: AttentionSpec


class MaxLogitsCollector:
    """Collector of the largest scores of modules' attention calls.

    Args:
        modules: modules, each with the callback for its calls.
        extra_pass: run an additional pass where the kernel does not return largest scores.
    """

    def __init__(
        self, modules: Mapping[nn.Module, ScoreCallback], *, extra_pass: bool = False
    ) -> None:
        self._modules = dict(modules)
        self._extra_pass = extra_pass
        self._inside: list[nn.Module] = []
        self._hooks = PatchSet()

    @property
    def wants(self) -> bool:
        """True if a call made now is collected: gradients must be enabled."""
        return bool(self._modules) and torch.is_grad_enabled()

    def by_kernel(self, kernel: str, exchange: Exchange) -> bool:
        """True if the call's own kernel has to return the largest scores; the same on every rank."""
        if not self.wants:
            return False
        gives = exchange.name != "ring_flash_attn" and has_feature(kernel, "max_logits")
        return gives or not self._extra_pass

    def forget_calls(self) -> None:
        """Clear the stack of tracked modules when a step ends or fails."""
        self._inside.clear()

    def note(
        self,
        inputs: AttentionInputs,
        largest_H: torch.Tensor | None,
        mesh: ContextParallelMesh,
        make_plan: Callable[[], AttentionPlan] | None,
    ) -> None:
        """Report one call to the callback of its module.

        Args:
            inputs: of the call.
            largest_H: the largest scores, if the call returned them.
            mesh: the mesh of the call.
            make_plan: plans the pass that computes them otherwise.
        """
        stash, tell = current_stash(), self._modules.get(self._inside[-1]) if self._inside else None
        if tell is None or not self.wants or (stash is not None and stash.replaying):
            return  # no collected module, or a recomputation of a call that was reported already
        if largest_H is None and make_plan is not None:
            largest_H = largest_scores(*inputs[:3], make_plan())
        if largest_H is not None:
            tell(MaxLogits(largest_H, inputs.q.shape[3], mesh.tp_rank, mesh.tp_size))

    def start(self, is_active: Callable[[], bool]) -> None:
        """Track calls of the modules until ``end``."""

        @exclude_from_compile
        def enter(module: nn.Module, args: Any) -> None:
            if is_active():
                self._inside.append(module)

        @exclude_from_compile
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if self._inside and self._inside[-1] is module:
                self._inside.pop()

        for module in self._modules:
            self._hooks.add(add_hook(module.register_forward_pre_hook, enter))
            self._hooks.add(add_hook(module.register_forward_hook, leave, always_call=True))

    def end(self) -> None:
        """Stop collecting and remove the hooks."""
        self._modules.clear()
        self._inside.clear()
        self._hooks.undo()


def make_plan_with_scores(make: Callable[..., AttentionPlan]) -> AttentionPlan:
    """Return a plan whose kernel returns the largest scores.

    Args:
        make: makes a plan, with them if ``max_logits``.

    Raises:
        ConfigError: the kernel does not return them; or any other error of ``make``.
    """
    try:
        return make(max_logits=True)
    except ConfigError as refused:
        make()  # raises if the call is refused without scores too
        raise ConfigError(
            f"QK-clip wants the largest scores of every attention call: {refused} Or have them computed in "
            "a separate forward pass, by another kernel: QKClip(extra_pass=True)."
        ) from None


def make_scores_plan(
    inputs: AttentionInputs, mesh: ContextParallelMesh, layout: SequenceLayout, exchange: Exchange
) -> AttentionPlan:
    """Return the plan of a pass for the largest scores alone.

    Raises:
        ConfigError: no kernel returns them.
    """
    how = Exchange() if exchange.name == "ring_flash_attn" else exchange
    q, k, v, spec = inputs
    return make_plan(q, k, v, mesh, layout, spec, "auto", exchange=how, max_logits=True)

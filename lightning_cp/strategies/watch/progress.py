"""Signs of progress within a step, for ranks that are slow and not stuck: gradients that have arrived, and
attention modules that were called where no attention is intercepted."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_cp.checkpoint.pretrained.names import plain
from lightning_cp.faults.position import Phase, Position
from lightning_cp.module_hooks import add_hook

_ATTENTION = re.compile(r"(Attention|Attn)(Layer|Block)?(V?\d+)?$")


class Progress:
    """Hooks of one run."""

    def __init__(self, position: Position) -> None:
        self._position = position
        self._hooks: list[Callable[[], None]] = []

    def follow(self, module: nn.Module, *, attention: bool) -> None:
        """Count what happens in a module from now on.

        Args:
            module: as it is called, wrapped for data parallelism.
            attention: calls of attention modules count, as nobody else counts attention.
        """
        count = self._position.progress
        for parameter in module.parameters():
            own = parameter.requires_grad and parameter.is_leaf
            # FSDP2's groups are counted by the engine, reduced or not: a hook here would be called only where
            # gradients are reduced, and have each wait for its copy to the CPU.
            if own and not isinstance(parameter, DTensor):
                hook = parameter.register_post_accumulate_grad_hook(count)
                self._hooks.append(hook.remove)
        for name, part in module.named_modules():
            if issubclass(type(part), FSDPModule):  # isinstance would hide that it is a module
                self._follow_calls(
                    plain(name) or f"the {type(part).__name__.removeprefix('FSDP')}", part
                )
        for part in module.modules() if attention else ():
            if _ATTENTION.search(type(part).__name__) and not isinstance(
                part, nn.MultiheadAttention
            ):
                self._hooks.append(add_hook(part.register_forward_pre_hook, self._called))

    def _follow_calls(self, name: str, part: nn.Module) -> None:
        """Note calls before FSDP's own hook, which waits for the other ranks."""

        def begin(*_: Any) -> None:
            if not torch.compiler.is_compiling():
                self._position.call(name)

        def end(*_: Any) -> None:
            if not torch.compiler.is_compiling():
                self._position.end_call()

        self._hooks.append(add_hook(part.register_forward_pre_hook, begin, prepend=True))
        self._hooks.append(add_hook(part.register_forward_hook, end))

    def begin_with(self, module: nn.Module) -> None:
        """A forward pass of this module begins a micro-batch, where nothing else does."""
        self._hooks.append(add_hook(module.register_forward_pre_hook, self._begins))

    def forget(self) -> None:
        """Take all hooks back."""
        while self._hooks:
            self._hooks.pop()()

    def _called(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._position.progress()

    def _begins(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if not (module.training and torch.is_grad_enabled()):
            self._position.enter(Phase.VALIDATION)
        elif self._position.place.phase != Phase.FORWARD:
            self._position.begin_micro_batch()

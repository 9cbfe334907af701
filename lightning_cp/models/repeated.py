"""Layers that the tokens of a batch go through more than once, which a count of parameters does not see."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_cp.models.calls import in_backward, is_compiled
from lightning_cp.module_hooks import add_hook


class RepeatedLayers:
    """Watches the linear layers of a model during one batch: how many rows each was given.

    Layers that are shared (ALBERT), or a model that is called twice in a step, have twice those of the batch.
    A head that is called chunk by chunk has not.
    """

    def __init__(self, model: nn.Module) -> None:
        self._rows: Counter[str] = Counter()
        self._undo: list[Callable[[], None]] = []
        if is_compiled(model):
            return
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                hook = self._counter(name)
                self._undo.append(add_hook(module.register_forward_pre_hook, hook))

    def _counter(self, name: str) -> Callable[..., None]:
        def count(module: nn.Linear, args: tuple[Any, ...]) -> None:
            if args and isinstance(args[0], torch.Tensor) and not in_backward():
                self._rows[name] += args[0].numel() // max(args[0].shape[-1], 1)

        return count

    def forget(self) -> None:
        """The batch begins now."""
        self._rows.clear()

    def end(self, tokens: int) -> str:
        """Stop watching; names a layer through which a batch of so many (padded, local) tokens went twice."""
        while self._undo:
            self._undo.pop()()
        return next((name for name, rows in self._rows.items() if rows >= 2 * tokens), "")

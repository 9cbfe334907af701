"""Activation checkpointing of a model's blocks while a step is active: only their inputs are kept.

The forward of a block is checkpointed, not its call, so that what an engine does around a block (gathering
its parameters, reducing its gradients) happens as often as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils.checkpoint import checkpoint

from lightning_cp.attention.keep import InPlace, keep_attention_in
from lightning_cp.errors import ConfigError
from lightning_cp.length.host import HostMemory
from lightning_cp.models.blocks import blocks_of
from lightning_cp.module_hooks import replace_method

_CACHES: dict[str, Any] = {"past_key_values": None, "layer_past": None, "use_cache": False}
"""Arguments of Hugging Face blocks: a block that is run again would fill a cache twice."""


def recompute_blocks(model: nn.Module, *, keeps_attention: bool, offloads: bool) -> Recomputed:
    """Its ``enter`` begins a step.

    Args:
        model: the user's.
        keeps_attention: attention's (out, lse) are kept, and neither computed nor communicated again.
        offloads: what is kept waits in host memory.

    Raises:
        ConfigError: there are no blocks, or they are checkpointed already.
    """
    blocks = blocks_of(model)
    if not blocks:
        raise ConfigError(
            f"activation_checkpointing recomputes blocks, and {type(model).__name__} has no list of modules "
            "with attention. Call torch.utils.checkpoint.checkpoint(..., use_reentrant=False, "
            "context_fn=lightning_cp.keep_attention) in the model, and leave activation_checkpointing away."
        )
    for name, module in model.named_modules():
        if isinstance(module, CheckpointWrapper) or getattr(
            module, "gradient_checkpointing", False
        ):
            raise ConfigError(
                f"activation_checkpointing: {name or type(module).__name__} is checkpointed already "
                "(gradient_checkpointing_enable, or a CheckpointWrapper), and would be computed three times. "
                "Use one of the two."
            )
    return Recomputed(blocks, keeps_attention, HostMemory() if offloads else InPlace())


@dataclass
class KeptBytes(InPlace):
    """Where what is kept goes, counted as it does."""

    place: InPlace = field(default_factory=InPlace)
    inputs: int = 0
    attention: int = 0

    def put(self, x: torch.Tensor) -> Any:
        """A result of attention."""
        self.attention += x.nbytes
        return self.place.put(x)

    def put_input(self, x: torch.Tensor) -> Any:
        """The inputs of a block; hidden states are its own, and all else (masks) blocks share.

        torch 2.10 puts an empty one beside them.
        """
        if not x.requires_grad or not x.numel():
            return x
        self.inputs += x.nbytes
        return self.place.put(x)

    def get(self, kept: Any) -> torch.Tensor:
        """The tensor again."""
        return self.place.get(kept)


class Recomputed:
    """The blocks of a model, their forward replaced from ``enter`` to what it returns."""

    def __init__(self, blocks: Sequence[nn.Module], keeps_attention: bool, place: InPlace) -> None:
        self._blocks = blocks
        self._keeps_attention = keeps_attention
        self._kept = KeptBytes(place)
        self._forwards = 0

    def enter(self) -> Callable[[], None]:
        """Replace the blocks' forward; returns what puts it back."""
        self._kept.inputs = self._kept.attention = self._forwards = 0
        undo = [
            replace_method(block, "forward", partial(self._forward, block.forward))
            for block in self._blocks
        ]

        def put_back() -> None:
            for each in undo:
                each()

        return put_back

    def _forward(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return own(*args, **kwargs)
        kwargs |= {name: value for name, value in _CACHES.items() if name in kwargs}
        self._forwards += 1
        contexts = partial(keep_attention_in, self._kept) if self._keeps_attention else _none
        with saved_tensors_hooks(self._kept.put_input, self._kept.get):
            return checkpoint(own, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    def report(self) -> str | None:
        """A line about what the step's forwards have kept so far; ``None`` before any."""
        if not self._forwards:
            return None
        attention = f", {_mebibytes(self._kept.attention)} of attention" * self._keeps_attention
        return (
            f"activation checkpointing of {len(self._blocks)} {type(self._blocks[0]).__name__}: this rank "
            f"keeps {_mebibytes(self._kept.inputs)} of their inputs{attention}{self._kept.place.told}"
        )


def _none() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), nullcontext()


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.2f} MiB"

"""Activation checkpointing of a model's blocks while a step is active, with optional offload to the host.

Only the inputs of blocks (and the results of attention, if asked) are saved. The forward of a block is
checkpointed, not its call, so that an engine's work around a block (gathering its parameters, reducing its
gradients) is not repeated.
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

from lightning_cp.attention.checkpointing import DeviceStore, keep_attention_in
from lightning_cp.errors import ConfigError
from lightning_cp.models.blocks import blocks_of
from lightning_cp.utils.patching import PatchSet

_CACHES: dict[str, Any] = {"past_key_values": None, "layer_past": None, "use_cache": False}
"""Cache arguments of Hugging Face blocks: a block that runs again would fill a cache twice."""


@dataclass(frozen=True)
class HostCopy:
    """A tensor in pinned host memory, and the event of its complete copy."""

    host: torch.Tensor
    device: torch.device
    copied: Any


class HostMemory(DeviceStore):
    """Store of saved tensors in host memory: copies to it overlap with computation.

    A tensor that is in host memory already stays there.
    """

    location_text = " in host memory"

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}
        """Stream per device for copies to the host, so that they wait for their source only."""

    def put(self, x: torch.Tensor) -> Any:
        """Store ``x``; return the argument for ``get``."""
        if x.device.type == "cpu":
            return x
        device = torch.get_device_module(x.device)
        stream = self._streams.setdefault(x.device, None) or device.Stream(x.device)
        self._streams[x.device] = stream
        stream.wait_stream(device.current_stream(x.device))
        host = torch.empty_like(x, device="cpu", pin_memory=True)
        with device.stream(stream):
            host.copy_(x, non_blocking=True)
        x.record_stream(stream)  # its memory may not be used again before it is copied
        return HostCopy(host, x.device, stream.record_event())

    def get(self, kept: Any) -> torch.Tensor:
        """Return the stored tensor, on its device."""
        if isinstance(kept, torch.Tensor):
            return kept
        device = torch.get_device_module(kept.device)
        device.current_stream(kept.device).wait_event(kept.copied)
        return kept.host.to(kept.device, non_blocking=True)


def recompute_blocks(
    model: nn.Module, *, keeps_attention: bool, offloads: bool
) -> RecomputedBlocks:
    """Return the checkpointing of a model's blocks; its ``enter`` begins a step.

    Args:
        model: the user's model.
        keeps_attention: save attention's (out, lse), which are then neither computed nor communicated again.
        offloads: keep saved tensors in host memory.

    Raises:
        ConfigError: there are no blocks, or they are checkpointed already.
    """
    blocks = blocks_of(model)
    if not blocks:
        raise ConfigError(
            f"activation_checkpointing recomputes blocks, and {type(model).__name__} has no list of modules "
            "with attention. Call torch.utils.checkpoint.checkpoint(..., use_reentrant=False, "
            "context_fn=lightning_cp.keep_attention) in the model, and remove activation_checkpointing=."
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
    return RecomputedBlocks(blocks, keeps_attention, HostMemory() if offloads else DeviceStore())


@dataclass
class SavedBytes(DeviceStore):
    """Store of saved tensors that counts their bytes."""

    place: DeviceStore = field(default_factory=DeviceStore)
    inputs: int = 0
    attention: int = 0

    def put(self, x: torch.Tensor) -> Any:
        """Store a result of attention."""
        self.attention += x.nbytes
        return self.place.put(x)

    def put_input(self, x: torch.Tensor) -> Any:
        """Store the hidden states of a block; other inputs (masks) are shared by blocks and stay.

        torch 2.10 saves an empty tensor beside them.
        """
        if not x.requires_grad or not x.numel():
            return x
        self.inputs += x.nbytes
        return self.place.put(x)

    def get(self, kept: Any) -> torch.Tensor:
        """Return the stored tensor."""
        return self.place.get(kept)


class RecomputedBlocks:
    """Blocks whose forward is replaced from ``enter`` until the call of the function that it returns."""

    def __init__(
        self, blocks: Sequence[nn.Module], keeps_attention: bool, place: DeviceStore
    ) -> None:
        self._blocks = blocks
        self._keeps_attention = keeps_attention
        self._kept = SavedBytes(place)
        self._forwards = 0

    def enter(self) -> Callable[[], None]:
        """Replace the blocks' forward; return the undo function."""
        self._kept.inputs = self._kept.attention = self._forwards = 0
        patches = PatchSet()
        for block in self._blocks:
            patches.replace(block, "forward", lambda own: partial(self._forward, own))
        return patches.undo

    def _forward(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return own(*args, **kwargs)
        kwargs |= {name: value for name, value in _CACHES.items() if name in kwargs}
        self._forwards += 1
        contexts = partial(keep_attention_in, self._kept) if self._keeps_attention else _no_contexts
        with saved_tensors_hooks(self._kept.put_input, self._kept.get):
            return checkpoint(own, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    def report(self) -> str | None:
        """Return a line about the bytes that the step has saved so far; ``None`` before any forward."""
        if not self._forwards:
            return None
        attention = f", {_mebibytes(self._kept.attention)} of attention" * self._keeps_attention
        return (
            f"activation checkpointing of {len(self._blocks)} {type(self._blocks[0]).__name__}: this rank "
            f"keeps {_mebibytes(self._kept.inputs)} of their inputs{attention}"
            f"{self._kept.place.location_text}"
        )


def _no_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), nullcontext()


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.2f} MiB"

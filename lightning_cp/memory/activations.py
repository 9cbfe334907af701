"""Activation checkpointing of a model's blocks while a step is active, with optional offload to the host.

Only the inputs of blocks (and the results of attention, if asked) are saved. The forward of a block is
checkpointed, not its call, so that an engine's work around a block (gathering its parameters, reducing its
gradients) is not repeated.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils.checkpoint import checkpoint

from lightning_cp.attention.checkpointing import DeviceStore, keep_attention_in
from lightning_cp.errors import ConfigError
from lightning_cp.models.blocks import blocks_of
from lightning_cp.utils.patching import PatchSet

_CACHES: dict[str, Any] = {"past_key_values": None, "layer_past": None, "use_cache": False}
"""Cache arguments of Hugging Face blocks: a block that runs again would fill a cache twice."""


class HostBlock:
    """Tensors that one block's forward has stored in host memory, in their order."""

    def __init__(self, before: HostBlock | None) -> None:
        self._before = weakref.ref(before) if before is not None else None
        self.copies: list[tuple[torch.Tensor, torch.device]] = []
        """Pinned memory, and the device of its source."""

    @property
    def before(self) -> HostBlock | None:
        """The block of the forward before this one, if a graph still has it."""
        return self._before() if self._before is not None else None


class HostCopy(NamedTuple):
    """Handle of a tensor in host memory; its block does not refer to it, so that both end with the graph."""

    block: HostBlock
    place: int


class HostTransfer(NamedTuple):
    """A device tensor of a copy between device and host that may not have ended."""

    tensor: torch.Tensor
    done: Any
    computing: Any
    """The stream that the memory of ``tensor`` belongs to."""

    def wait(self) -> torch.Tensor:
        """Let the computing stream, not the host, wait for the end; then the memory may be used or freed."""
        self.computing.wait_event(self.done)
        return self.tensor


class HostMemory(DeviceStore):
    """Store of saved tensors in host memory: copies run on a stream of their own, beside computation.

    Forward copies a block's tensors while the block computes, and frees their device memory at its end. In
    backward the first tensor of a block that is needed starts the copies of the block before it, which arrive
    while this one is recomputed: the device has at most one block's tensors ahead of their use.

    Device memory belongs to the computing stream, which waits for each copy before the memory is freed.
    ``Tensor.record_stream`` would free it when the *host* sees that the copy has ended, and a host that is
    several layers ahead of its device would allocate several layers more.

    A tensor that is in host memory already stays there.
    """

    location_text = " in host memory"

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}
        self._open: HostBlock | None = None
        """The block in forward."""
        self._leaving: list[HostTransfer] = []
        """Its tensors on the device."""
        self._last: weakref.ref[HostBlock] | None = None
        self._arriving: list[tuple[HostBlock, dict[int, HostTransfer]]] = []
        """The block in backward and the one before it, with their tensors that were not used yet."""

    @contextmanager
    def block(self) -> Iterator[None]:
        """Collect the tensors of a block's forward."""
        before = self._last() if self._last is not None else None
        self._open = HostBlock(before)
        try:
            yield
        finally:
            if self._open.copies:
                self._last = weakref.ref(self._open)
            self._open = None
            _wait(self._leaving)
            self._leaving = []

    def put(self, x: torch.Tensor) -> Any:
        """Store ``x``; return the argument for ``get``."""
        if x.device.type == "cpu":
            return x
        assert self._open is not None
        host = torch.empty_like(x, device="cpu", pin_memory=True)
        self._leaving.append(self._copy(host, x, x))
        self._open.copies.append((host, x.device))
        return HostCopy(self._open, len(self._open.copies) - 1)

    def get(self, kept: Any) -> torch.Tensor:
        """Return the stored tensor, on its device."""
        return kept if isinstance(kept, torch.Tensor) else self._fetch(kept).wait()

    def release(self) -> None:
        """Drop tensors that were brought to the device and not used."""
        for _, transfers in self._arriving:
            _wait(transfers.values())
        self._arriving = []

    def _fetch(self, kept: HostCopy) -> HostTransfer:
        """Return the copy of a tensor, which has begun; begin those of the block before."""
        if torch._C._current_graph_task_id() == -1:  # pyright: ignore[reportPrivateUsage]
            return self._copy_back(*kept.block.copies[kept.place])  # no backward, so no order
        self._bring(kept.block)
        transfer = self._arriving[0][1].pop(kept.place, None)
        if transfer is None:  # used before, as with ``retain_graph=True``
            transfer = self._copy_back(*kept.block.copies[kept.place])
        before = kept.block.before
        if before is not None and len(self._arriving) == 1:
            self._arriving.append(self._start(before))
        return transfer

    def _bring(self, block: HostBlock) -> None:
        """Make a block the first of those that arrive."""
        while self._arriving and self._arriving[0][0] is not block:
            _wait(self._arriving.pop(0)[1].values())
        if not self._arriving:
            self._arriving = [self._start(block)]
            # A backward that ends elsewhere than in the first block leaves tensors that nobody uses.
            Variable._execution_engine.queue_callback(self.release)  # pyright: ignore[reportPrivateUsage]

    def _start(self, block: HostBlock) -> tuple[HostBlock, dict[int, HostTransfer]]:
        return block, {at: self._copy_back(*copy) for at, copy in enumerate(block.copies)}

    def _copy_back(self, host: torch.Tensor, device: torch.device) -> HostTransfer:
        x = torch.empty_like(host, device=device)
        return self._copy(x, host, x)

    def _copy(self, into: torch.Tensor, source: torch.Tensor, x: torch.Tensor) -> HostTransfer:
        """Begin a copy once all that computes now has ended; ``x`` is the one of both on the device."""
        device = torch.get_device_module(x.device)
        if x.device not in self._streams:
            self._streams[x.device] = device.Stream(x.device)
        stream, computing = self._streams[x.device], device.current_stream(x.device)
        stream.wait_stream(computing)  # which made x, or has used its memory before
        with device.stream(stream):
            into.copy_(source, non_blocking=True)
        return HostTransfer(x, stream.record_event(), computing)


def _wait(transfers: Iterable[HostTransfer]) -> None:
    for transfer in transfers:
        transfer.wait()


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

        def undo() -> None:
            patches.undo()
            self._kept.place.release()

        return undo

    def _forward(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return own(*args, **kwargs)
        kwargs |= {name: value for name, value in _CACHES.items() if name in kwargs}
        self._forwards += 1
        contexts = partial(keep_attention_in, self._kept) if self._keeps_attention else _no_contexts
        hooks = saved_tensors_hooks(self._kept.put_input, self._kept.get)
        with self._kept.place.block(), hooks:
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

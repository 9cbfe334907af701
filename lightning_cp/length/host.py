"""Tensors that wait in host memory between forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lightning_cp.attention.keep import InPlace


@dataclass(frozen=True)
class Moved:
    """A tensor in pinned host memory, and when its copy is complete."""

    host: torch.Tensor
    device: torch.device
    copied: Any


class HostMemory(InPlace):
    """Takes tensors off an accelerator, beside what it computes, and brings them back where they are used.

    A tensor that is in host memory already stays where it is.
    """

    told = " in host memory"

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}
        """One per device, for copies to the host, so that they wait for nothing but what they copy."""

    def put(self, x: torch.Tensor) -> Any:
        """A stand-in for ``x`` until it is asked for."""
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
        return Moved(host, x.device, stream.record_event())

    def get(self, kept: Any) -> torch.Tensor:
        """The tensor again."""
        if isinstance(kept, torch.Tensor):
            return kept
        device = torch.get_device_module(kept.device)
        device.current_stream(kept.device).wait_event(kept.copied)
        return kept.host.to(kept.device, non_blocking=True)

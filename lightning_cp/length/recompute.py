"""State that a recomputation in backward needs to equal the forward: random numbers, and autocast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import get_device_states, set_device_states


class Conditions:
    """Those of a forward, as they are when this is made."""

    def __init__(self, *tensors: torch.Tensor, random: bool) -> None:
        """``random``: the forward may draw numbers."""
        self._kind = tensors[0].device.type
        self._autocast = [
            {
                "device_type": kind,
                "dtype": torch.get_autocast_dtype(kind),
                "enabled": torch.is_autocast_enabled(kind),
                "cache_enabled": torch.is_autocast_cache_enabled(),
            }
            for kind in {self._kind, "cpu"}
        ]
        self._random: Any = None
        if random:
            self._random = torch.get_rng_state(), *get_device_states(*tensors)

    @contextmanager
    def again(self) -> Iterator[None]:
        """They hold within, and those from before afterwards."""
        with ExitStack() as stack:
            for autocast in self._autocast:
                stack.enter_context(torch.autocast(**autocast))
            if self._random is not None:
                own, devices, states = self._random
                kind = "cuda" if self._kind == "cpu" else self._kind
                stack.enter_context(torch.random.fork_rng(devices, device_type=kind))
                torch.set_rng_state(own)
                set_device_states(devices, states, device_type=self._kind)
            yield

"""Sources of random numbers that objects have of their own, of any kind: where they stand, and back to it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
"""The kinds."""


def state_of(generator: Any) -> Any:
    """Where one of ``GENERATORS`` stands, to be given to ``set_state``."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state()


def set_state(generator: Any, state: Any) -> None:
    """Have it go on from there."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def shared() -> list[Any]:
    """The sources of all functions that are given none."""
    sources: list[Any] = [torch.default_generator, random._inst, np.random.mtrand._rand]
    if torch.cuda.is_initialized():
        sources.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return sources


def is_same(state: Any, other: Any) -> bool:
    """True if two states of one generator are equal."""
    if isinstance(state, dict):
        return is_same(tuple(state.values()), tuple(other.values()))
    if isinstance(state, tuple):
        return all(map(is_same, state, other))
    if isinstance(state, (np.ndarray, torch.Tensor)):
        return np.array_equal(state, other)
    return state == other

"""The state of everything that draws random numbers, at one moment, and as what a checkpoint may hold."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lightning_cp.strategies.generators import GENERATORS, set_state, state_of

_PARTS = ("", "batch_sampler", "sampler", "dataset")


@dataclass
class Moment:
    """Generators of the process, and those that a loader, its samplers and its dataset have of their own.

    Taking one is cheap; ``packed`` makes it what can be saved.
    """

    torch: torch.Tensor
    python: Any
    numpy: Any
    own: list[Any] = field(default_factory=list)

    @classmethod
    def now(cls, loader: Any = None) -> Moment:
        """This moment's, with the loader's own generators."""
        own = [state_of(found) for found in own_generators(loader)]
        return cls(torch.get_rng_state(), random.getstate(), np.random.get_state(), own)

    def restore(self, loader: Any = None) -> None:
        """Have all of them go on from there; a loader with other generators keeps its own."""
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        self.restore_own(loader)

    def restore_own(self, loader: Any) -> None:
        """Only those of the loader."""
        found = list(own_generators(loader))
        if len(found) == len(self.own):
            for generator, state in zip(found, self.own, strict=True):
                set_state(generator, state)

    def packed(self) -> dict[str, Any]:
        """Numbers, strings, lists and tensors."""
        return {
            "torch": self.torch,
            "python": _pack_python(self.python),
            "numpy": _pack_numpy(self.numpy),
            "own": [_pack(state) for state in self.own],
        }

    @classmethod
    def unpacked(cls, packed: dict[str, Any]) -> Moment:
        """The values that ``packed`` was made of."""
        return cls(
            packed["torch"],
            _unpack_python(packed["python"]),
            _unpack_numpy(packed["numpy"]),
            [_unpack(state) for state in packed["own"]],
        )


def own_generators(loader: Any) -> Iterator[Any]:
    """Generators that a loader, its samplers or its dataset have as attributes: each once, in fixed order."""
    seen: set[int] = set()
    for name in _PARTS:
        part = getattr(loader, name, None) if name else loader
        for attribute in sorted(_attributes(part)):
            value = getattr(part, "__dict__", {}).get(attribute)
            if isinstance(value, GENERATORS) and id(value) not in seen:
                seen.add(id(value))
                yield value


def _attributes(part: Any) -> list[str]:
    return [name for name in getattr(part, "__dict__", {}) if isinstance(name, str)]


def _pack(state: Any) -> dict[str, Any]:
    """A generator's state, by the form that it has."""
    if isinstance(state, torch.Tensor):
        return {"torch": state}
    if isinstance(state, dict):
        return {"bits": _plain(state)}
    return (
        {"numpy": _pack_numpy(state)} if state[0] == "MT19937" else {"python": _pack_python(state)}
    )


def _unpack(packed: dict[str, Any]) -> Any:
    if "numpy" in packed:
        return _unpack_numpy(packed["numpy"])
    if "python" in packed:
        return _unpack_python(packed["python"])
    return packed["torch"] if "torch" in packed else _arrays(packed["bits"])


def _pack_python(state: Any) -> dict[str, Any]:
    version, numbers, gauss = state
    return {"version": version, "numbers": torch.tensor(numbers, dtype=torch.int64), "gauss": gauss}


def _unpack_python(packed: dict[str, Any]) -> Any:
    return packed["version"], tuple(packed["numbers"].tolist()), packed["gauss"]


def _pack_numpy(state: Any) -> dict[str, Any]:
    kind, keys, place, has_gauss, gauss = state
    numbers = torch.from_numpy(keys.astype(np.int64))
    return {"kind": kind, "numbers": numbers, "rest": [int(place), int(has_gauss), float(gauss)]}


def _unpack_numpy(packed: dict[str, Any]) -> Any:
    place, has_gauss, gauss = packed["rest"]
    keys = packed["numbers"].numpy().astype(np.uint32)
    return packed["kind"], keys, int(place), int(has_gauss), gauss


def _plain(state: Any) -> Any:
    """NumPy's bit generators have dicts of numbers and arrays; numbers of up to 128 bits as text."""
    if isinstance(state, dict):
        return {name: _plain(value) for name, value in state.items()}
    if isinstance(state, np.ndarray):
        return {"array": [str(int(x)) for x in state], "dtype": str(state.dtype)}
    return f"int:{int(state)}" if isinstance(state, int | np.integer) else state


def _arrays(state: Any) -> Any:
    if isinstance(state, dict) and set(state) == {"array", "dtype"}:
        return np.array([int(x) for x in state["array"]], dtype=state["dtype"])
    if isinstance(state, dict):
        return {name: _arrays(value) for name, value in state.items()}
    return int(state[4:]) if isinstance(state, str) and state.startswith("int:") else state

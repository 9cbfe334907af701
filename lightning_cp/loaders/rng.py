"""States of all random number generators at one moment, also encoded for checkpoints."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states

from lightning_cp.comm.consensus import World, fingerprint

# Generators that objects own: their states, read and set.


GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
"""The supported classes of generators."""


def state_of(generator: Any) -> Any:
    """Return the state of a generator of one of the classes in ``GENERATORS``."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state()


def set_state(generator: Any, state: Any) -> None:
    """Set a generator's state."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def shared() -> list[Any]:
    """Return the generators that functions use by default."""
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


_PARTS = ("", "batch_sampler", "sampler", "dataset")


@dataclass
class RandomStates:
    """States of the process's generators, and of those that a loader, its samplers and its dataset own.

    Taking one is cheap; ``packed`` encodes it for saving.
    """

    torch: torch.Tensor
    python: Any
    numpy: Any
    own: list[Any] = field(default_factory=list)

    @classmethod
    def now(cls, loader: Any = None) -> RandomStates:
        """Return the present states, with the loader's own generators."""
        own = list(map(state_of, generators_of(loader))) if loader is not None else []
        return cls(torch.get_rng_state(), random.getstate(), np.random.get_state(), own)

    def restore(self, loader: Any = None) -> None:
        """Set all generators; those of a loader with others than the saved ones stay as they are."""
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        self.restore_own(loader)

    def restore_own(self, loader: Any) -> None:
        """Set only the loader's own generators."""
        found = generators_of(loader)
        if len(found) == len(self.own):
            for generator, state in zip(found, self.own, strict=True):
                set_state(generator, state)

    def packed(self) -> dict[str, Any]:
        """Encode as numbers, strings, lists and tensors."""
        return {
            "torch": self.torch,
            "python": _pack_python(self.python),
            "numpy": _pack_numpy(self.numpy),
            "own": [_pack(state) for state in self.own],
        }

    @classmethod
    def unpacked(cls, packed: dict[str, Any]) -> RandomStates:
        """Decode what ``packed`` returned."""
        return cls(
            packed["torch"],
            _unpack_python(packed["python"]),
            _unpack_numpy(packed["numpy"]),
            [_unpack(state) for state in packed["own"]],
        )


def generators_of(loader: Any) -> list[Any]:
    """Return the generators that a loader, its samplers or its dataset own: each once, in a fixed
    order."""
    found: dict[int, Any] = {}
    for part in _PARTS:
        owner = getattr(loader, part, None) if part else loader
        owned: dict[str, Any] = {}
        for name, value in getattr(owner, "__dict__", {}).items():
            if isinstance(value, GENERATORS) and isinstance(name, str):
                owned[name] = value
        for name in sorted(owned):
            found.setdefault(id(owned[name]), owned[name])
    return list(found.values())


def _pack(state: Any) -> dict[str, Any]:
    """Encode a generator's state by its type."""
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
    """Encode NumPy's dicts of numbers and arrays; numbers of up to 128 bits as text."""
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


# Random numbers as in one process, also where Lightning reseeds and where one rank reads for all.
#
# One process draws the order of samples and its transforms' numbers from the generators of its steps. Ranks
# that had the same state before a batch have the same state after it.


State = dict[str, Any]


@dataclass(frozen=True)
class Draws:
    """The draws of the reading rank: states before and after."""

    before: int
    after: State | None
    """``None``: no numbers were drawn."""


def random_state() -> State:
    """Return the state of the CPU's generators: torch's, Python's and NumPy's."""
    return _collect_rng_states(include_cuda=False)


def restore(state: State) -> None:
    """Set the state of the CPU's generators."""
    _set_rng_states(state)


def drawn_since(before: State) -> Draws:
    """Return the draws since the state ``before``."""
    after, mark = random_state(), _mark(before)
    return Draws(mark, None if _mark(after) == mark else after)


def follow(draws: Draws) -> None:
    """Advance the generators as the reading rank did; a rank in another state (seeded by its rank)
    keeps its own."""
    if draws.after is not None and _mark(random_state()) == draws.before:
        restore(draws.after)


@contextmanager
def keep_random_state() -> Iterator[None]:
    """Keep the state of all generators while processes connect, if it is equal on all ranks.

    Lightning then resets the state to ``seed_everything``'s seed, as ranks may have drawn differently
    before. One process does not reset, so what it shuffles after making its model would come in another
    order.
    """
    before = random_state()
    yield
    if len(set(World().gather(_mark(before)))) == 1:
        restore(before)


def _mark(state: State) -> int:
    kind, keys, *rest = state.get("numpy", ("", b""))
    numbers = keys.tobytes() if hasattr(keys, "tobytes") else keys
    return fingerprint(
        (state["torch"].numpy().tobytes(), state["python"], kind, numbers, [float(x) for x in rest])
    )

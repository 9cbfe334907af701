"""Random numbers as in one process: drawn on, where Lightning begins anew and where one rank reads for all.

One process draws the order of samples, and what transforms draw, from the generators from which its steps
draw as well. Ranks that were in the same state before a batch are in the same state after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states

from lightning_cp.comm.agreement import same_in_the_world
from lightning_cp.comm.checksum import fingerprint

State = dict[str, Any]


@dataclass(frozen=True)
class Draws:
    """The draws of the reading rank: from which state to which."""

    before: int
    after: State | None
    """``None``: nothing was drawn."""


def random_state() -> State:
    """The state of the generators of the CPU: torch's, Python's and NumPy's."""
    return _collect_rng_states(include_cuda=False)


def restore(state: State) -> None:
    """Draw from that state on."""
    _set_rng_states(state)


def drawn_since(before: State) -> Draws:
    """The draws since then."""
    after, mark = random_state(), _mark(before)
    return Draws(mark, None if _mark(after) == mark else after)


def follow(draws: Draws) -> None:
    """Draw the same; a rank that was in another state (seeded by its rank) keeps its own."""
    if draws.after is not None and _mark(random_state()) == draws.before:
        restore(draws.after)


@contextmanager
def going_on() -> Iterator[None]:
    """Keep the state of all generators while processes are connected, if it is that of every rank.

    Lightning then sets the state to ``seed_everything``'s seed, as ranks may have drawn differently before;
    one process does not, so that what it shuffles after making its model would come in another order.
    """
    before = random_state()
    yield
    if same_in_the_world(_mark(before)):
        restore(before)


def _mark(state: State) -> int:
    kind, keys, *rest = state.get("numpy", ("", b""))
    numbers = keys.tobytes() if hasattr(keys, "tobytes") else keys
    return fingerprint(
        (state["torch"].numpy().tobytes(), state["python"], kind, numbers, [float(x) for x in rest])
    )

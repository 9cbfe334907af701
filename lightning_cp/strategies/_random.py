"""Random numbers go on as in one process, where Lightning would begin anew."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist

from lightning_cp.comm.agreement import fingerprint


@contextmanager
def going_on() -> Iterator[None]:
    """Keep the state of all generators while processes are connected, if it is that of every rank.

    Lightning then sets the state to ``seed_everything``'s seed, as ranks may have drawn differently before;
    one process does not, so that what it shuffles after making its model would come in another order.
    """
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    own = fingerprint((states[0], states[1], states[2].numpy().tobytes()))
    every: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    if len(set(every)) == 1:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])

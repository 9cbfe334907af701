"""Lines that go wrong in every way, for the harness of ``benchmarks.gpus``."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from benchmarks.gpus.line import Line, Place, WrongResultError


def right(place: Place) -> str:
    total = torch.ones(1)
    dist.all_reduce(total)
    return f"{int(total)} ranks"


def wrong_on_one_rank(place: Place) -> str:
    """The others wait for it."""
    if dist.get_rank() == 1:
        raise WrongResultError("a loss is off by 1")
    return right(place)


def wrong_on_all(place: Place) -> str:
    raise WrongResultError(f"rank {dist.get_rank()} is wrong")


def dies(place: Place) -> str:
    if dist.get_rank() == 1:
        print("an illegal memory access", flush=True)
        os._exit(9)
    return right(place)


def hangs(place: Place) -> str:
    if dist.get_rank() == 0:
        time.sleep(600)
    return right(place)


FUNCTIONS = (right, wrong_on_one_rank, wrong_on_all, dies, hangs)


def lines(count: int) -> list[Line]:
    """Each, with one that is right after it."""
    pairs = [
        (Line(made.__name__, made), Line(f"right after {made.__name__}", right))
        for made in FUNCTIONS
    ]
    return [line for pair in pairs for line in pair]

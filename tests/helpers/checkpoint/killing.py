"""Kills ranks in the middle of saves.

``python -m tests.helpers.checkpoint.killing FOLDER FORM BACKGROUND POINTS``

Ranks are forked, so that each costs milliseconds. ``POINTS`` are names of ``kill_places.PLACES``, or how many
kills are to come at random moments of a save: one that comes after the save has ended does not count, and
another moment is drawn. Prints one JSON line per kill: where, who (nobody, if it came too late), and what is
then read.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from select import select
from statistics import median
from typing import Any

import torch
import torch._dynamo  # DTensor would import it in every fork, for seconds
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_cp.checkpoint.atomic import leftovers
from lightning_cp.checkpoint.read import latest_checkpoint, open_checkpoint
from lightning_cp.checkpoint.save import BackgroundSave, plan_save, save_checkpoint
from lightning_cp.errors import CheckpointError
from tests.helpers.checkpoint.kill_places import NAME, PLACES
from tests.helpers.checkpoint.states import same

RANKS = 2
OLD = 4
"""The step of the checkpoint that is there when a save is killed."""
BEGUN, DONE, FAILED = b"b", b"d", b"f"
"""What a rank says of its save, in a byte."""


def tensors(step: int) -> dict[str, Any]:
    """Large enough for a save to take a while."""
    generator = torch.Generator().manual_seed(step)
    weights = {f"w{at}": torch.randn(256, 256, generator=generator) for at in range(24)}
    return {"state_dict": weights, "step": step}


def rank_main(
    rank: int, folder: Path, form: str, background: bool, step: int, said: int, place: str | None
) -> None:
    """One rank of a save; says when it begins and when it has ended, and then lives on, as training does."""
    word = FAILED
    try:
        store = dist.FileStore(str(folder / f"store-{step}"), RANKS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
        state = tensors(step)
        mesh = init_device_mesh("cpu", (RANKS,))
        for key, value in state["state_dict"].items():
            state["state_dict"][key] = distribute_tensor(value, mesh, [Shard(0)])
        if place is not None:
            PLACES[place]()
        dist.barrier()
        os.write(said, BEGUN)
        _save(state, folder / "saved" / NAME, form, background)
        word = DONE
    finally:
        os.write(said, word)
        while True:
            signal.pause()


def _save(state: dict[str, Any], target: Path, form: str, background: bool) -> None:
    if not background:
        save_checkpoint(state, target, form=form)
        return
    running = BackgroundSave(plan_save(state, target, form=form)[0], limit=5)
    running.wait()
    if running.error is not None:
        raise running.error


@dataclass
class Outcome:
    """Of one save."""

    killed: list[int]
    """Ranks that were killed, by us or by themselves, before the save had ended."""
    done: int
    """Ranks that ended it."""
    seconds: float
    """From its beginning to its end."""


def save_in_ranks(
    folder: Path,
    form: str,
    background: bool,
    step: int,
    *,
    place: str | None = None,
    delay: float = 0.0,
    victims: Sequence[int] = (),
) -> Outcome:
    """Fork the ranks, kill ``victims`` so many seconds after the save has begun, and end what is left."""
    pids, (readable, said) = [], os.pipe()
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            own = place if rank == 0 or place == "in_data" else None
            rank_main(rank, folder, form, background, step, said, own)
        pids.append(pid)
    os.close(said)
    try:
        return _watched(pids, readable, delay, victims)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(readable)


def _watched(pids: list[int], readable: int, delay: float, victims: Sequence[int]) -> Outcome:
    """Until all ranks have ended the save, or one is gone and the others had time to notice."""
    heard = os.read(readable, 1)
    assert heard == BEGUN
    began, struck, words = time.monotonic(), False, [heard]
    until = began + 60.0
    while time.monotonic() < until and _ended(words) < RANKS:
        if victims and not struck and time.monotonic() >= began + delay:
            for victim in victims:
                os.kill(pids[victim], signal.SIGKILL)
            struck = True
        if _gone(pids):
            until = min(until, time.monotonic() + 1.5)
        next_look = began + delay if victims and not struck else time.monotonic() + 0.005
        if select([readable], [], [], max(0.0, next_look - time.monotonic()))[0]:
            words.append(os.read(readable, 1))
    took = time.monotonic() - began
    return Outcome(_gone(pids), words.count(DONE), took)


def _ended(words: list[bytes]) -> int:
    return words.count(DONE) + words.count(FAILED)


def _gone(pids: list[int]) -> list[int]:
    """Ranks that are no more; they are not reaped, so that nobody else gets their number."""
    how = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return [rank for rank, pid in enumerate(pids) if os.waitid(os.P_PID, pid, how) is not None]


def read_back(folder: Path) -> int:
    """The step that is read under the checkpoint's name; what is left beside it is refused or complete."""
    saved = folder / "saved"
    for path, _ in leftovers(saved):
        said = ""
        try:
            found = open_checkpoint(path).read()
            assert same(found, tensors(found["step"]))
        except CheckpointError as refused:
            said = str(refused)
        assert not said or path.name in said
    state = open_checkpoint(saved / NAME).read()
    assert same(state, tensors(state["step"])), "a mix of two saves"
    return state["step"]


@dataclass
class Moments:
    """Random moments of a save; how long one takes is learnt from those that ended.

    Args:
        chance: draws them.
        spans: seconds of saves.
    """

    chance: random.Random
    spans: list[float]

    def draw(self) -> tuple[float, float, list[int]]:
        """A share of the save, the same in seconds, and who is killed then."""
        share = self.chance.uniform(0, 1)
        return share, share * median(self.spans[-5:]), self.chance.choice(([0], [1], [0, 1]))


def main(folder: Path, form: str, background: bool, points: str) -> None:
    """One line per kill."""
    spans = []
    for step in range(
        1, OLD + 1
    ):  # all but the first replace a checkpoint, as those that are killed do
        outcome = save_in_ranks(folder, form, background, step)
        assert outcome.done == RANKS
        spans.append(outcome.seconds)
    shutil.copytree(folder / "saved", folder / "kept")
    if not points.isdecimal():
        for at, place in enumerate(points.split(",")):
            outcome = save_again(folder, form, background, OLD + 1 + at, place=place)
            report(folder, place, outcome, OLD + 1 + at)
        return
    moments, landed = Moments(random.Random(points + form), spans[1:]), 0
    for step in range(OLD + 1, OLD + 1 + 4 * int(points)):
        share, delay, victims = moments.draw()
        outcome = save_again(folder, form, background, step, delay=delay, victims=victims)
        report(folder, f"{share:.3f} of a save", outcome, step)
        landed += bool(outcome.killed)
        if landed == int(points):
            break
        if not outcome.killed:
            moments.spans.append(outcome.seconds)


def save_again(folder: Path, form: str, background: bool, step: int, **how: Any) -> Outcome:
    """A save that replaces the one of step ``OLD``."""
    shutil.rmtree(folder / "saved")
    shutil.copytree(folder / "kept", folder / "saved")
    return save_in_ranks(folder, form, background, step, **how)


def report(folder: Path, place: str, outcome: Outcome, step: int) -> None:
    """Which of the two saves is read, after making sure that it is one of them to the last bit."""
    read = {OLD: "old", step: "new"}[read_back(folder)]
    latest = latest_checkpoint(folder / "saved")
    assert latest is not None
    assert open_checkpoint(latest).tree["step"] == {"old": OLD, "new": step}[read]
    line = {"place": place, "killed": outcome.killed, "read": read}
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "True", sys.argv[4])

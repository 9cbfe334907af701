"""Kills ranks in the middle of saves: ``python -m tests.checkpoint.killing FOLDER FORM BACKGROUND POINTS``.

Ranks are forked, so that each costs milliseconds. ``POINTS`` are names of :data:`PLACES`, or a number of
random moments. Prints one JSON line per kill: where, who, whether it came in time, and what is then read.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_cp.checkpoint import durable, full, sharded
from lightning_cp.checkpoint.durable import leftovers
from lightning_cp.checkpoint.read import open_checkpoint
from lightning_cp.checkpoint.save import Background, plan, save_checkpoint
from lightning_cp.errors import CheckpointError
from tests.checkpoint.states import same

RANKS = 2
SAVES: list[float] = []
"""When saves began."""
NAME = "last.ckpt"


def tensors(step: int) -> dict[str, Any]:
    """Large enough for a save to take a while."""
    generator = torch.Generator().manual_seed(step)
    weights = {f"w{at}": torch.randn(256, 256, generator=generator) for at in range(24)}
    return {"state_dict": weights, "step": step}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _dying(module: Any, name: str, when: Callable[..., bool] = lambda *args: True) -> None:
    own = getattr(module, name)

    def dies(*args: Any, **kwargs: Any) -> Any:
        if when(*args):
            die()
        return own(*args, **kwargs)

    setattr(module, name, dies)


def in_data() -> None:
    """Half of the data is written."""
    _dying(full._Hashed, "write", lambda file, data: file.count > 2**20)
    own = sharded.write_shard

    def half(path: Path, *args: Any) -> Any:
        own(path, *args)
        os.truncate(path, path.stat().st_size // 2)
        die()

    sharded.write_shard = half


def before_manifest() -> None:
    """All data is written, and nothing says so."""
    _dying(sharded, "write_durably", lambda path, data: path.name == "manifest.json")
    _dying(full.struct, "pack")


def before_rename() -> None:
    """Everything is written, under another name."""
    _dying(sharded, "put_in_place")
    _dying(full, "put_in_place")


def while_replacing() -> None:
    """The old folder is set aside; a file is replaced in one step."""
    _dying(durable, "sync_folder", lambda folder: not (folder / NAME).exists())
    _dying(Path, "replace", lambda staged, target: target.name == NAME and staged.is_dir())


def before_latest() -> None:
    """The checkpoint has its name, and ``latest`` still says the one before."""
    _dying(sharded, "point_to")
    _dying(full, "point_to")


PLACES = {
    place.__name__: place
    for place in (in_data, before_manifest, before_rename, while_replacing, before_latest)
}


def rank_main(
    rank: int, folder: Path, form: str, background: bool, step: int, ready: int, place: str | None
) -> None:
    """One rank of a save; never returns."""
    status = 1
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
        os.write(ready, b"x")
        target = folder / "saved" / NAME
        if background:
            running = Background(plan(state, target, form=form)[0], limit=5)
            running.wait()
            status = int(running.error is not None)
        else:
            save_checkpoint(state, target, form=form)
            status = 0
    finally:
        os._exit(status)


def save_in_ranks(
    folder: Path,
    form: str,
    background: bool,
    step: int,
    *,
    place: str | None = None,
    kill: Any = None,
) -> list[int]:
    """Fork the ranks, kill as ``kill(pids)`` says once they begin, and give their exit statuses."""
    pids, readable, ready = [], *os.pipe()
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            own = place if rank == 0 or place == "in_data" else None
            rank_main(rank, folder, form, background, step, ready, own)
        pids.append(pid)
    os.close(ready)
    began = os.read(readable, 1)
    SAVES.append(time.monotonic())
    if kill is not None and began:
        kill(pids)
    statuses = _wait(pids, until=None if kill is None and place is None else time.monotonic() + 1.5)
    os.close(readable)
    return statuses


def _wait(pids: list[int], until: float | None) -> list[int]:
    """Survivors that wait for a rank that is gone are ended as a launcher would."""
    statuses: dict[int, int] = {}
    while len(statuses) < len(pids):
        for pid in set(pids) - set(statuses):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                statuses[pid] = os.waitstatus_to_exitcode(status)
        dead = any(status < 0 for status in statuses.values())
        if until is not None and time.monotonic() > until and dead:
            for pid in set(pids) - set(statuses):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return [statuses[pid] for pid in pids]


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


def main(folder: Path, form: str, background: bool, points: str) -> None:
    """One line per kill."""
    took = 0.0
    for step in (1, 2):  # the second one replaces a checkpoint, as those that are killed do
        assert save_in_ranks(folder, form, background, step) == [0] * RANKS
        took = time.monotonic() - SAVES[-1]
    shutil.copytree(folder / "saved", folder / "kept")
    places = points.split(",") if not points.isdecimal() else [None] * int(points)
    chance = random.Random(points + form)
    for at, place in enumerate(places):
        shutil.rmtree(folder / "saved")
        shutil.copytree(folder / "kept", folder / "saved")
        delay, victims = chance.uniform(0, took), chance.choice(([0], [1], [0, 1]))

        def kill(pids: list[int], delay: float = delay, victims: list[int] = victims) -> None:
            time.sleep(delay)
            for victim in victims:
                os.kill(pids[victim], signal.SIGKILL)

        statuses = save_in_ranks(
            folder, form, background, 3 + at, place=place, kill=None if place else kill
        )
        step = read_back(folder)
        said = (folder / "saved" / "latest").read_text().strip()
        print(
            json.dumps(
                {
                    "place": place or round(delay / took, 3),
                    "killed": [rank for rank, status in enumerate(statuses) if status == -9],
                    "unhurt": statuses == [0] * RANKS,
                    "read": {2: "old", 3 + at: "new"}[step],
                    "latest": said,
                }
            )
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "True", sys.argv[4])

"""Resume record of all ranks, as a checkpoint holds it, and the part that one rank resumes from."""

from __future__ import annotations

import hashlib
import io
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lightning_cp.comm.consensus import World
from lightning_cp.errors import CheckpointError, ConfigError
from lightning_cp.loaders.position import packed, unpacked
from lightning_cp.loaders.rng import RandomStates
from lightning_cp.mesh import ContextParallelMesh

FORMAT = 1
Record = dict[str, Any]


@dataclass
class ResumePoint:
    """This rank's state at one moment; cheap to take, encoded when it is saved."""

    random: RandomStates
    device: torch.Tensor | None = None
    """State of the accelerator's generator on this rank."""
    loaders: list[dict[str, Any]] = field(default_factory=list)
    """`LoaderPosition.saved` of each loader."""

    @classmethod
    def now(cls, device: torch.device, loaders: Sequence[dict[str, Any]]) -> ResumePoint:
        """Return the present state."""
        own = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(RandomStates.now(), own, list(loaders))

    def restore_random(self, device: torch.device) -> None:
        """Restore all generators of the process to this state."""
        self.random.restore()
        if self.device is not None and device.type == "cuda":
            torch.cuda.set_rng_state(self.device, device)


def record_of(point: Callable[[], ResumePoint], mesh: ContextParallelMesh) -> Record:
    """Return every rank's point. Collective.

    Args:
        point: returns this rank's point; an error of the user's loader or dataset is raised on all ranks.
        mesh: the process groups.

    Raises:
        ConfigError: a loader's own state holds more than numbers, strings, containers and tensors.
        CheckpointError: another rank has raised.
    """
    parts, part_of = _distinct(lambda: _as_bytes(_part_of(point())))
    return {
        "format": FORMAT,
        "mesh": _sizes(mesh),
        "parts": [_read(data) for data in parts],
        "part_of": part_of,
    }


def _part_of(point: ResumePoint) -> dict[str, Any]:
    return {
        "random": point.random.packed(),
        "device": point.device,
        "loaders": [packed(saved) for saved in point.loaders],
    }


def point_of(record: Mapping[str, Any], mesh: ContextParallelMesh, rank: int) -> ResumePoint:
    """Return the state that this rank resumes from.

    On the mesh that saved it, its own part. On another mesh: the random numbers of the rank that had its
    place in the mesh, and the loaders of the first rank that read its samples. If more ranks read
    different samples than before, and ranks did differ, the new ones draw from seeds derived from the old
    state.

    Raises:
        CheckpointError: a later version wrote the record.
    """
    if record.get("format") != FORMAT:
        raise CheckpointError(
            f"the checkpoint's resume state has format {record.get('format')}, and this version reads "
            f"{FORMAT}. Resume with the version of lightning_cp that wrote it."
        )
    saved: Mapping[str, int] = record["mesh"]
    parts, part_of = record["parts"], record["part_of"]
    ranks = (saved["data"], mesh.data_size)
    if saved == _sizes(mesh):
        point = _unpacked(parts[part_of[rank]])
        point.loaders = [{**each, "ranks": ranks} for each in point.loaders]
        return point
    data, cp = mesh.data_rank % saved["data"], mesh.cp_rank % saved["cp"]
    reader = data * saved["cp"] * saved["tp"]
    place = reader + cp * saved["tp"]
    point = _unpacked(parts[part_of[place]])
    loaders = _unpacked(parts[part_of[reader]]).loaders
    point.loaders = [{**each, "ranks": ranks} for each in loaders]
    if mesh.data_rank >= saved["data"] and len(parts) > 1:
        _reseed(point, mesh.data_rank)
    return point


def _distinct(make: Callable[[], bytes]) -> tuple[list[bytes], list[int]]:
    """Return the distinct values of ranks, and each rank's index among them; usually all are equal."""
    world, made = World(), list[bytes]()

    def digest() -> bytes:
        made.append(make())
        return hashlib.sha256(made[0]).digest()

    digests = world.gather_results(
        digest, lambda said: CheckpointError(f"nothing is saved: {said}")
    )
    data = made[0]
    owners = sorted({digests.index(digest) for digest in digests})
    held = world.gather(data if world.rank in owners else b"") if len(owners) > 1 else [data]
    places = {digests[owner]: place for place, owner in enumerate(owners)}
    return [held[owner] for owner in owners], [places[digest] for digest in digests]


def _unpacked(part: Mapping[str, Any]) -> ResumePoint:
    loaders = [unpacked(saved) for saved in part["loaders"]]
    return ResumePoint(RandomStates.unpacked(part["random"]), part["device"], loaders)


def _reseed(point: ResumePoint, data_rank: int) -> None:
    """Seed with numbers that no other data rank draws, the same each time that this checkpoint is
    resumed."""
    old = point.random.torch.numpy().tobytes()
    digest = hashlib.sha256(old + data_rank.to_bytes(4, "little")).digest()
    torch_seed, python_seed, numpy_seed = (digest[at : at + 8] for at in (0, 8, 16))
    entry = RandomStates.now()
    torch.manual_seed(int.from_bytes(torch_seed[:7], "little"))
    random.seed(int.from_bytes(python_seed, "little"))
    np.random.seed(int.from_bytes(numpy_seed[:4], "little"))
    point.random = RandomStates.now()
    point.device = None
    entry.restore()


def _sizes(mesh: ContextParallelMesh) -> dict[str, int]:
    tp = dist.get_world_size() // (mesh.data_size * mesh.cp_size)
    return {"data": mesh.data_size, "cp": mesh.cp_size, "tp": tp}


def _as_bytes(part: Mapping[str, Any]) -> bytes:
    """Serialize with ``torch.save``; refuse now what ``weights_only`` would refuse later."""
    buffer = io.BytesIO()
    try:
        torch.save(part, buffer)
        _read(buffer.getvalue())
    except Exception as error:
        raise ConfigError(
            "the state_dict() of a loader or its dataset cannot be saved: it may hold numbers, "
            f"strings, lists, dicts and tensors only ({error})."
        ) from error
    return buffer.getvalue()


def _read(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")

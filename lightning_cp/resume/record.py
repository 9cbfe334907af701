"""Resume record of all ranks, as a checkpoint holds it; and the state that the replay of a window needs.

That is what a micro-batch changes besides gradients: buffers, counting callbacks. One rank resumes from its
part of the record.
"""

from __future__ import annotations

import hashlib
import io
import random
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lightning_cp.comm.consensus import World
from lightning_cp.errors import CheckpointError, ConfigError
from lightning_cp.loaders.position import packed, unpacked
from lightning_cp.loaders.rng import RandomStates
from lightning_cp.mesh import ContextParallelMesh
from lightning_cp.utils.dtensor import local_part

FORMAT = 1
Record = dict[str, Any]

OF_STEPS = "state_is_of_steps"
"""True for callbacks whose state changes only with an optimizer step, so that nothing is restored."""
_PLAIN = (int, float, str, bool, type(None))


_Owned = tuple[nn.Module, str]
"""A module and the name of one of its buffers."""


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


class BufferCopies:
    """Copies of modules' persistent buffers, as of the last ``keep``."""

    def __init__(self) -> None:
        self._copies: dict[_Owned, torch.Tensor] = {}

    def save(self, modules: Iterable[nn.Module]) -> None:
        """Copy all buffers, reusing the memory of the earlier copies.

        Changed buffers are not detected: batch norm and ``.data`` write past a tensor's version, and
        comparing takes longer than copying, with a wait for each on a GPU.
        """
        copies: dict[_Owned, torch.Tensor] = {}
        values: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for owned, buffer in _persistent(modules):
            if owned in copies:
                continue
            own = self._copies.get(owned)
            if own is None or not _holds(own, buffer):
                copies[owned] = buffer.detach().clone()
                continue
            copies[owned] = own
            into, of = values.setdefault((own.device, own.dtype), ([], []))
            into.append(_here(own))
            of.append(_here(buffer))
        with torch.no_grad():
            for into, of in values.values():  # a GPU copies all of one dtype in one call
                torch._foreach_copy_(into, of)
        self._copies = copies

    def replace_in(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state of these modules with the copies in place of buffers.

        Buffers are recognized by their memory: modules may have several names, and wrappers and state
        hooks give others.
        """
        kept: dict[Hashable, torch.Tensor] = {}
        for (part, name), copy in self._copies.items():
            buffer = part._buffers.get(name)
            if buffer is not None and (memory := _memory_key(buffer)) is not None:
                kept[memory] = copy
        return {
            name: kept.get(_memory_key(x), x) if isinstance(x, torch.Tensor) else x
            for name, x in state.items()
        }


def _holds(copy: torch.Tensor, buffer: torch.Tensor) -> bool:
    """True if a buffer's value can be copied into ``copy``."""
    return (
        copy.shape == buffer.shape
        and copy.dtype == buffer.dtype
        and copy.device == buffer.device
        and isinstance(copy, DTensor) == isinstance(buffer, DTensor)
    )


def _here(x: torch.Tensor) -> torch.Tensor:
    return local_part(x) if isinstance(x, DTensor) else x


def _memory_key(x: torch.Tensor) -> Hashable:
    """Return a key that is equal for tensors of the same values in the same memory; ``None`` without
    memory."""
    x = _here(x)
    if x.layout != torch.strided or not x.data_ptr():
        return None
    return x.device, x.data_ptr(), x.shape, x.stride(), x.dtype


def _persistent(modules: Iterable[nn.Module]) -> Iterator[tuple[_Owned, torch.Tensor]]:
    """Return the persistent buffers of modules and submodules; a shared submodule comes once for each
    name."""
    parts: list[nn.Module | None] = list(modules)
    while parts:  # several times as fast as Module.modules(), and called every step
        part = parts.pop()
        if part is None:
            continue
        parts.extend(part._modules.values())
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield (part, name), buffer


_NOT_COPIED = object()
"""Placeholder for an attribute that is not copied."""


class CallbackStates:
    """Attributes of callbacks with a state: numbers and strings, in containers and dataclasses.

    ``state_dict`` is called only when something is saved, as Lightning calls it, on a copy of the callback
    with these attributes: it may be slow, or be counted. Callbacks that hold files are skipped.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[Any, dict[str, Any]]] = []

    def save(self, trainer: Trainer) -> None:
        """Copy the attributes."""
        callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        self._kept = [(each, _plain_attributes(each)) for each in callbacks if _is_followed(each)]

    def states(self) -> dict[str, Any]:
        """Return the states of that time, of callbacks whose state holds nothing else."""
        found: dict[str, Any] = {}
        for callback, attributes in self._kept:
            then = object.__new__(type(callback))
            now = callback.__dict__
            then.__dict__ = {
                name: now.get(name, x) if x is _NOT_COPIED else x for name, x in attributes.items()
            }
            state = then.state_dict()
            if state and _is_plain(state):
                found[callback.state_key] = state
        return found


def _is_followed(callback: Any) -> bool:
    own = getattr(
        type(callback), "state_dict", Callback.state_dict
    )  # stand-ins of tests lack the attribute
    has_state = own is not Callback.state_dict
    return has_state and not isinstance(callback, Checkpoint) and not getattr(callback, OF_STEPS, 0)


def _plain_attributes(callback: Any) -> dict[str, Any]:
    """Return all attributes by name; ``_NOT_COPIED`` for those of other types."""
    copies: dict[str, Any] = dict.fromkeys(callback.__dict__, _NOT_COPIED)
    for name, value in callback.__dict__.items():
        with suppress(_NotPlainError):
            copies[name] = _copied(value)
    return copies


class _NotPlainError(Exception):
    pass


def _copied(state: Any) -> Any:
    """Copy deeply and fast: it may run every step with all that a callback has recorded.

    Raises:
        _NotPlainError: the state holds more than numbers and strings in containers.
    """
    kind = type(state)
    if kind in _PLAIN:
        return state
    if kind is dict:
        return {_copied(key): _copied(value) for key, value in state.items()}
    if kind is list or kind is tuple:
        return kind([x if type(x) in _PLAIN else _copied(x) for x in state])
    if not _is_plain(state):
        raise _NotPlainError
    return deepcopy(state)


def _is_plain(state: Any) -> bool:
    if isinstance(state, dict):
        return all(_is_plain(key) and _is_plain(value) for key, value in state.items())
    if isinstance(state, list | tuple):
        return all(_is_plain(value) for value in state)
    if is_dataclass(state) and not isinstance(state, type):
        return all(_is_plain(value) for value in vars(state).values())
    return isinstance(state, _PLAIN)


# The order in which DistributedDataParallel adds up gradients, which decides how sums are rounded.
#
# It puts parameters into buckets in the order of registration, and after the first backward in the order in
# which gradients arrive. With four ranks and more, a number's place in its bucket decides in which order
# the ranks' parts are added. A resumed run would begin with the first order again, so the second one is
# restored. Only private names of PyTorch read and set it: where they are missing, nothing is done.


Order = list[list[int]]
"""For each bucket, in the order of filling: indices of its parameters among the reduced ones."""


def orders_of(modules: Iterable[nn.Module | None]) -> list[Order | None]:
    """Return the orders that the modules' next backwards use. Collective, between steps."""
    return [_order_of(module) for module in modules]


def set_orders(modules: Sequence[nn.Module | None], orders: Sequence[Order | None]) -> None:
    """Set the order of each module's next backward; modules with other parameters are skipped."""
    if len(modules) != len(orders):
        return
    for module, order in zip(modules, orders, strict=True):
        if isinstance(module, DistributedDataParallel) and order and _can_reorder(module):
            _lay_out(module, order)


def _order_of(module: nn.Module | None) -> Order | None:
    if not isinstance(module, DistributedDataParallel) or not _can_reorder(module):
        return None
    module.reducer._rebuild_buckets()  # as the next forward would
    said = module._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices")
    if said:
        return [[int(place) for place in bucket.split()] for bucket in str(said).split(",")]
    places = {id(p): place for place, p in enumerate(module._build_params_for_reducer()[0])}
    buckets = module.reducer._get_zeros_like_grad_buckets()  # not set yet: a run of few steps
    return [[places[id(p)] for p in bucket.parameters()] for bucket in buckets]


def _can_reorder(module: DistributedDataParallel) -> bool:
    """True if the order changes at all, and this PyTorch has the private names."""
    names = (
        "_ddp_init_helper",
        "_build_params_for_reducer",
        "_comm_hooks",
        "_remove_autograd_hooks",
    )
    known = all(hasattr(module, name) for name in names)
    return known and not module.find_unused_parameters and not module.static_graph


def _lay_out(module: Any, order: Order) -> None:
    parameters, sparse = module._build_params_for_reducer()
    if sorted(place for bucket in order for place in bucket) != list(range(len(parameters))):
        return
    names = module._build_debug_param_to_name_mapping(parameters)
    module._remove_autograd_hooks()
    with _set_order(order):
        module._ddp_init_helper(parameters, sparse, names, module.static_graph)
    for hook, state in module._comm_hooks:
        dist._register_comm_hook(module.reducer, state, hook)


@contextmanager
def _set_order(order: Order) -> Iterator[None]:
    """Set DistributedDataParallel's order; it reverses its argument."""
    own = dist._compute_bucket_assignment_by_size

    def assign(parameters: Any, limits: list[int], *rest: Any, **more: Any) -> Any:
        return [list(bucket) for bucket in reversed(order)], [limits[-1]] * len(order)

    dist._compute_bucket_assignment_by_size = assign  # type: ignore[assignment]
    try:
        yield
    finally:
        dist._compute_bucket_assignment_by_size = own  # type: ignore[assignment]

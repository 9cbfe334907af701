"""``load_pretrained``: a Hugging Face checkpoint into this rank's part of a model."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_cp.checkpoint.pretrained.agreed import require_same_plan, tell_other_paths
from lightning_cp.checkpoint.pretrained.allocate import dtypes, materialize
from lightning_cp.checkpoint.pretrained.fresh import computable
from lightning_cp.checkpoint.pretrained.incomplete import incomplete_until_done
from lightning_cp.checkpoint.pretrained.index import open_checkpoint
from lightning_cp.checkpoint.pretrained.keys import rules_of
from lightning_cp.checkpoint.pretrained.memory import (
    Part,
    peak_bytes,
    require_memory,
    require_memory_together,
)
from lightning_cp.checkpoint.pretrained.names import plain, tensors_of, unwrapped
from lightning_cp.checkpoint.pretrained.options import (
    Options,
    check_options,
    dtype_of,
    require_kinds,
)
from lightning_cp.checkpoint.pretrained.plan import LoadPlan, Slice, plan_load
from lightning_cp.checkpoint.pretrained.progress import Progress
from lightning_cp.checkpoint.pretrained.reader import BUFFER, SliceReader
from lightning_cp.checkpoint.pretrained.rest import LOADING, Rest, together
from lightning_cp.checkpoint.pretrained.twins import require_same
from lightning_cp.checkpoint.pretrained.unloaded import tell_unloaded
from lightning_cp.comm.local import local_part
from lightning_cp.comm.objects import World
from lightning_cp.comm.outcome import summed_over_world
from lightning_cp.errors import CheckpointError, RankFailure
from lightning_cp.mesh import ContextParallelMesh

_Asked = tuple[Options, nn.Module, torch.device, torch.device]


@dataclass(frozen=True)
class Loaded:
    """The result of a load on this rank."""

    nbytes: int
    """Read from the files, what was only compared included."""
    seconds: float
    peak_bytes: int
    """The most memory that the process has had so far."""
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def load_pretrained(
    model: nn.Module,
    path: str | os.PathLike[str],
    mesh: ContextParallelMesh | None = None,
    *,
    device: torch.device | str | None = None,
    **options: Any,
) -> Loaded:
    """Load a Hugging Face checkpoint; each rank reads what it holds, straight into its memory.

    All ranks of the world call it, with the model sharded already (FSDP2, tensor parallelism, both) or not.
    Nothing is allocated before names, shapes and headers of all files were compared with the model. On every
    rank it raises if it does on one; the model then is as it was, or refuses to be called.

    Args:
        model: on the meta device (then it gets its memory here) or a real one; as Fabric returns it, too.
        path: a directory with safetensors files, or one such file.
        mesh: of the run; tells the device.
        device: for what is on the meta device; by default that of DTensors' meshes, else of ``mesh``, else
            of the first parameter that is on another, else the CPU.
        **options: ``dtype`` of floating-point parameters (by default they keep theirs, and values are
            converted on the way); ``strict``, ``allow_missing`` and ``allow_unexpected`` (patterns) for names
            that one side lacks; ``keys`` (other names, fused projections: see ``keys.py``); ``prefix`` of the
            model's names (found by default); ``check_finite`` refuses NaN and infinity; ``progress`` shows a
            line; ``initialize(module)`` sets values that the checkpoint does not hold.

    Raises:
        CheckpointError: a file that is damaged or leads elsewhere, names or shapes that do not fit, not
            enough memory, a value that is not finite.
        ConfigError: an option that cannot be.
        RankFailure: another rank has raised.
    """
    made: list[_Asked] = []
    World().together(lambda: made.append(_asked(model, mesh, device, options)), _elsewhere)
    chosen, model, own_device, reach = made[0]
    started = time.monotonic()
    with together(reach):
        plan = _plan(model, path, chosen)
        rest = Rest(model, plan, chosen.initialize)
        wanted = _require_room(model, rest, dtype_of(chosen.dtype), own_device, reach)
    require_same_plan(plan, chosen)
    tell_other_paths(path)
    require_memory_together(wanted, own_device)
    rest.require_same(dtypes(model, dtype_of(chosen.dtype)))
    nbytes = plan.nbytes + sum(one.nbytes for one in plan.twins)
    (total,) = summed_over_world([nbytes], reach.type)
    with incomplete_until_done(model), Progress(plan, total, shown=chosen.progress) as progress:
        with together(reach):
            materialize(model, own_device, dtype_of(chosen.dtype))
        rest.set(reach, progress.now)
        progress.begin()
        with together(reach):
            _read(model, plan, chosen, progress)
            progress.finish()
    tell_unloaded(plan, chosen)
    seconds = time.monotonic() - started
    missing = (*plan.missing, *plan.beside)
    return Loaded(nbytes, seconds, peak_bytes(), missing, plan.unexpected)


def _asked(
    model: nn.Module,
    mesh: ContextParallelMesh | None,
    device: torch.device | str | None,
    options: dict[str, Any],
) -> _Asked:
    chosen, model = check_options(options), unwrapped(model)
    require_kinds(mesh, device)
    own_device = _device(model, mesh, device)
    return chosen, model, own_device, _reach(model, own_device)


def _elsewhere(said: str) -> RankFailure:
    return RankFailure(f"{LOADING} ended on all ranks, because of {said}")


def _plan(model: nn.Module, path: str | os.PathLike[str], options: Options) -> LoadPlan:
    return plan_load(
        model,
        open_checkpoint(path),
        rules=rules_of(options.keys),
        prefix=options.prefix,
        strict=options.strict,
        allow_missing=options.allow_missing,
        allow_unexpected=options.allow_unexpected,
    )


def _require_room(
    model: nn.Module,
    rest: Rest,
    dtype: torch.dtype | None,
    device: torch.device,
    reach: torch.device,
) -> int:
    """The bytes that are going to be allocated on ``device``, which have to be there."""
    parts, dtype_of = [], dtypes(model, dtype)
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if x.is_meta:
            local = local_part(x)
            nbytes = local.numel() * dtype_of(x).itemsize
            parts.append(Part(plain(name), local.shape, nbytes))
    apart = device != reach
    passing = rest.parts(apart, dtype_of)
    if apart:
        require_memory([], reach, passing)
    return require_memory(parts, device, [] if apart else passing)


def _read(model: nn.Module, plan: LoadPlan, options: Options, progress: Progress) -> None:
    tensors, bad = tensors_of(model, plan.prefix).by_name, _NotFinite(options.check_finite)
    with torch.no_grad(), SliceReader(progress.add, bad.look) as reader:
        for one in plan.slices:
            progress.now(one.parameter)
            into = local_part(tensors[one.parameter])[one.place]
            reader.read(one.entry, one.offsets, into)
            bad.require_none(one)
    progress.flush()
    with torch.no_grad(), SliceReader(progress.add) as reader:
        for one in plan.twins:
            progress.now(f"comparing {one.entry.name}")
            require_same(one, tensors, reader)


class _NotFinite:
    """The number of values that are NaN or infinite, if that is asked for."""

    def __init__(self, wanted: bool) -> None:
        self._wanted, self._count = wanted, 0

    def look(self, values: torch.Tensor) -> None:
        """A few at a time, as counting makes copies, and few are counted: NaN is an extreme too."""
        if not self._wanted or not values.is_floating_point():
            return
        for some in map(computable, values.split(BUFFER)):
            if not all(x.isfinite() for x in torch.aminmax(some)):
                self._count += int((~some.isfinite()).sum())

    def require_none(self, one: Slice) -> None:
        if self._count:
            raise CheckpointError(
                f"{one.parameter} in {one.entry.file.name} has {self._count:,} values that are NaN or "
                "infinite. They were trained that way, or the file was changed since; check_finite=False "
                "loads them."
            )


def _device(
    model: nn.Module, mesh: ContextParallelMesh | None, given: torch.device | str | None
) -> torch.device:
    """Where memory is taken."""
    kind = _mesh_kind(model) or (mesh.device_type if mesh is not None else _held_on(model))
    return _numbered(torch.device(given if given is not None else kind or "cpu"))


def _reach(model: nn.Module, device: torch.device) -> torch.device:
    """The device whose tensors ranks exchange; of an offloaded model not where its shards are."""
    kind = _mesh_kind(model)
    if kind is None and device.type == "cpu":  # which a group need not know
        kind = _held_on(model)
    return device if kind in (None, device.type) else _numbered(torch.device(kind))


def _held_on(model: nn.Module) -> str | None:
    """The kind of device of a plain model's first parameter that is on a real one."""
    return next((x.device.type for x in model.parameters() if not x.is_meta), None)


def _mesh_kind(model: nn.Module) -> str | None:
    sharded = next((x for x in model.parameters() if isinstance(x, DTensor)), None)
    return None if sharded is None else sharded.device_mesh.device_type


def _numbered(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device

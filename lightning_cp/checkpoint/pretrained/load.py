"""``load_pretrained``: a Hugging Face checkpoint into this rank's part of a model."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_cp.checkpoint.pretrained.fresh import (
    Names,
    computable,
    left_unset,
    local_part,
    materialize,
    own_on_meta,
    ways_to_set,
)
from lightning_cp.checkpoint.pretrained.incomplete import incomplete_until_done
from lightning_cp.checkpoint.pretrained.index import open_checkpoint
from lightning_cp.checkpoint.pretrained.keys import rules_of
from lightning_cp.checkpoint.pretrained.memory import (
    no_room,
    peak_bytes,
    require_memory,
    require_memory_together,
)
from lightning_cp.checkpoint.pretrained.names import plain, tensors_of, unwrapped
from lightning_cp.checkpoint.pretrained.options import Options, check_options, dtype_of
from lightning_cp.checkpoint.pretrained.plan import LoadPlan, plan_load
from lightning_cp.checkpoint.pretrained.progress import Progress
from lightning_cp.checkpoint.pretrained.reader import SliceReader
from lightning_cp.comm.outcome import share_outcome, summed_over_world
from lightning_cp.errors import CheckpointError
from lightning_cp.mesh import ContextParallelMesh


@dataclass(frozen=True)
class Loaded:
    """What was loaded on this rank."""

    nbytes: int
    """Read from the files."""
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
            the CPU.
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
    chosen, model = check_options(options), unwrapped(model)
    own_device = _device(model, mesh, device)
    reach = _reach(model, own_device)
    started = time.monotonic()
    planned, error = None, None
    try:
        planned = _prepare(model, path, chosen, own_device)
    except Exception as raised:  # whatever it is: the others are not to wait for this rank
        error = raised
    share_outcome(error, reach, what="loading pretrained weights")
    assert planned is not None
    plan, unset, wanted = planned
    require_memory_together(wanted, own_device)
    (total,) = summed_over_world([plan.nbytes], reach)
    with incomplete_until_done(model), Progress(plan, total, shown=chosen.progress) as progress:
        try:
            _load(model, plan, unset, chosen, own_device, progress)
            progress.finish()
        except Exception as raised:
            error = raised
        share_outcome(error, reach, what="loading pretrained weights")
    seconds = time.monotonic() - started
    missing = (*plan.missing, *plan.beside)
    return Loaded(plan.nbytes, seconds, peak_bytes(), missing, plan.unexpected)


Planned = tuple[LoadPlan, Names, int]
"""What is to be read, what no file holds, and the bytes that are going to be allocated."""


def _prepare(
    model: nn.Module, path: str | os.PathLike[str], options: Options, device: torch.device
) -> Planned:
    """All that can be refused without changing the model."""
    plan = plan_load(
        model,
        open_checkpoint(path),
        rules=rules_of(options.keys),
        prefix=options.prefix,
        strict=options.strict,
        allow_missing=options.allow_missing,
        allow_unexpected=options.allow_unexpected,
    )
    unset = _not_in_files(model, plan)
    for path_of, module in model.named_modules():
        if module in unset and not _ways(model, module, options):
            raise CheckpointError(
                f"{plain(path_of) or 'the model'} ({type(module).__name__}) has buffers or parameters on the "
                f"meta device that the checkpoint does not hold ({', '.join(unset[module])}), and nothing "
                "says what their values are. Give the module a method reset_buffers() or "
                "reset_parameters() that sets them, pass initialize=, or build it on a real device. "
                "Nothing was loaded."
            )
    return plan, unset, _require_room(model, dtype_of(options.dtype), device)


def _not_in_files(model: nn.Module, plan: LoadPlan) -> Names:
    """What is on the meta device and stays without values from files, tied ones once."""
    seen = {id(x) for name, x in plan.tensors.by_name.items() if name not in plan.missing}
    found: Names = {}
    for module, names in own_on_meta(model).items():
        for name in names:
            if id(getattr(module, name)) not in seen:
                seen.add(id(getattr(module, name)))
                found.setdefault(module, []).append(name)
    return found


def _ways(model: nn.Module, owner: nn.Module, options: Options) -> list[Callable[[nn.Module], Any]]:
    """How what no file holds gets its values."""
    return [options.initialize] if options.initialize is not None else ways_to_set(model, owner)


def _require_room(model: nn.Module, dtype: torch.dtype | None, device: torch.device) -> int:
    """The bytes that are going to be allocated, which have to be there."""
    parts = []
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if x.is_meta:
            local = local_part(x)
            parts.append((plain(name), local.shape, local.numel() * _dtype_for(x, dtype).itemsize))
    if parts:
        require_memory(sum(size for _, _, size in parts), device, parts)
    return sum(size for _, _, size in parts)


def _dtype_for(x: torch.Tensor, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and x.is_floating_point() else x.dtype


def _set_rest(model: nn.Module, unset: Names, options: Options) -> None:
    """Values that no file holds."""
    for module, names in unset.items():
        left = left_unset(module, names, _ways(model, module, options))
        if left:
            raise CheckpointError(
                f"{type(module).__name__} left its {left[0]} without a value when it was made again. Have "
                "its reset_buffers() or reset_parameters() set it, or pass initialize=."
            )


def _load(
    model: nn.Module,
    plan: LoadPlan,
    unset: Names,
    options: Options,
    device: torch.device,
    progress: Progress,
) -> None:
    """Change the model: memory, values that no file has, then all others."""
    dtype = dtype_of(options.dtype)
    try:
        materialize(model, device, dtype)
    except (RuntimeError, MemoryError) as error:  # torch's out of memory is a RuntimeError
        name, x = _first_without_memory(model, dtype)
        raise no_room(name, x, _dtype_for(x, dtype), device, error) from error
    _set_rest(model, unset, options)
    tensors = tensors_of(model, plan.prefix).by_name
    with torch.no_grad(), SliceReader(progress.add) as reader:
        for one in plan.slices:
            progress.now(one.parameter)
            local = local_part(tensors[one.parameter])
            place = tuple(slice(at, at + n) for at, n in zip(one.at, one.lengths, strict=True))
            reader.read(one.entry, one.offsets, local[place])
            if options.check_finite:
                _require_finite(one.parameter, one.entry.file.name, local[place])


def _first_without_memory(model: nn.Module, dtype: torch.dtype | None) -> tuple[str, torch.Tensor]:
    """What was to be allocated, or to get another dtype, and was not."""
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if x.is_meta or x.dtype != _dtype_for(x, dtype):
            return plain(name), local_part(x)
    return "a parameter", torch.empty(0)


def _require_finite(name: str, file: str, x: torch.Tensor) -> None:
    if x.is_floating_point() and (count := int((~computable(x).isfinite()).sum())):
        raise CheckpointError(
            f"{name} in {file} has {count:,} values that are NaN or infinite. They were trained that way, or "
            "the file was changed since; check_finite=False loads them."
        )


def _device(
    model: nn.Module, mesh: ContextParallelMesh | None, given: torch.device | str | None
) -> torch.device:
    sharded = next((x for x in model.parameters() if isinstance(x, DTensor)), None)
    kind = mesh.device_type if mesh is not None else "cpu"
    if sharded is not None:
        kind = sharded.device_mesh.device_type
    device = torch.device(given if given is not None else kind)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def _reach(model: nn.Module, device: torch.device) -> str:
    """The kind of device whose tensors ranks exchange; of an offloaded model not where its shards are."""
    sharded = next((x for x in model.parameters() if isinstance(x, DTensor)), None)
    return device.type if sharded is None else sharded.device_mesh.device_type

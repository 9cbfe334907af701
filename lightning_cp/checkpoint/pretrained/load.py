"""``load_pretrained``: load a Hugging Face checkpoint into this rank's part of a model."""

from __future__ import annotations

import logging
import math
import os
import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_cp.checkpoint.pretrained.adapters import check_adapter_origin
from lightning_cp.checkpoint.pretrained.files import open_weight_files
from lightning_cp.checkpoint.pretrained.initial_values import computable, dtypes, materialize
from lightning_cp.checkpoint.pretrained.keys import rules_of, tensors_of, unwrap
from lightning_cp.checkpoint.pretrained.matching import AllowedNames
from lightning_cp.checkpoint.pretrained.memory import (
    TensorMemory,
    bytes_needed,
    check_machine_memory,
    peak_bytes,
)
from lightning_cp.checkpoint.pretrained.meta_init import LOADING, UnsavedTensors
from lightning_cp.checkpoint.pretrained.options import (
    PretrainedOptions,
    check_device_arguments,
    dtype_of,
    incomplete_until_done,
    read_options,
)
from lightning_cp.checkpoint.pretrained.plan import (
    LoadPlan,
    Slice,
    check_same_plan,
    plan_load,
    warn_different_paths,
)
from lightning_cp.checkpoint.pretrained.reader import BUFFER_BYTES, DIRECT_BYTES, SliceReader
from lightning_cp.comm.consensus import World
from lightning_cp.errors import CheckpointError, RankFailure
from lightning_cp.mesh import ContextParallelMesh
from lightning_cp.utils.dtensor import local_part
from lightning_cp.utils.patching import strip_wrappers

# One line of progress for the whole model, over all ranks, not per file.
#
# Ranks add the number of bytes read to a counter in the store of the process group, a few times a second. A
# thread of rank 0 reads it and writes the line, also after rank 0 itself has finished. No rank waits for
# another.


INTERVAL = 0.5
"""In seconds, between two lines."""

_lock = threading.Lock()
_count = 0


class LoadProgress:
    """Progress of one load: a context manager, to be left once all ranks have ended, in any way.

    Args:
        plan: this rank's.
        total: bytes that all ranks read.
        shown: True on rank 0, which writes.
        stream: of the line; standard error by default.
    """

    def __init__(
        self, plan: LoadPlan, total: int, *, shown: bool = True, stream: TextIO | None = None
    ) -> None:
        compared = {one.entry.name: one.entry.nbytes for one in plan.tied}
        self._model, self._total = plan.model_bytes + sum(compared.values()), max(1, total)
        self._stream = stream if stream is not None else sys.stderr
        self._board = _SharedCounter()
        self._shown = shown and self._board.rank == 0
        self._layers = _layers(one.parameter for one in plan.slices)
        self._name, self._pending = "taking memory", 0
        self._started = self._last = time.monotonic()
        self._written = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep_showing, name="loading", daemon=True)

    def __enter__(self) -> LoadProgress:
        if self._shown:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._over.set()
        if not self._shown:
            return
        self._thread.join()
        if kind is None:
            self._write(self.line(1.0))
        self._stream.write("\n" if self._written else "")
        self._stream.flush()

    def now(self, name: str) -> None:
        """Set the current work: a parameter's name, or a text."""
        self._name = name

    def begin(self) -> None:
        """Start the measurement of the rate."""
        self._started = self._last = time.monotonic()

    def add(self, count: int) -> None:
        """Count bytes that were read."""
        self._pending += count
        if time.monotonic() - self._last >= INTERVAL:
            self.flush()

    def finish(self) -> None:
        """Record that this rank has read everything; others may not have."""
        self.flush()
        self._name = ""

    def flush(self) -> None:
        """Publish this rank's count."""
        self._last = time.monotonic()
        self._board.add(self._pending)
        self._pending = 0

    def show(self) -> None:
        """Write the line now."""
        self._write(self.line(self._board.read() / self._total))

    def _keep_showing(self) -> None:
        while not self._over.wait(INTERVAL):
            self.show()

    def line(self, share: float) -> str:
        """The line for the ``share`` of all ranks' bytes that were read."""
        share = min(1.0, share)
        seconds = max(1e-9, time.monotonic() - self._started)
        rate = share * self._model / seconds
        left = (1 - share) * self._model / rate if rate else float("inf")
        at, of = self._layers
        name = self._name or ("done" if share == 1 else "rank 0 is done")
        layer = f", layer {at[name]} of {of}" if name in at else ""
        return (
            f"loading {math.floor(100 * share):3d}% {_size(share * self._model)} of {_size(self._model)}, "
            f"{_size(rate)}/s, {_time(left)} left, {name}{layer}, "
            f"peak {self._board.peaks()}"
        )

    def _write(self, line: str) -> None:
        end = "\r" if self._stream.isatty() else "\n"
        padded = line.ljust(self._written) if end == "\r" else line
        self._written = len(line)
        self._stream.write(padded + end)
        self._stream.flush()


class _SharedCounter:
    """Counters of this load in the group's store; of this rank alone without a store."""

    def __init__(self) -> None:
        global _count
        with _lock:
            _count += 1  # ranks load together, so they count alike
            self._key = f"lightning_cp/loading/{_count}"
        self._store: Any = _store()
        together = dist.is_initialized()
        self.rank = dist.get_rank() if together else 0
        self._world = dist.get_world_size() if together else 1
        self._own = 0

    def add(self, count: int) -> None:
        self._own += count
        if self._store is None:
            return
        with suppress(RuntimeError):  # a lost store must not end the load
            self._store.add(self._key, count)
            self._store.set(f"{self._key}/{self.rank}", str(peak_bytes()))

    def read(self) -> int:
        """Bytes read by all ranks."""
        with suppress(RuntimeError):
            if self._store is not None:
                return int(self._store.add(self._key, 0))
        return self._own * self._world

    def peaks(self) -> str:
        """The largest peak memory of a rank, with the rank."""
        known = [(peak_bytes(), self.rank)]
        keys = [f"{self._key}/{rank}" for rank in range(self._world)]
        with suppress(RuntimeError):
            if self._store is not None and self._store.check(keys):  # all ranks have published
                known += [(int(x), rank) for rank, x in enumerate(self._store.multi_get(keys))]
        most, worst = max(known)
        return f"{_size(most)} (rank {worst})"


def _store() -> Any:
    """PyTorch's default store, which has no public name."""
    find = getattr(dist.distributed_c10d, "_get_default_store", None)
    return find() if find is not None and dist.is_initialized() else None


def _layers(names: Any) -> tuple[dict[str, int], int]:
    """The layer of each name, counted from 1, and the number of layers: the first number in the name."""
    found = {name: int(m[1]) + 1 for name in names if (m := re.search(r"\.(\d+)\.", f".{name}"))}
    return found, max(found.values(), default=0)


def _size(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count / 1e3:.1f} kB"


def _time(seconds: float) -> str:
    if seconds == float("inf"):
        return "?"
    minutes, rest = divmod(int(seconds + 0.5), 60)
    return f"{minutes}:{rest:02d}"


# Tied weights under several names in the files: they can be one parameter only if all are equal.


def check_tied_values(one: Slice, tensors: Mapping[str, torch.Tensor], reader: SliceReader) -> None:
    """Check that a slice of the files equals the values loaded for its parameter, some rows at a time.

    Raises:
        CheckpointError: they differ.
    """
    held = local_part(tensors[one.parameter])[one.place]
    rows = one.lengths[0] if one.lengths else 1
    each = max(1, DIRECT_BYTES * rows // max(1, held.nbytes))
    for first in range(0, rows, each):
        part = held[first : first + each] if one.lengths else held
        offsets = (one.offsets[0] + first, *one.offsets[1:]) if one.offsets else ()
        other = torch.empty(part.shape, dtype=part.dtype, device=part.device)
        reader.read(one.entry, offsets, other)
        if not _same(computable(part), computable(other)):
            raise CheckpointError(
                f"in the files {one.entry.name!r} has other values than {one.parameter!r}, and in the model "
                "both are one parameter. Build the model without the tie (tie_word_embeddings=False), or "
                f"leave {one.entry.name!r} unread (the model then has the values of the other): "
                f"allow_unexpected=[{one.entry.name!r}]."
            )


def _same(x: torch.Tensor, y: torch.Tensor) -> bool:
    return bool(((x == y) | ((x != x) & (y != y))).all())


# Tensors that were left out with ``strict=False``, which accepts any checkpoint, even of another model.


_log = logging.getLogger("lightning_cp")
_SHOWN = 5


def warn_not_loaded(plan: LoadPlan, options: PretrainedOptions) -> None:
    """Log them on the first rank, except those that a pattern allows."""
    if options.strict or World().rank:
        return
    lists = AllowedNames(options.allow_missing, options.allow_unexpected)
    missing = lists.refused_missing([*plan.missing, *plan.outside])
    if missing:
        _log.warning(
            "strict=False: %d of %d parameters of the model are not in the checkpoint, and keep the values "
            "they had or are initialised: %s",
            len(missing),
            len(plan.tensors.by_name) + len(plan.outside),
            _name_list(missing),
        )
    unexpected = lists.refused_unexpected(plan.unexpected)
    if unexpected:
        _log.warning(
            "strict=False: %d of %d tensors of the checkpoint were left unread: %s",
            len(unexpected),
            len(plan.files),
            _name_list(unexpected),
        )


def _name_list(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


_LoadRequest = tuple[PretrainedOptions, nn.Module, torch.device, torch.device]


@dataclass(frozen=True)
class PretrainedLoad:
    """The result of a load on this rank."""

    nbytes: int
    """Bytes read from the files, including those only compared."""
    seconds: float
    peak_bytes: int
    """Peak memory of the process so far."""
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def load_pretrained(
    model: nn.Module,
    path: str | os.PathLike[str],
    mesh: ContextParallelMesh | None = None,
    *,
    device: torch.device | str | None = None,
    **options: Any,
) -> PretrainedLoad:
    """Load a Hugging Face checkpoint; each rank reads what it holds, straight into its memory.

    All ranks of the world call it, with the model sharded already (FSDP2, tensor parallelism, both) or not.
    Nothing is allocated before names, shapes and headers of all files were compared with the model. On every
    rank it raises if it does on one; the model then is as it was, or refuses to be called.

    Args:
        model: on the meta device (it is allocated here) or a real one; as returned by Fabric, too.
        path: a directory with safetensors files, or one such file.
        mesh: of the run; determines the device.
        device: for meta tensors; by default that of DTensors' meshes, else of ``mesh``, else of the first
            parameter on another device, else the CPU.
        **options: ``dtype`` of floating-point parameters (by default they keep theirs, and values are
            converted); ``strict``, ``allow_missing`` and ``allow_unexpected`` (patterns) for names that one
            side lacks; ``keys`` (other names, fused projections: see ``keys.py``); ``prefix`` of the model's
            names (found by default); ``check_finite`` refuses NaN and infinity; ``progress`` shows a line;
            ``initialize(module)`` sets values that the checkpoint does not hold.

    Raises:
        CheckpointError: a file that is damaged or leads elsewhere, names or shapes that do not fit, not
            enough memory, a value that is not finite.
        ConfigError: an invalid option.
        RankFailure: another rank has raised.
    """
    world = World()
    request = world.run_on_all(
        lambda: _read_request(model, mesh, device, options), _other_rank_error
    )
    chosen, model, own_device, reach = request
    started = time.monotonic()
    with world.raising_on_all(reach.type, what=LOADING):
        plan = _plan(model, path, chosen)
        in_files = {id(x) for k, x in plan.tensors.by_name.items() if k not in plan.missing}
        check_adapter_origin(model, in_files)
        rest = UnsavedTensors(model, in_files, chosen.initialize)
        wanted = _bytes_needed(model, rest, dtype_of(chosen.dtype), own_device, reach)
    check_same_plan(plan, chosen)
    warn_different_paths(path)
    check_machine_memory(wanted, own_device)
    rest.check_same(dtypes(model, dtype_of(chosen.dtype)))
    nbytes = plan.nbytes + sum(one.nbytes for one in plan.tied)
    total = world.sum(nbytes, reach.type)
    with incomplete_until_done(model), LoadProgress(plan, total, shown=chosen.progress) as progress:
        with world.raising_on_all(reach.type, what=LOADING):
            materialize(model, own_device, dtype_of(chosen.dtype))
        rest.set(reach, progress.now)
        progress.begin()
        with world.raising_on_all(reach.type, what=LOADING):
            _read(model, plan, chosen, progress)
            progress.finish()
    warn_not_loaded(plan, chosen)
    seconds = time.monotonic() - started
    missing = (*plan.missing, *plan.outside)
    return PretrainedLoad(nbytes, seconds, peak_bytes(), missing, plan.unexpected)


def _read_request(
    model: nn.Module,
    mesh: ContextParallelMesh | None,
    device: torch.device | str | None,
    options: dict[str, Any],
) -> _LoadRequest:
    chosen, model = read_options(options), unwrap(model)
    check_device_arguments(mesh, device)
    own_device = _device(model, mesh, device)
    return chosen, model, own_device, _exchange_device(model, own_device)


def _other_rank_error(said: str) -> RankFailure:
    return RankFailure(f"{LOADING} ended on all ranks, because of {said}")


def _plan(model: nn.Module, path: str | os.PathLike[str], options: PretrainedOptions) -> LoadPlan:
    return plan_load(
        model,
        open_weight_files(path),
        rules=rules_of(options.keys),
        prefix=options.prefix,
        strict=options.strict,
        allow_missing=options.allow_missing,
        allow_unexpected=options.allow_unexpected,
    )


def _bytes_needed(
    model: nn.Module,
    rest: UnsavedTensors,
    dtype: torch.dtype | None,
    device: torch.device,
    reach: torch.device,
) -> int:
    """Return the bytes that the load allocates on ``device``, which has them free."""
    parts, dtype_of = [], dtypes(model, dtype)
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if x.is_meta:
            local = local_part(x)
            nbytes = local.numel() * dtype_of(x).itemsize
            parts.append(TensorMemory(strip_wrappers(name), local.shape, nbytes))
    other_device = device != reach
    passing = rest.parts(other_device, dtype_of)
    if other_device:
        bytes_needed([], reach, passing)
    return bytes_needed(parts, device, [] if other_device else passing)


def _read(
    model: nn.Module, plan: LoadPlan, options: PretrainedOptions, progress: LoadProgress
) -> None:
    tensors, bad = tensors_of(model, plan.prefix).by_name, _NotFinite(options.check_finite)
    with torch.no_grad(), SliceReader(progress.add, bad.add) as reader:
        for one in plan.slices:
            progress.now(one.parameter)
            into = local_part(tensors[one.parameter])[one.place]
            reader.read(one.entry, one.offsets, into)
            bad.check_none(one)
    progress.flush()
    with torch.no_grad(), SliceReader(progress.add) as reader:
        for one in plan.tied:
            progress.now(f"comparing {one.entry.name}")
            check_tied_values(one, tensors, reader)


class _NotFinite:
    """Counter of NaN and infinite values, if requested."""

    def __init__(self, wanted: bool) -> None:
        self._wanted, self._count = wanted, 0

    def add(self, values: torch.Tensor) -> None:
        """Count in small blocks, as counting makes copies, and only if an extreme is not finite, as
        NaN is.
        """
        if not self._wanted or not values.is_floating_point():
            return
        for some in map(computable, values.split(BUFFER_BYTES)):
            if not all(x.isfinite() for x in torch.aminmax(some)):
                self._count += int((~some.isfinite()).sum())

    def check_none(self, one: Slice) -> None:
        if self._count:
            raise CheckpointError(
                f"{one.parameter} in {one.entry.file.name} has {self._count:,} values that are NaN or "
                "infinite. They were trained that way, or the file was changed since; check_finite=False "
                "loads them."
            )


def _device(
    model: nn.Module, mesh: ContextParallelMesh | None, given: torch.device | str | None
) -> torch.device:
    """The device for meta tensors."""
    kind = _mesh_kind(model) or (mesh.device_type if mesh is not None else _held_on(model))
    return _with_index(torch.device(given if given is not None else kind or "cpu"))


def _exchange_device(model: nn.Module, device: torch.device) -> torch.device:
    """The device whose tensors ranks exchange; for an offloaded model not that of its shards."""
    kind = _mesh_kind(model)
    if kind is None and device.type == "cpu":  # a group need not have a CPU backend
        kind = _held_on(model)
    return device if kind in (None, device.type) else _with_index(torch.device(kind))


def _held_on(model: nn.Module) -> str | None:
    """Device type of a plain model's first parameter that is not on meta."""
    return next((x.device.type for x in model.parameters() if not x.is_meta), None)


def _mesh_kind(model: nn.Module) -> str | None:
    sharded = next((x for x in model.parameters() if isinstance(x, DTensor)), None)
    return None if sharded is None else sharded.device_mesh.device_type


def _with_index(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device

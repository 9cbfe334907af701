"""``export_pretrained``: a model of any sharding as a Hugging Face checkpoint."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_cp.checkpoint.durable import (
    SAVING,
    beside,
    discard,
    put_in_place,
    sweep,
    sync,
    write_durably,
)
from lightning_cp.checkpoint.paths import local_path
from lightning_cp.checkpoint.pretrained.export_files import WHAT, Writer
from lightning_cp.checkpoint.pretrained.export_plan import Export, plan_export
from lightning_cp.checkpoint.pretrained.incomplete import require_complete
from lightning_cp.checkpoint.pretrained.index import INDEX
from lightning_cp.checkpoint.pretrained.names import unwrapped
from lightning_cp.checkpoint.pretrained.options import dtype_of
from lightning_cp.checkpoint.pretrained.write import index_text
from lightning_cp.comm.outcome import share_outcome
from lightning_cp.errors import ConfigError

FILE_BYTES = 5_000_000_000
REPLACED = (INDEX, "config.json", "generation_config.json")
"""What may be in a folder that is replaced, beside safetensors files."""


def export_pretrained(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    config: Any = None,
    dtype: torch.dtype | str | None = None,
    keys: Mapping[str, str] | None = None,
    prefix: str | None = None,
    file_bytes: int = FILE_BYTES,
    overwrite: bool = False,
) -> Path:
    """Write a model's parameters as safetensors files that ``from_pretrained`` and ``load_pretrained`` read.

    All ranks of the world call it. Rank 0 has one tensor whole at a time and writes; the folder gets its name
    once everything is on the disk, and what ends before leaves nothing.

    Args:
        model: sharded in any way, or not; as Fabric returns it, too.
        path: the folder to be made.
        config: has ``save_pretrained``; by default the network's own, if it has one.
        dtype: of floating-point tensors in the files; by default their own.
        keys: as for ``load_pretrained``: parameter names to names in the files. A fused parameter cannot be
            taken apart, since nothing says where; parts of equal shapes say how they are joined (``+0``).
        prefix: of the model's names, to be left away; by default that of the network from transformers in it.
        file_bytes: a file is not longer, unless one tensor is.
        overwrite: replace a folder that is there, if it holds nothing but such files.

    Returns:
        The folder.

    Raises:
        ConfigError: a folder that is there, or options that cannot be.
        CheckpointError: a model that was loaded in part, or files that cannot be written.
        RankFailure: another rank has raised.
    """
    target, model, made, error = local_path(path), unwrapped(model), None, None
    try:
        require_complete(model)
        if type(overwrite) is not bool:
            raise ConfigError(f"overwrite must be True or False, got {overwrite!r}.")
        if config is not None and not callable(getattr(config, "save_pretrained", None)):
            raise ConfigError(
                f"config must have save_pretrained, as transformers' have, got {config!r}."
            )
        made = plan_export(model, keys, prefix, dtype_of(dtype), file_bytes)
        _require_free(target, overwrite)
    except Exception as raised:  # whatever it is: the others are not to wait for this rank
        error = raised
    device = _device_type(model)
    share_outcome(error, device, what=WHAT)
    assert made is not None
    first = not dist.is_initialized() or dist.get_rank() == 0
    staged = beside(target, SAVING)
    writer = Writer(staged if first else None, device)
    try:
        writer.try_to(lambda folder: folder.mkdir(parents=True))
        writer.try_to(lambda folder: sweep(folder.parent))  # what killed exports have left
        writer.write(made)
        writer.try_to(partial(_finish, made, target, config))
    finally:
        if first:
            discard(staged)
    share_outcome(writer.error, device, what=WHAT)
    return target


def _require_free(target: Path, overwrite: bool) -> None:
    if not os.path.lexists(target):
        return
    if target.is_symlink() or not target.is_dir():
        raise ConfigError(f"{target.name} is there, and no folder. Name another one.")
    others = [x.name for x in target.iterdir() if x.is_dir() or not _is_replaced(x)]
    if others and (overwrite or any(target.iterdir())):
        raise ConfigError(
            f"the folder {target.name} holds {others[0]}, which no export writes and which would be lost: "
            "the folder is not replaced. Name another one, or move that file away."
        )
    if any(target.iterdir()) and not overwrite:
        raise ConfigError(
            f"the folder {target.name} is not empty. Name another one, or pass overwrite=True."
        )


def _is_replaced(file: Path) -> bool:
    return file.suffix == ".safetensors" or file.name in REPLACED


def _finish(made: Export, target: Path, config: Any, staged: Path) -> None:
    """All but the tensors, then the name."""
    if len(made.files) > 1:
        write_durably(staged / INDEX, index_text(made.shapes, made.files).encode())
    _save_config(made, staged, config)
    for file in staged.glob("*.json"):
        sync(file)
    put_in_place(staged, target)


def _save_config(made: Export, staged: Path, config: Any) -> None:
    """The network's configuration says the class and the dtype that are in the files now."""
    given = config if config is not None else getattr(made.network, "config", None)
    if not callable(getattr(given, "save_pretrained", None)):
        return
    saved: Any = copy.deepcopy(given)
    floats = [x.dtype for x in made.shapes.values() if x.dtype.is_floating_point]
    if config is None:
        kind = type(made.network)
        saved.architectures = [kind.__name__.removeprefix("FSDP")]
    if floats:
        saved.dtype = max(set(floats), key=floats.count)
    saved.save_pretrained(staged)
    generation: Any = getattr(made.network, "generation_config", None)
    if config is None and callable(getattr(generation, "save_pretrained", None)):
        generation.save_pretrained(staged)


def _device_type(model: nn.Module) -> str:
    for x in model.parameters():
        return x.device_mesh.device_type if isinstance(x, DTensor) else x.device.type
    return "cpu"

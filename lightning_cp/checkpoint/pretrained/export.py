"""``export_pretrained``: a model of any sharding as a Hugging Face checkpoint."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
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
from lightning_cp.comm.objects import World
from lightning_cp.comm.outcome import share_outcome
from lightning_cp.errors import ConfigError, without_home

FILE_BYTES = 5_000_000_000
REPLACED = (INDEX, "config.json", "generation_config.json")
"""What may be in a folder that is replaced, beside safetensors files and what is written now."""


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

    Of a model with adapters (peft), the adapters alone are written, in peft's own files.

    All ranks of the world call it. Rank 0 has one tensor whole at a time and writes; the folder gets its name
    once everything is on the disk, and what ends before leaves nothing.

    Args:
        model: sharded in any way, or not; as Fabric returns it, too.
        path: the folder to be made, the same on all ranks.
        config: has ``save_pretrained``; by default the network's own, if it has one.
        dtype: of floating-point tensors in the files; by default their own.
        keys: as for ``load_pretrained``: parameter names to names in the files. A fused parameter cannot be
            taken apart, since nothing says where; parts of equal shapes say how they are joined (``+0``).
        prefix: of the model's names, to be left away; by default that of the network from transformers in it.
        file_bytes: a file is not longer, unless one tensor is.
        overwrite: replace a folder that is there, if it holds nothing but such files, or others that this
            export writes again.

    Returns:
        The folder.

    Raises:
        ConfigError: a folder that is there, or options that cannot be.
        CheckpointError: a model that was loaded in part, or files that cannot be written.
        RankFailure: another rank has raised.
    """
    model, made, error = unwrapped(model), None, None
    device, first = _device_type(model), World().rank == 0
    target = _same_target(path, device)
    staged = beside(target, SAVING)
    writer = Writer(staged if first else None, target, device)
    try:
        try:
            require_complete(model)
            _require_options(config, overwrite)
            made = plan_export(model, keys, prefix, dtype_of(dtype), file_bytes)
            writer.try_to(partial(_begin, made, config))
            if not made.is_adapter:  # of which files will be written is known later
                writer.try_to(partial(_require_free, target, overwrite))
            error = writer.error
        except Exception as raised:  # whatever it is: the others are not to wait for this rank
            error = raised
        share_outcome(error, device, what=WHAT)
        assert made is not None
        if made.is_adapter:
            tensors = writer.gathered(made)
            writer.try_to(partial(_save_adapters, made.network, tensors))
        else:
            writer.write(made)
        writer.try_to(partial(_finish, made))
        writer.try_to(partial(_require_free, target, overwrite))  # that may have taken hours
        writer.try_to(lambda folder: put_in_place(folder, target))
        share_outcome(writer.error, device, what=WHAT)
    finally:
        if first:
            discard(staged)
    return target


def _require_options(config: Any, overwrite: object) -> None:
    if type(overwrite) is not bool:
        raise ConfigError(
            f"overwrite must be True or False, got {overwrite!r}. "
            "True replaces the files that are there."
        )
    if config is not None and not callable(getattr(config, "save_pretrained", None)):
        raise ConfigError(
            f"config must have save_pretrained, as transformers' have, got {config!r}. "
            "Pass model.config, or leave it out."
        )


def _same_target(path: str | os.PathLike[str], device_type: str) -> Path:
    """Where all ranks export to. Collective.

    Raises:
        CheckpointError: no folder of this machine's file system.
        ConfigError: no path, none that can be made, or not the same on all ranks.
        RankFailure: another rank has raised.
    """
    target, error = Path(), None
    try:
        target = local_path(path)
        if not target.name:
            raise ConfigError(f"{target} is there, and cannot be replaced. Name a folder in it.")
    except Exception as raised:  # whatever it is: the others are not to wait for this rank
        error = raised
    share_outcome(error, device_type, what=WHAT)
    every = World().gather(str(target))
    odd = next((rank for rank, other in enumerate(every) if other != every[0]), None)
    if odd is not None:
        raise ConfigError(
            f"ranks export to different paths: {without_home(every[0])} on rank 0, "
            f"{without_home(every[odd])} on rank {odd}. Give the same one on every rank, absolute if they "
            "run in different folders: rank 0 writes all of it."
        )
    return target


def _begin(made: Export, config: Any, staged: Path) -> None:
    """With the configuration, whose own files are known then."""
    sweep(staged.parent)  # what killed exports have left
    staged.mkdir(parents=True)
    if not made.is_adapter:
        _save_config(made, staged, config)


def _save_adapters(network: Any, tensors: dict[str, torch.Tensor], staged: Path) -> None:
    """By the network's own method, which knows the names in the files."""
    type(network).save_pretrained(network, str(staged), state_dict=tensors)


def _require_free(target: Path, overwrite: bool, staged: Path) -> None:
    """Nothing is at ``target`` that is not to be replaced by what is in ``staged``, or will be."""
    if not os.path.lexists(target):
        return
    if target.is_symlink() or not target.is_dir():
        raise ConfigError(f"{target.name} is there, and no folder. Name another one.")
    lost = next((x for x in target.rglob("*") if not _is_replaced(x, target, staged)), None)
    if lost is not None:
        raise ConfigError(
            f"the folder {target.name} holds {lost.relative_to(target)}, which this export does not write "
            "and which would be lost: the folder is not replaced. Name another one, or move that file away."
        )
    if any(target.iterdir()) and not overwrite:
        raise ConfigError(
            f"the folder {target.name} is not empty. Name another one, or pass overwrite=True."
        )


def _is_replaced(x: Path, target: Path, staged: Path) -> bool:
    again = staged / x.relative_to(target)
    if x.is_dir():
        return again.is_dir() and not x.is_symlink()
    ours = x.parent == target and (x.suffix == ".safetensors" or x.name in REPLACED)
    return ours or again.is_file()


def _finish(made: Export, staged: Path) -> None:
    """All but the name."""
    if len(made.files) > 1:
        write_durably(staged / INDEX, index_text(made.shapes, made.files).encode())
    for x in staged.rglob("*"):
        sync(x)


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


def refuse_save_pretrained(model: nn.Module) -> None:
    """Have ``save_pretrained`` of networks that are sharded say what to call instead, as long as they are."""
    for module in model.modules():
        if callable(getattr(type(module), "save_pretrained", None)):
            module.__dict__["save_pretrained"] = partial(_refuse_sharded, module)


def _refuse_sharded(module: Any, *given: Any, **options: Any) -> Any:
    """In place of a network's ``save_pretrained``.

    Raises:
        ConfigError: its parameters are shards.
    """
    if any(isinstance(x, DTensor) for x in module.parameters()):
        kind = type(module).__name__.removeprefix("FSDP")
        raise ConfigError(
            f"save_pretrained of {kind} cannot write sharded parameters: each rank holds a part. Call "
            "lightning_cp.checkpoint.export_pretrained(model, path) on all ranks, in the run or after it; of "
            "a model with adapters it writes the adapters."
        )
    return type(module).save_pretrained(module, *given, **options)

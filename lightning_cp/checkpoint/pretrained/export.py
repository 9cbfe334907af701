"""``export_pretrained``: a model of any sharding as a Hugging Face checkpoint."""

from __future__ import annotations

import copy
import errno
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from lightning_cp import error_display
from lightning_cp.checkpoint.atomic import (
    SAVING,
    discard,
    display_path,
    local_path,
    put_in_place,
    sweep,
    sync,
    temporary_path,
    write_durably,
)
from lightning_cp.checkpoint.pretrained.adapters import (
    adapters_to_export,
    keep_adapters,
    save_adapters,
)
from lightning_cp.checkpoint.pretrained.files import (
    INDEX,
    TensorFile,
    TensorSpec,
    aligned_order,
    index_text,
    split_into_files,
)
from lightning_cp.checkpoint.pretrained.keys import (
    Rule,
    Tensors,
    check_rules_used,
    joinable,
    rule_for,
    rules_of,
    tensors_of,
    unwrap,
)
from lightning_cp.checkpoint.pretrained.matching import lost_names
from lightning_cp.checkpoint.pretrained.options import check_complete, dtype_of
from lightning_cp.checkpoint.reshard import assemble
from lightning_cp.comm.consensus import World, error_summary
from lightning_cp.errors import CheckpointError, ConfigError, without_home
from lightning_cp.utils.patching import strip_wrappers

# The plan of an export: parameters, their keys and their files; nothing is written yet.


@dataclass(frozen=True)
class JoinedTensor:
    """Parameters that are written as one tensor."""

    tensors: tuple[torch.Tensor, ...]
    dim: int = 0
    """The dimension along which they are concatenated."""

    def shape(self, dtype: torch.dtype | None) -> TensorSpec:
        """Entry of the joined tensor in the file."""
        first, shape = self.tensors[0], list(self.tensors[0].shape)
        if len(self.tensors) > 1:
            shape[self.dim] = sum(x.shape[self.dim] for x in self.tensors)
        made = dtype if dtype is not None and first.is_floating_point() else first.dtype
        return TensorSpec(made, tuple(shape))


@dataclass(frozen=True)
class ExportPlan:
    """The files of an export, and their tensors."""

    network: nn.Module
    parts: dict[str, JoinedTensor]
    shapes: dict[str, TensorSpec]
    files: dict[str, list[str]]
    is_renamed: bool = False
    """True if the user named tensors of the files."""
    is_adapter: bool = False
    """True if the network writes itself, as adapters have their own files; ``files`` is empty."""


def plan_export(
    model: nn.Module,
    keys: Mapping[str, str] | None,
    prefix: str | None,
    dtype: torch.dtype | None,
    file_bytes: int,
) -> ExportPlan:
    """Plan an export; the arguments are those of ``export_pretrained``.

    Raises:
        ConfigError: invalid options.
    """
    if type(file_bytes) is not int or file_bytes < 1:
        raise ConfigError(
            f"file_bytes must be an integer of at least 1, got {file_bytes!r}. "
            "Leave it out for files of 5 GB."
        )
    if prefix is not None and not isinstance(prefix, str):
        raise ConfigError(
            f"prefix must be text, or None to have it found, got {prefix!r}. "
            "Leave it out if you do not know it."
        )
    path, network = _network(model, prefix)
    held = tensors_of(model, path)
    if not held.by_name:
        raise ConfigError(
            f"no parameter of the model begins with prefix={path!r}. "
            "Leave prefix out to have it found."
        )
    rules = rules_of(keys)
    check_rules_used(rules, [name for names in held.aliases.values() for name in names])
    if adapters := adapters_to_export(network):
        keep_adapters(held, adapters)
    parts = _parts(held, rules, all_names=bool(adapters))
    shapes = {key: joined.shape(dtype) for key, joined in parts.items()}
    files = {} if adapters else split_into_files(shapes, file_bytes)
    return ExportPlan(network, parts, shapes, files, bool(rules), bool(adapters))


def _network(model: nn.Module, prefix: str | None) -> tuple[str, nn.Module]:
    """Name and module of the network: the outermost module with its own way to be saved."""
    for path, module in model.named_modules():
        at = f"{strip_wrappers(path)}." if path else ""
        saves = callable(getattr(module, "save_pretrained", None)) and hasattr(module, "config")
        if at == prefix or (prefix is None and saves):
            return at, module
    return prefix or "", model


def _parts(held: Tensors, rules: Sequence[Rule], *, all_names: bool) -> dict[str, JoinedTensor]:
    parts: dict[str, JoinedTensor] = {}
    tensors = {alias: x for name, x in held.by_name.items() for alias in held.aliases[name]}
    for name, rule in _rules(held, rules, all_names=all_names):
        key, keys = rule.sources[0], rule.sources
        if len(keys) > 1:
            raise ConfigError(
                f"{name} cannot be written as {' + '.join(keys)}: nothing says where one ends and the next "
                "begins. Leave that line of keys out, and have the fused name in the files."
            )
        made_of = tuple(tensors[other] for other in rule.parameters)
        if key in parts and [id(x) for x in parts[key].tensors] != [id(x) for x in made_of]:
            raise ConfigError(
                f"{name} cannot be written as {key}, which is the name of other parameters already: one of "
                "them would be lost. Give it another name in keys."
            )
        parts[key] = JoinedTensor(made_of, _dim(key, made_of, rule.dim))
    return parts


def _rules(held: Tensors, rules: Sequence[Rule], *, all_names: bool) -> Iterator[tuple[str, Rule]]:
    """The rule for each parameter: tied ones under the first of their names that has a line in ``keys``.

    With ``all_names`` under each of their names, of which peft chooses.
    """
    for names in held.aliases.values():
        if all_names:
            yield from ((name, rule_for(name, rules)) for name in names)
            continue
        found = ((name, made) for name in names for rule in rules if (made := rule.of(name)))
        yield next(found, (names[0], rule_for(names[0], ())))


def _dim(key: str, tensors: Sequence[torch.Tensor], wanted: int | None) -> int:
    """The dimension along which the file's tensor joins the parameters."""
    if len(tensors) == 1:
        return 0
    dims = joinable([tuple(x.shape) for x in tensors], wanted)
    shapes = ", ".join(str(list(x.shape)) for x in tensors)
    if not dims or len({x.dtype for x in tensors}) > 1:
        raise ConfigError(
            f"{key} cannot be made of tensors of shapes {shapes}: they have one dtype, and lie side by side "
            "along one dimension, the only one that may differ. "
            "Write a line of keys that joins tensors which fit."
        )
    if len(dims) > 1:
        raise ConfigError(
            f"{key}: parts of shapes {shapes} fit along dimension {' and '.join(map(str, dims))}. Say which "
            "it is in keys: 'a +0 b' joins rows (outputs of nn.Linear), 'a +1 b' columns."
        )
    return dims[0]


# The files of an export: all ranks gather tensors, and one of them writes.


EXPORTING = "exporting weights"
"""Name of the work in messages."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


class ExportWriter:
    """Writes files on one rank; takes part in gathering on the others, which have no folder.

    An error is raised once all ranks know of it: before the next tensor is gathered, or at the end.

    Args:
        folder: where files are written; on one rank only.
        target: its final name, for messages.
        device_type: of the default group's tensors.
    """

    def __init__(self, folder: Path | None, target: Path, device_type: str) -> None:
        self.error: Exception | None = None
        self._folder, self._target, self._device_type = folder, target, device_type
        self._file: TensorFile | None = None

    def try_to(self, act: Callable[[Path], object]) -> None:
        """Run ``act`` on the folder, unless an earlier call failed."""
        if self._folder is None or self.error is not None:
            return
        try:
            with export_errors(self._target):
                act(self._folder)
        except (CheckpointError, ConfigError) as raised:
            self.error = raised

    def write(self, made: ExportPlan) -> None:
        """Write all files of tensors. Collective.

        Raises:
            CheckpointError: this rank cannot write, or cannot hold a whole tensor.
            RankFailure: another rank failed.
        """
        for name, keys in made.files.items():
            shapes = {key: made.shapes[key] for key in keys}
            self.try_to(partial(self._begin, name, shapes))
            try:
                for key in aligned_order(shapes):
                    self._add_all(key, made.parts[key], shapes[key].dtype)
                self.try_to(lambda _: self._file and self._file.sync())
            finally:
                if self._file is not None:
                    self._file.close()
                self._file = None

    def gather_all(self, made: ExportPlan) -> dict[str, torch.Tensor]:
        """Gather all tensors on the rank that writes; empty on others. Collective.

        Raises:
            CheckpointError: this rank cannot hold a whole tensor.
            RankFailure: another rank failed.
        """
        whole: dict[str, torch.Tensor] = {}
        for key, joined in made.parts.items():
            parts = [self._whole(key, x) for x in joined.tensors]
            if self._folder is not None:
                made_of = _concatenate([x.detach().cpu() for x in parts], joined.dim)
                whole[key] = made_of.to(made.shapes[key].dtype)
        return whole

    def _begin(self, name: str, shapes: Mapping[str, TensorSpec], folder: Path) -> None:
        self._file = TensorFile(folder / name, shapes)

    def _add_all(self, key: str, joined: JoinedTensor, dtype: torch.dtype) -> None:
        if joined.dim == 0:  # dim 0: they are contiguous in the file
            for x in joined.tensors:
                self._add([self._whole(key, x)], 0, dtype)
        else:
            self._add([self._whole(key, x) for x in joined.tensors], joined.dim, dtype)

    def _whole(self, key: str, x: torch.Tensor) -> torch.Tensor:
        """Gather a tensor once all ranks have room for it: a rank that failed within would leave the others
        waiting.
        """
        if isinstance(x, DTensor):
            try:
                if self.error is None:
                    _check_room(key, x)
            except CheckpointError as raised:
                self.error = raised
            World().raise_on_all(self.error, self._device_type, what=EXPORTING)
        return assemble(x)

    def _add(self, parts: list[torch.Tensor], dim: int, dtype: torch.dtype) -> None:
        file = self._file
        if file is not None:
            self.try_to(lambda _: file.write(_concatenate([x.cpu() for x in parts], dim).to(dtype)))


@contextmanager
def export_errors(target: Path) -> Iterator[None]:
    """Convert errors of an export before it has its name; later errors stay as they are.

    Args:
        target: the name.

    Raises:
        ConfigError: raised as such.
        CheckpointError: any other error.
    """
    try:
        yield
    except (CheckpointError, ConfigError):
        raise
    except OSError as raised:
        advice = "Name a folder that can be written"
        if raised.errno in _FULL:
            advice = "Free some space or name another folder"
        raise CheckpointError(
            f"the export could not be written to {display_path(target)} ({error_summary(raised)}), and "
            "nothing of it is "
            f"left. {advice}, and call it again: the model is as it was."
        ) from None
    except Exception as raised:  # e.g. from the configuration's save_pretrained
        raise CheckpointError(
            f"the export could not be written to {display_path(target)}, and nothing of it is left: "
            f"{error_summary(raised)}. "
            "The model is as it was: call the export again when that is fixed."
        ) from raised


def _check_room(key: str, x: DTensor) -> None:
    """Check that ``x`` can be gathered, by allocating as much memory and freeing it.

    Raises:
        CheckpointError: there is not enough.
    """
    local, device = x.to_local(), x.device_mesh.device_type
    sizes = [x.numel() * x.dtype.itemsize] * (1 if _is_concatenation(x) else 2)
    if local.device.type != device:
        sizes.append(local.nbytes)
    try:
        held = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        del held
    except Exception as raised:
        raise CheckpointError(
            f"{key} of shape {list(x.shape)} ({x.dtype}) cannot be had whole on this rank, which takes "
            f"{sum(sizes):,} bytes on {device} for a while: {error_summary(raised)}. Nothing of the export "
            "is left, "
            "and the model is as it was."
        ) from raised


def _is_concatenation(x: DTensor) -> bool:
    """True if the shards concatenated are the whole tensor, so that nothing needs to be rearranged."""
    sharded = [(p, at) for at, p in enumerate(x.placements) if not p.is_replicate()]
    by_rows = all(type(p) is Shard and p.dim == 0 for p, _ in sharded)
    return by_rows and x.shape[:1].numel() % prod(x.device_mesh.size(at) for _, at in sharded) == 0


def _concatenate(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]


FILE_BYTES = 5_000_000_000
REPLACEABLE = (INDEX, "config.json", "generation_config.json")
"""Files that may be in a folder to be replaced, beside safetensors files and those that are written now."""
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *(
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "tokenizer.model",
        "spiece.model",
        "sentencepiece.bpe.model",
    ),
    *(
        "chat_template.jinja",
        "chat_template.json",
        "processor_config.json",
        "preprocessor_config.json",
    ),
)
"""Files of transformers' tokenizers and processors: they stay in a folder that is replaced."""


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
        model: with any sharding or none; as returned by Fabric, too.
        path: the new folder, the same on all ranks.
        config: has ``save_pretrained``; by default the network's own, if it has one.
        dtype: of floating-point tensors in the files; by default their own.
        keys: as for ``load_pretrained``: parameter names to names in the files. A fused parameter cannot
            be split, since nothing defines where; parts of equal shapes need the dimension to join (``+0``).
        prefix: removed from the model's names; by default that of the network from transformers in it.
        file_bytes: the limit of a file's size, unless one tensor is larger.
        overwrite: replace an existing folder, if it holds only such files, or others that this export
            writes. A tokenizer's files stay, unless it writes a tokenizer.

    Returns:
        The folder.

    Raises:
        ConfigError: the folder exists, or invalid options.
        CheckpointError: a model that was loaded in part, or files that cannot be written.
        RankFailure: another rank has raised.
    """
    model, world = unwrap(model), World()
    device, first = _device_type(model), world.rank == 0
    target = _same_target(path, device)
    staged = temporary_path(target, SAVING)
    writer = ExportWriter(staged if first else None, target, device)
    try:
        with world.raising_on_all(device, what=EXPORTING):
            check_complete(model)
            _check_options(config, overwrite)
            made = plan_export(model, keys, prefix, dtype_of(dtype), file_bytes)
            writer.try_to(partial(_begin, made, config))
            writer.try_to(partial(_copy_tokenizer, target))
            if not made.is_adapter:  # adapters' files are known later
                writer.try_to(partial(_check_free, made, target, overwrite))
            if writer.error is not None:
                raise writer.error
        if made.is_adapter:
            tensors = writer.gather_all(made)
            writer.try_to(partial(save_adapters, made.network, tensors))
        else:
            writer.write(made)
        writer.try_to(partial(_finish, made))
        writer.try_to(partial(_check_free, made, target, overwrite))  # writing may have taken hours
        writer.try_to(lambda folder: put_in_place(folder, target))
        world.raise_on_all(writer.error, device, what=EXPORTING)
    finally:
        if first:
            discard(staged)
    return target


def _check_options(config: Any, overwrite: object) -> None:
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
    """The folder of the export, the same on all ranks. Collective.

    Raises:
        CheckpointError: not a folder of this machine's file system.
        ConfigError: not a path, one that cannot be made, or different ones on ranks.
        RankFailure: another rank has raised.
    """
    with World().raising_on_all(device_type, what=EXPORTING):
        target = local_path(path)
        if not target.name:
            raise ConfigError(f"{target} is there, and cannot be replaced. Name a folder in it.")
    every = World().gather(str(target))
    odd = next((rank for rank, other in enumerate(every) if other != every[0]), None)
    if odd is not None:
        raise ConfigError(
            f"ranks export to different paths: {without_home(every[0])} on rank 0, "
            f"{without_home(every[odd])} on rank {odd}. Give the same one on every rank, absolute if they "
            "run in different folders: rank 0 writes all of it."
        )
    return target


def _begin(made: ExportPlan, config: Any, staged: Path) -> None:
    """Write the configuration first, whose files are known then."""
    sweep(staged.parent)  # leftovers of killed exports
    staged.mkdir(parents=True)
    if not made.is_adapter:
        _save_config(made, staged, config)
        if not made.is_renamed and (text := lost_names(made.network, made.parts)):
            error_display.warn(text)


def _check_free(made: ExportPlan, target: Path, overwrite: bool, staged: Path) -> None:
    """Check that ``target`` is free, or holds only files that ``staged`` replaces."""
    if not os.path.lexists(target):
        return
    if target.is_symlink() or not target.is_dir():
        raise ConfigError(f"{target.name} is there, and no folder. Name another one.")
    lost = next((x for x in target.rglob("*") if not _is_replaced(made, x, target, staged)), None)
    if lost is not None:
        raise ConfigError(
            f"the folder {target.name} holds {lost.relative_to(target)}, which this export does not write "
            "and which would be lost: the folder is not replaced. Name another one, or move that file away."
        )
    if any(target.iterdir()) and not overwrite:
        raise ConfigError(
            f"the folder {target.name} is not empty. Name another one, or pass overwrite=True."
        )


def _is_replaced(made: ExportPlan, x: Path, target: Path, staged: Path) -> bool:
    again = staged / x.relative_to(target)
    if x.is_dir():
        return again.is_dir() and not x.is_symlink()
    ours = x.parent == target and (x.suffix == ".safetensors" or x.name in REPLACEABLE)
    return again.is_file() or (ours and not made.is_adapter)


def _copy_tokenizer(target: Path, staged: Path) -> None:
    """Copy the files of a tokenizer from the folder that is replaced, unless this export writes one."""
    if any((staged / name).exists() for name in TOKENIZER_FILES):
        return
    for name in TOKENIZER_FILES:
        if (target / name).is_file():
            shutil.copy2(target / name, staged / name)


def _finish(made: ExportPlan, staged: Path) -> None:
    """Write the index, after all tensors."""
    if len(made.files) > 1:
        write_durably(staged / INDEX, index_text(made.shapes, made.files).encode())
    for x in staged.rglob("*"):
        sync(x)


def _save_config(made: ExportPlan, staged: Path, config: Any) -> None:
    """Save the network's configuration with the class and the dtype of the files."""
    given = config if config is not None else getattr(made.network, "config", None)
    if not callable(getattr(given, "save_pretrained", None)):
        return
    saved: Any = copy.deepcopy(given)
    floats = [x.dtype for x in made.shapes.values() if x.dtype.is_floating_point]
    if config is None:
        kind = type(made.network)
        saved.architectures = [kind.__name__.removeprefix("FSDP")]
        if getattr(saved, "tie_word_embeddings", False):
            saved.tie_word_embeddings = not _is_untied(made.network)  # older readers would tie them
    if floats:
        saved.dtype = max(set(floats), key=floats.count)
    saved.save_pretrained(staged)
    generation: Any = getattr(made.network, "generation_config", None)
    if config is None and callable(getattr(generation, "save_pretrained", None)):
        generation.save_pretrained(staged)


def _is_untied(network: Any) -> bool:
    """True if embeddings and head are two parameters."""
    try:
        ends = network.get_output_embeddings(), network.get_input_embeddings()
    except (AttributeError, NotImplementedError):  # transformers' of a model without words
        return False
    first, last = (getattr(end, "weight", None) for end in ends)
    return first is not None and last is not None and first is not last


def _device_type(model: nn.Module) -> str:
    for x in model.parameters():
        return x.device_mesh.device_type if isinstance(x, DTensor) else x.device.type
    return "cpu"


def guard_save_pretrained(model: nn.Module) -> None:
    """Make ``save_pretrained`` of sharded networks raise with advice, as long as they are sharded."""
    for module in model.modules():
        if callable(getattr(type(module), "save_pretrained", None)):
            module.__dict__["save_pretrained"] = partial(_save_if_whole, module)


def _save_if_whole(module: Any, *given: Any, **options: Any) -> Any:
    """Replacement of a network's ``save_pretrained``.

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

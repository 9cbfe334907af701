"""The files of a checkpoint and their safetensors headers, checked before anything is allocated; a writer.

The format: 8 bytes with the length of a header, the header as JSON (``name -> dtype, shape, data_offsets``),
then the tensors' bytes, little-endian and in C order, without a gap. The safetensors library (0.8.0) accepts
headers that are refused here: a name that comes twice, an unknown field, a name that is endless or that a
terminal obeys, more than 64 dimensions, a size of more than 63 bits. Files are written one tensor at a time:
the header comes first, since all sizes are known.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch

from lightning_cp.checkpoint.atomic import display_path, local_path, locate
from lightning_cp.checkpoint.manifest import is_foreign
from lightning_cp.errors import CheckpointError, ConfigError
from lightning_cp.watchdog.phase import PIECE, sign_of_life

HEADER_LIMIT = 100_000_000
"""In bytes; the limit of the format's own implementation."""

NAME_LIMIT = 1_000
"""In characters of a tensor's name; names are sent to other ranks, and shown."""
SIZE_LIMIT = 2**63
"""Limit of a dimension or an offset: 64 bits."""

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}

FOR_PYTORCH = {"format": "pt"}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Offset in the file."""
    state: tuple[int, ...]
    """State of the file when this was read, see ``file_state``."""

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of a file, in the order of its header.

    Raises:
        CheckpointError: not a safetensors file, or an incomplete one; names the tensor and the fault.
            Nothing was allocated for any of them.
    """
    try:
        with open_regular(file) as stream:
            size, state = os.fstat(stream.fileno()).st_size, file_state(stream.fileno())
            length = _header_length(file, stream.read(8), size)
            text = stream.read(length)
    except OSError as error:
        _raise_file_error(file, f"it cannot be read ({error.strerror})")
    if len(text) < length:
        _raise_file_error(file, "it is truncated within its header")
    found = parse_json(file, text)
    metadata = found.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(x, str) for x in metadata.values()):
        _raise_file_error(file, "its __metadata__ is not a mapping of text to text")
    for name in found:
        check_name(file, name)
    entries = {name: _entry(file, name, said, 8 + length, state) for name, said in found.items()}
    _check_cover(file, entries, 8 + length, size)
    return entries


def file_state(fd: int) -> tuple[int, ...]:
    """Marks of a file that change when it is replaced or written to: its inode, length and time."""
    found = os.fstat(fd)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def check_name(file: Path, name: str) -> None:
    """Check that a tensor's name can be shown.

    Raises:
        CheckpointError: it is too long, or has characters that control a terminal.
    """
    if len(name) > NAME_LIMIT:
        _raise_file_error(
            file, f"a tensor's name has {len(name):,} characters, and {NAME_LIMIT:,} is the limit"
        )
    if not name.isprintable():
        _raise_file_error(file, f"{name!r} has characters that cannot be shown")


def open_regular(file: Path) -> BinaryIO:
    """Open a regular file for reading; any other, such as a pipe, could block forever.

    Raises:
        CheckpointError: not a regular file.
        OSError: it does not exist, or may not be read.
    """
    if not stat.S_ISREG(os.stat(file).st_mode):  # noqa: PTH116 - follows links, as opening does
        _raise_file_error(file, "it is not a regular file")
    return file.open("rb", buffering=0)


def parse_json(file: Path, text: bytes, what: str = "its header") -> dict[str, Any]:
    """Parse JSON with an object at the top, in which names are unique.

    Args:
        file: for messages.
        text: its content.
        what: name of the content, for messages.

    Raises:
        CheckpointError: anything else.
    """
    try:
        found = json.loads(text.decode(), object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        _raise_file_error(file, f"{what} is not valid JSON ({_short(error)})")
    if not isinstance(found, dict):
        _raise_file_error(file, f"{what} is not a JSON object")
    return found


def _short(error: BaseException) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} comes twice")
        found[name] = value
    return found


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number")


def _header_length(file: Path, start: bytes, size: int) -> int:
    if len(start) < 8:
        _raise_file_error(file, f"it is truncated: {size} bytes, where a header's length takes 8")
    length = int.from_bytes(start, "little")
    if length > HEADER_LIMIT:
        _raise_file_error(
            file, f"its header claims {length:,} bytes, and {HEADER_LIMIT:,} is the limit"
        )
    if length > size - 8:
        _raise_file_error(
            file, f"it is truncated: its header claims {length:,} bytes, it has {size - 8:,}"
        )
    return length


def _entry(file: Path, name: str, said: Any, data: int, state: tuple[int, ...]) -> TensorEntry:
    if not isinstance(said, dict) or set(said) != {"dtype", "shape", "data_offsets"}:
        _raise_file_error(
            file, f"of {name!r} it does not say exactly dtype, shape and data_offsets"
        )
    if not isinstance(said["dtype"], str) or said["dtype"] not in DTYPES:
        _raise_file_error(
            file,
            f"{name!r} has dtype {str(said['dtype'])[:80]!r}; those known are {', '.join(DTYPES)}",
        )
    shape = _integers(file, name, "shape", said["shape"])
    offsets = _integers(file, name, "data_offsets", said["data_offsets"])
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        _raise_file_error(
            file, f"{name!r} has data_offsets {list(offsets)}, not a start and an end"
        )
    entry = TensorEntry(name, file, DTYPES[said["dtype"]], shape, data + offsets[0], state)
    if entry.nbytes != offsets[1] - offsets[0]:
        _raise_file_error(
            file,
            f"{name!r} of shape {list(shape)} and dtype {said['dtype']} takes {entry.nbytes:,} bytes, but "
            f"its data_offsets say {offsets[1] - offsets[0]:,}",
        )
    return entry


def _integers(file: Path, name: str, what: str, said: Any) -> tuple[int, ...]:
    if not isinstance(said, list) or not all(type(x) is int and x >= 0 for x in said):
        _raise_file_error(
            file, f"{name!r} has {what} {str(said)[:80]}, not a list of integers from 0 on"
        )
    if len(said) > 64:
        _raise_file_error(file, f"{name!r} has {len(said)} dimensions, and 64 is the limit")
    if max(said, default=0) >= SIZE_LIMIT:
        _raise_file_error(file, f"{name!r} has {what} of numbers that take more than 63 bits")
    return tuple(said)


def _check_cover(file: Path, entries: Mapping[str, TensorEntry], data: int, size: int) -> None:
    """Check that tensors cover the data to the end of the file, without gap or overlap."""
    at, before = data, "the header"
    for entry in sorted(entries.values(), key=lambda x: (x.start, x.nbytes)):
        if entry.start < at:
            _raise_file_error(file, f"{entry.name!r} overlaps {before}")
        if entry.start > at:
            _raise_file_error(
                file, f"there is a gap of {entry.start - at:,} bytes before {entry.name!r}"
            )
        at, before = entry.start + entry.nbytes, repr(entry.name)
    if at > size:
        _raise_file_error(
            file, f"it is truncated: its tensors end at byte {at:,}, the file at {size:,}"
        )
    if at < size:
        _raise_file_error(file, f"{size - at:,} bytes after its last tensor belong to none")


def _raise_file_error(file: Path, what: str) -> NoReturn:
    raise CheckpointError(
        f"{file.name} is refused: {what}. Nothing was loaded. Fetch the file again, or have who made it "
        "write it again."
    )


# The files of a checkpoint and their tensors: plain names inside one directory only.


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_OF_A_RUN = (
    "A checkpoint of a training run is resumed with ckpt_path=. To begin another run from its weights, load "
    "them into the model (MyModule.load_from_checkpoint(file); of a folder, `python -m "
    "lightning_cp.checkpoint folder file` makes one file) and write them once with export_pretrained(model, "
    "new_path)."
)


@dataclass(frozen=True)
class WeightFiles:
    """The tensors of a directory, by name."""

    path: Path
    entries: dict[str, TensorEntry]
    single_file: str = ""
    """Name of the file that was given, if the directory has others too."""

    @property
    def nbytes(self) -> int:
        """Size of all tensors."""
        return sum(entry.nbytes for entry in self.entries.values())

    @property
    def display_name(self) -> str:
        """Path for messages."""
        return (
            f"the file {self.single_file!r} alone"
            if self.single_file
            else f"the checkpoint {self.path.name!r}"
        )

    @property
    def advice(self) -> str:
        """Advice if it does not fit the model."""
        if not self.single_file:
            return ""
        return f" Its folder has {INDEX}: give the folder, to load all of its files."


def open_weight_files(path: str | os.PathLike[str]) -> WeightFiles:
    """Read and check every header of a checkpoint; no tensor is read.

    Args:
        path: a directory with ``model.safetensors`` or ``model.safetensors.index.json``, or such a file.

    Raises:
        CheckpointError: it is missing, damaged, not safetensors, or leads out of its directory.
        ConfigError: not a path.
    """
    path, single_file = locate(local_path(path)), ""
    if not path.exists():
        raise CheckpointError(
            f"there is no checkpoint at {display_path(path)!r}. Give a directory with {SINGLE} or {INDEX}. "
            "Names of "
            "the Hugging Face hub are not fetched from here: huggingface_hub.snapshot_download gives a "
            "directory."
        )
    if path.is_dir():
        chosen = _of_directory(path)
    else:
        path, chosen = path.parent, path
        if chosen.name != INDEX and (path / INDEX).is_file():
            single_file = chosen.name
    if chosen.suffix in PICKLES:
        _raise_pickle_error(chosen)
    files = _indexed(chosen) if chosen.name.endswith(".json") else {chosen.name: None}
    entries: dict[str, TensorEntry] = {}
    for name in sorted(files):
        held = read_header(_inside(path, name))
        for key in files[name] or ():
            if key not in held:
                _raise_error(chosen, f"it says that {key!r} is in {name}, which does not hold it")
        for key, entry in held.items():
            if key in entries:
                _raise_error(
                    chosen, f"{key!r} is in two files, {entries[key].file.name} and {name}"
                )
            entries[key] = entry
    return WeightFiles(path, entries, single_file)


def _of_directory(path: Path) -> Path:
    """The index or the single file of a directory."""
    single, index = path / SINGLE, path / INDEX
    if single.is_file() and index.is_file():
        _raise_error(
            path, f"there are {SINGLE} and {INDEX}; give the path of the one that is to be loaded"
        )
    if single.exists() or index.exists():
        return single if single.exists() else index
    if not is_foreign(path.resolve()):
        raise CheckpointError(
            f"{display_path(path)} holds no weights in Hugging Face's format. {_OF_A_RUN}"
        )
    others = sorted(path.glob("*.safetensors"))
    if len(others) == 1:
        return others[0]
    pickles = [x for x in sorted(path.iterdir()) if x.suffix in PICKLES]
    if pickles and not others:
        _raise_pickle_error(pickles[0])
    what = f"there is neither {SINGLE} nor {INDEX}"
    if others:
        what = f"there are {len(others)} files such as {others[0].name}, and no {INDEX}"
    return _raise_error(path, what)


def _indexed(index: Path) -> dict[str, list[str] | None]:
    """File -> keys, from the index."""
    try:
        with open_regular(index) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > HEADER_LIMIT:
                _raise_error(index, f"it has {size:,} bytes, and {HEADER_LIMIT:,} is the limit")
            text = stream.read(size)  # a larger limit would be allocated
    except OSError as error:
        _raise_error(index, f"it cannot be read ({error.strerror})")
    said = parse_json(index, text, "the index").get("weight_map")
    if not isinstance(said, dict) or not said:
        _raise_error(index, "it has no weight_map")
    files: dict[str, list[str] | None] = {}
    for key, name in said.items():
        check_name(index, key)
        if not isinstance(name, str):
            _raise_error(index, f"the file of {key!r} is {str(name)[:80]}, not a name")
        if name in ("", ".", "..") or any(mark in name for mark in "/\\\0:"):
            _raise_error(
                index, f"the file of {key!r} is {name[:80]!r}: only plain names are followed"
            )
        if not name.endswith(".safetensors"):
            _raise_error(
                index, f"the file of {key!r} is {name[:80]!r}, which is not a safetensors file"
            )
        keys = files.setdefault(name, [])
        assert keys is not None
        keys.append(key)
    return files


def _inside(directory: Path, name: str) -> Path:
    """A file of the directory; links may stay inside, or lead to the blobs of the hub's own cache."""
    file = directory / name
    if not os.path.lexists(file):
        _raise_error(directory, f"{name} is named, but there is no such file")
    try:
        real = file.resolve(strict=True)
    except (OSError, RuntimeError):  # Python 3.12 raises OSError for a loop of links
        _raise_error(directory, f"{name} is a link to a file that is not there")
    if not any(real.is_relative_to(root) for root in _roots(directory)):
        _raise_error(directory, f"{name} is a link that leads out of the directory")
    return file


def _roots(directory: Path) -> list[Path]:
    """Directories that files may be in; in the hub's cache, ``models--x/snapshots/y`` links to
    ``models--x/blobs``.
    """
    real = directory.resolve()
    cached = real.parent.name == "snapshots" and real.parent.parent.name.startswith("models--")
    return [real, real.parent.parent / "blobs"] if cached else [real]


def _raise_pickle_error(file: Path) -> NoReturn:
    raise CheckpointError(
        f"{file.name} is refused: such files are pickles, which can run any code when they are read. Only "
        "safetensors are loaded from outside. If you trust who made it, convert it once: "
        f"AutoModelForCausalLM.from_pretrained(path).save_pretrained(new_path). {_OF_A_RUN}"
    )


def _raise_error(path: Path, what: str) -> NoReturn:
    raise CheckpointError(f"the checkpoint {path.name!r} is refused: {what}. Nothing was loaded.")


@dataclass(frozen=True)
class TensorSpec:
    """A file's entry for a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def split_into_files(tensors: Mapping[str, TensorSpec], limit: int) -> dict[str, list[str]]:
    """File names and the keys in each, in order; a file has at most ``limit`` bytes, or one tensor."""
    files: list[list[str]] = [[]]
    size = 0
    for key, tensor in tensors.items():
        if files[-1] and size + tensor.nbytes > limit:
            files.append([])
            size = 0
        files[-1].append(key)
        size += tensor.nbytes
    if len(files) == 1:
        return {SINGLE: files[0]}
    total = len(files)
    return {
        f"model-{number:05d}-of-{total:05d}.safetensors": keys
        for number, keys in enumerate(files, start=1)
    }


def index_text(tensors: Mapping[str, TensorSpec], files: Mapping[str, Sequence[str]]) -> str:
    """The index text, with the file of each key, as transformers writes it."""
    where = {key: name for name, keys in files.items() for key in keys}
    total = sum(tensor.nbytes for tensor in tensors.values())
    return json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2) + "\n"


class TensorFile:
    """A new file, whose tensors are written in the order of ``tensors``.

    Args:
        path: must not exist.
        tensors: entries of its tensors.
    """

    def __init__(self, path: Path, tensors: Mapping[str, TensorSpec]) -> None:
        self.order = aligned_order(tensors)
        self._stream: BinaryIO = path.open("xb", buffering=0)
        self._put(memoryview(header_bytes({key: tensors[key] for key in self.order})))

    def write(self, x: torch.Tensor) -> None:
        """Append the next tensor, on the CPU."""
        flat: Any = x.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        self._put(memoryview(flat))

    def _put(self, rest: memoryview) -> None:
        while rest:
            rest = rest[self._stream.write(rest[:PIECE]) :]
            sign_of_life()

    def sync(self) -> None:
        """Flush the file to disk."""
        self._stream.flush()
        os.fsync(self._stream.fileno())

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def aligned_order(tensors: Mapping[str, TensorSpec]) -> list[str]:
    """Keys with the largest elements first, so that each tensor is aligned for its dtype."""
    return sorted(tensors, key=lambda key: -tensors[key].dtype.itemsize)


def header_bytes(
    tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str] = FOR_PYTORCH, multiple: int = 8
) -> bytes:
    """The length and the header.

    Args:
        tensors: in the order of writing.
        metadata: strings in the header's metadata.
        multiple: alignment of the first tensor in bytes.

    Raises:
        ConfigError: a dtype that the format does not have.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for key, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise ConfigError(
                f"{key} has dtype {tensor.dtype}, which safetensors does not hold. "
                "Export with dtype=, or convert it before."
            )
        entries[key] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % multiple)
    return len(text).to_bytes(8, "little") + text

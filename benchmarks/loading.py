"""Peak memory and time of loading a Hugging Face checkpoint into sharded models, beside their bounds.

    python -m benchmarks.loading --gigabytes 4.3 --files 24 --ranks 1 2 4 --rounds 3

makes a checkpoint of a Llama's shapes in a temporary folder, and loads it in new processes into a model on
the meta device, sharded by FSDP2 (``fsdp``), by rows and columns (``tp``), or by both on one dimension
(``fsdp_tp``). Memory is the rise of the process's peak (VmHWM, mapped files included) over its memory before
loading; the bound is its own shard + 1.25 x the largest slice + 256 MB. The slowest rank's time is compared
with plain reading of as many bytes from the same places of the files into new memory; so are CPU-seconds of
all ranks, which suffer less from other programs. ``--ways checked`` is ours with ``check_finite``. Ways and
rounds alternate; medians are printed. ``--cold`` drops the files from the page cache before each run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

from benchmarks.markdown import markdown_head
from benchmarks.step_memory import process_memory, reset_peak
from lightning_cp.bench.processes import on_ranks
from lightning_cp.checkpoint.pretrained.files import (
    INDEX,
    TensorFile,
    TensorSpec,
    index_text,
    open_weight_files,
    split_into_files,
)
from lightning_cp.checkpoint.pretrained.load import load_pretrained
from lightning_cp.checkpoint.pretrained.plan import LoadPlan, plan_load
from lightning_cp.errors import ConfigError
from lightning_cp.utils import console as table
from lightning_cp.utils.command_help import argument_parser
from lightning_cp.utils.dtensor import local_part

KINDS = ("fsdp", "tp", "fsdp_tp")
ROW_SHARDED = ("o_proj", "down_proj")
HIDDEN, INNER, VOCAB, HEAD_DIM = 2048, 5632, 32000, 64


class Embedding(nn.Embedding):
    """A large weight of the files, and a number that they do not contain, as Gemma's has."""

    embed_scale: torch.Tensor

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__(rows, columns)
        self.register_buffer("embed_scale", torch.tensor(columns**0.5), persistent=False)

    def reset_buffers(self) -> None:
        """Restore the initial value."""
        self.embed_scale.fill_(self.embedding_dim**0.5)


class Block(nn.Module):
    """A Llama's layer, without its computation."""

    inv_freq: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.register_module(name, nn.Linear(HIDDEN, HIDDEN, bias=False))
        for name in ("gate_proj", "up_proj"):
            self.register_module(name, nn.Linear(HIDDEN, INNER, bias=False))
        self.down_proj = nn.Linear(INNER, HIDDEN, bias=False)
        self.norm = nn.Parameter(torch.ones(HIDDEN))
        self.register_buffer("inv_freq", self.frequencies("meta"), persistent=False)

    def reset_buffers(self) -> None:
        """Restore the initial values."""
        self.inv_freq.copy_(self.frequencies(self.norm.device))

    @staticmethod
    def frequencies(device: torch.device | str) -> torch.Tensor:
        """Return the frequencies of rotary positions."""
        return 10_000.0 ** -(torch.arange(0, HEAD_DIM, 2, device=device) / HEAD_DIM)


class Network(nn.Module):
    """Layers between an embedding and a head."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed_tokens = Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)


def network(layers: int) -> Network:
    """Build the model on the meta device, in bfloat16."""
    with torch.device("meta"):
        return Network(layers).to(torch.bfloat16)


def layers_for(nbytes: float) -> int:
    """Return the number of layers of a model of that size, at least one."""
    sizes = [sum(p.nbytes for p in network(count).parameters()) for count in (0, 1)]
    return max(1, round((nbytes - sizes[0]) / (sizes[1] - sizes[0])))


def make_checkpoint(folder: Path, layers: int, files: int) -> None:
    """Write a checkpoint of meaningless finite numbers, different in every tensor.

    Raises:
        ConfigError: too many files for the number of tensors.
    """
    shapes = {
        name: TensorSpec(p.dtype, tuple(p.shape)) for name, p in network(layers).named_parameters()
    }
    total = sum(shape.nbytes for shape in shapes.values())
    limit, made = total // files, split_into_files(shapes, max(1, total // files))
    while len(made) > files:
        limit += total // (100 * files) + 1
        made = split_into_files(shapes, limit)
    if len(made) < files // 2:
        raise ConfigError(
            f"--files {files} is more than {len(shapes)} tensors can be spread over. "
            "Write fewer files."
        )
    first_infinite = 0x7F80  # the bits of bfloat16; smaller ones are finite numbers
    noise = torch.randint(0, first_infinite, (VOCAB * HIDDEN + 4096,), dtype=torch.int16)
    for name, keys in made.items():
        file = TensorFile(folder / name, {key: shapes[key] for key in keys})
        for number, key in enumerate(file.order):
            count = torch.Size(shapes[key].shape).numel()
            file.write(noise[number : number + count])
        file.close()
    (folder / INDEX).write_text(index_text(shapes, made))


def shard(model: Network, kind: str, world: int) -> None:
    """Shard the model over all ranks."""
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
    elif kind == "tp":
        mesh = None
        _by_rows_and_columns(model, init_device_mesh("cpu", (world,)))
    else:
        both = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("fsdp", "tp"))
        _by_rows_and_columns(model, both["tp"])
        mesh = both["fsdp"]
    if mesh is not None:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)


def _by_rows_and_columns(model: Network, mesh: Any) -> None:
    """Shard as tensor parallelism does: output rows, or input columns."""

    def part(name: str, module: nn.Module, mesh: Any) -> None:
        for own, x in list(module.named_parameters(recurse=False)):
            dim = 1 if name.endswith(ROW_SHARDED) else 0
            if x.ndim == 2:
                made = distribute_tensor(x, mesh, [Shard(dim)], src_data_rank=None)
                module.register_parameter(own, nn.Parameter(made))

    distribute_module(model, mesh, part)


HEAD = (
    *("ranks", "sharding", "way", "shard, MB", "largest slice, MB", "peak, MB", "bound, MB"),
    *("peak / bound", "time, s", "plain reading, s", "ratio", "ratio of CPU-seconds"),
)
WAYS = ("ours", "checked", "dcp")
RESERVE = 256e6


@dataclass(frozen=True)
class ClockReading:
    """Time of one rank: a reading of the clocks, or a difference of two."""

    seconds: float
    cpu: float

    @classmethod
    def now(cls) -> ClockReading:
        """Read the clocks."""
        return cls(time.monotonic(), time.process_time())

    def since(self, start: ClockReading) -> ClockReading:
        """Return the difference of two readings."""
        return ClockReading(self.seconds - start.seconds, self.cpu - start.cpu)


@dataclass(frozen=True)
class LoadResult:
    """The memory and time of loading on one rank."""

    shard: int
    largest: int
    peak: int
    spent: ClockReading

    @property
    def bound(self) -> float:
        """The bound of the peak in bytes."""
        return self.shard + 1.25 * self.largest + RESERVE


def load(
    folder: Path, layers: int, kind: str, way: str = "ours", dtype: str | None = None
) -> LoadResult:
    """Load on this rank, optionally in another dtype, and return the memory and time."""
    model = network(layers)
    shard(model, kind, dist.get_world_size())
    plan = plan_load(model, open_weight_files(folder))
    largest = max(one.nbytes for one in plan.slices)
    # PyTorch's one-time set-up is not part of loading.
    load_nothing = torch.empty(8).to(torch.bfloat16)
    del load_nothing
    dist.barrier()
    reset_peak()
    before, started = process_memory("VmRSS"), ClockReading.now()
    if way == "dcp":
        _load_by_dcp(model, folder)
    else:
        load_pretrained(model, folder, dtype=dtype, check_finite=way == "checked", progress=False)
    spent = ClockReading.now().since(started)
    size = sum(local_part(x).nbytes for x in model.parameters())
    return LoadResult(size, largest, process_memory("VmHWM") - before, spent)


def _load_by_dcp(model: nn.Module, folder: Path) -> None:
    """Load with PyTorch's own reader, as in its documentation."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader
    from torch.distributed.checkpoint import load as load_checkpoint

    model.to_empty(device="cpu")
    load_checkpoint(dict(model.state_dict()), storage_reader=HuggingFaceStorageReader(str(folder)))


def read_plainly(folder: Path, layers: int, kind: str) -> ClockReading:
    """Time the reading of as many bytes from the same places into new memory."""
    model = network(layers)
    shard(model, kind, dist.get_world_size())
    plan: LoadPlan = plan_load(model, open_weight_files(folder))
    dist.barrier()
    started = ClockReading.now()
    memory: list[torch.Tensor] = []
    for one in plan.slices:
        memory.append(torch.empty(one.nbytes, dtype=torch.uint8))
        start = one.entry.start + (one.offsets[0] * one.nbytes // max(1, one.lengths[0]))
        start = min(start, one.entry.start + one.entry.nbytes - one.nbytes)
        with one.entry.file.open("rb", buffering=0) as stream:
            held: Any = memory[-1].numpy()
            at = 0
            while at < one.nbytes:
                at += os.preadv(stream.fileno(), [memoryview(held)[at:]], start + at)
    return ClockReading.now().since(started)


def drop_from_cache(folder: Path) -> None:
    """Drop the files from the page cache, so that the next read goes to the disk."""
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def rows(given: argparse.Namespace, folder: Path, layers: int) -> Iterator[list[str]]:
    """Yield a row for each number of ranks, sharding and way."""
    for ranks in given.ranks:
        for kind in given.shardings:
            if kind == "fsdp_tp" and ranks % 2:
                continue
            plain: list[list[ClockReading]] = []
            found: dict[str, list[list[LoadResult]]] = {way: [] for way in given.ways}
            for _ in range(given.rounds):
                for way in given.ways:
                    _before(given, folder)
                    plain.append(on_ranks(ranks, read_plainly, folder, layers, kind))
                    _before(given, folder)
                    found[way].append(on_ranks(ranks, load, folder, layers, kind, way))
            for way in given.ways:
                yield _row(ranks, kind, way, found[way], plain)


def _before(given: argparse.Namespace, folder: Path) -> None:
    if given.cold:
        drop_from_cache(folder)


def _row(
    ranks: int, kind: str, way: str, rounds: list[list[LoadResult]], plain: list[list[ClockReading]]
) -> list[str]:
    """Return the row of the rank and round closest to the bound, with median times."""
    worst = max((x for every in rounds for x in every), key=lambda x: x.peak / x.bound)
    own, bare = _medians([[x.spent for x in every] for every in rounds]), _medians(plain)
    sizes = (worst.shard, worst.largest, worst.peak, worst.bound)
    return [
        *(str(ranks), kind, way, *(f"{size / 1e6:,.0f}" for size in sizes)),
        f"{worst.peak / worst.bound:.2f}",
        *(f"{own.seconds:.2f}", f"{bare.seconds:.2f}", f"{own.seconds / bare.seconds:.2f}"),
        f"{own.cpu / bare.cpu:.2f}",
    ]


def _medians(rounds: list[list[ClockReading]]) -> ClockReading:
    """Return the medians of the slowest rank's time and of all ranks' CPU-seconds."""
    slowest = statistics.median(max(x.seconds for x in every) for every in rounds)
    return ClockReading(slowest, statistics.median(sum(x.cpu for x in every) for every in rounds))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print a Markdown table."""
    parser = argument_parser(__doc__)
    parser.add_argument("--gigabytes", type=float, default=4.3, help="of the checkpoint")
    parser.add_argument("--files", type=int, default=24, help="that it consists of")
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 2, 4], help="ranks that load it"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of all ways; medians are shown")
    parser.add_argument(
        "--shardings", nargs="+", choices=KINDS, default=["fsdp", "tp"], help="of the model"
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["ours"], help="of loading")
    parser.add_argument("--cold", action="store_true", help="files are not in the page cache")
    given = parser.parse_args(arguments)
    for name in ("gigabytes", "files", "rounds"):
        if not getattr(given, name) > 0:
            parser.error(f"--{name} must be positive, got {getattr(given, name)}")
    if min(given.ranks) < 1:
        parser.error(f"--ranks must be positive, got {given.ranks}")
    with tempfile.TemporaryDirectory() as name:
        folder, layers = Path(name), layers_for(given.gigabytes * 1e9)
        make_checkpoint(folder, layers, given.files)
        sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
        print(f"{sum(sizes) / 1e9:.2f} GB in {len(sizes)} files, {layers} layers, bfloat16\n")
        print(markdown_head(HEAD))
        for cells in rows(given, folder, layers):
            print(table.markdown_row(cells), flush=True)


if __name__ == "__main__":
    main()

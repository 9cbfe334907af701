"""Peak memory and time of loading a Hugging Face checkpoint into sharded models, beside their bounds.

    python -m lightning_cp.bench.loading --gigabytes 4.3 --files 24 --ranks 1 2 4 --rounds 3

makes a checkpoint of a Llama's shapes in a temporary folder, and loads it in fresh processes into a model on
the meta device, sharded by FSDP2 (``fsdp``), by rows and columns (``tp``), or by both on one dimension
(``fsdp_tp``). Memory is what the process's peak (VmHWM, mapped files included) rises over what it had before
loading; the bound is its own shard + 1.25 x the largest slice + 256 MB. Time is that of the slowest rank, and
is compared with reading as many bytes from the same places of the files into fresh memory, and nothing else;
so are CPU-seconds of all ranks together, which suffer less where other programs run. ``--ways checked`` is
ours with ``check_finite``. Ways and rounds alternate; medians are printed. ``--cold`` drops the files from
the page cache before each.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_cp.bench import table
from lightning_cp.bench.llama_files import KINDS, layers_for, make_checkpoint, network, shard
from lightning_cp.bench.processes import on_ranks
from lightning_cp.checkpoint.pretrained.index import open_checkpoint
from lightning_cp.checkpoint.pretrained.load import load_pretrained
from lightning_cp.checkpoint.pretrained.plan import LoadPlan, plan_load
from lightning_cp.comm.local import local_part
from lightning_cp.command_help import argument_parser
from lightning_cp.errors import ConfigError

HEAD = (
    *("ranks", "sharding", "way", "shard, MB", "largest slice, MB", "peak, MB", "bound, MB"),
    *("peak / bound", "time, s", "plain reading, s", "ratio", "ratio of CPU-seconds"),
)
WAYS = ("ours", "checked", "dcp")
RESERVE = 256e6


@dataclass(frozen=True)
class Spent:
    """By one rank since then."""

    seconds: float
    cpu: float

    @classmethod
    def now(cls) -> Spent:
        """What the clocks show."""
        return cls(time.monotonic(), time.process_time())

    def since(self, start: Spent) -> Spent:
        """The difference of two readings."""
        return Spent(self.seconds - start.seconds, self.cpu - start.cpu)


@dataclass(frozen=True)
class Found:
    """Of one rank."""

    shard: int
    largest: int
    peak: int
    spent: Spent

    @property
    def bound(self) -> float:
        """Bytes that the peak may have."""
        return self.shard + 1.25 * self.largest + RESERVE


def load(
    folder: Path, layers: int, kind: str, way: str = "ours", dtype: str | None = None
) -> Found:
    """Load on this rank, parameters in another dtype if asked for, and say what it took."""
    model = network(layers)
    shard(model, kind, dist.get_world_size())
    plan = plan_load(model, open_checkpoint(folder))
    largest = max(one.nbytes for one in plan.slices)
    # What PyTorch sets up once is not the loader's.
    load_nothing = torch.empty(8).to(torch.bfloat16)
    del load_nothing
    dist.barrier()
    reset_peak()
    before, started = status("VmRSS"), Spent.now()
    if way == "dcp":
        _load_by_dcp(model, folder)
    else:
        load_pretrained(model, folder, dtype=dtype, check_finite=way == "checked", progress=False)
    spent = Spent.now().since(started)
    size = sum(local_part(x).nbytes for x in model.parameters())
    return Found(size, largest, status("VmHWM") - before, spent)


def _load_by_dcp(model: nn.Module, folder: Path) -> None:
    """PyTorch's own reader, as its documentation has it."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader
    from torch.distributed.checkpoint import load as load_checkpoint

    model.to_empty(device="cpu")
    load_checkpoint(dict(model.state_dict()), storage_reader=HuggingFaceStorageReader(str(folder)))


def read_plainly(folder: Path, layers: int, kind: str) -> Spent:
    """What it takes to read as many bytes from the same places into fresh memory."""
    model = network(layers)
    shard(model, kind, dist.get_world_size())
    plan: LoadPlan = plan_load(model, open_checkpoint(folder))
    dist.barrier()
    started = Spent.now()
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
    return Spent.now().since(started)


def reset_peak() -> None:
    """Forget the most memory that the process has had."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def status(name: str) -> int:
    """Bytes of this process, as Linux counts them.

    Raises:
        ConfigError: the system does not tell.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise ConfigError(f"this system does not tell {name}: the benchmark needs Linux.")


def drop_from_cache(folder: Path) -> None:
    """Have the next reader go to the disk."""
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def rows(given: argparse.Namespace, folder: Path, layers: int) -> Iterator[list[str]]:
    """A row for each number of ranks, sharding and way."""
    for ranks in given.ranks:
        for kind in given.shardings:
            if kind == "fsdp_tp" and ranks % 2:
                continue
            plain: list[list[Spent]] = []
            found: dict[str, list[list[Found]]] = {way: [] for way in given.ways}
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
    ranks: int, kind: str, way: str, rounds: list[list[Found]], plain: list[list[Spent]]
) -> list[str]:
    """The rank and the round that came closest to the bound; the median times."""
    worst = max((x for every in rounds for x in every), key=lambda x: x.peak / x.bound)
    own, bare = _medians([[x.spent for x in every] for every in rounds]), _medians(plain)
    sizes = (worst.shard, worst.largest, worst.peak, worst.bound)
    return [
        *(str(ranks), kind, way, *(f"{size / 1e6:,.0f}" for size in sizes)),
        f"{worst.peak / worst.bound:.2f}",
        *(f"{own.seconds:.2f}", f"{bare.seconds:.2f}", f"{own.seconds / bare.seconds:.2f}"),
        f"{own.cpu / bare.cpu:.2f}",
    ]


def _medians(rounds: list[list[Spent]]) -> Spent:
    """Of the slowest rank's time, and of all ranks' CPU-seconds."""
    slowest = statistics.median(max(x.seconds for x in every) for every in rounds)
    return Spent(slowest, statistics.median(sum(x.cpu for x in every) for every in rounds))


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
        print(table.head(HEAD))
        for cells in rows(given, folder, layers):
            print(table.row(cells), flush=True)


if __name__ == "__main__":
    main()

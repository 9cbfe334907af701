"""What is free, and what a load takes: against the bound, in fresh processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks import loading
from benchmarks.loading import Embedding, layers_for, make_checkpoint
from lightning_cp.bench.processes import on_ranks
from lightning_cp.checkpoint import load_pretrained
from lightning_cp.checkpoint.pretrained import memory
from lightning_cp.utils.dtensor import local_part


def test_what_a_container_has_read_from_files_is_free(tmp_path: Path) -> None:
    for name, text in {
        "memory.max": "1000\n",
        "memory.current": "900\n",
        "memory.stat": "anon 100\ninactive_file 700\nactive_file 100\n",
    }.items():
        (tmp_path / name).write_text(text)
    assert memory._below_cgroup_limit(tmp_path) == 800
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._below_cgroup_limit(tmp_path) is None


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [None, "float32"])
@pytest.mark.parametrize(("kind", "ranks"), [("fsdp", 2), ("tp", 2), ("fsdp_tp", 4)])
def test_a_load_stays_below_its_bound(
    kind: str, ranks: int, dtype: str | None, tmp_path: Path
) -> None:
    layers = layers_for(1.3e9)
    make_checkpoint(tmp_path, layers, files=20)
    for one in on_ranks(ranks, loading.load, tmp_path, layers, kind, "ours", dtype):
        assert one.shard * 0.9 < one.peak < one.bound
        assert 2 * one.shard > one.bound  # a rank that had everything twice would be seen


def with_values_looked_at(path: Path) -> tuple[int, int]:
    """The bytes of one large parameter, and the most memory beyond them while it is loaded and looked at."""
    with torch.device("meta"):
        model = nn.Linear(1024, 150_000, bias=False, dtype=torch.bfloat16)
    torch.ones(8).isfinite()  # what PyTorch sets up once is not the loader's
    loading.reset_peak()
    before = loading.process_memory("VmRSS")
    load_pretrained(model, path, check_finite=True, progress=False)
    return model.weight.nbytes, loading.process_memory("VmHWM") - before - model.weight.nbytes


@pytest.mark.nightly
def test_values_are_looked_at_a_few_at_a_time(tmp_path: Path) -> None:
    weight = torch.ones(150_000, 1024, dtype=torch.bfloat16)
    save_file({"weight": weight}, tmp_path / "model.safetensors")
    ((size, more),) = on_ranks(1, with_values_looked_at, tmp_path)
    assert more < size / 4  # once all of it would have been copied


ROWS, COLUMNS = 262_144, 2048


def embedding_alone(path: Path) -> loading.LoadResult:
    """Most of the model is one weight, beside a number that no file holds."""
    with torch.device("meta"):
        model = Embedding(ROWS, COLUMNS).to(torch.bfloat16)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    torch.empty(8).to(torch.bfloat16).normal_()  # what PyTorch sets up once is not the loader's
    dist.barrier()
    loading.reset_peak()
    before, size = loading.process_memory("VmRSS"), local_part(model.weight).nbytes
    load_pretrained(model, path, progress=False)
    peak = loading.process_memory("VmHWM") - before
    return loading.LoadResult(size, size, peak, loading.ClockReading(0.0, 0.0))


@pytest.mark.nightly
def test_a_weight_beside_an_unsaved_buffer_stays_sharded(tmp_path: Path) -> None:
    size = ROWS * COLUMNS * 2
    said = {"weight": {"dtype": "BF16", "shape": [ROWS, COLUMNS], "data_offsets": [0, size]}}
    header = json.dumps(said).encode()
    header += b" " * (-len(header) % 8)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)  # zeros that take no disk
    for one in on_ranks(4, embedding_alone, tmp_path):
        assert one.shard * 0.9 < one.peak < one.bound < size

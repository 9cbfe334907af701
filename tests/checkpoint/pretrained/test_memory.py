"""What is free, and what a load takes: against the bound, in fresh processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from lightning_cp.bench import loading
from lightning_cp.bench.llama_files import layers_for, make_checkpoint
from lightning_cp.bench.processes import on_ranks
from lightning_cp.checkpoint import load_pretrained
from lightning_cp.checkpoint.pretrained import memory


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


@pytest.mark.slow
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
    before = loading.status("VmRSS")
    load_pretrained(model, path, check_finite=True, progress=False)
    return model.weight.nbytes, loading.status("VmHWM") - before - model.weight.nbytes


@pytest.mark.slow
def test_values_are_looked_at_a_few_at_a_time(tmp_path: Path) -> None:
    weight = torch.ones(150_000, 1024, dtype=torch.bfloat16)
    save_file({"weight": weight}, tmp_path / "model.safetensors")
    ((size, more),) = on_ranks(1, with_values_looked_at, tmp_path)
    assert more < size / 4  # once all of it would have been copied

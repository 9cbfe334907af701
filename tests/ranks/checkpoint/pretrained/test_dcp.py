"""Behind PyTorch's interface: the same slices as PyTorch's own reader, by PyTorch's own plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint import load as load_by_dcp

from lightning_cp.checkpoint import CheckedStorageReader, load_pretrained
from lightning_cp.errors import CheckpointError
from tests.helpers.checkpoint.cases import cases
from tests.helpers.checkpoint.pretrained.models import make, save, shard, whole, world_of
from tests.helpers.pool import run_ranks


def load_three_ways(rank: int, world: int, path: Path, kind: str) -> None:
    found = []
    for reader in (HuggingFaceStorageReader(str(path)), CheckedStorageReader(path), None):
        model = make(torch.bfloat16, device="meta" if reader is None else "cpu")
        mesh = shard(model, kind)
        state: dict[str, Any] = dict(model.state_dict())
        if reader is None:
            load_pretrained(model, path, mesh, progress=False)
        else:
            load_by_dcp(state, storage_reader=reader)
        found.append(whole(model))
    for ours in found[1:]:
        assert all(torch.equal(ours[name], x) for name, x in found[0].items())


@pytest.mark.nightly
@pytest.mark.parametrize("kind", cases([("plain",), ("fsdp_tp",), ("hsdp_tp",)], [("fsdp_tp",)]))
def test_three_readers_agree(kind: str, tmp_path: Path) -> None:
    save(tmp_path, seed=6)
    run_ranks(world_of(kind), load_three_ways, tmp_path, kind)


def test_bad_files_are_refused_here_too(tmp_path: Path) -> None:
    save(tmp_path, seed=6)
    file = tmp_path / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(
        CheckpointError, match=r"model-00002-of-00003.safetensors is refused: .*trunc"
    ):
        CheckedStorageReader(tmp_path)

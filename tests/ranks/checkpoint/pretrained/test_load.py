"""Every way to shard a model, loaded from files that transformers wrote, bitwise."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_cp.checkpoint import load_pretrained
from tests.helpers.checkpoint.cases import cases
from tests.helpers.checkpoint.pretrained.models import MESHES, make, save, shard, whole, world_of
from tests.helpers.pool import run_ranks


def load_sharded(
    rank: int, world: int, path: Path, kind: str, device: str, **changes: Any
) -> dict[str, torch.Tensor]:
    model = make(device=device, **changes)
    for parameter in model.parameters():
        if device != "meta":
            parameter.data.fill_(float("nan"))
    mesh = shard(model, kind)
    loaded = load_pretrained(model, path, mesh, progress=False)
    assert loaded.nbytes > 0
    assert not any(x.is_meta for x in (*model.parameters(), *model.buffers()))
    found = whole(model)
    found["inv_freq"] = model.model.rotary_emb.inv_freq.clone()
    return found


QUICK = [("plain", "cpu"), ("fsdp_tp", "meta")]


@pytest.mark.parametrize(("kind", "device"), cases(product(MESHES, ("meta", "cpu")), QUICK))
def test_each_rank_gets_its_part_of_what_transformers_wrote(
    kind: str, device: str, tmp_path: Path
) -> None:
    wanted = save(tmp_path)
    wanted["inv_freq"] = make().model.rotary_emb.inv_freq
    for found in run_ranks(world_of(kind), load_sharded, tmp_path, kind, device):
        assert found.keys() == wanted.keys()
        for name, x in wanted.items():
            assert torch.equal(found[name], x), name


def tied(rank: int, world: int, path: Path, kind: str) -> tuple[bool, dict[str, torch.Tensor]]:
    model = make(device="meta", tie_word_embeddings=True)
    mesh = shard(model, kind)
    load_pretrained(model, path, mesh, progress=False)
    return model.lm_head.weight is model.model.embed_tokens.weight, whole(model)


@pytest.mark.parametrize("kind", ["fsdp", pytest.param("hsdp", marks=pytest.mark.nightly)])
def test_tied_weights_stay_tied_where_they_are_sharded(kind: str, tmp_path: Path) -> None:
    wanted = save(tmp_path, tie_word_embeddings=True)
    for is_tied, found in run_ranks(world_of(kind), tied, tmp_path, kind):
        assert is_tied
        for name, x in wanted.items():
            assert torch.equal(found[name], x), name

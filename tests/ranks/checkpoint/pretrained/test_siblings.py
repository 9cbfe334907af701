"""What no file holds is set beside parameters that files hold: those are never made whole for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_cp.checkpoint import load_pretrained
from lightning_cp.errors import CheckpointError
from lightning_cp.utils.dtensor import forget_meshes, local_part
from tests.helpers.checkpoint.pretrained.models import load
from tests.helpers.pool import run_ranks

ROWS, COLUMNS = 4096, 16


class Largest(TorchDispatchMode):
    """The most bytes that one tensor of this rank has had."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, torch.Tensor) and not x.is_meta:
                self.nbytes = max(self.nbytes, local_part(x).nbytes)
        return made


class Scaled(nn.Module):
    """A weight of the files, and beside it a number that they do not hold."""

    embed_scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(ROWS, COLUMNS))
        self.register_buffer("embed_scale", torch.tensor(3.0), persistent=False)


class Buffers(Scaled):
    def reset_buffers(self) -> None:
        self.embed_scale = torch.full((), 3.0, device=self.weight.device)


class Everything(Scaled):
    def reset_parameters(self) -> None:
        for x in (self.weight, self.weight.data, self.weight.detach().view(-1)):
            nn.init.normal_(x)
        nn.init.trunc_normal_(self.weight)
        nn.init.xavier_uniform_(self.weight)
        self.weight.data[0].zero_()
        self.embed_scale.fill_(3.0)


class Family(nn.Module):
    """As models of transformers do."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Scaled):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.constant_(module.embed_scale, 3.0)


WAYS = {"reset_buffers": Buffers, "reset_parameters": Everything, "_init_weights": Scaled}


def around(embedding: type[nn.Module], model: type[nn.Module] = nn.Module) -> Any:
    """A model on the meta device that has such an embedding."""
    with torch.device("meta"):
        made: Any = model()
        made.emb = embedding()
    return made


def in_part(rank: int, world: int, path: Path, way: str) -> tuple[int, int, bool]:
    """The bytes of this rank's shard and of the largest tensor that there was; whether values are right."""
    forget_meshes()
    model = around(WAYS[way], Family if way == "_init_weights" else nn.Module)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    torch.manual_seed(rank)
    expected = torch.get_rng_state()
    with Largest() as largest:
        load_pretrained(model, path, progress=False)
    held = local_part(model.emb.weight)
    right = bool(held.eq(2.0).all()) and model.emb.embed_scale.item() == 3.0
    return held.nbytes, largest.nbytes, right and torch.equal(expected, torch.get_rng_state())


@pytest.mark.parametrize("way", WAYS)
def test_what_files_hold_is_not_made_whole(way: str, tmp_path: Path) -> None:
    save_file({"emb.weight": torch.full((ROWS, COLUMNS), 2.0)}, tmp_path / "model.safetensors")
    for shard, largest, right in run_ranks(2, in_part, tmp_path, way):
        assert right
        assert largest <= shard == ROWS * COLUMNS * 4 // 2


def gemma(rank: int, world: int, path: Path) -> tuple[int, int, float]:
    from transformers import Gemma3ForCausalLM

    forget_meshes()
    with torch.device("meta"):
        model: Any = Gemma3ForCausalLM(small_gemma())
    model.tie_weights()  # transformers 5.0 does not on the meta device
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    with Largest() as largest:
        load_pretrained(model, path, progress=False)
    embedding = model.model.embed_tokens
    return local_part(embedding.weight).nbytes, largest.nbytes, embedding.embed_scale.item()


def small_gemma() -> Any:
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(
        vocab_size=2048,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )


def test_the_embedding_of_a_gemma_is_not_made_whole(tmp_path: Path) -> None:
    from transformers import Gemma3ForCausalLM

    Gemma3ForCausalLM(small_gemma()).save_pretrained(tmp_path)
    for shard, largest, scale in run_ranks(2, gemma, tmp_path):
        assert largest <= shard == 2048 * 16 * 4 // 2
        assert scale == 4.0  # the root of the hidden size


class Reads(Scaled):
    """Sets a buffer by a weight."""

    def reset_buffers(self) -> None:
        self.embed_scale.copy_(self.weight.norm())


class Computes(Scaled):
    """Sets a buffer by another, which the files hold."""

    rates: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rates", torch.ones(3))

    def reset_buffers(self) -> None:
        self.embed_scale.copy_(self.rates.sum())


@pytest.mark.parametrize(("kind", "name"), [(Reads, "weight"), (Computes, "rates")])
def test_who_reads_what_is_not_there_yet_is_told_what_to_do(
    kind: Any, name: str, tmp_path: Path
) -> None:
    held = {"emb.weight": torch.full((ROWS, COLUMNS), 2.0), "emb.rates": torch.ones(3)}
    save_file(held, tmp_path / "model.safetensors")
    model = around(kind)
    with pytest.raises(CheckpointError) as raised:
        load(model, tmp_path, allow_unexpected=["emb.rates"])
    said = str(raised.value)
    assert f"emb ({kind.__name__})" in said
    assert f"{name} has no values" in said
    assert "reset_buffers()" in said
    assert "initialize=" in said
    model = around(kind)
    ways = {"initialize": lambda module: module.embed_scale.fill_(3.0)}
    load(model, tmp_path, allow_unexpected=["emb.rates"], **ways)
    assert model.emb.embed_scale.item() == 3.0


class Kept(Scaled):
    """Has values beside what is on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.full((3,), 5.0, device="cpu"))
        self.register_buffer("table", torch.full((3,), 6.0, device="cpu"), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.own)
        self.embed_scale.fill_(float(self.table.sum()))  # its values may be read
        self.table.zero_()
        self.table = torch.zeros(3)


def test_values_that_are_there_are_kept_whoever_writes_them(tmp_path: Path) -> None:
    save_file({"weight": torch.full((ROWS, COLUMNS), 2.0)}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = Kept()
    load(model, tmp_path, allow_missing=["own"])
    assert model.own.tolist() == [5.0] * 3
    assert model.table.tolist() == [6.0] * 3
    assert model.embed_scale.item() == 18.0

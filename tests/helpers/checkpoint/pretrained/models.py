"""Checkpoints that transformers has written, and models of every sharding to load them into."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from lightning_cp import ContextParallelMesh
from lightning_cp.checkpoint import load_pretrained
from lightning_cp.checkpoint.pretrained.options import check_complete
from lightning_cp.errors import CheckpointError
from lightning_cp.utils.dtensor import forget_meshes


def config(**changes: Any) -> Any:
    """Of a Llama whose sizes divide by nothing in particular."""
    from transformers import LlamaConfig

    sizes = {
        "vocab_size": 90,
        "hidden_size": 24,
        "intermediate_size": 36,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**{**sizes, **changes})


def make(
    dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 5, **changes: Any
) -> Any:
    """The model of ``config``, with the same values every time."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    with torch.device(device):
        model: Any = LlamaForCausalLM(config(**changes))
    model.tie_weights()  # transformers 5.0 does not on the meta device
    return model.to(dtype)


def save(path: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> dict[str, torch.Tensor]:
    """Have transformers write a checkpoint of several files; what is in it."""
    model = make(dtype, **changes)
    model.save_pretrained(path, max_shard_size="20KB")
    return {name: x.detach().clone() for name, x in model.state_dict().items()}


def without(path: Path, *names: str) -> None:
    """Take tensors out of a checkpoint of one file."""
    weights = {name: x.clone() for name, x in make(seed=6).state_dict().items()}
    for name in names:
        del weights[name]
    save_file(weights, path / "model.safetensors")


def load(model: nn.Module, path: Path, **options: Any) -> Any:
    return load_pretrained(model, path, progress=False, **options)


def refuse(model: nn.Module, path: Path, says: str, **options: Any) -> None:
    """A refused load leaves the model as it was."""
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=says):
        load(model, path, **options)
    for name, x in model.state_dict().items():
        assert x.is_meta or torch.equal(x, before[name])
    check_complete(model)


class Wrapped(nn.Module):
    """A network under another name, with something of its own beside it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.net = network
        self.metric = nn.Linear(2, 2)


class Fused(nn.Module):
    """One projection instead of three."""

    def __init__(self, sizes: tuple[int, ...] = (6, 4, 4), device: str = "meta") -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"qkv": nn.Linear(5, sum(sizes), bias=False, device=device)})
            for _ in range(2)
        )


class Apart(nn.Module):
    """Three projections."""

    def __init__(self, sizes: tuple[int, ...] = (6, 4, 4), device: str = "meta") -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    name: nn.Linear(5, size, bias=False, device=device)
                    for name, size in zip("qkv", sizes, strict=True)
                }
            )
            for _ in range(2)
        )


PARTS = " + ".join(f"layers.*.{name}.weight" for name in "qkv")
WHOLE = "layers.*.qkv.weight"


MESHES: dict[str, dict[str, int]] = {
    "plain": {"ring_size": 2},
    "fsdp": {"ring_size": 2, "data_parallel_shard_size": 2},
    "hsdp": {"ring_size": 2, "data_parallel_replicate_size": 2},
    "tp": {"tensor_parallel_size": 2},
    "fsdp_tp": {"ring_size": 2, "tensor_parallel_size": 2},
    "hsdp_tp": {
        "ring_size": 2,
        "data_parallel_replicate_size": 2,
        "tensor_parallel_size": 2,
    },
}
"""By name: sizes of the mesh."""


def world_of(kind: str) -> int:
    """Ranks that a kind takes."""
    return torch.Size(MESHES[kind].values()).numel()


def shard(model: Any, kind: str) -> ContextParallelMesh:
    """Shard a Llama as ``kind`` says; the mesh."""
    forget_meshes()
    mesh = ContextParallelMesh(device_type="cpu", **MESHES[kind])
    if "tp" in kind:
        plan = {
            "model.embed_tokens": RowwiseParallel(input_layouts=None),
            "lm_head": ColwiseParallel(),
        }
        for layer in range(len(model.model.layers)):
            at = f"model.layers.{layer}"
            for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
                plan[f"{at}.{name}"] = ColwiseParallel()
            plan |= {
                f"{at}.self_attn.o_proj": RowwiseParallel(),
                f"{at}.mlp.gate_proj": ColwiseParallel(),
                f"{at}.mlp.up_proj": ColwiseParallel(),
                f"{at}.mlp.down_proj": RowwiseParallel(),
            }
        plan.pop("model.embed_tokens")
        parallelize_module(model, mesh.axis_mesh("tp"), plan)
    if "sdp" in kind:
        fsdp: Any = mesh.axis_mesh("fsdp")
        if "hsdp" in kind:
            fsdp = mesh.device_mesh["dp_replicate", "ring"]
        for layer in model.model.layers:
            fully_shard(layer, mesh=fsdp)
        fully_shard(model, mesh=fsdp)
    return mesh


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer, gathered."""
    with torch.no_grad():
        return {
            name: (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()
            for name, x in model.state_dict().items()
        }

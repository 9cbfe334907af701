"""A checkpoint of a Llama's shapes, written for the loading benchmark, and the model that takes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

from lightning_cp.checkpoint.pretrained.index import INDEX
from lightning_cp.checkpoint.pretrained.write import Shape, TensorFile, in_files, index_text
from lightning_cp.errors import ConfigError

KINDS = ("fsdp", "tp", "fsdp_tp")
ROW_SHARDED = ("o_proj", "down_proj")
HIDDEN, INNER, VOCAB, HEAD = 2048, 5632, 32000, 64


class Embedding(nn.Embedding):
    """A large weight of the files beside a number that they do not hold, as Gemma's."""

    embed_scale: torch.Tensor

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__(rows, columns)
        self.register_buffer("embed_scale", torch.tensor(columns**0.5), persistent=False)

    def reset_buffers(self) -> None:
        """As it is made."""
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
        """As they are made."""
        self.inv_freq.copy_(self.frequencies(self.norm.device))

    @staticmethod
    def frequencies(device: torch.device | str) -> torch.Tensor:
        """Of rotary positions."""
        return 10_000.0 ** -(torch.arange(0, HEAD, 2, device=device) / HEAD)


class Network(nn.Module):
    """So many layers between an embedding and a head."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed_tokens = Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)


def network(layers: int) -> Network:
    """On the meta device, in bfloat16."""
    with torch.device("meta"):
        return Network(layers).to(torch.bfloat16)


def layers_for(nbytes: float) -> int:
    """As many as make up a model of that size, at least one."""
    sizes = [sum(p.nbytes for p in network(count).parameters()) for count in (0, 1)]
    return max(1, round((nbytes - sizes[0]) / (sizes[1] - sizes[0])))


def make_checkpoint(folder: Path, layers: int, files: int) -> None:
    """Write it: bytes of no meaning, different everywhere.

    Raises:
        ConfigError: more files than tensors can be spread over.
    """
    shapes = {
        name: Shape(p.dtype, tuple(p.shape)) for name, p in network(layers).named_parameters()
    }
    total = sum(shape.nbytes for shape in shapes.values())
    limit, made = total // files, in_files(shapes, max(1, total // files))
    while len(made) > files:
        limit += total // (100 * files) + 1
        made = in_files(shapes, limit)
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
    """Shard it over all ranks."""
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
    """As tensor parallelism does: output rows, or input columns."""

    def part(name: str, module: nn.Module, mesh: Any) -> None:
        for own, x in list(module.named_parameters(recurse=False)):
            dim = 1 if name.endswith(ROW_SHARDED) else 0
            if x.ndim == 2:
                made = distribute_tensor(x, mesh, [Shard(dim)], src_data_rank=None)
                module.register_parameter(own, nn.Parameter(made))

    distribute_module(model, mesh, part)

"""Rows are scaled by their own head's factor wherever they lie: by values, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_cp.errors import ConfigError, NonFiniteError
from lightning_cp.optim.qk_clip import QKClip
from lightning_cp.utils.dtensor import forget_meshes
from tests.helpers.optim.shardings import weights
from tests.helpers.pool import expect_on_every_rank, run_ranks

HEADS, KV_HEADS, DIM, TAU, ALPHA = 6, 3, 4, 10.0, 0.25
MAXIMA = torch.tensor([3.0, 40.0, 9.0, 2.0, 25.0, 11.0])
"""Of three groups: 40, 9 and 25."""
SHARDINGS: dict[str, tuple[int, int, int]] = {
    "plain": (1, 1, 1),
    "ddp": (2, 1, 1),
    "fsdp 2": (1, 2, 1),
    "fsdp 4": (1, 4, 1),
    "fsdp 7, uneven": (1, 7, 1),
    "hsdp": (2, 2, 1),
    "tp": (1, 1, 2),
    "tp 4, uneven": (1, 1, 4),
    "fsdp and tp": (1, 2, 2),
    "fsdp 4 and tp": (1, 4, 2),
    "fsdp and tp 3": (1, 2, 3),
    "hsdp and tp": (2, 2, 2),
}
"""Sizes of dp_replicate, fsdp and tp."""


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(12, HEADS * DIM)
        self.k_proj = nn.Linear(12, KV_HEADS * DIM)
        self.v_proj = nn.Linear(12, KV_HEADS * DIM)
        self.o_proj = nn.Linear(HEADS * DIM, 12)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention(), Attention()])


def sharded(sharding: str) -> Model:
    torch.manual_seed(5)
    model, (copies, shards, tp) = Model().double(), SHARDINGS[sharding]
    forget_meshes()
    if copies * shards * tp == 1 or (shards, tp) == (1, 1):
        return model
    mesh = init_device_mesh("cpu", (copies, shards, tp), mesh_dim_names=("dp", "fsdp", "tp"))
    for layer in model.layers if tp > 1 else ():
        columns = {f"{name}_proj": ColwiseParallel() for name in "qkv"}
        parallelize_module(layer, mesh["tp"], {**columns, "o_proj": RowwiseParallel()})
    if shards > 1:
        over = mesh["dp", "fsdp"] if copies > 1 else mesh["fsdp"]
        for layer in model.layers:
            fully_shard(layer, mesh=over)
    return model


def by_hand(keys: str, rope: bool) -> dict[str, torch.Tensor]:
    """One row after the other, of the first layer: the other one's scores are small."""
    torch.manual_seed(5)
    found = {n: p.detach().clone() for n, p in Model().double().named_parameters()}
    for kind in ("weight", "bias"):
        q, k = (found[f"layers.0.{name}_proj.{kind}"] for name in "qk")
        for row in range(HEADS * DIM):
            head = row // DIM
            first = head // 2 * 2
            largest = MAXIMA[head] if keys == "query" else MAXIMA[first : first + 2].max()
            alone = keys == "query" or (rope and row % DIM in (1, 2))
            q[row] *= min(1.0, TAU / float(largest)) ** (1.0 if alone else ALPHA)
        for row in range(KV_HEADS * DIM):
            first = row // DIM * 2
            alone = keys == "query" or (rope and row % DIM in (1, 2))
            gamma = min(1.0, TAU / float(MAXIMA[first : first + 2].max()))
            k[row] *= gamma ** (0.0 if alone else 1 - ALPHA)
    return found


def settings_of(keys: str, rope: bool) -> dict[str, Any]:
    rows = {"rope": "query", "rope_rows": (1, 3)} if rope else {}
    return {"tau": TAU, "alpha": ALPHA, "keys": keys, **rows}


def clipped(rank: int, world_size: int, sharding: str, keys: str, rope: bool) -> Any:
    """Each rank has noted some heads, and each head's maximum is some other rank's."""
    model = sharded(sharding)
    clip = QKClip(**settings_of(keys, rope))
    clip.bind(model.named_parameters())
    for micro_batch in range(2):  # one of them has it
        largest = torch.where(
            torch.arange(HEADS) % (2 * world_size) == 2 * rank + micro_batch, MAXIMA, -torch.inf
        )
        largest[0] = MAXIMA[0] - rank  # known to all, and not alike
        clip.note("layers.0", largest)
        clip.note("layers.1", torch.full((HEADS,), TAU - rank))
    clip.check_ready()
    heads = clip.apply()
    strided = [
        type(x).__name__ for p in model.parameters() if isinstance(p, DTensor) for x in p.placements
    ]
    return weights(model), heads, clip.largest, "_StridedShard" in strided


@pytest.mark.quick(
    "fsdp 4 and tp-query-uniform",
    "fsdp and tp 3-group-rope",
    "hsdp-group-uniform",
    "tp-group-uniform",
    "tp 4, uneven-query-rope",
    "fsdp 7, uneven-group-rope",
    "ddp-query-uniform",
    "fsdp 4-query-rope",
)
@pytest.mark.parametrize("rope", [False, True], ids=["uniform", "rope"])
@pytest.mark.parametrize("keys", ["group", "query"])
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_each_row_by_its_own_head(sharding: str, keys: str, rope: bool) -> None:
    copies, shards, tp = SHARDINGS[sharding]
    want = by_hand(keys, rope)
    heads = {"group": [0, 1, 4, 5], "query": [1, 4, 5]}[keys]
    for found, told, largest, strided in run_ranks(
        copies * shards * tp, clipped, sharding, keys, rope
    ):
        assert strided == (tp > 1 and shards > 1)
        assert told == {"layers.0": heads}
        assert largest == {"layers.0": 40.0, "layers.1": TAU}
        for name, x in want.items():
            torch.testing.assert_close(found[name], x, rtol=1e-14, atol=0, msg=name)


def heads_of_tp(rank: int, world_size: int, whole: bool) -> list[float]:
    """Each rank's calls have its own heads; or all."""
    clip = QKClip(tau=TAU)
    clip.bind(sharded("plain").named_parameters())
    own = MAXIMA if whole else MAXIMA[rank * 2 : rank * 2 + 2]
    for layer in ("layers.0", "layers.1"):
        clip.note(layer, own, head_dim=DIM, tp_rank=rank, tp_size=world_size)
    clip.check_ready()
    assert clip._ready is not None
    return clip._ready["layers.0"]


@pytest.mark.parametrize("whole", [False, True])
def test_heads_of_tensor_parallel_ranks(whole: bool) -> None:
    assert run_ranks(3, heads_of_tp, whole) == [MAXIMA.tolist()] * 3


def messages(rank: int, world_size: int) -> list[int]:
    """How many numbers each step's reductions had."""
    clip, sizes = QKClip(tau=TAU), []
    clip.bind(sharded("plain").named_parameters())
    real, objects = dist.all_reduce, dist.all_gather_object

    def counted(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(x.numel())
        return real(x, *args, **kwargs)

    def none(*args: Any, **kwargs: Any) -> Any:
        sizes.append(-1)
        return objects(*args, **kwargs)

    dist.all_reduce, dist.all_gather_object = counted, none
    try:
        for step in range(3):
            if rank == 0 or step:  # at first one rank alone has called the layers
                clip.note("layers.0", MAXIMA)
                clip.note("layers.1", MAXIMA)
            clip.check_ready()
            clip.apply()
    finally:
        dist.all_reduce, dist.all_gather_object = real, objects
    return sizes


def test_one_message_a_step() -> None:
    assert run_ranks(2, messages) == [[-1, 2 * HEADS, 2 * HEADS, 2 * HEADS]] * 2


def refused(rank: int, world_size: int, fault: str) -> None:
    """Something is wrong on the last rank, or everywhere: all raise, and nothing is changed."""
    model = sharded("fsdp 2")
    before = weights(model)
    clip = QKClip(tau=TAU)
    clip.bind(model.named_parameters())
    bad = MAXIMA.clone()
    for step in range(2):
        clip.note("layers.0", MAXIMA)
        if step == 0 or fault != "missing":
            if step and rank:
                bad[4] = {"nan": torch.nan, "inf": torch.inf}.get(fault, 1.0)
            heads = 12 if fault == "other heads" and rank else HEADS
            clip.note("layers.1", bad if heads == HEADS else torch.ones(heads))
        try:
            clip.check_ready()
            assert step == 0
            before = weights(model)  # not applied
        finally:
            assert all(torch.equal(x, before[name]) for name, x in weights(model).items())


@pytest.mark.parametrize(
    ("fault", "error", "said"),
    [
        ("nan", NonFiniteError, r"NaN or infinite \(layers.1: heads 4\). Nothing was changed"),
        ("inf", NonFiniteError, r"NaN or infinite \(layers.1: heads 4\). Nothing was changed"),
        ("missing", ConfigError, r"no largest scores of layers.1 since the last step \(1 layers\)"),
        ("other heads", ConfigError, r"different numbers of heads in layers.1: \[6, 12\]"),
    ],
)
def test_ranks_refuse_together(fault: str, error: Any, said: str) -> None:
    expect_on_every_rank(2, refused, fault, error=error, match=said)

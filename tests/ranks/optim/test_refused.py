"""What is handed to Muon wrongly is refused by name, and nothing is changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from lightning_cp.errors import ConfigError, LightningCPError, NonFiniteError
from lightning_cp.optim import Muon
from lightning_cp.utils.dtensor import forget_meshes
from tests.helpers.optim.shardings import Model, give, gradients, sharded, weights, whole
from tests.helpers.pool import expect_on_every_rank, run_ranks

SETTINGS = [
    ({"ns_steps": 0}, "ns_steps is a whole number from 1 to 99, got 0"),
    ({"ns_steps": 2.5}, "ns_steps"),
    ({"ns_steps": True}, "ns_steps"),
    ({"ns_steps": 100}, "ns_steps"),
    ({"lr": -1.0}, "lr is a number at least 0, got -1.0"),
    ({"lr": float("nan")}, "lr is a number"),
    ({"lr": "fast"}, "lr is a number"),
    ({"weight_decay": -0.1}, "weight_decay"),
    ({"momentum": 1.0}, "momentum is a number at least 0 and below 1"),
    ({"betas": (0.9,)}, "betas are 2 numbers"),
    ({"betas": (0.9, 1.0)}, r"betas\[1\]"),
    ({"betas": 0.9}, "betas are 2 numbers"),
    ({"eps": 0.0}, "eps is a number above 0"),
    ({"adamw_eps": 0.0}, "adamw_eps"),
    ({"adamw_lr": -1.0}, "adamw_lr is a number at least 0, or None"),
    ({"chunk_mib": 0}, "chunk_mib is a number above 0"),
    ({"ns_coefficients": (1.0, 2.0)}, "ns_coefficients are 3 numbers"),
    ({"ns_dtype": "int8"}, "ns_dtype='int8' is not a dtype to compute in"),
    ({"ns_dtype": "float8_e4m3fn"}, "ns_dtype"),
    ({"ns_dtype": None}, "ns_dtype"),
    ({"adjust_lr_fn": "muon"}, "Known: match_rms_adamw, original"),
    ({"impl": "fast"}, "impl='fast' is unknown. Known: owner, reference"),
    ({"impl": "reference", "ns_dtype": "float32"}, "impl='reference' is torch.optim.Muon"),
    ({"matrices": ["*.norm.weight"]}, r"layers.0.norm.weight \[12\].*1 dimension"),
    ({"matrices": ["embed_tokens.weight"]}, "an embedding or a head, by its name"),
    ({"matrices": ["lm_head.weight"]}, "an embedding or a head, by its name"),
    ({"matrices": ["*.missing"]}, r"matrices= has '\*.missing', which fits no parameter"),
    ({"matrices": "*"}, "matrices= is a list of patterns"),
    ({"matrices": [1]}, "matrices= is a list of patterns"),
    ({"adamw": None}, "adamw= is a list of patterns"),
    ({"embeddings": None}, "embeddings= is a list of patterns"),
    ({"embeddings": ["embed.weight"]}, "embeddings= has 'embed.weight', which fits no parameter"),
    ({"matrices": ["*.odd.weight"], "adamw": ["*.odd.weight"]}, "both name layers.0.odd.weight"),
    ({"fused": ["*.up_proj.weight"]}, "fused= maps patterns"),
    ({"fused": {"*.up_proj.weight": 20}}, "fused= maps patterns"),
    ({"matrices": []}, "no parameter is a matrix"),
    ({"adamw": ["nothing"]}, "adamw= has 'nothing'"),
    ({"adamw": ["layers*"]}, "no parameter is a matrix"),
    ({"fused": {"*.up_proj.weight": (10, 11)}}, "does not fit layers.0.up_proj.weight"),
    ({"fused": {"*.up_proj.weight": (20, 0)}}, "to positive sizes of projections"),
    ({"fused": {"*.norm.weight": (6, 6)}}, "which AdamW steps: 1 dimension"),
    ({"fused": {"nowhere": (6, 6)}}, "fused= has 'nowhere'"),
    (
        {"fused": {"*.up_proj.weight": (10, 10)}, "impl": "reference"},
        "fused= is not known to impl='reference'",
    ),
]


@pytest.mark.parametrize(("settings", "said"), SETTINGS, ids=[str(x) for x, _ in SETTINGS])
def test_settings(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        Muon(Model().named_parameters(), **settings)


def test_what_is_given() -> None:
    model = Model()
    with pytest.raises(ConfigError, match="names tell embeddings"):
        Muon(model.parameters())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="was given no parameters"):
        Muon([])
    with pytest.raises(ConfigError, match="no parameter is a matrix"):
        Muon(nn.LayerNorm(4).named_parameters())


def test_matrices_that_were_flattened() -> None:
    """As FullyShardedDataParallel does with ``use_orig_params``."""
    model = Model()
    optimizer = Muon(model)
    give(model, gradients(model, 0))
    weight = model.get_parameter("layers.0.odd.weight")
    weight.data, weight.grad = weight.data.flatten(), None
    with pytest.raises(ConfigError, match=r"layers.0.odd.weight was a matrix .* shape \[84\] now"):
        optimizer.step()


class Tied(nn.Module):
    """One matrix under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.other = nn.Linear(4, 4, bias=False)


def test_tied_ones() -> None:
    named = list(Tied().named_parameters(remove_duplicate=False))
    with pytest.raises(ConfigError, match=r"tied: it is first\.weight and second"):
        Muon(named, matrices=["first.weight", "other.weight"])
    found = {one.name: one for one in Muon(named).assigned}
    assert not found["first.weight"].is_matrix
    assert found["other.weight"].is_matrix
    assert "second.weight" not in found


def test_no_groups_later() -> None:
    optimizer = Muon(Model().named_parameters())
    with pytest.raises(ConfigError, match="cannot be added to Muon later"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})


def refused(rank: int, world_size: int, name: str, value: float, where: str) -> None:
    """A gradient that is not finite on the ranks that hold one entry: all raise, nothing moves."""
    model = sharded(name, torch.float32)
    optimizer = Muon(model.named_parameters())
    give(model, gradients(whole(torch.float32), 0))
    optimizer.step()
    before = weights(model)
    states = [x.clone() for s in optimizer.state.values() for x in s.values()]
    bad = gradients(whole(torch.float32), 1)
    bad[where].view(-1)[0] = value
    give(model, bad)
    try:
        optimizer.step()
    finally:
        now = [x for s in optimizer.state.values() for x in s.values()]
        assert all(torch.equal(weights(model)[n], x) for n, x in before.items())
        assert all(torch.equal(a.clone(), b) for a, b in zip(now, states, strict=True))


@pytest.mark.quick(
    "layers.1.norm.bias-fsdp+tp 2x2-nan",
    "layers.0.up_proj.weight-ddp 2-*",
    "layers.1.norm.bias-plain-inf",
    "layers.1.norm.bias-hsdp 2x2-inf",
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["plain", "ddp 2", "hsdp 2x2", "fsdp+tp 2x2"])
@pytest.mark.parametrize("where", ["layers.0.up_proj.weight", "layers.1.norm.bias"])
def test_gradients_that_are_not_finite(name: str, value: float, where: str) -> None:
    from math import prod

    from tests.helpers.optim.shardings import SHARDINGS

    expect_on_every_rank(
        *(prod(SHARDINGS[name]), refused, name, value, where),
        error=NonFiniteError,
        match=f"{where}.*Nothing was changed",
    )


def large(rank: int, world_size: int) -> None:
    """Numbers whose squares overflow are finite."""
    model = whole(torch.float32)
    optimizer = Muon(model.named_parameters(), ns_dtype="float32")
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e30)
    optimizer.step()


def test_large_gradients_are_finite() -> None:
    run_ranks(2, large)


def apart(rank: int, world_size: int) -> None:
    """A parameter takes part on one rank only."""
    model = whole(torch.float32)
    optimizer = Muon(model.named_parameters())
    give(model, gradients(model, 0))
    if rank:
        model.get_parameter("layers.0.odd.weight").grad = None
    optimizer.step()


def others(rank: int, world_size: int) -> None:
    """Ranks that do not train one model."""
    torch.manual_seed(rank)
    model = Model()
    optimizer = Muon(model.named_parameters())
    give(model, gradients(whole(torch.float32), 0))
    optimizer.step()


def partial(rank: int, world_size: int, name: str = "w") -> None:
    """Values that nobody holds."""
    x = DTensor.from_local(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Partial()])
    p, other = nn.Parameter(x), nn.Parameter(torch.ones(6, 4))
    p.grad, other.grad = torch.ones_like(p), torch.ones_like(other)
    Muon([(name, p), ("other", other)]).step()


def partial_embedding(rank: int, world_size: int) -> None:
    """Likewise, of one that AdamW steps."""
    partial(rank, world_size, "embed.weight")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (apart, "gradients of different parameters.*rank 0: layers.0.odd.weight"),
        (others, "have other values on other ranks"),
        (partial, "^w: .*Partial.*no rank holds"),
        (partial_embedding, r"^embed.weight: .*Partial.*no rank holds"),
    ],
    ids=["apart", "others", "partial", "partial embedding"],
)
def test_ranks_that_differ(fault: Any, said: str) -> None:
    error: type[LightningCPError] = ConfigError
    expect_on_every_rank(2, fault, error=error, match=said)


def on_half(rank: int, world_size: int, name: str) -> dict[str, torch.Tensor]:
    """A parameter of which each half of the ranks has a copy, cut along both axes of its own mesh."""
    forget_meshes()
    halves = [DeviceMesh("cpu", torch.arange(4).view(2, 2) + 4 * half) for half in range(2)]
    model = whole(torch.float64)
    module, attribute = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
    full, at = model.get_parameter(name).detach(), halves[rank // 4]
    cut = distribute_tensor(full, at, [Shard(0), Shard(1)], src_data_rank=None)
    module.register_parameter(attribute, nn.Parameter(cut))
    optimizer = Muon(model.named_parameters(), ns_dtype="float64")
    for step in range(3):
        give(model, gradients(whole(torch.float64), step))
        optimizer.step()
    return weights(model)


def test_matrices_of_some_ranks_have_one_axis() -> None:
    name = "layers.1.odd.weight"
    said = f"{name}: .*spread over several axes of a mesh of 4 out of 8 ranks"
    expect_on_every_rank(8, on_half, name, error=ConfigError, match=said)


def test_what_adamw_steps_may_lie_anyhow() -> None:
    got = run_ranks(8, on_half, "embed_tokens.weight")
    model = whole(torch.float64)
    optimizer = Muon(model.named_parameters(), ns_dtype="float64")
    for step in range(3):
        give(model, gradients(model, step))
        optimizer.step()
    for of_rank in got:
        for name, weight in weights(model).items():
            torch.testing.assert_close(of_rank[name], weight, rtol=1e-12, atol=1e-14)

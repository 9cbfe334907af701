"""Ranks that build other models or optimizers are told so, all of them, before anything is exchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from lightning_cp.consistency import model as alike
from lightning_cp.errors import ConfigError
from lightning_cp.fabric import UlyssesRingStrategy
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.helpers.pool.environment import PoolEnvironment
from tests.helpers.strategies.plain_llama import PlainLlama
from tests.helpers.strategies.small import VOCAB, Small, loader, trainer_of


def llama(odd: bool, what: str) -> nn.Module:
    """A small model, another one on the odd rank."""
    torch.manual_seed(11)
    options: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "layers": 1}
    if odd and what in ("layers", "num_kv_heads"):
        options[what] = {"layers": 2, "num_kv_heads": 4}[what]
    model = PlainLlama(VOCAB, **options)
    if odd and what == "dtype":
        model.double()
    if odd and what == "frozen":
        model.head.requires_grad_(False)
    if odd and what == "tied":
        model.head.weight = model.embed.weight
    if odd and what == "buffer":
        model.register_buffer("seen", torch.zeros(3))
    return model


DIFFERENT = {
    "layers": r"blocks\.1\.\S+ \(rank 0: missing; rank 1: \[",
    "num_kv_heads": r"blocks\.0\.k\.weight \(rank 0: \[\d+, \d+\] .*; rank 1: \[\d+, ",
    "dtype": r"embed\.weight \(rank 0: .* float32; rank 1: .* float64\)",
    "frozen": r"head\.weight \(rank 0: .* float32; rank 1: .* float32, frozen\)",
    "tied": r"head\.weight \(rank 0: .*; rank 1: .*tied to \S*embed\.weight\)",
    "buffer": r"buffer \S*seen \(rank 0: missing; rank 1: \[3\]",
}
ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"data_parallel": "fsdp"},
    "zero1": {"data_parallel": "zero1"},
    "tp": {"data_parallel": "fsdp", "tensor_parallel_size": 2},
}


class Other(Small):
    """Its model may be another one on rank 1, and its optimizer."""

    def __init__(self, odd: bool, what: str) -> None:
        super().__init__()
        torch.set_default_dtype(torch.float32)
        self.model: Any = llama(odd, what)
        self._odd, self._what = odd, what

    def configure_optimizers(self) -> Any:
        return optimizer_of(self, self._odd, self._what)


def optimizer_of(model: nn.Module, odd: bool, what: str) -> torch.optim.Optimizer:
    """AdamW, or something else on the odd rank."""
    parameters: Any = list(model.parameters())
    if odd and what == "groups":
        parameters = [{"params": parameters[:3]}, {"params": parameters[3:]}]
    elif odd and what == "fewer":
        parameters = parameters[:-1]
    elif odd and what == "order":
        parameters = [parameters[1], parameters[0], *parameters[2:]]
    if odd and what == "class":
        return torch.optim.SGD(parameters, lr=0.01)
    rates: dict[str, Any] = {"rate": 0.02, "rate in a tensor": torch.tensor(0.02)}
    rate = rates.get(what, 0.01) if odd else 0.01
    return torch.optim.AdamW(
        parameters, lr=rate, betas=(0.9, 0.9 if odd and what == "betas" else 0.99)
    )


def start(rank: int, world_size: int, kind: str, engine: str, what: str, odd: int) -> None:
    """A run's setup, and with the Trainer a step."""
    settings = {"labels": "aligned", **ENGINES[engine]}
    if kind == "trainer":
        trainer_of(world_size, settings, max_steps=1).fit(Other(rank == odd, what), loader(2))
        return
    strategy = UlyssesRingStrategy(**settings)
    plugins: Any = [PoolEnvironment()]
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy, plugins=plugins)
    fabric.launch()
    model = llama(rank == odd, what)
    fabric.setup(model, optimizer_of(model, rank == odd, what))


@pytest.mark.parametrize("kind", ["trainer", "fabric"])
@pytest.mark.parametrize(
    ("engine", "what"),
    [
        *(("ddp", what) for what in DIFFERENT),
        *(("fsdp", what) for what in ("layers", "dtype", "num_kv_heads")),
        ("zero1", "frozen"),
        ("tp", "tied"),
    ],
)
def test_another_model_is_named(kind: str, engine: str, what: str) -> None:
    match = f"ranks have different models: .*{DIFFERENT[what]}"
    expect_on_every_rank(2, start, kind, engine, what, 1, error=ConfigError, match=match)


UNLIKE = {
    "rate": r"AdamW, lr of group 0 \(rank 0: 0\.01; rank 1: 0\.02\)",
    "class": r"optimizer \(rank 0: torch\.optim\.adamw\.AdamW; rank 1: torch\.optim\.sgd\.SGD\)",
    "betas": r"betas of group 0 \(rank 0: \(0\.9, 0\.99\); rank 1: \(0\.9, 0\.9\)\)",
    "rate in a tensor": r"lr of group 0 \(rank 0: 0\.01; rank 1: 0\.019",
    "groups": r"groups of parameters \(rank 0: 1; rank 1: 2\)",
    "fewer": r"parameters of group 0 \(rank 0: \d+; rank 1: \d+\)",
    "order": r"parameter 0 of group 0 \(rank 0: \S*embed\.weight; rank 1: ",
}


@pytest.mark.quick("ddp-rate-fabric", "ddp-groups-fabric", "ddp-fewer-fabric", "fsdp-rate-fabric")
@pytest.mark.parametrize("kind", ["trainer", "fabric"])
@pytest.mark.parametrize(
    ("engine", "what"), [*(("ddp", what) for what in UNLIKE), ("fsdp", "rate"), ("fsdp", "class")]
)
def test_another_optimizer_is_named(kind: str, engine: str, what: str) -> None:
    match = f"ranks have different optimizers: .*{UNLIKE[what]}"
    expect_on_every_rank(2, start, kind, engine, what, 1, error=ConfigError, match=match)


@pytest.mark.quick("ddp-fabric", "tp-fabric")
@pytest.mark.parametrize("kind", ["trainer", "fabric"])
@pytest.mark.parametrize("engine", ENGINES)
def test_equal_ones_pass(kind: str, engine: str) -> None:
    run_ranks(2, start, kind, engine, "", 1)


def configured(rank: int, world_size: int, changed: dict[str, Any]) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**{**small, **heads, **(changed if rank else {})}))
    alike.check_same_model(nn.ModuleList([model]))


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"rms_norm_eps": 0.1}, r"config\.rms_norm_eps \(rank 0: 1e-06; rank 1: 0\.1\)"),
        ({"rope_theta": 5e5}, r"rope_theta \(rank 0: 10000\.0; rank 1: 500000\.0\)"),
    ],
)
def test_a_config_that_shapes_do_not_show_is_compared(changed: Any, match: str) -> None:
    expect_on_every_rank(2, configured, changed, error=ConfigError, match=match)


def test_where_a_config_comes_from_is_not_compared() -> None:
    run_ranks(2, configured, {"name_or_path": "elsewhere", "attn_implementation": "eager"})


def on_meta(rank: int, world_size: int, how: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    small: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 16}
    config = LlamaConfig(
        **small, num_hidden_layers=1, num_attention_heads=2, tie_word_embeddings=how != "not to tie"
    )
    with torch.device("cpu" if how == "on a device" else "meta"):
        model = LlamaForCausalLM(config)
    model.tie_weights()
    if how != "tied":
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
    alike.check_same_model(nn.ModuleList([model]))


def test_a_model_on_the_meta_device_that_is_not_tied_is_refused() -> None:
    """As transformers 5.0 makes it; on a device it was the user who changed it."""
    match = r"LlamaForCausalLM on the meta device does not share .* Call its tie_weights\(\)"
    expect_on_every_rank(2, on_meta, "apart", error=ConfigError, match=match)
    for how in ("tied", "not to tie", "on a device"):
        run_ranks(2, on_meta, how)


class _Moved(nn.Module):
    def __init__(self, names: str) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.zeros(2)))


def moved(rank: int, world_size: int) -> None:
    alike.check_same_model(_Moved("ab" if rank else "ba"))


def test_another_order_is_named() -> None:
    """Parameters are broadcast one after another."""
    match = r"order of parameters \(rank 0: b, a; rank 1: a, b\)"
    expect_on_every_rank(2, moved, error=ConfigError, match=match)


def test_lazy_and_meta_parameters_have_facts() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))
    found = alike.model_facts(model)
    assert found["0.weight"] == "[2, 2] float32, on the meta device"
    assert found["1.weight"].startswith("not initialised")

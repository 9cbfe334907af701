"""Parameters in closed form against those of transformers' models on the meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_cp.apps.plan.settings import model_of_modules
from lightning_cp.apps.train.model import model_on_meta
from lightning_cp.errors import ConfigError
from lightning_cp.layout import HeadSplit, SequenceLayout
from lightning_cp.planner.attention import AttentionCost, AttentionCostInputs, call_cost
from lightning_cp.planner.model import FAMILIES, model_from_config, read_config
from tests.helpers.planner.configs import LLAMA_405B, SMALL

VARIANTS: list[dict[str, Any]] = [
    *({"model_type": family} for family in FAMILIES),
    {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    {"model_type": "llama", "tie_word_embeddings": True},
    {"model_type": "llama", "head_dim": 24, "num_key_value_heads": 1},
    {"model_type": "qwen3", "head_dim": 32, "attention_bias": True},
    {"model_type": "qwen2", "tie_word_embeddings": True},
    {"model_type": "gemma2", "head_dim": 32, "tie_word_embeddings": False},
    {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 3},
]


@pytest.mark.parametrize(
    "variant", VARIANTS, ids=lambda variant: "-".join(map(str, variant.values()))
)
def test_names_and_shapes_are_those_of_transformers(variant: dict[str, Any]) -> None:
    config = {"head_dim": 8, **SMALL, **variant}
    model = model_from_config(config, "small")
    real = {name: tuple(p.shape) for name, p in model_on_meta(config).named_parameters()}
    assert {one.name: one.shape for one in model.parameters} == real
    assert model.num_parameters == sum(map(torch.Size.numel, map(torch.Size, real.values())))


@pytest.mark.parametrize("family", ["mistral", "gemma2", "qwen2"])
def test_windows_are_those_of_transformers(family: str) -> None:
    """Layers with a window, as the config of transformers says it."""
    config = {
        **SMALL,
        "model_type": family,
        "head_dim": 8,
        "sliding_window": 7,
        "use_sliding_window": True,
        "max_window_layers": 1,
    }
    read: Any = model_on_meta(config).config
    kinds = getattr(read, "layer_types", None) or ["sliding_attention"] * 3
    wanted = [7 if kind == "sliding_attention" else None for kind in kinds]
    assert [layer.window for layer in model_from_config(config, "small").layers] == wanted
    assert 7 in wanted


def test_the_number_of_parameters_that_is_published() -> None:
    assert model_from_config(LLAMA_405B, "405b").num_parameters == 405_853_388_800


def test_products_are_those_that_a_token_goes_through() -> None:
    """6 FLOPs for each: all weights of layers but norms, the head, two of four experts and the router."""
    model = model_from_config({**SMALL, "model_type": "mixtral", "num_local_experts": 4}, "small")
    attention = 64 * 64 * 2 + 2 * 64 * 32
    experts = 2 * 3 * 64 * 112 + 4 * 64
    assert model.flops_per_token == 6 * (3 * (attention + experts) + 96 * 64)


def test_a_family_that_is_not_known_is_read_off_its_modules() -> None:
    config = {
        "model_type": "gpt_neox",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 96,
    }
    model = model_of_modules(config, "neox")
    real = sum(p.numel() for p in model_on_meta(config).parameters())
    assert model.num_parameters == real
    assert (len(model.layers), model.heads, model.kv_heads, model.tp_sizes) == (3, 4, 4, (1,))
    assert "not known in closed form" in model.assumed


def test_values_of_another_width_are_priced() -> None:
    """Latent attention: keys of 8 + 4 entries, values of 10; FlashAttention computes with 12 of both."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 4}
    dims = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 10, "kv_lora_rank": 16}
    model = model_of_modules({"model_type": "deepseek_v3", **sizes, **heads, **dims}, "deepseek")
    assert (model.head_dim, model.value_dim) == (12, 10)
    assert model.flops_per_pair == 6 * (12 + 10)

    layout, split = SequenceLayout(64, 2, 2), HeadSplit(4, 4, 2)
    rates = ((1e12, 1e12), (), 1e9, 1e9, 0.0)

    def cost(key_dim: int, value_dim: int) -> AttentionCost:
        return call_cost(
            AttentionCostInputs(layout, None, split, key_dim, value_dim, 2, "ring", *rates)
        )

    narrow, equal = cost(12, 10), cost(12, 12)
    assert narrow.computing == equal.computing
    for one, other in zip(narrow.traffic, equal.traffic, strict=True):
        assert one.total_bytes * 24 == other.total_bytes * 22
    assert cost(12, 1).memory < equal.memory


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({**SMALL, "model_type": "mamba"}, "model_type='mamba'"),
        ({**SMALL, "hidden_size": 0}, "needs hidden_size"),
        ({**SMALL, "num_key_value_heads": 3}, "num_key_value_heads=3 does not divide"),
        ({key: value for key, value in SMALL.items() if key != "vocab_size"}, "needs vocab_size"),
    ],
)
def test_what_cannot_be_is_refused(config: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        model_from_config(config, "bad")


def test_files_that_are_no_configs(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        read_config(tmp_path)
    file = tmp_path / "config.json"
    file.write_text("[1]")
    with pytest.raises(ConfigError, match="holds a JSON list"):
        read_config(file)
    file.write_text("{")
    with pytest.raises(ConfigError, match="is not valid JSON"):
        read_config(tmp_path)

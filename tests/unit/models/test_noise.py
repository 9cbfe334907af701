"""Noise that ranks would draw otherwise than one process is refused by the name of its setting."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from lightning_cp.errors import ConfigError
from lightning_cp.models.guards.noise import check_training_noise

SIZES: dict[str, Any] = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16}
SIZES |= {"num_hidden_layers": 1, "num_attention_heads": 2}


def llama(**more: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SIZES, **more))


def bert(rate: float) -> BertForMaskedLM:
    return BertForMaskedLM(BertConfig(**SIZES, attention_probs_dropout_prob=rate))


def neftune() -> nn.Module:
    model: Any = llama()
    model.model.embed_tokens.neftune_noise_alpha = 5.0
    return model


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: llama(attention_dropout=0.1), "attention_dropout in the config of Llama.* is 0.1"),
        (lambda: bert(0.25), "attention_probs_dropout_prob in the config of Bert.* is 0.25"),
        (lambda: nn.Sequential(nn.MultiheadAttention(8, 2, 0.5)), r"dropout of 0 .* is 0\.5"),
        (neftune, r"embed_tokens\.neftune_noise_alpha is 5\.0: NEFTune"),
    ],
    ids=["llama", "bert", "torch", "neftune"],
)
def test_noise_is_refused(make: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        check_training_noise(make())


def test_what_ranks_do_by_themselves_is_theirs() -> None:
    model = llama(attention_dropout=0.1)
    check_training_noise(model, set(model.modules()))
    check_training_noise(bert(0.0))  # whose hidden dropout is 0.1
    part: Any
    for part in model.modules():
        if hasattr(part, "attention_dropout"):
            part.attention_dropout = 0.0
    check_training_noise(model)


def test_embeddings_without_noise() -> None:
    model: Any = llama()
    model.model.embed_tokens.neftune_noise_alpha = None
    check_training_noise(model)

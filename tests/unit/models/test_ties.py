"""Models on the meta device share the weights that their configs tie, or are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_cp.consistency.model import check_ties
from lightning_cp.errors import ConfigError


def test_a_head_that_should_be_tied_is_refused_by_name() -> None:
    sizes: dict[str, Any] = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_hidden_layers": 1}
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True))
        model.tie_weights()
        check_ties(model)
        model.lm_head.weight = nn.Parameter(torch.empty(8, 8))
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM on the meta .*Call its tie_weights"):
        check_ties(model)

"""Small LitGPT models of several families; litgpt is imported when one is made."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.models.zoo import CAP, Asked, Options, use_torchs_norms, window_of

needs_litgpt = pytest.mark.skipif(
    find_spec("litgpt") is None,
    reason="needs litgpt, in an environment of its own: make test-litgpt",
)

LONGEST = 64
"""``block_size``: longer than the tests' sequences."""
LAYERS = 2


class Called(nn.Module):
    """A LitGPT model inside of a module that is called as Hugging Face models are."""

    def __init__(self, gpt: Any) -> None:
        super().__init__()
        self.gpt = gpt

    def forward(self, input_ids: torch.Tensor, **others: Any) -> Any:
        """``logits`` [B, L, vocabulary]; masks and positions are not passed on: the model takes none."""
        return SimpleNamespace(logits=self.gpt(input_ids))


def litgpt_file(name: str) -> Any:
    """The module ``litgpt.<name>``, which type checkers need not know."""
    return import_module(f"litgpt.{name}")


def litgpt_config(file: str = "model", family: str = "", **settings: Any) -> Any:
    """Four heads, hidden size 32, two layers; of ``litgpt.<file>``, the rest as ``family`` has it."""
    sizes: Options = {"n_layer": LAYERS, "n_head": 4, "n_embd": 32, "block_size": LONGEST}
    vocabulary: Options = {"vocab_size": 43, "padded_vocab_size": 43}
    values: Options = {**sizes, **vocabulary, "intermediate_size": 48, **settings}
    kind = litgpt_file(file).Config
    if family:
        return kind.from_name(family, **values)
    return kind(**{"name": "tiny", "rotary_percentage": 1.0, **values})


def litgpt_model(file: str = "model", scale: float = 0.2, **settings: Any) -> Any:
    """A ``litgpt.<file>.GPT`` whose attention matters: weights are large enough for scores to differ."""
    gpt = litgpt_file(file).GPT(litgpt_config(file, **settings))
    use_torchs_norms(gpt)
    for weight in gpt.parameters():
        if weight.dim() > 1:
            nn.init.normal_(weight, std=scale)
    return gpt


LLAMA: Options = {
    "norm_class_name": "RMSNorm",
    "mlp_class_name": "LLaMAMLP",
    "bias": False,
    "parallel_residual": False,
    "n_query_groups": 2,
}
GEMMA: Options = {
    **LLAMA,
    "mlp_class_name": "GemmaMLP",
    "scale_embeddings": True,
    "post_attention_norm": True,
    "post_mlp_norm": True,
}
LATENT: Options = {
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 8,
}
YARN: Options = {
    "factor": 4.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "original_max_seq_len": 16,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
}


def of(**settings: Any) -> Callable[[Asked], Any]:
    """A family without a window."""
    return lambda asked: Called(litgpt_model(**settings))


def with_window(**settings: Any) -> Callable[[Asked], Any]:
    """A family whose window is the case's."""
    return lambda asked: Called(litgpt_model(**settings, sliding_window_size=window_of(asked)))


def gemma2(**caps: Any) -> Callable[[Asked], Any]:
    """Window in the first of two layers, scores of a scale of their own."""
    kinds: Options = {"sliding_window_indices": [1, 0], "attention_scores_scalar": 5}
    sizes: Options = {"head_size": 8, "n_query_groups": 2}
    return with_window(family="Gemma-2-2b", **sizes, **kinds, **caps)


def gemma3() -> Callable[[Asked], Any]:
    """Rotary bases of their own for layers with a window; norms of queries and keys."""
    bases: Options = {"rope_local_base_freq": 3.0, "rope_base": 100, "rope_indices": [1, 0]}
    return with_window(**GEMMA, **bases, sliding_window_indices=[1, 0], norm_qk=True)


CAPS: Options = {"attention_logit_softcapping": CAP}
NO_CAPS: Options = {"attention_logit_softcapping": None}
LORA: Options = {"lora_r": 2, "lora_alpha": 4, "lora_query": True, "lora_value": True}
MOE: Options = {"mlp_class_name": "LLaMAMoE", "n_expert": 3, "n_expert_per_token": 2}

LITGPT_ZOO: dict[str, Callable[[Asked], Any]] = {
    "litgpt_pythia": of(family="pythia-14m"),
    "litgpt_llama": of(family="Llama-3.2-1B", n_query_groups=2),
    "litgpt_one_group": of(**{**LLAMA, "n_query_groups": 1}),
    "litgpt_mistral": with_window(**LLAMA),
    "litgpt_gemma2": gemma2(**CAPS),
    "litgpt_gemma2_uncapped": gemma2(**NO_CAPS),
    "litgpt_gemma3": gemma3(),
    "litgpt_yarn": of(**LLAMA, rope_adjustments=YARN),
    "litgpt_latent": of(**{**LLAMA, "n_query_groups": 4}, latent_attention=LATENT),
    "litgpt_moe": of(**{**LLAMA, **MOE}, moe_intermediate_size=24),
    "litgpt_lora": of(file="lora", **LLAMA, **LORA),
}

LITGPT_FAMILIES: dict[str, str] = {
    "litgpt_pythia": "Pythia, RoPE on a quarter",
    "litgpt_llama": "Llama 3.2, groups",
    "litgpt_one_group": "Llama, one key head",
    "litgpt_yarn": "Llama, YaRN",
    "litgpt_mistral": "Mistral, window",
    "litgpt_gemma2": "Gemma 2, alternating windows, caps",
    "litgpt_gemma2_uncapped": "Gemma 2 without caps",
    "litgpt_gemma3": "Gemma 3, two RoPE tables",
    "litgpt_latent": "latent attention",
    "litgpt_moe": "mixture of experts",
    "litgpt_lora": "LoRA of a Llama",
}
"""What each is called in the table."""

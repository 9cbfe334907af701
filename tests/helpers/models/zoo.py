"""Small Hugging Face models of many families, made from what a case asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

Options = dict[str, Any]

WIDE = 1000
"""A window that hides nothing."""


CAP = 2.0
"""Of the scores of a capped model."""

NEED_EAGER = {
    *("BloomForCausalLM", "Gemma2ForCausalLM", "GptOssForCausalLM", "MiMoV2FlashForCausalLM"),
}
"""Models for which transformers has no other attention in one process; its softmax is float32."""


LATENT: Options = {
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "head_dim": 4,  # of the part that is rotated
    "v_head_dim": 10,
    "num_key_value_heads": 4,  # each query head has keys of its own
}
"""Of latent attention, whose keys are as wide as their two parts, and values are not."""

EXPERTS: Options = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
}


class Asked(Protocol):
    """What models are made from: see ``tests.helpers.models.steps.Case``."""

    @property
    def attention(self) -> str: ...
    @property
    def use_cache(self) -> bool: ...
    @property
    def window(self) -> int: ...


def make(name: str, asked: Asked, **extra: Any) -> Any:
    """A model of two layers, four heads and hidden size 32, of the class ``name``."""
    import transformers

    sizes: Options = {"vocab_size": 43, "hidden_size": 32, "intermediate_size": 48}
    heads: Options = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    tokens: Options = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config_class = getattr(transformers, name).config_class
    config = config_class(**{**sizes, **heads, **tokens, "use_cache": asked.use_cache, **extra})
    config._attn_implementation = "eager" if name in NEED_EAGER else asked.attention
    config._experts_implementation = "eager"  # the grouped one has no float64
    model = getattr(transformers, name)(config)
    use_torchs_norms(model)
    return model


def use_torchs_norms(model: nn.Module) -> None:
    """transformers' own norms compute in float32, which float64 comparisons would see."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child).__name__.endswith("RMSNorm") and not isinstance(child, nn.RMSNorm):
                size: int = child.weight.shape[0]  # type: ignore[index,assignment,union-attr]
                norm = nn.RMSNorm(size, eps=1e-6)
                norm.requires_grad_(child.weight.requires_grad)  # type: ignore[arg-type,union-attr]
                setattr(parent, name, norm)


def window_of(asked: Asked) -> int:
    """The size of the window as configs take it."""
    return asked.window or WIDE


def mistral(asked: Asked) -> Any:
    """Every layer has the window."""
    return make("MistralForCausalLM", asked, sliding_window=window_of(asked))


def qwen2(asked: Asked) -> Any:
    """The window begins at the second layer."""
    window: Options = {"use_sliding_window": True, "sliding_window": window_of(asked)}
    return make("Qwen2ForCausalLM", asked, **window, max_window_layers=1)


def gemma2(asked: Asked, cap: float | None = None) -> Any:
    """Sliding and full layers alternate; weights are so large that a cap of a few units matters."""
    caps: Options = {"attn_logit_softcapping": cap, "final_logit_softcapping": cap and 30.0}
    scale: Options = {"head_dim": 8, "query_pre_attn_scalar": 5}
    weights: Options = {} if cap is None else {"initializer_range": 0.3}
    window: Options = {"sliding_window": window_of(asked)}
    return make("Gemma2ForCausalLM", asked, **window, **caps, **scale, **weights)


def gemma3(asked: Asked) -> Any:
    """Sliding and full layers, with rotary bases of their own."""
    kinds: Options = {"layer_types": ["sliding_attention", "full_attention"]}
    scale: Options = {"head_dim": 8, "query_pre_attn_scalar": 8}
    return make("Gemma3ForCausalLM", asked, sliding_window=window_of(asked), **kinds, **scale)


def modernbert(asked: Asked) -> Any:
    """Bidirectional: full and local layers."""
    kinds: Options = {"layer_types": ["full_attention", "sliding_attention"]}
    window: Options = {
        "local_attention": 2 * window_of(asked),
        "cls_token_id": 1,
        "sep_token_id": 2,
    }
    return make("ModernBertForMaskedLM", asked, **kinds, **window)


def phimoe(asked: Asked) -> Any:
    """The window is in the mask alone: the attention call does not have it."""
    experts: Options = {
        "num_local_experts": 2,
        "router_jitter_noise": 0.0,
        "input_jitter_noise": 0.0,
    }
    return make("PhimoeForCausalLM", asked, sliding_window=window_of(asked), **experts)


def gpt_oss(asked: Asked) -> Any:
    """Sinks, and alternating windows; weights so large that heads differ."""
    experts: Options = {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8}
    window: Options = {"sliding_window": window_of(asked), "initializer_range": 0.3}
    return make("GptOssForCausalLM", asked, **experts, **window)


def llama4(asked: Asked) -> Any:
    """Attends in chunks of the window's size."""
    chunk: Options = {"attention_chunk_size": window_of(asked), "no_rope_layers": [1, 1]}
    experts: Options = {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8}
    more: Options = {"intermediate_size_mlp": 48, "moe_layers": []}
    return make("Llama4ForCausalLM", asked, **chunk, **experts, **more)


def roberta(asked: Asked) -> Any:
    """Positions begin at 1, behind the padding index."""
    dropout: Options = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return make("RobertaForMaskedLM", asked, max_position_embeddings=64, **dropout)


def opt(asked: Asked) -> Any:
    """Positions count the tokens that are not padding."""
    sizes: Options = {"ffn_dim": 48, "max_position_embeddings": 64, "word_embed_proj_dim": 32}
    return make("OPTForCausalLM", asked, dropout=0.0, attention_dropout=0.0, **sizes)


def esm(asked: Asked, kind: str = "absolute") -> Any:
    """Learned positions begin behind the padding index, in a function of the file; rotary ones at 0."""
    dropout: Options = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes: Options = {"max_position_embeddings": 64, "token_dropout": False}
    return make("EsmForMaskedLM", asked, position_embedding_type=kind, **dropout, **sizes)


def by_length(
    kind: str, name: str = "LlamaForCausalLM", original: int = 32
) -> Callable[[Asked], Any]:
    """Frequencies change where a sequence is longer than ``original``: the tests' are."""
    factors = [0.3 * (1 + index) for index in range(4)]
    rope: Options = {
        "rope_type": kind,
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": original,
        "short_factor": [1.0] * 4,
        "long_factor": factors,
    }
    longest: Options = {"max_position_embeddings": original if kind == "dynamic" else 4 * original}
    more = {"original_max_position_embeddings": original} if name.startswith("Phi3") else {}
    return lambda asked: make(name, asked, rope_parameters=rope, **longest, **more)


def bloom(asked: Asked) -> Any:
    """ALiBi; twelve heads, whose slopes are no powers of two."""
    dropout: Options = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    sizes: Options = {"hidden_size": 48, "n_head": 12, "n_layer": 2, "initializer_range": 0.2}
    return make("BloomForCausalLM", asked, **{**sizes, **dropout})


def falcon(**kind: Any) -> Callable[[Asked], Any]:
    """Rotary or ALiBi positions; keys of one head, of groups or of each."""
    dropout: Options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "initializer_range": 0.2}
    return lambda asked: make("FalconForCausalLM", asked, **dropout, **kind)


def latent(name: str, **extra: Any) -> Callable[[Asked], Any]:
    """Latent attention, with values of another width than keys, and experts where a family has them."""

    def made(asked: Asked) -> Any:
        import transformers

        defaults = getattr(transformers, name).config_class()
        known = {key: x for key, x in {**LATENT, **EXPERTS}.items() if hasattr(defaults, key)}
        return make(name, asked, **{**known, **extra})

    return made


def mimo(asked: Asked) -> Any:
    """Sinks and windows in one of two layers, whose K/V heads are more; values narrower than keys."""
    dims: Options = {"head_dim": 8, "v_head_dim": 6, "initializer_range": 0.3}
    window: Options = {"sliding_window": window_of(asked)}
    kinds: Options = {"layer_types": ["full_attention", "sliding_attention"]}
    return make("MiMoV2FlashForCausalLM", asked, **EXPERTS, **dims, **window, **kinds)


def ordinary(name: str, **extra: Any) -> Callable[[Asked], Any]:
    """A family without a window."""
    return lambda asked: make(name, asked, **extra)


ZOO: dict[str, Callable[[Asked], Any]] = {
    "mistral": mistral,
    "qwen2": qwen2,
    "gemma": ordinary("GemmaForCausalLM", head_dim=8),
    "cohere": ordinary("CohereForCausalLM"),
    "gemma2": gemma2,
    "gemma2_capped": lambda asked: gemma2(asked, CAP),
    "gemma2_almost_uncapped": lambda asked: gemma2(asked, 1e6),
    "gemma3": gemma3,
    "modernbert": modernbert,
    "phimoe": phimoe,
    "gpt_oss": gpt_oss,
    "llama4": llama4,
    "roberta": roberta,
    "opt": opt,
    "esm": esm,
    "esm_rotary": lambda asked: esm(asked, "rotary"),
    "afmoe": ordinary("AfmoeForCausalLM", head_dim=8, num_experts=2, num_experts_per_tok=1),
    "qwen3": ordinary("Qwen3ForCausalLM", head_dim=8),
    "phi3": ordinary("Phi3ForCausalLM"),
    "bloom": bloom,
    "falcon": falcon(),
    "falcon_new": falcon(new_decoder_architecture=True, num_kv_heads=2),
    "falcon_alibi": falcon(alibi=True, multi_query=False),
    "phi3_longrope": by_length("longrope", "Phi3ForCausalLM"),
    "phi3_shortrope": by_length("longrope", "Phi3ForCausalLM", 64),
    "llama_longrope": by_length("longrope"),
    "llama_dynamic": by_length("dynamic"),
    "llama_not_dynamic": by_length("dynamic", original=64),
    "gpt_neox": ordinary("GPTNeoXForCausalLM"),
    "olmo2": ordinary("Olmo2ForCausalLM"),
    "mixtral": ordinary("MixtralForCausalLM", num_local_experts=2),
    "qwen3_moe": ordinary("Qwen3MoeForCausalLM", head_dim=8, num_experts=2, num_experts_per_tok=1),
    "axk1": latent("AXK1ForCausalLM"),
    "deepseek_v2": latent("DeepseekV2ForCausalLM"),
    "deepseek_v3": latent("DeepseekV3ForCausalLM"),
    "glm4_moe_lite": latent("Glm4MoeLiteForCausalLM"),
    "longcat_flash": latent("LongcatFlashForCausalLM", num_layers=1, ffn_hidden_size=48),
    "mimo_v2_flash": mimo,
    "minicpm3": latent("MiniCPM3ForCausalLM"),
    "mistral4": latent("Mistral4ForCausalLM", head_dim=12),
    "youtu": latent("YoutuForCausalLM"),
    "granite": ordinary("GraniteForCausalLM"),
    "smollm3": ordinary("SmolLM3ForCausalLM"),
}

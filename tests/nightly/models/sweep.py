"""Every causal and masked language model of transformers that can be made tiny, one step of each."""

from __future__ import annotations

from typing import Any

import torch

from lightning_cp.config import StrategyConfig
from lightning_cp.models.hf.labels import label_alignment
from lightning_cp.runtime.runtime import ContextParallelRuntime
from tests.helpers.models.steps import Case, Outcome, make_batch, run_step
from tests.helpers.models.zoo import LATENT

SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size",), 43),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "word_embed_proj_dim", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), 2),
    **dict.fromkeys(("decoder_layers", "encoder_layers", "num_key_value_heads"), 2),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok",), 2),
    **dict.fromkeys(("moe_intermediate_size",), 16),
    **dict.fromkeys(("head_dim",), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("sliding_window",), 1000),
    **dict.fromkeys(("pad_token_id",), 0),
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id"), 1),
    **dict.fromkeys(("eos_token_id",), 2),
    **dict.fromkeys(("use_cache", "token_dropout"), False),
}  # fmt: skip
"""What configs call their sizes; those that a config does not have are left out."""

SLIDING: dict[str, Any] = {"head_dim": 10, "qk_nope_head_dim": 4, "v_head_dim": 6}
OTHERS: dict[str, dict[str, Any]] = {
    "AXK1ForCausalLM": {"n_group": 2, "topk_group": 1},
    "Dots3NoteForCausalLM": {
        **{"use_dsa": False, "layer_types": ["full_attention", "sliding_attention"]},
        **{"sliding_window": 10, "head_dim": 12, "n_group": 2, "topk_group": 1},
        **{f"swa_{name}": value for name, value in {**LATENT, **SLIDING}.items()},
        **{"swa_num_attention_heads": 4, "swa_qk_rope_head_dim": 6},
    },
    "KimiLinearForCausalLM": {"linear_head_dim": 8, "linear_num_heads": 4},
    "MiMoV2FlashForCausalLM": {"v_head_dim": 6},
    "Mistral4ForCausalLM": {"head_dim": 12},
}
"""Of single classes."""

LARGEST = 3_000_000
"""Parameters of a model that is still tiny."""


def names() -> list[str]:
    """The classes whose attention can be swapped at all."""
    import transformers

    found: list[str] = []
    for name in dir(transformers):
        if name.endswith(("ForCausalLM", "ForMaskedLM", "LMHeadModel")):
            kind = getattr(transformers, name)
            if getattr(kind, "_can_set_attn_implementation", lambda: False)():
                found.append(name)
    return found


def make_tiny(name: str) -> Any:
    """A float64 model of the class, with weights that make every layer matter, and no dropout."""
    import transformers

    kind = getattr(transformers, name)
    defaults = kind.config_class()
    sizes = {**SIZES, **(LATENT if _has(defaults, "kv_lora_rank") else {})}
    known = {k: v for k, v in sizes.items() if _has(defaults, k)}
    config = kind.config_class(**{**known, **OTHERS.get(name, {})})
    config._attn_implementation = "sdpa" if kind._supports_sdpa else "eager"
    config._experts_implementation = "eager"  # the grouped one has no float64
    with torch.device("meta"):
        size = sum(p.numel() for p in kind(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size} parameters")
    torch.manual_seed(3)
    model = kind(config)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.double().eval()


def _has(config: Any, name: str) -> bool:
    """Whether a config has a setting; some raise errors of another kind where layers differ in it."""
    try:
        return hasattr(config, name)
    except Exception:
        return True


def batch() -> dict[str, torch.Tensor]:
    """No token is padding for a model that looks for it."""
    plain = make_batch(Case())
    return {"input_ids": plain["input_ids"].clamp(min=3), "labels": plain["labels"]}


def step(model: Any, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, logits), the loss as the model computes it."""
    output = model(input_ids=given["input_ids"], labels=given["labels"])
    return output.loss, output.logits


def one_process(name: str) -> Outcome:
    """The plain model on the whole batch."""
    model = make_tiny(name)
    loss, logits = step(model, batch())
    loss.backward()
    gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    return Outcome(float(loss.detach()), gradients, logits.detach())


def some_ranks(
    rank: int, world_size: int, name: str, ring_size: int = 2, ulysses_size: int = 1
) -> Outcome:
    """The same on a mesh, gradients averaged as an engine does."""
    model = make_tiny(name)
    labels = "auto" if label_alignment(model) else "aligned"
    settings = StrategyConfig(ulysses_size=ulysses_size, ring_size=ring_size, labels=labels)
    runtime = ContextParallelRuntime(settings)
    runtime.meshes.build(world_size, "cpu", None, model)
    try:
        runtime.attach(model, {}, needs_labels=True)
        return run_step(runtime, model, world_size, batch(), step)
    finally:
        runtime.detach()

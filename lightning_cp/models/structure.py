"""Mask and head counts of a model's attention, read from its modules and configs before any call.

The choice of a layout uses them. Every layout is exact, so a wrong guess costs time only. They come from the
model, not from observed calls: a resumed run must shard its first batch as the previous run would have, or
its sums would round in another order.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_cp.layout import Mask
from lightning_cp.layout.cost import HeadCounts
from lightning_cp.models.litgpt import litgpt_heads, litgpt_models, litgpt_windows
from lightning_cp.models.swap import config_value, hf_models

UNBOUNDED = -1


def expected_mask(model: nn.Module) -> Mask:
    """Return the widest mask of the Hugging Face and LitGPT attention inside; causal if no module says.

    Layers may differ (Gemma 2 and 3, gpt-oss); the layer that sees most costs most. A window of such a
    module counts the query itself.
    """
    parts = [part for root in hf_models(model) for part in root.modules()]
    said = [part for part in parts if isinstance(getattr(part, "is_causal", None), bool)]
    of_litgpt = litgpt_windows(model)
    causal = any(part.is_causal for part in said) or bool(of_litgpt) or not said
    sizes = [*(_window(part) for part in said), *of_litgpt]
    widest = UNBOUNDED if UNBOUNDED in sizes or not sizes else max(sizes)
    return Mask(causal, (widest, UNBOUNDED if causal else widest))


def module_mask(part: Any) -> Mask:
    """Return the mask of one Hugging Face attention module; causal by default."""
    causal = bool(getattr(part, "is_causal", True))
    window = _window(part)
    return Mask(causal, (window, UNBOUNDED if causal else window))


def expected_heads(model: nn.Module) -> HeadCounts | None:
    """Return the head counts of the first Hugging Face or LitGPT model that has them, or ``None``."""
    for root in hf_models(model):
        config = root.config
        query, size = (
            config_value(config, "num_attention_heads"),
            config_value(config, "hidden_size"),
        )
        if type(query) is int and type(size) is int:
            kv = config_value(config, "num_key_value_heads") or query
            return HeadCounts(query, kv, sum(head_dims(config, size // query)) // 2)
    return next((litgpt_heads(root) for root in litgpt_models(model)), None)


def head_dims(config: Any, default: int) -> tuple[int, int]:
    """Return the head dims of keys and of values in a transformers config."""
    dim = config_value(config, "head_dim") or default
    parts = [config_value(config, f"qk_{part}_head_dim") for part in ("nope", "rope")]
    of_values = config_value(config, "v_head_dim")
    of_keys = sum(parts) if all(type(part) is int for part in parts) else dim
    return of_keys, of_values if type(of_values) is int else of_keys


def _window(part: Any) -> int:
    """Return a module's left window; a config without ``layer_types`` describes all layers."""
    size = getattr(part, "sliding_window", None)
    config = getattr(part, "config", None)
    alike = not hasattr(part, "sliding_window") and config_value(config, "layer_types") is None
    if alike and config_value(config, "use_sliding_window") in (None, True):
        size = config_value(config, "sliding_window")
    return size - 1 if isinstance(size, int) and size > 0 else UNBOUNDED

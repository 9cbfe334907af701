"""The mask and heads of a model's attention, as far as its modules tell before they are called.

Layouts are chosen by them, and exact for any, so that a wrong guess costs time only. They are read from the
model and not from calls that were seen: a run that resumes must shard its first batch as the run before
would have, or its sums would be rounded in another order.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_cp.layout import Mask
from lightning_cp.layout.cost import Heads
from lightning_cp.models.litgpt import litgpt_heads, litgpt_models, litgpt_windows
from lightning_cp.models.swap import hf_models, told

UNBOUNDED = -1


def expected_mask(model: nn.Module) -> Mask:
    """The widest mask of the Hugging Face and LitGPT attention modules inside; causal where nothing tells.

    Layers differ (Gemma 2 and 3, gpt-oss): those that see most cost most. A window of theirs counts the query
    itself.
    """
    parts = [part for root in hf_models(model) for part in root.modules()]
    said = [part for part in parts if isinstance(getattr(part, "is_causal", None), bool)]
    of_litgpt = litgpt_windows(model)
    causal = any(part.is_causal for part in said) or bool(of_litgpt) or not said
    sizes = [*(_window(part) for part in said), *of_litgpt]
    widest = UNBOUNDED if UNBOUNDED in sizes or not sizes else max(sizes)
    return Mask(causal, (widest, UNBOUNDED if causal else widest))


def mask_of(part: Any) -> Mask:
    """Of one Hugging Face attention module: causal where it does not say."""
    causal = bool(getattr(part, "is_causal", True))
    window = _window(part)
    return Mask(causal, (window, UNBOUNDED if causal else window))


def expected_heads(model: nn.Module) -> Heads | None:
    """The heads of a Hugging Face or LitGPT model, of the first that tells; ``None`` if none does."""
    for root in hf_models(model):
        config = root.config
        query, size = told(config, "num_attention_heads"), told(config, "hidden_size")
        if type(query) is int and type(size) is int:
            kv = told(config, "num_key_value_heads") or query
            return Heads(query, kv, sum(head_dims(config, size // query)) // 2)
    return next((litgpt_heads(root) for root in litgpt_models(model)), None)


def head_dims(config: Any, default: int) -> tuple[int, int]:
    """Of queries and keys, and of values, as a config of transformers says it."""
    dim = told(config, "head_dim") or default
    parts = [told(config, f"qk_{part}_head_dim") for part in ("nope", "rope")]
    of_values = told(config, "v_head_dim")
    of_keys = sum(parts) if all(type(part) is int for part in parts) else dim
    return of_keys, of_values if type(of_values) is int else of_keys


def _window(part: Any) -> int:
    """The distance that a module sees back; a config without kinds of layers speaks for all of them."""
    size = getattr(part, "sliding_window", None)
    config = getattr(part, "config", None)
    alike = not hasattr(part, "sliding_window") and told(config, "layer_types") is None
    if alike and told(config, "use_sliding_window") in (None, True):
        size = told(config, "sliding_window")
    return size - 1 if isinstance(size, int) and size > 0 else UNBOUNDED

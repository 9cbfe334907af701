"""Patches for BLOOM and Falcon, which do not use transformers' attention interface.

While a step is active, the ``forward`` of their attention modules is replaced: the same projections, and
between them one call like those of the attention interface.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from lightning_cp import error_display
from lightning_cp.errors import ConfigError
from lightning_cp.models.handle import SwapHandle
from lightning_cp.utils.patching import PatchSet

Attend = Callable[..., tuple[torch.Tensor, None]]
"""Result of ``attention_function``: of q, k, v [B, H, L, D], out [B, L, H, D]."""

EXACT_UNTIL = 256
"""Falcon's own bias holds positions in bfloat16: integers up to this one are exact."""

_OWN_MASK = "_update_causal_mask"

_IGNORED_ARGUMENTS = {"cache_position", "kwargs"}
"""Arguments until transformers 5.3, or since then: there is no cache, and they are passed by name."""


def has_own_attention(model: Any) -> bool:
    """True if the model has attention that this file patches."""
    return any(True for _ in _modules(model))


def takes_no_positions(model: Any) -> bool:
    """True if the patched attention uses distances only, so the model takes no positions."""
    return any(type(part).__name__ == "BloomAttention" for part in _modules(model))


def swap_own_attention(model: Any, handle: SwapHandle, attend: Attend) -> None:
    """Patch the attention of a model while a step is active.

    Args:
        model: ``has_own_attention(model)``.
        handle: signals the begin and end of steps.
        attend: takes q, k, v, a mask and ``alibi_slopes``.

    Raises:
        ConfigError: a setting of the model that is not reproduced, or a version with other arguments.
    """
    modules = list(_modules(model))
    patched: dict[Any, Callable[..., Any]] = {}
    for module in modules:
        ours = _FORWARDS[type(module).__name__]
        _check_arguments(module, ours)
        _check_settings(module)
        _check_one_bias(module)
        patched[module] = partial(ours, module, attend)
    handle.on_activate(lambda: _patch_forwards(patched))
    for part in model.modules():
        if hasattr(part, _OWN_MASK):
            handle.on_activate(partial(_ask_for_mask, part))
    if any(_has_bias(module) for module in modules):
        handle.on_activate(lambda: _warn_of_rounding(handle))


def _modules(model: Any) -> Iterator[Any]:
    return (
        part
        for part in model.modules()
        if type(part).__name__ in _FORWARDS and type(part).__module__ in _FILES
    )


def _patch_forwards(patched: Mapping[Any, Callable[..., Any]]) -> Callable[[], None]:
    patches = PatchSet()
    for module, ours in patched.items():
        patches.put_method(module, "forward", ours)
    return patches.undo


def _ask_for_mask(part: Any) -> Callable[[], None]:
    """Request the mask as later versions do; transformers 5.0 and 5.1 build it in the model's file."""
    from transformers.masking_utils import create_causal_mask

    create: Any = create_causal_mask

    def ask(mask: Any, embeddings: torch.Tensor, cache_position: torch.Tensor, *rest: Any) -> Any:
        return create(part.config, embeddings, mask, cache_position, None)

    patches = PatchSet()
    patches.put_method(part, _OWN_MASK, ask)
    return patches.undo


def _bloom(
    module: Any,
    attend: Attend,
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    alibi: torch.Tensor,
    attention_mask: Any,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    q, k, v = module._reshape(module.query_key_value(hidden_states))
    out, _ = attend(
        *(module, q, k, v, attention_mask),
        dropout=module.attention_dropout.p if module.training else 0.0,
        scaling=module.inv_norm_factor,
        alibi_slopes=_slopes(module, q),
    )
    added = F.dropout(
        module.dense(out.flatten(2)), p=module.hidden_dropout, training=module.training
    )
    return residual + added, None


def _falcon(
    module: Any,
    attend: Attend,
    hidden_states: torch.Tensor,
    alibi: torch.Tensor | None,
    attention_mask: Any,
    position_ids: torch.Tensor | None = None,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    q, k, v = (x.transpose(1, 2) for x in _falcon_heads(module, hidden_states))
    options: dict[str, Any] = {"scaling": module.inv_norm_factor}
    if alibi is None:
        assert position_embeddings is not None
        q, k = _source_module(module).apply_rotary_pos_emb(q, k, *position_embeddings)
    else:  # the bias is scaled along with the scores; without a bias there is no dropout
        options["alibi_slopes"] = _slopes(module, q) * module.inv_norm_factor
        options["dropout"] = module.attention_dropout.p if module.training else 0.0
    out, _ = attend(module, q, k, v, attention_mask, **options)
    return module.dense(out.flatten(2)), None


def _falcon_heads(module: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return q [B, L, H, D], and k, v [B, L, K, D], which are not repeated for each query head."""
    fused = module.query_key_value(hidden_states)
    if not module.new_decoder_architecture:
        return module._split_heads(fused)
    groups = module.num_kv_heads
    each = module.num_heads // groups + 2
    parts = fused.unflatten(-1, (groups, each, module.head_dim))
    return parts[..., :-2, :].flatten(2, 3), parts[..., -2, :], parts[..., -1, :]


def _slopes(module: Any, q_BHLD: torch.Tensor) -> torch.Tensor:
    """Return float32 [H]: the bias that the model's own code gives to the second of two keys."""
    heads = module.num_heads
    two = torch.ones(1, 2, dtype=torch.long, device=q_BHLD.device)
    return (
        _source_module(module).build_alibi_tensor(two, heads, torch.float32)[:, 0, 1].contiguous()
    )


def _source_module(module: Any) -> ModuleType:
    return sys.modules[type(module).__module__]


_FORWARDS: dict[str, Callable[..., Any]] = {
    "BloomAttention": _bloom,
    "FalconAttention": _falcon,
    "FalconFlashAttention2": _falcon,
}
_FILES = ("transformers.models.bloom.modeling_bloom", "transformers.models.falcon.modeling_falcon")


def _check_arguments(module: Any, ours: Callable[..., Any]) -> None:
    own = forward_arguments(type(module).forward)[1:]
    known = forward_arguments(ours)[2:]
    if own != known:
        raise ConfigError(
            f"{type(module).__name__} of this version of transformers takes {own}, and {known} is known "
            "here, so its attention cannot be swapped. Use a version that this package was tested with."
        )


def forward_arguments(forward: Callable[..., Any]) -> list[str]:
    """Return the argument names that a forward of these modules must have, in order."""
    return [
        name for name in inspect.signature(forward).parameters if name not in _IGNORED_ARGUMENTS
    ]


def _check_settings(module: Any) -> None:
    if getattr(module, "slow_but_exact", False) and module.pretraining_tp > 1:
        raise ConfigError(
            "BLOOM with slow_but_exact=True and pretraining_tp > 1 adds its output projection in parts and "
            "without its bias, which is not reproduced. Set slow_but_exact=False."
        )


def _check_one_bias(module: Any) -> None:
    if _has_bias(module) and module.config._attn_implementation == "eager":
        raise ConfigError(
            "Falcon with alibi=True and attn_implementation='eager' has its ALiBi bias twice in one process: "
            "transformers adds it to the mask and to the scores. Load it with attn_implementation='sdpa', "
            "its default, which adds it once."
        )


def _has_bias(module: Any) -> bool:
    """True for Falcon with ALiBi; BLOOM's bias is of another kind."""
    return type(module).__name__.startswith("Falcon") and bool(module.config.alibi)


def _warn_of_rounding(handle: SwapHandle) -> Callable[[], None]:
    state = handle.state
    rounds = state is not None and state.layout.seq_len > EXACT_UNTIL
    if rounds and "Falcon" not in handle.warned:
        handle.warned.add("Falcon")
        error_display.warn(
            "Falcon's own ALiBi bias counts positions in bfloat16, which rounds those above "
            f"{EXACT_UNTIL}; here it is exact, so losses differ from one process by that rounding."
        )
    return lambda: None

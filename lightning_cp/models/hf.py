"""Hugging Face models, through transformers' attention *and* mask interfaces.

Both are registered: with an unknown mask name, transformers would drop masks silently. While a step is
active the model's configs name our implementation, whose masks are notes of what the model asked for
(documents and padding are in the layout; zigzag positions must not be read as packing), and a hook
completes forward calls with what a shard cannot know: global positions, labels shifted on the whole
sequence, and the count of targets. Outside of a step the configs name what they named before.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from lightning_cp.errors import ConfigError
from lightning_cp.models.handle import SwapHandle
from lightning_cp.models.hf_attention import attention_function
from lightning_cp.models.hf_call import CallCheck
from lightning_cp.models.hf_labels import label_alignment as label_alignment
from lightning_cp.models.hf_mask import mask_function
from lightning_cp.models.hf_own import has_own, swap_own
from lightning_cp.models.hf_rotary import refuse_counting_rows, tell_longest
from lightning_cp.models.report import Swap

_names = (f"lightning_cp_{number}" for number in itertools.count())


def swap_hf(model: Any, handle: SwapHandle) -> Swap:
    """Swap the attention of one ``PreTrainedModel``.

    Raises:
        ConfigError: the model does not use transformers' attention interface, or has two sequences.
    """
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    before: str = model.config._attn_implementation
    if getattr(model.config, "is_encoder_decoder", False):
        raise ConfigError(
            f"{type(model).__name__} is an encoder-decoder model: it has two sequences, and cross-attention "
            "is not sharded. Use a decoder-only or encoder-only model, or a strategy without context "
            "parallelism."
        )
    own = not _uses_interface(model) and has_own(model)
    if not own and not _uses_interface(model):
        raise ConfigError(
            f"{type(model).__name__} does not use transformers' attention interface, so its attention cannot "
            f"be swapped (0 modules). {_ALIBI if _has_alibi(model) else ''}Use a model that does (most "
            f"current ones; others do in later versions than {_version()}), or a strategy without context "
            "parallelism."
        )
    refuse_counting_rows(model)
    tell_longest(model, _all_configs(model), handle)
    name = next(_names)
    here: Any = weakref.proxy(handle)  # what is global must not keep a model alive
    attend = attention_function(here, before)
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask_function(here, before, dims=2 if own else 4))
    for interface in (AttentionInterface, AttentionMaskInterface):
        forget = weakref.finalize(handle, interface._global_mapping.pop, name, None)
        forget.atexit = False
        handle.on_undo(forget)
    configs = _all_configs(model) if own else _configs_that_change(model, name)
    handle.on_activate(lambda: _choose(configs, name))
    if own:
        swap_own(model, handle, attend)
    CallCheck(handle, _hf_modules(model), before)
    return Swap("attention of its own, patched" if own else "attention interface", before)


def _version() -> str:
    return sys.modules["transformers"].__version__


def _uses_interface(model: Any) -> bool:
    return bool(type(model)._can_set_attn_implementation())


_ALIBI = (
    "It adds an ALiBi bias to its scores in attention of its own. ALiBi is exact in "
    "context_parallel_attention(..., spec=AttentionSpec(alibi_slopes=...)), which a model of your own can "
    "call. "
)


def _has_alibi(model: Any) -> bool:
    """BLOOM and MPT have the bias always, Falcon where its config says so."""
    names = vars(sys.modules[type(model).__module__])
    return any("alibi" in name for name in names) and bool(getattr(model.config, "alibi", True))


def _hf_modules(model: Any) -> list[Any]:
    """The model and every model inside, which a step may call as well."""
    kind = sys.modules["transformers"].PreTrainedModel
    return [module for module in model.modules() if isinstance(module, kind)]


def _configs_that_change(model: Any, name: str) -> list[Any]:
    """The configs, shared or of parts, in which the model looks up its attention."""
    before = _all_configs(model)
    names = [config._attn_implementation for config in before]
    try:
        model.set_attn_implementation(name)
        return [config for config in before if config._attn_implementation == name]
    finally:
        for config, own in zip(before, names, strict=True):
            config._attn_implementation_internal = own


def _all_configs(model: Any) -> list[Any]:
    ahead = [module.config for module in _hf_modules(model)]
    found: dict[int, Any] = {}
    while ahead:
        config = ahead.pop()
        if config is None or id(config) in found:
            continue
        found[id(config)] = config
        ahead.extend(getattr(config, key, None) for key in config.sub_configs)
    return list(found.values())


def _choose(configs: list[Any], name: str) -> Callable[[], None]:
    """Name the implementation in ``configs``; returns what puts the previous names back."""
    before = [config._attn_implementation for config in configs]
    for config, own in zip(configs, before, strict=True):
        config._attn_implementation_internal = _chosen(name, own)

    def put_back() -> None:
        for config, own in zip(configs, before, strict=True):
            config._attn_implementation_internal = own

    return put_back


def _chosen(name: str, before: str) -> str:
    """The name of an implementation; of a copy of a config, which nobody would put back, the one before.

    An enumeration, as PyTorch's compiler takes those for constants in all versions, and other strings of a
    class of their own since 2.13 only.
    """

    class Chosen(StrEnum):
        NAME = name

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            return before

        def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
            return str, (before,)

    return Chosen.NAME

"""LitGPT models: in an active step they attend over the whole sequence, at their tokens' global positions.

A LitGPT model slices its rotary tables by the number of tokens that it is given, and a layer with a window
builds a mask of them. On a rank both would be of its own tokens. So every attention module gets the rows of
the tables that belong to its tokens, builds no mask, and its ``scaled_dot_product_attention`` is ours.
litgpt is never imported: a model of it is there only if somebody else has.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_cp.attention.spec import AttentionSpec
from lightning_cp.errors import ConfigError
from lightning_cp.layout.cost import Heads
from lightning_cp.models.handle import SwapHandle
from lightning_cp.models.litgpt_calls import check_of, require_rows
from lightning_cp.models.mixing import LOCAL
from lightning_cp.models.report import Swap
from lightning_cp.models.step_state import StepState
from lightning_cp.module_hooks import add_hook, replace_method
from lightning_cp.untraced import untraced

ATTEND = "scaled_dot_product_attention"
"""The method of attention modules that is replaced: of q, k, v [B, H, L, D] and a mask, out [B, L, H, D]."""
WINDOWED = "apply_sliding_window_attention"
"""Their attribute that makes them build a mask of [tokens, tokens]."""
ARGUMENTS = ["x", "cos", "sin", "mask", "input_pos", "input_pos_maxp1"]
"""Of their ``forward``, which stays their own."""


def litgpt_models(model: nn.Module) -> list[Any]:
    """The LitGPT models inside ``model``; none if litgpt was never imported."""
    file = sys.modules.get("litgpt.model")
    return [] if file is None else [part for part in model.modules() if isinstance(part, file.GPT)]


def litgpt_windows(model: nn.Module) -> list[int]:
    """The distance that each attention module of the LitGPT models inside sees back; -1: unbounded."""
    parts = (part for root in litgpt_models(model) for _, part in _attention_of(root))
    return [_window(part) for part in parts]


def litgpt_heads(model: Any) -> Heads:
    """The heads of a LitGPT model, as its attention calls have them."""
    config = model.config
    dims = [_head_dim(part) for _, part in _attention_of(model)]
    of_keys = max([*dims, 1])
    of_values = config.v_head_dim if config.latent_attention else of_keys
    return Heads(config.n_head, config.n_query_groups, (of_keys + of_values) // 2)


def swap_litgpt(model: Any, handle: SwapHandle) -> Swap:
    """Swap the attention and the positions of one LitGPT model.

    Args:
        model: a ``litgpt.GPT``; with LoRA too, which changes projections only.
        handle: says when steps begin and end, and takes attention calls.

    Raises:
        ConfigError: attention of another kind than LitGPT's own, or a setting that cannot be executed.
    """
    parts = list(_attention_of(model))
    for _, part in parts:
        _require_own(part)
    attends = {part: partial(_attend, handle, _spec(part), part.config) for _, part in parts}
    handle.on_activate(lambda: _choose(attends))
    check = check_of(model, handle)
    handle.on_undo(add_hook(model.register_forward_pre_hook, check, with_kwargs=True))
    rope = _Rope(model, handle)
    handle.on_activate(lambda: rope.forget)
    for index, part in parts:
        hook = rope.hook_of(index, part)
        handle.on_undo(add_hook(part.register_forward_pre_hook, hook, with_kwargs=True))
    return Swap("LitGPT's method, and RoPE", "its own")


def require_whole(models: Iterable[nn.Module], alone: Collection[nn.Module]) -> None:
    """Refuse a LitGPT model of which some attention is declared local.

    Raises:
        ConfigError: rotary rows are those of the whole sequence for all of its attention.
    """
    for model in models:
        for index, part in _attention_of(model):
            if part in alone:
                raise ConfigError(
                    f"attention of block {index} of {type(model).__name__}, a LitGPT model, is left alone "
                    f"({LOCAL} = True on it or around it), but the model's rotary rows are those of the "
                    "whole sequence, for all its attention. Declare the whole model, or modules without "
                    "attention."
                )


def _attention_of(model: Any) -> Iterator[tuple[int, Any]]:
    """Attention modules, each with the index of its block."""
    file = sys.modules["litgpt.model"]
    kinds = (file.CausalSelfAttention, file.MultiheadLatentAttention)
    for index, block in enumerate(model.transformer.h):
        yield from ((index, part) for part in block.modules() if isinstance(part, kinds))


def _require_own(part: Any) -> None:
    """Refuse attention whose method does something else, which ours would leave out."""
    file, kind = sys.modules["litgpt.model"], type(part)
    own = [getattr(base, ATTEND) for base in kind.__mro__ if base.__module__ == file.__name__][:1]
    if any(base.__module__ == "litgpt.adapter" for base in kind.__mro__):
        raise ConfigError(
            "LitGPT's adapters (litgpt.adapter, litgpt.adapter_v2) have a second attention, over their "
            "adaption prompt, which is not available under context parallelism. Use LoRA (litgpt.lora) or "
            "the whole model (litgpt.model), or a strategy without context parallelism."
        )
    if ATTEND in vars(part) or getattr(kind, ATTEND) not in own:
        raise ConfigError(
            f"{kind.__module__}.{kind.__name__} has a {ATTEND} of its own, which would be replaced while "
            "a step is active: what it does would be left out. Use LitGPT's own attention, or a strategy "
            "without context parallelism."
        )
    taken = list(inspect.signature(part.forward).parameters)
    if taken != ARGUMENTS:
        raise ConfigError(
            f"{kind.__module__}.{kind.__name__} takes {taken}, and {ARGUMENTS} is known here, so that it "
            "cannot be told positions. Use a version of litgpt that this package was tested with (0.5.13)."
        )


def _choose(attends: Mapping[Any, Callable[..., torch.Tensor]]) -> Callable[[], None]:
    """Replace the method, and have no masks built; returns what puts both back."""
    windowed = {part: getattr(part, WINDOWED) for part in attends if hasattr(part, WINDOWED)}
    undo = [replace_method(part, ATTEND, ours) for part, ours in attends.items()]
    for part in windowed:
        setattr(part, WINDOWED, False)

    def put_back() -> None:
        for each in undo:
            each()
        for part, own in windowed.items():
            setattr(part, WINDOWED, own)

    return put_back


@untraced
def _attend(
    handle: SwapHandle,
    spec: AttentionSpec,
    config: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """[B, L, H, Dv] of q, k [B, H, L, D] and v [B, H, L, Dv], whose heads are repeated for each query head.

    One of each group is given on, by stride.
    """
    if mask is not None:
        raise ConfigError(
            f"LitGPT's attention was given a dense mask of shape {tuple(mask.shape)}, which cannot be "
            "sharded. What can be expressed: causality, sliding_window_size, and packed documents "
            "(cu_seqlens or segment_ids in the batch)."
        )
    repeats = k.shape[1] // config.n_query_groups
    q_BLHD, k_BLKD, v_BLKD = (x.transpose(1, 2) for x in (q, k[:, ::repeats], v[:, ::repeats]))
    return handle.attention(q_BLHD, k_BLKD, v_BLKD, spec)


def _spec(part: Any) -> AttentionSpec:
    """The spec of what the module's own method computes."""
    config = part.config
    scale = 1.0 / math.sqrt(config.attention_scores_scalar or _head_dim(part))
    return AttentionSpec(
        softmax_scale=scale * part.mscale * part.mscale,
        window=(_window(part), -1),
        softcap=config.attention_logit_softcapping or 0.0,
    )


def _head_dim(part: Any) -> int:
    """Of queries and keys."""
    config = part.config
    return config.qk_head_dim if config.latent_attention else config.head_size


def _window(part: Any) -> int:
    """The number of tokens before its own that a query sees: theirs counts the query itself; -1: all.

    Raises:
        ConfigError: a window in which a query would not see itself.
    """
    if not getattr(part, WINDOWED, False):
        return -1
    size = part.config.sliding_window_size
    if size < 1:
        raise ConfigError(
            f"sliding_window_size must be at least 1 token, got {size}. "
            "Set it to None for no window."
        )
    return size - 1


class _Rope:
    """The rows of a model's rotary tables for a rank's tokens: looked up once in a step, for all layers.

    Recomputation in backward finds them here too, as it runs within the step.
    """

    def __init__(self, model: Any, handle: SwapHandle) -> None:
        self._model = model
        self._handle = handle
        self._rows: tuple[torch.Tensor, torch.Tensor] | None = None

    def forget(self) -> None:
        """The step is over."""
        self._rows = None

    def hook_of(self, index: int, part: Any) -> Callable[..., Any]:
        """A forward pre-hook for the attention of one block."""
        signature = inspect.signature(part.forward)

        @untraced
        def give_rows(part: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            state = self._handle.state
            if state is None:
                return None
            given = signature.bind(*args, **kwargs).arguments
            rows = self._of_step(state)
            which = getattr(self._model.config, "rope_indices", None)
            if which is not None:  # two tables side by side; a layer has one of them
                rows = tuple(x[..., which[index]] for x in rows)
            given["cos"], given["sin"] = (x.to(given["cos"].dtype) for x in rows)
            return (), given

        return give_rows

    def _of_step(self, state: StepState) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [B or 1, L, elements], or [..., 2] where there are two tables."""
        if self._rows is None:
            require_rows(self._model, state)
            cos, sin = self._model.cos, self._model.sin
            at = state.position_ids.to(cos.device)
            # Not by indexing: that takes a negative position for one from behind.
            every = (x.index_select(0, at.flatten()) for x in (cos, sin))
            cos, sin = (x.unflatten(0, at.shape) for x in every)
            self._rows = cos, sin
        return self._rows

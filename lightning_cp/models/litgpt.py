"""LitGPT models: attention over the whole sequence at global positions, and checks of their calls.

A LitGPT model slices its rotary tables by the number of tokens that it is given, and a layer with a window
builds a mask of that size. On a rank both would describe local tokens only. While a step is active, every
attention module therefore gets the table rows of its tokens' global positions, builds no mask, and its
``scaled_dot_product_attention`` is replaced. This file never imports litgpt: a model of it exists only if
the user's code imported it.
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
from lightning_cp.batch.step_state import StepState
from lightning_cp.errors import ConfigError, ShapeError
from lightning_cp.layout.cost import HeadCounts
from lightning_cp.models.guards.token_mixing import LOCAL
from lightning_cp.models.handle import SwapHandle, SwapMethod
from lightning_cp.utils.patching import PatchSet, add_hook
from lightning_cp.utils.tracing import exclude_from_compile

ATTENTION_METHOD = "scaled_dot_product_attention"
"""Replaced method of attention modules: of q, k, v [B, H, L, D] and a mask, out [B, L, H, D]."""
WINDOW_FLAG = "apply_sliding_window_attention"
"""Attribute that makes an attention module build a mask [tokens, tokens]."""
FORWARD_ARGUMENTS = ["x", "cos", "sin", "mask", "input_pos", "input_pos_maxp1"]
"""Arguments of an attention module's ``forward``, which is not replaced."""


def make_call_check(model: Any, handle: SwapHandle) -> Callable[..., None]:
    """Return a forward pre-hook that checks a call of a whole model before any data move."""
    signature = inspect.signature(model.forward)

    @exclude_from_compile
    def check(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        state = handle.state
        if state is None:
            return
        if state.position_ids.dim() != 2:
            raise ConfigError(
                f"position_ids of the batch, {tuple(state.position_ids.shape)} on this rank, have several "
                "positions for each token, and a LitGPT model has one. Give [rows, tokens], or none."
            )
        call = signature.bind(*args, **kwargs).arguments
        if call.get("input_pos") is not None:
            raise ConfigError(
                "a LitGPT model was called with input_pos=, which is for its key/value cache: a cache is not "
                "sharded. Leave it out (positions are those of the batch), and generate outside of steps."
            )
        if call.get("idx") is not None:
            _check_tokens(call["idx"], state)
        check_rope_rows(model, state)
        _check_declared(state)

    return check


def _check_tokens(idx: torch.Tensor, state: StepState) -> None:
    rows, tokens = state.position_ids.shape
    if idx.shape[1] != tokens or rows not in (1, idx.shape[0]):
        raise ShapeError(
            f"a LitGPT model was called with tokens {tuple(idx.shape)}, but this rank holds {tokens} tokens "
            f"of each of {'all' if rows == 1 else rows} rows of the batch. Call it with all of them: inputs "
            "and targets are shifted against each other in the dataset (labels='aligned'), not in the step."
        )


def check_rope_rows(model: Any, state: StepState) -> None:
    """Check that the rotary tables have a row for every position of the whole batch: all ranks agree."""
    length, longest, limit = state.layout.seq_len, state.positions.longest, model.max_seq_length
    if max(length, longest + 1) <= limit:
        return
    what = f"sequences have {length} tokens"
    if length <= limit:
        what = f"the position_ids of the batch go up to {longest}"
    raise ConfigError(
        f"max_seq_length of a LitGPT model ({type(model).__name__}) is {limit}, but {what} over all ranks, "
        f"and rotary embeddings need a row for every position. Set model.max_seq_length = "
        f"{max(length, longest + 1)} or more (its config's block_size, {model.config.block_size}, is the "
        "most that it takes)."
    )


def _check_declared(state: StepState) -> None:
    if state.positions.not_sequential and not state.positions.packed:
        raise ConfigError(
            "the position_ids of the batch do not count 0, 1, 2, ..., but the batch declares no documents, "
            "and a LitGPT model takes no positions: in one process it would number the tokens of a row from "
            "0 on. For packed documents put cu_seqlens or segment_ids into the batch as well, which isolate "
            "them; otherwise take position_ids out."
        )


def litgpt_models(model: nn.Module) -> list[Any]:
    """Return the LitGPT models inside ``model``; none if litgpt was never imported."""
    file = sys.modules.get("litgpt.model")
    return [] if file is None else [part for part in model.modules() if isinstance(part, file.GPT)]


def litgpt_windows(model: nn.Module) -> list[int]:
    """Return the left window of each attention module of the LitGPT models inside; -1: unbounded."""
    parts = (part for root in litgpt_models(model) for _, part in _attention_of(root))
    return [_window(part) for part in parts]


def litgpt_heads(model: Any) -> HeadCounts:
    """Return the head counts of a LitGPT model's attention calls."""
    config = model.config
    dims = [_head_dim(part) for _, part in _attention_of(model)]
    of_keys = max([*dims, 1])
    of_values = config.v_head_dim if config.latent_attention else of_keys
    return HeadCounts(config.n_head, config.n_query_groups, (of_keys + of_values) // 2)


def swap_litgpt(model: Any, handle: SwapHandle) -> SwapMethod:
    """Swap the attention and the positions of one LitGPT model.

    Args:
        model: a ``litgpt.GPT``; with LoRA too, which changes projections only.
        handle: signals the begin and end of steps, and executes attention calls.

    Raises:
        ConfigError: attention of another kind than LitGPT's own, or a setting that cannot be executed.
    """
    parts = list(_attention_of(model))
    for _, part in parts:
        _check_supported(part)
    attends = {part: partial(_attend, handle, _spec(part), part.config) for _, part in parts}
    handle.on_activate(lambda: _patch_attention(attends))
    check = make_call_check(model, handle)
    handle.on_undo(add_hook(model.register_forward_pre_hook, check, with_kwargs=True))
    rope = _RopeRows(model, handle)
    handle.on_activate(lambda: rope.forget)
    for index, part in parts:
        hook = rope.hook_of(index, part)
        handle.on_undo(add_hook(part.register_forward_pre_hook, hook, with_kwargs=True))
    return SwapMethod("LitGPT's method, and RoPE", "its own")


def check_no_local_attention(models: Iterable[nn.Module], local: Collection[nn.Module]) -> None:
    """Check that no attention of a LitGPT model is declared local.

    Raises:
        ConfigError: some is, but the model's rotary rows describe the whole sequence for all attention.
    """
    for model in models:
        for index, part in _attention_of(model):
            if part in local:
                raise ConfigError(
                    f"attention of block {index} of {type(model).__name__}, a LitGPT model, is left alone "
                    f"({LOCAL} = True on it or around it), but the model's rotary rows are those of the "
                    "whole sequence, for all its attention. Declare the whole model, or modules without "
                    "attention."
                )


def _attention_of(model: Any) -> Iterator[tuple[int, Any]]:
    """Yield the attention modules, each with the index of its block."""
    file = sys.modules["litgpt.model"]
    kinds = (file.CausalSelfAttention, file.MultiheadLatentAttention)
    for index, block in enumerate(model.transformer.h):
        yield from ((index, part) for part in block.modules() if isinstance(part, kinds))


def _check_supported(part: Any) -> None:
    """Check that the replaced method is LitGPT's own, and that ``forward`` has the known arguments."""
    file, kind = sys.modules["litgpt.model"], type(part)
    own = [
        getattr(base, ATTENTION_METHOD) for base in kind.__mro__ if base.__module__ == file.__name__
    ][:1]
    if any(base.__module__ == "litgpt.adapter" for base in kind.__mro__):
        raise ConfigError(
            "LitGPT's adapters (litgpt.adapter, litgpt.adapter_v2) have a second attention, over their "
            "adaption prompt, which is not available under context parallelism. Use LoRA (litgpt.lora) or "
            "the whole model (litgpt.model), or a strategy without context parallelism."
        )
    if ATTENTION_METHOD in vars(part) or getattr(kind, ATTENTION_METHOD) not in own:
        raise ConfigError(
            f"{kind.__module__}.{kind.__name__} has its own {ATTENTION_METHOD}, which would be replaced "
            "while a step is active: what it does would be left out. Use LitGPT's own attention, or a "
            "strategy without context parallelism."
        )
    taken = list(inspect.signature(part.forward).parameters)
    if taken != FORWARD_ARGUMENTS:
        raise ConfigError(
            f"{kind.__module__}.{kind.__name__} takes {taken}, and {FORWARD_ARGUMENTS} is known here, so "
            "that it cannot receive positions. Use a version of litgpt that this package was tested with "
            "(0.5.13)."
        )


def _patch_attention(attends: Mapping[Any, Callable[..., torch.Tensor]]) -> Callable[[], None]:
    """Replace the attention method and disable mask building; return the undo function."""
    patches = PatchSet()
    for part, ours in attends.items():
        patches.put_method(part, ATTENTION_METHOD, ours)
        if hasattr(part, WINDOW_FLAG):
            patches.put_value(part, WINDOW_FLAG, False)
    return patches.undo


@exclude_from_compile
def _attend(
    handle: SwapHandle,
    spec: AttentionSpec,
    config: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return out [B, L, H, Dv] of q, k [B, H, L, D] and v [B, H, L, Dv].

    LitGPT repeats k and v for each query head; a stride selects one head of each group.
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
    """Return the spec of the attention that the module's own method computes."""
    config = part.config
    scale = 1.0 / math.sqrt(config.attention_scores_scalar or _head_dim(part))
    return AttentionSpec(
        softmax_scale=scale * part.mscale * part.mscale,
        window=(_window(part), -1),
        softcap=config.attention_logit_softcapping or 0.0,
    )


def _head_dim(part: Any) -> int:
    """Return the head dim of queries and keys."""
    config = part.config
    return config.qk_head_dim if config.latent_attention else config.head_size


def _window(part: Any) -> int:
    """Return the number of tokens before its own that a query sees; -1: all.

    LitGPT's window size counts the query itself.

    Raises:
        ConfigError: a window in which a query would not see itself.
    """
    if not getattr(part, WINDOW_FLAG, False):
        return -1
    size = part.config.sliding_window_size
    if size < 1:
        raise ConfigError(
            f"sliding_window_size must be at least 1 token, got {size}. "
            "Set it to None for no window."
        )
    return size - 1


class _RopeRows:
    """Rows of a model's rotary tables for a rank's tokens, looked up once per step for all layers.

    Recomputation in backward uses the same rows, as it runs within the step.
    """

    def __init__(self, model: Any, handle: SwapHandle) -> None:
        self._model = model
        self._handle = handle
        self._rows: tuple[torch.Tensor, torch.Tensor] | None = None

    def forget(self) -> None:
        """Drop the rows when a step ends."""
        self._rows = None

    def hook_of(self, index: int, part: Any) -> Callable[..., Any]:
        """Return a forward pre-hook for the attention of one block."""
        signature = inspect.signature(part.forward)

        @exclude_from_compile
        def give_rows(part: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            state = self._handle.state
            if state is None:
                return None
            call = signature.bind(*args, **kwargs).arguments
            rows = self._of_step(state)
            which = getattr(self._model.config, "rope_indices", None)
            if which is not None:  # two tables side by side; a layer uses one of them
                rows = tuple(x[..., which[index]] for x in rows)
            call["cos"], call["sin"] = (x.to(call["cos"].dtype) for x in rows)
            return (), call

        return give_rows

    def _of_step(self, state: StepState) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin [B or 1, L, elements], or [..., 2] where there are two tables."""
        if self._rows is None:
            check_rope_rows(self._model, state)
            cos, sin = self._model.cos, self._model.sin
            at = state.position_ids.to(cos.device)
            # Not by indexing: a negative position would count from the end.
            every = (x.index_select(0, at.flatten()) for x in (cos, sin))
            cos, sin = (x.unflatten(0, at.shape) for x in every)
            self._rows = cos, sin
        return self._rows

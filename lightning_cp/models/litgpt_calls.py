"""Calls of a LitGPT model that are refused while a step is active; litgpt is not imported here."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from lightning_cp.errors import ConfigError, ShapeError
from lightning_cp.models.handle import SwapHandle
from lightning_cp.models.step_state import StepState
from lightning_cp.untraced import untraced


def check_of(model: Any, handle: SwapHandle) -> Callable[..., None]:
    """A forward pre-hook for a whole model: what is wrong with a call is said before any data move."""
    signature = inspect.signature(model.forward)

    @untraced
    def check(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        state = handle.state
        if state is None:
            return
        if state.position_ids.dim() != 2:
            raise ConfigError(
                f"position_ids of the batch, {tuple(state.position_ids.shape)} on this rank, have several "
                "positions for each token, and a LitGPT model has one. Give [rows, tokens], or none."
            )
        given = signature.bind(*args, **kwargs).arguments
        if given.get("input_pos") is not None:
            raise ConfigError(
                "a LitGPT model was called with input_pos=, which is for its key/value cache: a cache is not "
                "sharded. Leave it out (positions are those of the batch), and generate outside of steps."
            )
        if given.get("idx") is not None:
            _require_tokens(given["idx"], state)
        require_rows(model, state)
        _require_declared(state)

    return check


def _require_tokens(idx: torch.Tensor, state: StepState) -> None:
    rows, tokens = state.position_ids.shape
    if idx.shape[1] != tokens or rows not in (1, idx.shape[0]):
        raise ShapeError(
            f"a LitGPT model was called with tokens {tuple(idx.shape)}, but this rank holds {tokens} tokens "
            f"of each of {'all' if rows == 1 else rows} rows of the batch. Call it with all of them: inputs "
            "and targets are shifted against each other in the dataset (labels='aligned'), not in the step."
        )


def require_rows(model: Any, state: StepState) -> None:
    """Of the whole batch, so that all ranks raise or none."""
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


def _require_declared(state: StepState) -> None:
    if state.positions.count_anew and not state.positions.packed:
        raise ConfigError(
            "the position_ids of the batch do not count 0, 1, 2, ..., but the batch declares no documents, "
            "and a LitGPT model takes no positions: in one process it would number the tokens of a row from "
            "0 on. For packed documents put cu_seqlens or segment_ids into the batch as well, which isolate "
            "them; otherwise take position_ids out."
        )

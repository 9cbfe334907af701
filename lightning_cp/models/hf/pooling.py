"""Heads of Hugging Face models with one value per row: the token that they take is found on any rank.

transformers takes the last token that is not padding (``score`` of decoders), or the first one (poolers and
classification heads of encoders). A hook puts the values of that token of the whole row where the model takes
them from, so that its own code is not changed.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_cp.comm.reduce import all_max
from lightning_cp.errors import ConfigError
from lightning_cp.layout.axes import Flat
from lightning_cp.loss.sequence import pick_positions
from lightning_cp.models.handle import SwapHandle
from lightning_cp.models.hf.positions import parameters_of
from lightning_cp.utils.patching import add_hook
from lightning_cp.utils.tensors import to_device, to_list
from lightning_cp.utils.tracing import exclude_from_compile

_OTHER_POOLING = re.compile(r"\.(mean|sum|amax|max|gather)\(")

_CHECKS = 8
"""Padded batches of steps with gradients whose tokens are compared with the mask."""


def has_row_head(model: Any) -> bool:
    """True if a Hugging Face model has one value per row, by its class or its loss function."""
    if type(model).__name__.endswith("ForSequenceClassification"):
        return True
    # Reading the loss_function of a model that takes no labels would warn of an unknown loss_type.
    if "labels" not in parameters_of(model):
        return False
    loss = getattr(model, "loss_function", None)
    return getattr(loss, "__name__", "") == "ForSequenceClassificationLoss"


class RowHead:
    """The head of a model with one value per row.

    Args:
        handle: holds the active step, if there is one.
        model: whose class ends in ``ForSequenceClassification``.
    """

    def __init__(self, handle: SwapHandle, model: Any) -> None:
        self._handle = handle
        self._model = model
        self._ids: torch.Tensor | None = None
        self._checks = 0
        self.is_supported = self._attach()
        """The way in which the model takes a token is known."""

    def _attach(self) -> bool:
        model = self._model
        score = getattr(model, "score", None)
        if isinstance(score, nn.Module) and "last_non_pad_token" in _source(model):
            self._hook(score.register_forward_hook, self._last_of_scores)
            return True
        base = getattr(model, "base_model", None)
        pooler = getattr(base, "pooler", None)
        parts = [model, *model.children(), *([pooler] if pooler is not None else [])]
        if base is None or base is model or not self._takes_first(parts):
            return False
        if pooler is not None:
            self._hook(pooler.register_forward_pre_hook, self._first_of_input)
        else:
            self._hook(base.register_forward_hook, self._first_of_output)
        return True

    def _takes_first(self, parts: list[Any]) -> bool:
        """True if the code of a model, its heads and its pooler takes the first token, and no others."""
        code = "".join(map(_source, parts))
        chosen = getattr(self._model.config, "classifier_pooling", None)
        only = chosen == "cls" if chosen is not None else not _OTHER_POOLING.search(code)
        return "[:, 0" in code and only

    def _hook(self, register: Callable[..., Any], hook: Callable[..., Any]) -> None:
        self._handle.on_undo(add_hook(register, exclude_from_compile(hook)))

    def begin_call(self, call: dict[str, Any]) -> None:
        """Record the token ids of the model's next call."""
        self._ids = call.get("input_ids")

    def _last_of_scores(self, module: nn.Module, args: Any, scores: torch.Tensor) -> Any:
        """Return the scores of each row's last token in place of those of every token."""
        if self._handle.state is None:
            return None
        ids, self._ids = self._ids, None
        pad = self._model.config.get_text_config().pad_token_id
        positions, size = self._positions(scores.device)
        at = torch.full(scores.shape[:1], size - 1, device=scores.device)
        if ids is None or pad is None:
            self._check_not_padding(-1)
        else:
            is_token = (ids != pad) & (positions < size)
            own = torch.where(is_token, positions, 0).amax(1)
            at = all_max(own, self._handle.mesh.group(Flat.CP))
            self._check_not_masked(at, pad)
        return self._pick(scores, at)[:, None].expand_as(scores)

    def _first_of_input(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        if self._handle.state is None:
            return None
        return self._first(args[0])[:, None], *args[1:]

    def _first_of_output(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._handle.state is None:
            return None
        hidden = self._first(output[0])[:, None].expand_as(output[0])
        if isinstance(output, tuple):
            return hidden, *output[1:]
        output["last_hidden_state"] = hidden
        return output

    def _first(self, hidden: torch.Tensor) -> torch.Tensor:
        self._check_not_padding(0)
        return self._pick(hidden, torch.zeros(hidden.shape[0], device=hidden.device))

    def _check_not_padding(self, at: int) -> None:
        """Check that the first (0) or last (-1) position of each row is a token.

        Raises:
            ConfigError: on every rank, some row has padding there.
        """
        assert self._handle.state is not None
        documents = self._handle.state.layout.documents
        if documents is None:
            return
        bound = 0 if at == 0 else documents.seq_len
        padded = [n for n, row in enumerate(documents.rows) if not (len(row) and bound in row[at])]
        if padded:
            first = "first", "Pad on the right (tokenizer.padding_side='right')."
            last = "last", "Pad on the left, or pass input_ids and set config.pad_token_id."
            which, instead = first if at == 0 else last
            raise ConfigError(
                f"{type(self._model).__name__} makes its output of the {which} position of each row, which "
                f"is padding in row {padded[0]} of the batch: in one process padding attends to the row's "
                f"tokens, and here it has no attention. {instead}"
            )

    def _check_not_masked(self, at: torch.Tensor, pad: int) -> None:
        """Check that position ``at`` [B] of each row is a token of the mask, for rows with padding.

        Reading ``at`` makes the host wait, so steps with gradients are checked a few times only: what pads a
        batch is not the id of the config in all batches or in none.

        Raises:
            ConfigError: on every rank, the mask excludes a row's token.
        """
        assert self._handle.state is not None
        documents = self._handle.state.layout.documents
        if documents is None or (torch.is_grad_enabled() and self._checks >= _CHECKS):
            return
        self._checks += torch.is_grad_enabled()
        for number, (row, chosen) in enumerate(zip(documents.rows, to_list(at), strict=False)):
            if not any(start <= chosen < end for start, end in row):
                raise ConfigError(
                    f"{type(self._model).__name__} makes its output of position {chosen} of row {number}, "
                    f"the last whose id is not pad_token_id={pad}, but attention_mask excludes it. Set "
                    "config.pad_token_id to the id that pads the batch."
                )

    def _pick(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Return the values [B, ...] of the tokens at positions ``at`` [B] of the whole rows."""
        positions, _ = self._positions(x.device)
        return pick_positions(x, at, positions).over(self._handle.mesh.group(Flat.CP))

    def _positions(self, device: torch.device) -> tuple[torch.Tensor, int]:
        """Return the positions [L] of this rank's tokens, and the length of the sequence."""
        assert self._handle.state is not None
        layout = self._handle.state.layout
        positions = layout.positions(self._handle.mesh.cp_rank)
        return to_device(positions, device), layout.seq_len


def _source(module: Any) -> str:
    try:
        return inspect.getsource(inspect.unwrap(type(module).forward))
    except (OSError, TypeError):  # made without a file
        return ""

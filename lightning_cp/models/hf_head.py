"""A Hugging Face model's loss without its logits: while a step is active, its head notes what it was given.

A model that is called with ``labels=`` gets ``ChunkedLogits`` of its head, and computes its loss of these
as it would of any: by transformers' loss functions or its own ``cross_entropy``. Called without labels it
makes its logits as ever. Outside of a step the head is the plain head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lightning_cp.errors import ConfigError
from lightning_cp.length.chunked_logits import ChunkedLogits, Head
from lightning_cp.models.hf_call import by_name
from lightning_cp.models.hf_signature import parameters_of
from lightning_cp.module_hooks import add_hook, replace_method
from lightning_cp.untraced import untraced


def chunk_heads(models: Sequence[Any], chunk_tokens: int) -> list[ChunkedHead]:
    """The heads of all models that have one and take labels; ``enter`` of each begins a step.

    Args:
        models: Hugging Face models, none inside another.
        chunk_tokens: whose logits exist at once.

    Raises:
        ConfigError: no model has a head, or a head is no plain ``nn.Linear``.
    """
    found = [
        (model, head)
        for model in models
        if "labels" in parameters_of(model) and (head := _head_of(model)) is not None
    ]
    if not found:
        names = ", ".join(type(model).__name__ for model in models) or "no Hugging Face model"
        raise ConfigError(
            f"chunked_loss={chunk_tokens} computes the loss of a Hugging Face language model behind its "
            "head, but there is none that has a head (get_output_embeddings()) and takes labels: "
            f"{names}. For a module of your own call lightning_cp.linear_cross_entropy in the step, and "
            "leave chunked_loss away."
        )
    return [ChunkedHead(model, head, chunk_tokens) for model, head in found]


def _head_of(model: Any) -> nn.Module | None:
    """The layer that makes logits, which must be a plain one.

    Raises:
        ConfigError: it is another kind of layer.
    """
    try:
        head = model.get_output_embeddings()
    except (AttributeError, NotImplementedError):  # what transformers says of models that have none
        return None
    if head is not None and (type(head) is not nn.Linear or "forward" in vars(head)):
        raise ConfigError(
            f"chunked_loss: the head of {type(model).__name__} is a {type(head).__name__}, and only a plain "
            "nn.Linear is known to compute weight times hidden states plus bias (LoRA, quantised and "
            "parametrised layers do something else). Leave the head out of it, or leave chunked_loss away."
        )
    return head


class ChunkedHead:
    """The head of one model, replaced from ``enter`` to what it returns."""

    def __init__(self, model: Any, head: nn.Module, chunk_tokens: int) -> None:
        self._model = model
        self._head = head
        self._chunk_tokens = chunk_tokens
        self._calls: list[list[Head]] = []
        """Of each call of the model that is under way: what its head was given."""
        self._made_whole = False
        """A call that trains was given no labels."""

    def enter(self) -> Callable[[], None]:
        """Replace the head's forward; returns what puts it back."""
        before, after = untraced(self._before), untraced(self._after)
        model = self._model
        undo = [
            add_hook(model.register_forward_pre_hook, before, with_kwargs=True),
            add_hook(model.register_forward_hook, after, always_call=True),
            replace_method(self._head, "forward", untraced(self._forward)),
        ]

        def put_back() -> None:
            for each in undo:
                each()
            self._forget()

        return put_back

    def report(self) -> str | None:
        """That logits were made all the same; ``None`` if they were not."""
        if not self._made_whole:
            return None
        return (
            f"chunked_loss: {type(self._model).__name__} was called without labels=, so its logits were made "
            "whole. Pass labels= to the model, or compute the loss by lightning_cp.linear_cross_entropy."
        )

    def _forward(self, hidden: torch.Tensor) -> ChunkedLogits | torch.Tensor:
        head: Any = self._head
        if not self._calls or self._calls[-1] is _WHOLE:
            return F.linear(hidden, head.weight, head.bias)
        _require_plain(head)
        noted = Head(hidden, head.weight, head.bias, self._chunk_tokens)
        self._calls[-1].append(noted)
        return noted.logits()

    def _before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if model is not self._model:  # a copy of it
            return
        labelled = by_name(model, args, kwargs)[1].get("labels") is not None
        self._calls.append([] if labelled else _WHOLE)
        self._made_whole |= not labelled and torch.is_grad_enabled()

    def _after(self, model: Any, args: Any, output: Any) -> None:
        if model is self._model and self._calls:
            for head in self._calls.pop():
                head.tensors = None  # whoever keeps the logits keeps nothing else

    def _forget(self) -> None:
        while self._calls:
            for head in self._calls.pop():
                head.tensors = None


_WHOLE: list[Head] = []
"""In the place of what a call's head was given, if its logits are made."""


def _require_plain(head: nn.Module) -> None:
    """Refuse a head that an engine has changed since it was looked at.

    Raises:
        ConfigError: it was wrapped by itself, or another layer was put over it.
    """
    if type(head) is nn.Linear:
        return
    raise ConfigError(
        f"chunked_loss: the head became a {type(head).__name__}, whose weight is whole within its own "
        "forward only, while the loss is computed after it. Leave the head out of wrap_modules: it "
        "then belongs to the model itself."
    )

"""Outputs that a Hugging Face model makes of a whole sequence: a rank would make them of its own tokens.

Heads of one value per sequence are refused by name, and so is what a model without a head has pooled. What
else has no dimension along the sequence (a second head's values, the logits of the last tokens) may be left
unused; a gradient that comes to it says that it was not. Losses among it are looked at in ``hf_loss``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any, NoReturn

import torch

from lightning_cp.errors import ConfigError

_HEADS = re.compile(r"For(SequenceClassification|MultipleChoice|NextSentencePrediction)$")
_POOLED = "pooler_output"


def refuse_head(model: Any, given: Mapping[str, Any]) -> None:
    """Before a call: refuse a model of one value per sequence, and a loss that is a softmax over tokens.

    Raises:
        ConfigError: naming the class.
    """
    name = type(model).__name__
    of_loss = getattr(getattr(model, "loss_function", None), "__name__", "")
    if _HEADS.search(name) or of_loss == "ForSequenceClassificationLoss":
        raise ConfigError(
            f"{name} makes one value of a sequence, from one of its tokens, which only one rank has. What "
            "works: a value for each token (ForTokenClassification, ForCausalLM, ForMaskedLM, or the model "
            "without its head), with a label for each, -100 where there is none."
        )
    if given.get("start_positions") is not None or given.get("end_positions") is not None:
        raise ConfigError(
            f"{name} is called with start_positions or end_positions: its loss is a softmax over tokens, of "
            "which a rank has a part. Call it without, in predict_step; train without context parallelism."
        )


def watch_output(model: Any, output: Any, local_len: int) -> None:
    """After the outermost call: refuse what was pooled, and have the rest of that kind notice its use.

    Args:
        model: that was called by the step.
        output: what it returned.
        local_len: tokens of a rank.

    Raises:
        ConfigError: a model without a head, which returns its pooled token for the step to use.
    """
    name = type(model).__name__
    if isinstance(output, tuple):
        pooled = getattr(model, "pooler", None) is not None
        fields = {str(place): value for place, value in enumerate(output)}
    else:
        fields = dict(output) if isinstance(output, Mapping) else {}
        pooled = isinstance(fields.get(_POOLED), torch.Tensor)
    if pooled:
        raise ConfigError(
            f"{name} returns {_POOLED}, made from one of a rank's own tokens, where one process takes one of "
            "the whole sequence. If nothing needs it, leave the pooling layer out: model.pooler = None, or "
            "add_pooling_layer=False. Otherwise use a strategy without context parallelism."
        )
    for key, value in fields.items():
        if not isinstance(value, torch.Tensor) or not value.requires_grad or not value.dim():
            continue
        if local_len not in value.shape:
            value.register_hook(partial(_refuse_use, name, key, tuple(value.shape)))


def _refuse_use(name: str, key: str, shape: tuple[int, ...], gradient: torch.Tensor) -> NoReturn:
    raise ConfigError(
        f"the loss uses {key} {shape} of {name}, which has no dimension along the sequence, so that each "
        "rank makes it of its own tokens. What works: a loss of values of each token (all logits, "
        "last_hidden_state)."
    )

"""A Hugging Face model of a ``config.json``, without values or memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lightning_cp.errors import ConfigError


def model_on_meta(config: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    """The causal language model that a ``config.json`` describes, on the meta device, to be trained.

    Args:
        config: its content; ``model_type`` names the family.
        dtype: of its parameters, whatever ``config`` says of files.

    Raises:
        ConfigError: transformers is not installed, or has no causal language model of that kind.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError(
            "building a model from its config.json needs transformers. Install lightning_cp[hf]."
        ) from error
    settings = dict(config)
    kind = settings.pop("model_type", None)
    try:
        read = AutoConfig.for_model(kind, **settings)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(read, dtype=dtype)
    except ValueError as error:
        raise ConfigError(
            f"transformers makes no causal language model of model_type={kind!r}: {error}"
        ) from error
    return model.train()

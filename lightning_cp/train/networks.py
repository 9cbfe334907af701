"""A Hugging Face model of a ``config.json``, without values or memory: engines give it both, part by part."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_cp.errors import ConfigError
from lightning_cp.planner.families import read_config


def model_on_meta(
    config: Mapping[str, Any] | str | Path, dtype: torch.dtype | str = "float32"
) -> nn.Module:
    """The causal language model that a ``config.json`` describes, on the meta device, to be trained.

    Args:
        config: its content, in which ``model_type`` names the family; or the file, or its folder.
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
    settings = read_config(config) if isinstance(config, str | Path) else dict(config)
    dtype = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
    kind = settings.pop("model_type", None)
    try:
        read = AutoConfig.for_model(kind, **settings)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(read, dtype=dtype)
    except ValueError as error:
        told = re.split(r" (?:Should contain|Model type should be) one of", str(error))[0]
        raise ConfigError(  # without the list of hundreds of others
            f"transformers makes no causal language model of model_type={kind!r}: {told}"
        ) from error
    return model.train()

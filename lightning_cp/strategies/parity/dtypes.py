"""The dtypes that a run computes in, besides its parameters'."""

from __future__ import annotations

import torch

from lightning_cp.strategies.arguments.settings import Settings
from lightning_cp.strategies.engines.checks import precision_of


def dtypes_of(precision: str, settings: Settings) -> frozenset[torch.dtype]:
    """By the name of Lightning's precision, and by what an engine gathers parameters in."""
    found: set[torch.dtype] = set()
    if "bf16" in precision or "transformer-engine" in precision:
        found.add(torch.bfloat16)
    elif "16" in precision:
        found.add(torch.float16)
    policy = precision_of(settings.mixed_precision).param_dtype
    return frozenset(found | ({policy} if policy is not None else set()))

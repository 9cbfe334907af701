"""What the settings replace in a model while a step is active, besides attention."""

from __future__ import annotations

from torch import nn

from lightning_cp.models.hf_head import chunk_heads
from lightning_cp.models.patches import Patch
from lightning_cp.models.swap import hf_models
from lightning_cp.strategies.arguments.settings import Settings


def patches_of(model: nn.Module, settings: Settings) -> list[Patch]:
    """To be entered when a step begins, in this order.

    Args:
        model: the user's.
        settings: with ``chunked_loss``.

    Raises:
        ConfigError: a model that does not have what is to be replaced.
    """
    if settings.loss_chunk_tokens is None:
        return []
    return [head.enter for head in chunk_heads(hf_models(model), settings.loss_chunk_tokens)]

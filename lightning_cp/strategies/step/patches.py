"""Replacements in a model while a step is active, besides attention."""

from __future__ import annotations

from torch import nn

from lightning_cp.models.hf_head import chunk_heads
from lightning_cp.models.mlps import tile_mlps
from lightning_cp.models.patches import StepPatches
from lightning_cp.models.recomputed import recompute_blocks
from lightning_cp.models.swap import hf_models
from lightning_cp.strategies.arguments.settings import Settings


def patches_of(model: nn.Module, settings: Settings) -> StepPatches:
    """For the settings that save memory of long sequences.

    Raises:
        ConfigError: a model that does not have what is to be replaced.
    """
    patches = StepPatches()
    if settings.loss_chunk_tokens is not None:
        for head in chunk_heads(hf_models(model), settings.loss_chunk_tokens):
            patches.add(head.enter, head.report)
    if settings.mlp_tile_tokens is not None:
        for mlp in tile_mlps(model, settings.mlp_tile_tokens, settings.mlp_modules):
            patches.add(mlp.enter)
    if settings.activation_checkpointing != "none":
        blocks = recompute_blocks(
            model,
            keeps_attention=settings.activation_checkpointing == "keep_attention",
            offloads=settings.activation_offload,
        )
        patches.add(blocks.enter, blocks.report)
    return patches

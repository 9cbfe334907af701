"""Rotary embeddings whose frequencies depend on the longest position of the whole batch.

transformers uses the largest position in a call of the embedding, which on a rank is that of its local
tokens. Hooks append one position, the largest of the batch, and remove it from the result.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from lightning_cp.errors import ConfigError
from lightning_cp.models.handle import SwapHandle
from lightning_cp.utils.patching import add_hook
from lightning_cp.utils.tracing import exclude_from_compile

LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Kinds of rotary embedding that depend on the length."""


def patch_length_dependent_rope(model: Any, configs: Iterable[Any], handle: SwapHandle) -> None:
    """Give length-dependent rotary embeddings the length of the whole batch, while a step is active.

    Raises:
        ConfigError: a config has such a kind, but no module of the model does.
    """
    found = [part for part in model.modules() if _kinds(getattr(part, "rope_type", None))]
    kinds = {kind for config in configs for kind in _config_kinds(config)}
    if kinds and not found:
        raise ConfigError(
            f"{type(model).__name__} has rope_type={sorted(kinds)[0]!r}, whose frequencies depend on the "
            "largest position that a rank holds, and no module of it has such a rope_type, so it cannot be "
            "told that of the whole batch. What works: default, linear, yarn and llama3."
        )
    for part in found:
        _patch_rope(part, handle)


def check_rotary_takes_positions(model: Any) -> None:
    """Check that no rotary embedding numbers its input tokens itself, without positions.

    Raises:
        ConfigError: naming the class.
    """
    for part in model.modules():
        name = type(part).__name__
        if "Rotary" in name and list(inspect.signature(part.forward).parameters) == ["q", "k"]:
            raise ConfigError(
                f"{name} of {type(model).__name__} takes no positions: every rank would count its own tokens "
                "from 0, which is silently wrong. ESM takes positions from transformers 5.6 on. Otherwise "
                "use another model, or a strategy without context parallelism."
            )


def _patch_rope(part: nn.Module, handle: SwapHandle) -> None:
    signature = inspect.signature(part.forward)
    if "position_ids" not in signature.parameters:
        raise ConfigError(
            f"{type(part).__name__} looks at the longest position (rope_type={_kinds(part.rope_type)[0]!r}) "
            f"and takes no position_ids, but {list(signature.parameters)}, so it cannot be told that of the "
            "whole batch. Use a version of transformers that this package was tested with."
        )

    @exclude_from_compile
    def lengthen(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if handle.state is None:
            return None
        call = signature.bind(*args, **kwargs).arguments
        positions = call["position_ids"]
        longest = positions.new_full((*positions.shape[:-1], 1), handle.state.positions.longest)
        extra = call.pop("kwargs", {})
        return (), {**call, "position_ids": torch.cat([positions, longest], dim=-1), **extra}

    @exclude_from_compile
    def shorten(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if handle.state is None:
            return None
        expected = kwargs["position_ids"].shape[-1]
        parts = output if isinstance(output, tuple) else (output,)
        for x in parts:
            if x.shape[-2] != expected:
                raise ConfigError(
                    f"{type(part).__name__} was given {expected} positions and returned {tuple(x.shape)}, "
                    "whose last dimension but one should be these. Use a version of transformers that this "
                    "package was tested with."
                )
        cut = tuple(x[..., :-1, :] for x in parts)
        return cut if isinstance(output, tuple) else cut[0]

    handle.on_undo(add_hook(part.register_forward_pre_hook, lengthen, with_kwargs=True))
    handle.on_undo(add_hook(part.register_forward_hook, shorten, with_kwargs=True))


def _config_kinds(config: Any) -> list[str]:
    found: list[str] = []
    for name in ("rope_parameters", "rope_scaling"):
        rope = getattr(config, name, None) or {}
        for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
            found += _kinds(part.get("rope_type", part.get("type")))
    return found


def _kinds(rope_type: Any) -> list[str]:
    """Return the length-dependent kinds in ``rope_type``, which is a dict where layers differ."""
    every = rope_type.values() if isinstance(rope_type, dict) else [rope_type]
    return [
        kind for kind in every if isinstance(kind, str) and any(x in kind for x in LENGTH_DEPENDENT)
    ]

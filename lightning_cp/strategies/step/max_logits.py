"""Attention modules that tell the optimizers of a run of their largest scores (QK-clip)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_cp.models.max_logits import MaxLogits, Tell
from lightning_cp.optim.qk_clip import QKClip
from lightning_cp.optim.qk_layers import refuse_norms


def clips_of(optimizers: Iterable[Any]) -> list[QKClip]:
    """The QK-clips of optimizers, Lightning's wrappers taken off."""
    found = (getattr(_unwrapped(optimizer), "qk_clip", None) for optimizer in optimizers)
    return [clip for clip in found if isinstance(clip, QKClip)]


def adopted(optimizer: Optimizer, adopt: Callable[[Optimizer], object]) -> None:
    """Have an engine put sharded parameters into an optimizer, and its QK-clip know them.

    Args:
        optimizer: the user's.
        adopt: what the engine does.
    """
    before = list(_parameters(optimizer))
    adopt(optimizer)
    now = dict(zip(map(id, before), _parameters(optimizer), strict=True))
    for clip in clips_of([optimizer]):
        clip.follow(now)


def collected_modules(
    model: nn.Module, clips: Iterable[QKClip], is_aside: Callable[[], bool]
) -> dict[nn.Module, Tell]:
    """The modules whose attention is collected, and who is told.

    They are found by the projections that they hold: names depend on what optimizers were given.

    Args:
        model: everything that is called in a step.
        clips: of its optimizers.
        is_aside: whether a step is none of the run's.

    Raises:
        ConfigError: a module normalises queries or keys.
    """
    tells: dict[nn.Module, list[Tell]] = {}
    for clip in clips:
        layers = {id(weight): (layer, name) for layer, (name, weight) in clip.weights().items()}
        for module, (layer, _) in _holders(model, layers):
            refuse_norms(layer, (name for name, _ in module.named_children()))
            tells.setdefault(module, []).append(partial(_tell, clip, layer, is_aside))
    return {module: partial(_tell_all, of) for module, of in tells.items()}


def _holders(
    model: nn.Module, layers: Mapping[int, tuple[str, str]]
) -> Iterator[tuple[nn.Module, tuple[str, str]]]:
    """Modules that have a projection as a child; or as a parameter of their own, under another name than
    ``weight``."""
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            if id(p) in layers and name != "weight":
                yield module, layers[id(p)]
        for child in module.children():
            p = child._parameters.get("weight")
            if id(p) in layers:
                yield module, layers[id(p)]


def _tell(clip: QKClip, layer: str, is_aside: Callable[[], bool], told: MaxLogits) -> None:
    if not is_aside():
        clip.note(
            *(layer, told.largest),
            head_dim=told.head_dim,
            tp_rank=told.tp_rank,
            tp_size=told.tp_size,
        )


def _tell_all(tells: Iterable[Tell], told: MaxLogits) -> None:
    for tell in tells:
        tell(told)


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _unwrapped(optimizer: Any) -> Any:
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, Optimizer) else optimizer

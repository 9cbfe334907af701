"""The MLPs of a model in tiles of tokens: while a step is active, each runs on some tokens at a time.

Under context parallelism nothing but attention may look at other tokens in any case, so an MLP of any
kind may be cut along the sequence; what has experts may not, since a model may look at all its routing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_cp.errors import ConfigError
from lightning_cp.length.tiled import run_in_tiles
from lightning_cp.models.blocks import blocks_of, matches
from lightning_cp.models.token_draws import TileDraws
from lightning_cp.module_hooks import replace_method
from lightning_cp.untraced import untraced

NAMES = ("mlp", "feed_forward", "feedforward", "ffn")
"""What the MLP of a block is called in transformers, LitGPT, nanoGPT and most others."""


def tile_mlps(
    model: nn.Module, tile_tokens: int, wanted: str | Sequence[str] | None
) -> list[TiledMlp]:
    """The MLPs of all blocks, or those that are named; ``enter`` of each begins a step.

    Args:
        model: the user's.
        tile_tokens: of all rows together.
        wanted: class names or patterns of dotted names.

    Raises:
        ConfigError: there is none, a name fits no module, or one has experts.
    """
    found = _found_in_blocks(model) if wanted is None else _named(model, wanted)
    for name, module in found.items():
        _require_no_experts(name, module)
    return [TiledMlp(name, module, tile_tokens) for name, module in found.items()]


def _found_in_blocks(model: nn.Module) -> dict[str, nn.Module]:
    blocks = blocks_of(model)
    names = {module: name for name, module in model.named_modules()}
    found = {
        f"{names[block]}.{name}": child
        for block in blocks
        for name, child in block.named_children()
        if name in NAMES
    }
    if not found:
        parts = sorted({name for block in blocks for name, _ in block.named_children()})
        has = f"have {', '.join(parts)}" if parts else "were not found"
        raise ConfigError(
            f"tiled_mlp: no block of {type(model).__name__} has a part called {', '.join(NAMES)}; its blocks "
            f"{has}. Name the classes of its MLPs in mlp_modules=, or leave tiled_mlp away."
        )
    return found


def _named(model: nn.Module, wanted: str | Sequence[str]) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for each in [wanted] if isinstance(wanted, str) else wanted:
        named = {name: m for name, m in model.named_modules() if name and matches(each, name, m)}
        if not named:
            raise ConfigError(
                f"mlp_modules: {each!r} is neither the class nor the name of a module of "
                f"{type(model).__name__}. None finds parts of blocks called {', '.join(NAMES)}."
            )
        found |= named
    for name in found:
        around = [other for other in found if name.startswith(f"{other}.")]
        if around:
            raise ConfigError(
                f"mlp_modules names {name!r}, which is inside {around[0]!r}, too. Name one of them."
            )
    return found


def _require_no_experts(name: str, module: nn.Module) -> None:
    shared = [key for key, part in module.named_modules() if key.split(".")[-1] == "experts"]
    stacked = [key for key, p in module.named_parameters() if p.dim() > 2]
    if shared or stacked:
        raise ConfigError(
            f"tiled_mlp: {name} ({type(module).__name__}) has experts ({(shared or stacked)[0]}), and their "
            "routing is looked at over all tokens (load balancing), so it is not cut into tiles. Leave "
            "tiled_mlp away, or name the other MLPs in mlp_modules=."
        )


class TiledMlp:
    """One MLP, replaced from ``enter`` to what it returns."""

    def __init__(self, name: str, module: nn.Module, tile_tokens: int) -> None:
        self._name = name
        self._module = module
        self._tile_tokens = tile_tokens

    def enter(self) -> Callable[[], None]:
        """Replace the forward; returns what puts it back.

        Raises:
            ConfigError: a part of the MLP is sharded by itself, and would be gathered for each tile.
        """
        module: Any = self._module
        for key, part in module.named_modules():
            if key and isinstance(part, FSDPModule):
                raise ConfigError(
                    f"tiled_mlp: {self._name}.{key} is sharded by itself, and would be gathered for every "
                    "tile. Wrap whole blocks or whole MLPs (wrap_modules=)."
                )
        return replace_method(module, "forward", self._as_forward(module.forward))

    def _as_forward(self, own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        size, name, module = self._tile_tokens, self._name, self._module

        @untraced
        def forward(*inputs: Any, **others: Any) -> torch.Tensor:
            tensors = (*inputs, *others.values())
            shapes = {x.shape[:-1] if isinstance(x, torch.Tensor) else None for x in tensors}
            if len(shapes) != 1 or None in shapes or not next(iter(shapes)):
                raise ConfigError(
                    f"tiled_mlp: {name} ({type(module).__name__}) was called with {_told(tensors)}, and only "
                    "tensors [..., tokens, features] with the same tokens can be cut into tiles. Name the "
                    "modules that take those in mlp_modules=, or leave tiled_mlp away."
                )
            call = partial(_call, own, len(inputs), list(others))  # which keeps no input
            return run_in_tiles(module, call, tensors, size, lambda x: TileDraws(x).tile)

        return forward


def _call(
    own: Callable[..., torch.Tensor], count: int, names: Sequence[str], *tile: torch.Tensor
) -> torch.Tensor:
    """``count`` arguments by position, and the others by their names."""
    return own(*tile[:count], **dict(zip(names, tile[count:], strict=True)))


def _told(given: Sequence[Any]) -> str:
    shown = [str(list(x.shape)) if isinstance(x, torch.Tensor) else type(x).__name__ for x in given]
    return ", ".join(shown) or "nothing"

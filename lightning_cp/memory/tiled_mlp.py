"""MLPs that run on tiles of tokens while a step is active, in forward and again in backward.

Intermediate activations exist for one tile only, and none is saved. Gradients of parameters are summed over
tiles in float32 at least, so that nothing is rounded more often than without tiles, and reach autograd once:
hooks on parameters, and engines that wait for gradients, see no difference. An MLP of any kind may be tiled,
since under context parallelism nothing but attention may look at other tokens; a module with experts may
not, because a model may look at its routing over all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule
from torch.func import functional_call
from torch.utils.checkpoint import get_device_states, set_device_states

from lightning_cp.errors import ConfigError
from lightning_cp.models.blocks import blocks_of, matches
from lightning_cp.randomness.token_draws import TileDraws
from lightning_cp.utils.patching import PatchSet
from lightning_cp.utils.tracing import exclude_from_compile

Forward = Callable[..., torch.Tensor]

Around = Callable[[torch.Tensor], Callable[[slice], AbstractContextManager[None]]]
"""Makes, of the first input, the context of each tile (a slice of a row's tokens)."""

MLP_NAMES = ("mlp", "feed_forward", "feedforward", "ffn")
"""Names of a block's MLP in transformers, LitGPT, nanoGPT and most others."""


class ForwardState:
    """Random state and autocast of a forward, for an equal recomputation in backward."""

    def __init__(self, *tensors: torch.Tensor, random: bool) -> None:
        """Save the current state; ``random``: the forward may draw numbers."""
        self._kind = tensors[0].device.type
        self._autocast = [
            {
                "device_type": kind,
                "dtype": torch.get_autocast_dtype(kind),
                "enabled": torch.is_autocast_enabled(kind),
                "cache_enabled": torch.is_autocast_cache_enabled(),
            }
            for kind in {self._kind, "cpu"}
        ]
        self._random: Any = None
        if random:
            self._random = torch.get_rng_state(), *get_device_states(*tensors)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Restore the saved state within the block."""
        with ExitStack() as stack:
            for autocast in self._autocast:
                stack.enter_context(torch.autocast(**autocast))
            if self._random is not None:
                own, devices, states = self._random
                kind = "cuda" if self._kind == "cpu" else self._kind
                stack.enter_context(torch.random.fork_rng(devices, device_type=kind))
                torch.set_rng_state(own)
                set_device_states(devices, states, device_type=self._kind)
            yield


def run_in_tiles(
    module: nn.Module,
    forward: Forward,
    inputs: Sequence[torch.Tensor],
    tile_tokens: int,
    around: Around = lambda _: nullcontext,
) -> torch.Tensor:
    """Return ``forward(*inputs)``, with the memory of ``tile_tokens`` tokens.

    Args:
        module: module whose parameters ``forward`` uses.
        forward: treats each token by itself; its result is one tensor ``[..., L, any]``.
        inputs: ``[B, L, C]`` each, or ``[L, C]``.
        tile_tokens: tokens of all rows in a tile; inputs with at most that many are not tiled.
        around: makes the context of each tile, in forward and backward.

    Raises:
        ConfigError: a result that is not a tensor with as many tokens.
    """
    tokens = inputs[0].shape[-2]
    rows = inputs[0].shape[:-2].numel()
    size = max(1, tile_tokens // max(1, rows))
    if tokens <= size:
        return forward(*inputs)
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    run = _TiledCall(module, forward, list(trained), size, around)
    if torch.is_grad_enabled():
        return _TiledFunction.apply(run, len(inputs), *inputs, *trained.values())  # type: ignore[return-value]
    return run.whole(inputs)


class _TiledCall(nn.Module):
    """One call; a module, so that ``functional_call`` can replace its parameters without the inner hooks."""

    def __init__(
        self, module: nn.Module, forward: Forward, names: list[str], size: int, around: Around
    ) -> None:
        super().__init__()
        self.around = around
        self.inner = module
        self._own = forward
        self._names = [f"inner.{name}" for name in names]
        self._size = size

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self._own(*inputs)

    def tiles(self, tokens: int) -> list[slice]:
        """Return the tiles, as slices of a row's tokens."""
        return [slice(at, min(at + self._size, tokens)) for at in range(0, tokens, self._size)]

    def whole(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the concatenated outputs of all tiles."""
        tokens = inputs[0].shape[-2]
        out: torch.Tensor | None = None
        within = self.around(inputs[0])
        for at in self.tiles(tokens):
            given = [_tile(x, at) for x in inputs]
            with within(at):
                made: Any = self._own(*given)
            if not isinstance(made, torch.Tensor) or made.shape[:-1] != given[0].shape[:-1]:
                raise ConfigError(_bad_output(self.inner, made))
            if out is None:
                out = made.new_empty(*made.shape[:-2], tokens, made.shape[-1])
            out[..., at, :] = made
        assert out is not None
        return out

    def gradients(
        self,
        inputs: Sequence[torch.Tensor],
        needs: Sequence[bool],
        values: Sequence[torch.Tensor],
        d_out: torch.Tensor,
    ) -> list[torch.Tensor | None]:
        """Return the gradients of one tile's inputs, where needed, and of all parameters."""
        leaves = [x.detach().requires_grad_(need) for x, need in zip(inputs, needs, strict=True)]
        own = [x.detach().requires_grad_() for x in values]
        with torch.enable_grad():
            out = functional_call(self, dict(zip(self._names, own, strict=True)), tuple(leaves))
        asked = [x for x in (*leaves, *own) if x.requires_grad]
        if not out.requires_grad:
            return [None] * (len(leaves) + len(own))
        made = iter(torch.autograd.grad(out, asked, d_out, allow_unused=True))
        return [next(made) if x.requires_grad else None for x in (*leaves, *own)]


class _TiledFunction(torch.autograd.Function):
    """Tiled forward and backward over L tokens, in tiles of n; parameters of any shape.

    | pass | input | output | held at once | collectives |
    |---|---|---|---|---|
    | forward | inputs [B, L, C], parameters | out [B, L, C'] | what [B, n] tokens make | none |
    | backward | d out [B, L, C'] | d inputs, d parameters | the same, and float32 d parameters | none |
    """

    @staticmethod
    def forward(ctx: Any, run: _TiledCall, count: int, *tensors: torch.Tensor) -> torch.Tensor:
        inputs = tensors[:count]
        ctx.run, ctx.count = run, count
        ctx.conditions = ForwardState(*inputs, random=run.inner.training)
        ctx.save_for_backward(*tensors)
        return run.whole(inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # type: ignore[override]
        saved = (
            ctx.saved_tensors
        )  # read once: a checkpoint around this recomputes them at each access
        inputs, values = saved[: ctx.count], saved[ctx.count :]
        (d_out,) = gradients
        needs = ctx.needs_input_grad[2 : 2 + ctx.count]
        d_inputs = [
            torch.zeros_like(x) if need else None for x, need in zip(inputs, needs, strict=True)
        ]
        sums = [_GradientSum(x) for x in values]
        with ctx.conditions.again():
            within = ctx.run.around(inputs[0])
            for at in ctx.run.tiles(inputs[0].shape[-2]):
                tile = [_tile(x, at) for x in inputs]
                with within(at):
                    made = ctx.run.gradients(tile, needs, values, _tile(d_out, at))
                for whole, part in zip(d_inputs, made, strict=False):
                    if whole is not None and part is not None:
                        whole[..., at, :] = part
                for total, part in zip(sums, made[ctx.count :], strict=True):
                    total.add(part)
        return None, None, *d_inputs, *(total.result() for total in sums)


def _tile(x: torch.Tensor, at: slice) -> torch.Tensor:
    """Return a tile, contiguous as modules expect their inputs."""
    return x[..., at, :].contiguous()


class _GradientSum:
    """Sum of a parameter's gradients over tiles, in float32 at least."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self._dtype = parameter.dtype
        self._total: torch.Tensor | None = None

    def add(self, part: torch.Tensor | None) -> None:
        if part is None:
            return
        if self._total is None:  # a copy: autograd may have returned the same tensor elsewhere
            wide = torch.promote_types(part.dtype, torch.float32)
            self._total = part.to(wide, copy=True)
        else:
            self._total += part

    def result(self) -> torch.Tensor | None:
        return None if self._total is None else self._total.to(self._dtype)


def _bad_output(module: nn.Module, made: Any) -> str:
    got = list(made.shape) if isinstance(made, torch.Tensor) else type(made).__name__
    return (
        f"tiled_mlp: {type(module).__name__} was run on some of the tokens and returned {got}, and only one "
        "tensor with a row for each token can be put together again. Name the modules that do in "
        "mlp_modules=, or remove tiled_mlp=."
    )


def tile_mlps(
    model: nn.Module, tile_tokens: int, wanted: str | Sequence[str] | None
) -> list[TiledMlp]:
    """Return the MLPs of all blocks, or the named ones; ``enter`` of each begins a step.

    Args:
        model: the user's model.
        tile_tokens: tokens of all rows in a tile.
        wanted: class names or patterns of dotted names.

    Raises:
        ConfigError: there is no MLP, a name fits no module, or one has experts.
    """
    found = _mlps_of_blocks(model) if wanted is None else _mlps_by_name(model, wanted)
    for name, module in found.items():
        _check_no_experts(name, module)
    return [TiledMlp(name, module, tile_tokens) for name, module in found.items()]


def _mlps_of_blocks(model: nn.Module) -> dict[str, nn.Module]:
    blocks = blocks_of(model)
    names = {module: name for name, module in model.named_modules()}
    found = {
        f"{names[block]}.{name}": child
        for block in blocks
        for name, child in block.named_children()
        if name in MLP_NAMES
    }
    if not found:
        parts = sorted({name for block in blocks for name, _ in block.named_children()})
        has = f"have {', '.join(parts)}" if parts else "were not found"
        raise ConfigError(
            f"tiled_mlp: no block of {type(model).__name__} has a part called {', '.join(MLP_NAMES)}; its "
            f"blocks {has}. Name the classes of its MLPs in mlp_modules=, or remove tiled_mlp=."
        )
    return found


def _mlps_by_name(model: nn.Module, wanted: str | Sequence[str]) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for each in [wanted] if isinstance(wanted, str) else wanted:
        named = {name: m for name, m in model.named_modules() if name and matches(each, name, m)}
        if not named:
            raise ConfigError(
                f"mlp_modules: {each!r} is neither the class nor the name of a module of "
                f"{type(model).__name__}. None finds parts of blocks called {', '.join(MLP_NAMES)}."
            )
        found |= named
    for name in found:
        around = [other for other in found if name.startswith(f"{other}.")]
        if around:
            raise ConfigError(
                f"mlp_modules names {name!r}, which is inside {around[0]!r}, too. Name one of them."
            )
    return found


def _check_no_experts(name: str, module: nn.Module) -> None:
    shared = [key for key, part in module.named_modules() if key.split(".")[-1] == "experts"]
    stacked = [key for key, p in module.named_parameters() if p.dim() > 2]
    if shared or stacked:
        raise ConfigError(
            f"tiled_mlp: {name} ({type(module).__name__}) has experts ({(shared or stacked)[0]}), and their "
            "routing is looked at over all tokens (load balancing), so it is not cut into tiles. Remove "
            "tiled_mlp=, or name the other MLPs in mlp_modules=."
        )


class TiledMlp:
    """MLP whose forward is replaced from ``enter`` until the call of the function that it returns."""

    def __init__(self, name: str, module: nn.Module, tile_tokens: int) -> None:
        self._name = name
        self._module = module
        self._tile_tokens = tile_tokens

    def enter(self) -> Callable[[], None]:
        """Replace the forward; return the undo function.

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
        patches = PatchSet()
        patches.replace(module, "forward", self._as_forward)
        return patches.undo

    def _as_forward(self, own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        size, name, module = self._tile_tokens, self._name, self._module

        @exclude_from_compile
        def forward(*inputs: Any, **others: Any) -> torch.Tensor:
            tensors = (*inputs, *others.values())
            shapes = {x.shape[:-1] if isinstance(x, torch.Tensor) else None for x in tensors}
            if len(shapes) != 1 or None in shapes or not next(iter(shapes)):
                raise ConfigError(
                    f"tiled_mlp: {name} ({type(module).__name__}) was called with "
                    f"{_describe_inputs(tensors)}, and only tensors [..., tokens, features] with the same "
                    "tokens can be cut into tiles. Name the modules that take those in mlp_modules=, or "
                    "remove tiled_mlp=."
                )
            call = partial(_call, own, len(inputs), list(others))  # keeps no input alive
            return run_in_tiles(module, call, tensors, size, lambda x: TileDraws(x).tile)

        return forward


def _call(
    own: Callable[..., torch.Tensor], count: int, names: Sequence[str], *tile: torch.Tensor
) -> torch.Tensor:
    """Call ``own`` with ``count`` arguments by position, and the others by their names."""
    return own(*tile[:count], **dict(zip(names, tile[count:], strict=True)))


def _describe_inputs(given: Sequence[Any]) -> str:
    shown = [str(list(x.shape)) if isinstance(x, torch.Tensor) else type(x).__name__ for x in given]
    return ", ".join(shown) or "nothing"

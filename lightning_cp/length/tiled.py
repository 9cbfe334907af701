"""A module that treats each token by itself, run on some tokens at a time, forward and again in backward.

What lies between its input and its output exists for one tile only, and nothing of it is kept. Gradients of
parameters are summed over tiles in float32 at least, so that nothing is rounded more often than without
tiles, and reach autograd once: hooks on parameters, and engines that wait for gradients, see what they
ever do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from lightning_cp.errors import ConfigError
from lightning_cp.length.recompute import Conditions

Forward = Callable[..., torch.Tensor]

Around = Callable[[torch.Tensor], Callable[[slice], AbstractContextManager[None]]]
"""Of the first input: makes what each tile, along the tokens of a row, is run in."""

DEFAULT_TILE_TOKENS = 4096
"""Enough for matrix products at full speed, and for adding to the parameters' gradients seldom."""


def run_in_tiles(
    module: nn.Module,
    forward: Forward,
    inputs: Sequence[torch.Tensor],
    tile_tokens: int,
    around: Around = lambda _: nullcontext,
) -> torch.Tensor:
    """The result of ``forward(*inputs)``, with the memory of ``tile_tokens`` tokens.

    Args:
        module: whose parameters ``forward`` uses.
        forward: treats each token by itself; its result is one tensor ``[..., L, any]``.
        inputs: ``[B, L, C]`` each, or ``[L, C]``.
        tile_tokens: of all rows together. Up to as many are run as ever.
        around: what each tile is run in, forward and backward.

    Raises:
        ConfigError: a result that is no tensor with as many tokens.
    """
    tokens = inputs[0].shape[-2]
    rows = inputs[0].shape[:-2].numel()
    size = max(1, tile_tokens // max(1, rows))
    if tokens <= size:
        return forward(*inputs)
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    run = _Run(module, forward, list(trained), size, around)
    if torch.is_grad_enabled():
        return _Tiled.apply(run, len(inputs), *inputs, *trained.values())  # type: ignore[return-value]
    return run.whole(inputs)


class _Run(nn.Module):
    """One call: a module, so that its parameters can be others for a while, past the module's own hooks."""

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
        """Along the tokens of a row."""
        return [slice(at, min(at + self._size, tokens)) for at in range(0, tokens, self._size)]

    def whole(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The outputs of all tiles, beside each other."""
        tokens = inputs[0].shape[-2]
        out: torch.Tensor | None = None
        within = self.around(inputs[0])
        for at in self.tiles(tokens):
            given = [_tile(x, at) for x in inputs]
            with within(at):
                made: Any = self._own(*given)
            if not isinstance(made, torch.Tensor) or made.shape[:-1] != given[0].shape[:-1]:
                raise ConfigError(_no_tiles(self.inner, made))
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
        """Of one tile's inputs, where they need one, and of all parameters, whose values are given."""
        leaves = [x.detach().requires_grad_(need) for x, need in zip(inputs, needs, strict=True)]
        own = [x.detach().requires_grad_() for x in values]
        with torch.enable_grad():
            out = functional_call(self, dict(zip(self._names, own, strict=True)), tuple(leaves))
        asked = [x for x in (*leaves, *own) if x.requires_grad]
        if not out.requires_grad:
            return [None] * (len(leaves) + len(own))
        made = iter(torch.autograd.grad(out, asked, d_out, allow_unused=True))
        return [next(made) if x.requires_grad else None for x in (*leaves, *own)]


class _Tiled(torch.autograd.Function):
    """Over L tokens, in tiles of n; parameters of any shape.

    | pass | input | output | held at once | collectives |
    |---|---|---|---|---|
    | forward | inputs [B, L, C], parameters | out [B, L, C'] | what [B, n] tokens make | none |
    | backward | d out [B, L, C'] | d inputs, d parameters | the same, and float32 d parameters | none |
    """

    @staticmethod
    def forward(ctx: Any, run: _Run, count: int, *tensors: torch.Tensor) -> torch.Tensor:
        inputs = tensors[:count]
        ctx.run, ctx.count = run, count
        ctx.conditions = Conditions(*inputs, random=run.inner.training)
        ctx.save_for_backward(*tensors)
        return run.whole(inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # type: ignore[override]
        saved = (
            ctx.saved_tensors
        )  # once: a checkpoint around this recomputes them when they are asked for
        inputs, values = saved[: ctx.count], saved[ctx.count :]
        (d_out,) = gradients
        needs = ctx.needs_input_grad[2 : 2 + ctx.count]
        d_inputs = [
            torch.zeros_like(x) if need else None for x, need in zip(inputs, needs, strict=True)
        ]
        sums = [_Sum(x) for x in values]
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
    """Contiguous, as modules expect what they are given to be."""
    return x[..., at, :].contiguous()


class _Sum:
    """A parameter's gradient, in float32 at least until it is whole."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self._dtype = parameter.dtype
        self._total: torch.Tensor | None = None

    def add(self, part: torch.Tensor | None) -> None:
        if part is None:
            return
        if self._total is None:  # a copy: autograd may have given the same tensor to others
            wide = torch.promote_types(part.dtype, torch.float32)
            self._total = part.to(wide, copy=True)
        else:
            self._total += part

    def result(self) -> torch.Tensor | None:
        return None if self._total is None else self._total.to(self._dtype)


def _no_tiles(module: nn.Module, made: Any) -> str:
    got = list(made.shape) if isinstance(made, torch.Tensor) else type(made).__name__
    return (
        f"tiled_mlp: {type(module).__name__} was run on some of the tokens and returned {got}, and only one "
        "tensor with a row for each token can be put together again. Name the modules that do in "
        "mlp_modules=, or leave tiled_mlp away."
    )

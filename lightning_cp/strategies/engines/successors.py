"""Successors of parameters: those that optimizers of a model that was sharded step and zero."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import nn
from torch.optim import Optimizer

from lightning_cp.errors import ConfigError


class _Sharded(NamedTuple):
    """A parameter that was sharded, and where to find what was made of it.

    Not what was made itself: PyTorch cannot move DTensors that somebody has a weak reference to.
    """

    before: weakref.ref[nn.Parameter]
    module: weakref.ref[nn.Module]
    name: str


class Successors:
    """Of all modules that one engine has sharded."""

    def __init__(self) -> None:
        self._sharded: dict[int, _Sharded] = {}  # by id of what was there before

    def note(self, module: nn.Module, before: Mapping[str, nn.Parameter]) -> None:
        """A module was sharded; ``before`` are the parameters that it had, by name."""
        at = weakref.ref(module)
        self._sharded.update({id(p): _Sharded(weakref.ref(p), at, n) for n, p in before.items()})

    def put_into(self, optimizer: Optimizer, engine: str) -> None:
        """Have an optimizer step sharded parameters in the place of those that they were made of.

        Args:
            optimizer: the user's.
            engine: for the message.

        Raises:
            ConfigError: the optimizer has stepped already, with whole parameters.
        """
        for group in optimizer.param_groups:
            now = [self._now(p) for p in group["params"]]
            if any(
                a is not b and b in optimizer.state
                for a, b in zip(now, group["params"], strict=True)
            ):
                raise ConfigError(
                    f"{type(optimizer).__name__} has state of parameters that data_parallel={engine!r} "
                    "has sharded since. Call fabric.setup before its first step; load its state afterwards."
                )
            group["params"] = now

    def _now(self, parameter: nn.Parameter) -> nn.Parameter:
        """The successor of a parameter; itself, if it has none."""
        known = self._sharded.get(id(parameter))
        module = known.module() if known is not None and known.before() is parameter else None
        return parameter if known is None or module is None else module.get_parameter(known.name)


def dropping_when_zeroed(optimizer: Optimizer, drop: Callable[[set[int]], object]) -> None:
    """Have ``zero_grad`` drop too what ranks keep elsewhere than in ``grad``.

    By its class and not on the object: Lightning's wrappers inherit from the class, and call that one's.

    Args:
        optimizer: is of a class of its own afterwards, which is nothing but that.
        drop: called with the ids of parameters whose gradients were zeroed.
    """
    kind = type(optimizer)

    def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        kind.zero_grad(self, set_to_none)
        drop({id(p) for group in self.param_groups for p in group["params"]})

    own = {"zero_grad": zero_grad, "__module__": kind.__module__, "__doc__": kind.__doc__}
    optimizer.__class__ = type(kind.__name__, (kind,), own)

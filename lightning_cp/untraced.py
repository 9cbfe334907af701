"""What ``torch.compile`` leaves to Python: all that ranks do together, and all that is noted about a step;
and the moment in which it begins.

A compiled model is cut at these calls. Between them its graphs are what they would be without context
parallelism, and do not depend on the batch's layout, or on whether a step is active.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_WHY = (
    "under context parallelism attention is exchanged between ranks from Python, so that a model is compiled "
    "in parts: call torch.compile without fullgraph=True"
)


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Have compiled code call ``function`` as it is.

    ``torch.compiler.disable`` imports the compiler, which takes seconds: where nothing has done so yet, that
    waits until compiled code comes here.
    """
    disable: Any = torch.compiler.disable
    if "torch._dynamo" in sys.modules:
        return disable(function, reason=_WHY)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.compiler.is_compiling():
            return function(*args, **kwargs)
        return disable(function, reason=_WHY)(*args, **kwargs)

    return call


class FirstCompile:
    """The first time that anything is compiled within steps, which then take long.

    Args:
        say: called once, when that begins.
    """

    def __init__(self, say: Callable[[], None]) -> None:
        self._say: Callable[[], None] | None = say
        self._follows = False

    def begin(self) -> None:
        """A step begins. Without a compiler, which ``torch.compile`` imports, there is nothing to follow."""
        if self._say is not None and not self._follows and "torch._dynamo" in sys.modules:
            from torch._dynamo.callback import callback_handler

            callback_handler.register_start_callback(self._begins)
            self._follows = True

    def end(self) -> None:
        """The step is over."""
        if self._follows:
            from torch._dynamo.callback import callback_handler

            with suppress(ValueError):  # torch.compiler.reset() has forgotten it
                callback_handler.remove_start_callback(self._begins)
            self._follows = False

    def _begins(self, *_: object) -> None:
        say, self._say = self._say, None
        if say is not None:
            say()

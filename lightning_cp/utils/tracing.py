"""Calls outside ``torch.compile``, the first compilation, and named ranges for profilers.

Communication between ranks and the records of a step stay in Python: a compiled model is cut at these calls.
Between them its graphs are the same as without context parallelism, and do not depend on the batch's layout,
or on whether a step is active.

Any profiler shows the ranges: the strategy's ``profile=``, Lightning's PyTorchProfiler or a
``torch.profiler``. Without a profiler a range costs about 0.2 us and formats nothing. Communication is
asynchronous, so it has one range for *posting* and one for *waiting*; data is in flight from the first to the
end of the second. Transfers of one name are waited for in the order of their posts; the profile view relies
on that.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, ParamSpec, TypeVar

import torch
import torch.autograd.profiler as profiler
from torch._C._profiler import _RecordFunctionFast

P = ParamSpec("P")
R = TypeVar("R")

_WHY = (
    "under context parallelism attention is exchanged between ranks from Python, so that a model is compiled "
    "in parts: call torch.compile without fullgraph=True"
)


def exclude_from_compile(function: Callable[P, R]) -> Callable[P, R]:
    """Make compiled code call ``function`` uncompiled.

    ``torch.compiler.disable`` imports the compiler, which takes seconds: if it is not imported yet, that
    waits until compiled code makes the call.
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


def is_traced(x: object) -> bool:
    """True if the compiler traces operations on this tensor.

    Until torch 2.12 graphs call functions of PyTorch by name. What replaces one is then traced again, with
    tensors that have no values, and PyTorch does not say that it compiles.
    """
    return torch.compiler.is_compiling() or type(x).__name__ in ("FakeTensor", "FunctionalTensor")


class FirstCompile:
    """The first compilation inside a step, which makes that step slow.

    Args:
        say: called once, when the compilation begins.
    """

    def __init__(self, say: Callable[[], None]) -> None:
        self._say: Callable[[], None] | None = say
        self._follows = False

    def begin(self) -> None:
        """Begin a step; do nothing unless ``torch.compile`` has imported the compiler."""
        if self._say is not None and not self._follows and "torch._dynamo" in sys.modules:
            from torch._dynamo.callback import callback_handler

            callback_handler.register_start_callback(self._begins)
            self._follows = True

    def end(self) -> None:
        """End the step."""
        if self._follows:
            from torch._dynamo.callback import callback_handler

            with suppress(ValueError):  # torch.compiler.reset() removed it
                callback_handler.remove_start_callback(self._begins)
            self._follows = False

    def _begins(self, *_: object) -> None:
        say, self._say = self._say, None
        if say is not None:
            say()


PREFIX = "cp: "
"""Prefix of every name, to find the ranges among thousands of operators."""

_NOTHING = nullcontext()


def profile_range(name: str, of: object = None) -> AbstractContextManager[object]:
    """Return a named range of a profile; it does nothing while no profiler is on.

    Args:
        name: the name without the prefix; ``{}`` in it stands for ``of``.
        of: the hop, chunk or collective.
    """
    if not profiler._is_profiler_enabled:
        return _NOTHING
    return _RecordFunctionFast(PREFIX + name.format(of))

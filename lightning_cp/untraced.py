"""What ``torch.compile`` leaves to Python: all that ranks do together, and all that is noted about a step.

A compiled model is cut at these calls. Between them its graphs are what they would be without context
parallelism, and do not depend on the batch's layout, or on whether a step is active.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
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

"""A model whose ``forward`` is called itself, past the hooks of its call.

So do older releases of peft, ``checkpoint(model.forward, ...)`` and whoever writes ``model.forward(...)``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

Instead = Callable[[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""What is called in the place of a forward: with the model, its own forward, and the arguments."""


def replace_forward(model: Any, instead: Instead) -> Callable[[], None]:
    """Have ``instead`` called for ``model.forward``; returns what puts it back.

    A copy of the model that is made meanwhile has the forward of its class.
    """
    own, attributes = model.forward, vars(model)
    had, before = "forward" in attributes, attributes.get("forward")

    def forward(called: Any, *args: Any, **kwargs: Any) -> Any:
        if called is not model:
            return type(called).forward(called, *args, **kwargs)
        return instead(model, own, args, kwargs)

    signature = inspect.signature(own)
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [itself, *signature.parameters.values()]
    vars(forward)["__signature__"] = signature.replace(parameters=parameters)
    attributes["forward"] = MethodType(forward, model)

    def put_back() -> None:
        if had:
            attributes["forward"] = before
        else:
            attributes.pop("forward", None)

    return put_back

"""Methods of a model that are replaced as long as its attention is swapped.

Not from step to step: compiled code would be compiled again each time.

Its ``forward`` may be called itself, past the hooks of its call: so do older releases of peft,
``checkpoint(model.forward, ...)`` and whoever writes ``model.forward(...)``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

Instead = Callable[[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""What is called in the place of a method: with the model, its own method, and the arguments."""


def replace_method(model: Any, name: str, instead: Instead) -> Callable[[], None]:
    """Have ``instead`` called for a method of the model; returns what puts it back.

    Of a copy of the model that is made meanwhile it is its class's own method.
    """
    own, attributes = getattr(model, name), vars(model)
    had, before = name in attributes, attributes.get(name)

    def method(called: Any, *args: Any, **kwargs: Any) -> Any:
        if called is not model:
            return getattr(type(called), name)(called, *args, **kwargs)
        return instead(model, own, args, kwargs)

    signature = inspect.signature(own)
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [itself, *signature.parameters.values()]
    vars(method)["__signature__"] = signature.replace(parameters=parameters)
    attributes[name] = MethodType(method, model)

    def put_back() -> None:
        if had:
            attributes[name] = before
        else:
            attributes.pop(name, None)

    return put_back

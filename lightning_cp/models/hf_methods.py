"""Methods of a model that are replaced while a step is active.

Its ``forward`` may be called itself, past the hooks of its call: so do older releases of peft,
``checkpoint(model.forward, ...)`` and whoever writes ``model.forward(...)``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any, NoReturn

from lightning_cp.errors import ConfigError

Instead = Callable[[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""What is called in the place of a method: with the model, its own method, and the arguments."""


def replace_method(model: Any, name: str, instead: Instead) -> Callable[[], None]:
    """Have ``instead`` called for a method of the model; returns what puts it back.

    A copy of the model that is made meanwhile has the method of its class.
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


def refuse_generate(model: Any, own: Any, args: Any, kwargs: Any) -> NoReturn:
    """In the place of ``generate``.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        f"{type(model).__name__}.generate was called within a step: it makes one token after another from a "
        "key/value cache, and a rank has a part of the prompt. Generate with cp_size=1, or outside of steps "
        "(on_validation_epoch_end, say), where the model is the plain model and takes whole prompts."
    )

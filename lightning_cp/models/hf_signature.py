"""Arguments of the forward of a Hugging Face model."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

Parameters = dict[str, inspect.Parameter]


def parameters_of(model: Any) -> Parameters:
    """The parameters of ``model.forward`` by name, without ``self``."""
    if "forward" in vars(model):  # replaced on this instance, by a wrapper for example
        return dict(inspect.signature(model.forward).parameters)
    return _of_class(type(model))


@lru_cache(maxsize=256)
def _of_class(kind: type[Any]) -> Parameters:
    parameters = dict(inspect.signature(kind.forward).parameters)
    del parameters[next(iter(parameters))]
    return parameters


def takes_extra(model: Any) -> bool:
    """True if arguments that are not named are passed on."""
    return any(p.kind is p.VAR_KEYWORD for p in parameters_of(model).values())

"""A model that was loaded in part says so, whoever calls it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_cp.errors import CheckpointError

_started: WeakKeyDictionary[nn.Module, list[RemovableHandle]] = WeakKeyDictionary()


@contextmanager
def incomplete_until_done(model: nn.Module) -> Iterator[None]:
    """Refuse every forward from here on; once the block ends without an error, allow it again."""
    if model not in _started:
        _started[model] = [
            module.register_forward_pre_hook(_refuse, prepend=True) for module in model.modules()
        ]
    yield
    for handle in _started.pop(model, []):
        handle.remove()


def require_complete(model: nn.Module) -> None:
    """Refuse a model whose loading began and did not end.

    Raises:
        CheckpointError: it did.
    """
    if any(module in _started for module in model.modules()):
        _refuse()


def _refuse(*_: Any) -> NoReturn:
    raise CheckpointError(
        "this model is incomplete: loading its pretrained weights began and did not end, so some of them are "
        "whatever was in memory. It may not be trained, evaluated or saved. Load it again, or make a new one."
    )

"""A model that was loaded in part says so, whoever calls it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_cp.checkpoint.pretrained.fresh import Names, own_on_meta
from lightning_cp.errors import CheckpointError

_started: WeakKeyDictionary[nn.Module, list[RemovableHandle]] = WeakKeyDictionary()
_empty: WeakKeyDictionary[nn.Module, list[str]] = WeakKeyDictionary()
"""What of modules had no values when a load began that has not ended well."""


@contextmanager
def incomplete_until_done(model: nn.Module) -> Iterator[None]:
    """Refuse every forward from here on; once the block ends without an error, allow it again."""
    if model not in _started:
        _started[model] = [
            module.register_forward_pre_hook(_refuse, prepend=True) for module in model.modules()
        ]
    _empty.update(without_values(model))
    yield
    for handle in _started.pop(model, []):
        handle.remove()
    for module in model.modules():
        _empty.pop(module, None)


def without_values(model: nn.Module) -> Names:
    """Tensors on the meta device, by modules, or with memory of a load that failed."""
    on_meta, found = own_on_meta(model), Names()
    for module in model.modules():
        own = {**module._parameters, **module._buffers}
        names = dict.fromkeys([*_empty.get(module, ()), *on_meta.get(module, ())])
        if there := [name for name in names if own.get(name) is not None]:
            found[module] = there
    return found


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

"""Plain trees as JSON: containers with their kinds, tensors by name."""

from __future__ import annotations

import base64
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from lightning_cp.checkpoint.plain import Place
from lightning_cp.errors import CheckpointError


def encode(tree: Any, name: Callable[[Place, Any], str], at: Place = ()) -> Any:
    """The form of a plain tree that ``json`` can write.

    Args:
        tree: as ``plain`` makes it.
        name: called with the place and the tensor of each; gives what it is called in the file.
        at: where the tree is.
    """
    if tree is None or isinstance(tree, (bool, int, str)):
        return tree
    if isinstance(tree, float):
        return tree if math.isfinite(tree) else {"float": repr(tree)}
    if type(tree) is list:
        return [encode(x, name, (*at, i)) for i, x in enumerate(tree)]
    if isinstance(tree, dict):
        kind = "ordered" if type(tree) is OrderedDict else "dict"
        return {kind: [[encode(k, name, at), encode(v, name, (*at, k))] for k, v in tree.items()]}
    if type(tree) is tuple:
        return {"tuple": [encode(x, name, (*at, i)) for i, x in enumerate(tree)]}
    return _encode_atom(tree, name, at)


def _encode_atom(tree: Any, name: Callable[[Place, Any], str], at: Place) -> Any:
    if isinstance(tree, bytes):
        return {"bytes": base64.b64encode(tree).decode()}
    if isinstance(tree, complex):
        return {"complex": [repr(tree.real), repr(tree.imag)]}
    if isinstance(tree, torch.Size):
        return {"size": list(tree)}
    if isinstance(tree, set):
        return {"set": [encode(x, name, at) for x in sorted(tree, key=repr)]}
    if isinstance(tree, (torch.dtype, torch.device)):
        return {type(tree).__name__: str(tree).removeprefix("torch.")}
    return {"tensor": name(at, tree)}


def decode(value: Any, tensor: Callable[[str], Any]) -> Any:
    """The plain tree again.

    Args:
        value: what ``json`` has read.
        tensor: gives what stands for a tensor of the file.

    Raises:
        CheckpointError: it is nothing that ``encode`` has written.
    """
    if isinstance(value, list):
        return [decode(x, tensor) for x in value]
    if not isinstance(value, dict):
        return value
    (kind, content), *more = value.items()
    if more or kind not in _DECODERS:
        raise CheckpointError(
            f"the checkpoint holds a {kind!r}, which this release does not know. Load it "
            "with the release that wrote it."
        )
    return _DECODERS[kind](content, tensor)


def dtype_named(name: str) -> torch.dtype:
    """``float32`` and the like.

    Raises:
        CheckpointError: there is no such dtype.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(
            f"the checkpoint holds a dtype {name!r}, which this PyTorch does not have. Load it with the "
            "PyTorch that wrote it."
        )
    return found


def _pairs(kind: type) -> Callable[[Any, Any], Any]:
    return lambda content, tensor: kind((decode(k, tensor), decode(v, tensor)) for k, v in content)


_DECODERS: dict[str, Callable[[Any, Any], Any]] = {
    "dict": _pairs(dict),
    "ordered": _pairs(OrderedDict),
    "tuple": lambda content, tensor: tuple(decode(x, tensor) for x in content),
    "set": lambda content, tensor: {decode(x, tensor) for x in content},
    "float": lambda content, tensor: float(content),
    "bytes": lambda content, tensor: base64.b64decode(content),
    "complex": lambda content, tensor: complex(float(content[0]), float(content[1])),
    "size": lambda content, tensor: torch.Size(content),
    "dtype": lambda content, tensor: dtype_named(content),
    "device": lambda content, tensor: torch.device(content),
    "tensor": lambda content, tensor: tensor(content),
}

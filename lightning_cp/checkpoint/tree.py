"""State as plain containers, numbers, strings and tensors, which can be written without pickling code.

Values that PyTorch's ``weights_only`` loading would refuse become plain, with a note of their type: a Hydra
``DictConfig`` in hyperparameters is written as a dict, and is a ``DictConfig`` again once read.
"""

from __future__ import annotations

import base64
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

from lightning_cp.errors import CheckpointError

Place = tuple[Any, ...]
"""Keys and indices that lead to an item of a tree."""
_EXACTLY = {int: int.__int__, float: float.__float__, str: str.__str__}
"""Conversions of a subclass to its value, whatever its ``str(value)`` is."""
_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


@dataclass
class PlainTree:
    """A tree made plain.

    Args:
        tree: dicts, lists, tuples, sets, atoms and tensors.
        notes: places, with the types of their values.
        unwritable: names of values that could not be written and may be missing.
    """

    tree: Any
    notes: list[list[Any]] = field(default_factory=list)
    unwritable: list[str] = field(default_factory=list)


def make_plain(tree: Any, may_lack: Sequence[str] = ()) -> PlainTree:
    """Make a tree plain; the tensors stay the same objects.

    Args:
        tree: the state.
        may_lack: keys of the top level whose entries are left out if they cannot be written.

    Raises:
        CheckpointError: naming any other value that cannot be written.
    """
    made = PlainTree(None)
    made.tree = _PlainConverter(made, frozenset(may_lack)).make(tree, ())
    return made


def is_plain(value: Any) -> bool:
    """True if a value is written unchanged, and read with the same types."""
    kind = type(value)
    if kind in (dict, OrderedDict):
        return all(map(is_plain, value)) and all(map(is_plain, value.values()))
    if kind in (list, tuple, set):
        return all(map(is_plain, value))
    return kind in (*_ATOMS, torch.Size, torch.Tensor)


def restore_types(tree: Any, notes: Sequence[Sequence[Any]]) -> Any:
    """The tree with the types of the notes; innermost first, in the order of writing."""
    for place, kind in notes:
        tree = _replace_at(tree, tuple(place), _RESTORE.get(kind, lambda value: value))
    return tree


def map_leaves(
    tree: Any, visit: Callable[[Place, Any], Any], place: Place = (), leaf: type = torch.Tensor
) -> Any:
    """The same plain tree with every tensor (or ``leaf``) replaced by ``visit(place, tensor)``."""
    if isinstance(tree, leaf):
        return visit(place, tree)
    if (kind := type(tree)) in (dict, OrderedDict):
        return kind((k, map_leaves(v, visit, (*place, k), leaf)) for k, v in tree.items())
    if type(tree) in (list, tuple):
        return type(tree)(map_leaves(v, visit, (*place, i), leaf) for i, v in enumerate(tree))
    return tree


def dotted(place: Place) -> str:
    """A place as text; not unique: ``{"a": {"b.c": 1}, "a.b": {"c": 2}}`` has two equal ones."""
    return ".".join(map(str, place)) or "the state"


def unique_name(place: Place, taken: Container[str]) -> str:
    """The dotted place, with a suffix if it is taken."""
    name = ".".join(map(str, place))
    while name in taken:
        name += "'"
    return name


class _PlainConverter:
    def __init__(self, made: PlainTree, may_lack: frozenset[str]) -> None:
        self._made, self._may_lack = made, may_lack

    def make(self, value: Any, place: Place) -> Any:
        if isinstance(value, torch.Tensor):
            _check_dense(value, place)
            return value.detach()
        if type(value) in (*_ATOMS, torch.Size):
            return value
        special = self._special(value, place)
        if special is not None:
            return special[0]
        if isinstance(value, Mapping):
            return self._mapping(value, place)
        if isinstance(value, (list, tuple)):
            items = [self.make(item, (*place, at)) for at, item in enumerate(value)]
            return tuple(items) if isinstance(value, tuple) else items
        if isinstance(value, (set, frozenset)):
            return {self.make(item, (*place, "a set's member")) for item in value}
        for kind, exactly in _EXACTLY.items():  # their subclasses, such as enumerations of strings
            if isinstance(value, kind):
                return exactly(value)
        raise CheckpointError(
            f"{dotted(place)} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be "
            "saved: checkpoints hold tensors, numbers, strings and plain containers, so that loading one "
            "never runs code. Keep it out of the state, or save what it can be made from."
        )

    def _special(self, value: Any, place: Place) -> tuple[Any] | None:
        kind, made = _kind_of(value, place)
        if kind is None:
            return None
        made = self.make(made, place)
        self._made.notes.append([list(place), kind])
        return (made,)

    def _mapping(self, value: Mapping[Any, Any], place: Place) -> dict[Any, Any]:
        made: dict[Any, Any] = OrderedDict() if isinstance(value, OrderedDict) else {}
        for key, item in value.items():
            if type(key) not in (str, int, float, bool, tuple, type(None)):
                raise CheckpointError(
                    f"a key of {dotted(place)} is a {type(key).__qualname__}; keys must be strings or "
                    "numbers. "
                    "Convert it before the save: str(key)."
                )
            try:
                made[key] = self.make(item, (*place, key))
            except CheckpointError:
                if not place or place[0] not in self._may_lack:
                    raise
                self._made.unwritable.append(dotted((*place, key)))
        return made


def _check_dense(value: torch.Tensor, place: Place) -> None:
    if value.layout != torch.strided:
        raise CheckpointError(
            f"{dotted(place)} is a tensor with layout {value.layout}, and checkpoints hold dense ones. Keep "
            "it out of the state, or save x.to_dense()."
        )
    if value.is_meta:
        raise CheckpointError(
            f"{dotted(place)} is on the meta device, so it has no values to be saved. Keep it out of the "
            "state, or load it first."
        )


def _kind_of(value: Any, place: Place) -> tuple[str | None, Any]:
    omegaconf = sys.modules.get("omegaconf")  # a config implies that omegaconf is imported
    if omegaconf is not None:
        for kind in ("DictConfig", "ListConfig"):
            made_by = getattr(omegaconf, kind)
            if isinstance(value, made_by):
                return kind, omegaconf.OmegaConf.to_container(value, resolve=False)
            if value is made_by:
                return f"class {kind}", None
    if isinstance(value, PurePath):
        return "path", str(value)
    if isinstance(value, np.ndarray) and value.dtype != object:
        return _array(value, place)
    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):
        return "number", value.item()
    return None, None


def _array(value: np.ndarray[Any, Any], place: Place) -> tuple[str, Any]:
    for letter, kind in (("U", "array of str"), ("S", "array of bytes")):
        if value.dtype.kind == letter:
            return kind, value.tolist()
    try:
        native = value.astype(value.dtype.newbyteorder("="), order="C", copy=True)
        return "array", torch.from_numpy(native)
    except TypeError:
        raise CheckpointError(
            f"{dotted(place)} is a NumPy array of {value.dtype}, which is not a dtype of PyTorch. Keep it "
            "out of the state, or save it as numbers or strings."
        ) from None


def _config(value: Any) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.create(value)


def _class(name: str) -> Callable[[Any], Any]:
    def load(value: Any) -> Any:
        import omegaconf

        return getattr(omegaconf, name)

    return load


_RESTORE: dict[str, Callable[[Any], Any]] = {
    "DictConfig": _config,
    "ListConfig": _config,
    "class DictConfig": _class("DictConfig"),
    "class ListConfig": _class("ListConfig"),
    "array": lambda value: value.numpy(),
    "array of str": lambda value: np.array(value, dtype=np.str_),
    "array of bytes": lambda value: np.array(value, dtype=np.bytes_),
}
"""Restore functions by type; paths and numbers are the strings and numbers as written."""


def _replace_at(tree: Any, place: Place, make: Callable[[Any], Any]) -> Any:
    if not place:
        return make(tree)
    key, *rest = place
    if isinstance(tree, tuple):
        items = list(tree)
        items[key] = _replace_at(items[key], tuple(rest), make)
        return tuple(items)
    if (isinstance(tree, dict) and key in tree) or isinstance(tree, list):
        tree[key] = _replace_at(tree[key], tuple(rest), make)
    return tree


# Plain trees as JSON: containers with their types, tensors by name.


def encode(tree: Any, name: Callable[[Place, Any], str], at: Place = ()) -> Any:
    """The JSON form of a plain tree.

    Args:
        tree: the result of ``make_plain``.
        name: called with the place of each tensor and the tensor; returns its name in the file.
        at: place of the tree.
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
    """The plain tree of a JSON value.

    Args:
        value: as parsed by ``json``.
        tensor: returns the value for a tensor's name.

    Raises:
        CheckpointError: not a value that ``encode`` has written.
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
    """The dtype of a name such as ``float32``.

    Raises:
        CheckpointError: unknown name.
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

"""A snapshot of the Python state of modules and a step, which restores the contents of the same objects.

It follows references from the modules: attributes, containers, objects of the user's classes, closures of
functions. Containers and objects are not copied, but a list of their references is, so that large data costs
one reference per entry. An iterator cannot be reset: a copy takes its place where one can be made; others are
replayed, so that the same values are drawn again.
"""

from __future__ import annotations

import argparse
import copy
import functools
import io
import operator
import queue
import socket
import subprocess
import sys
import threading
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from multiprocessing.pool import Pool
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import Strategy as FabricStrategy
from lightning.fabric.wrappers import _FabricModule
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torchmetrics import Metric

from lightning_cp.error_display import is_library
from lightning_cp.loaders.rng import GENERATORS, set_state, state_of
from lightning_cp.parity.replay import Replay, has_numbers, is_strided, replayable

_PARTS = {name for name, value in vars(nn.Module()).items() if isinstance(value, dict)}
"""Dicts that every module has: of its hooks, submodules, parameters and buffers."""
_OF_EVERY_MODULE = ({*vars(nn.Module()), *vars(LightningModule()), "training"} - _PARTS) | {
    "_parameters",
    "_buffers",
}
"""Attributes that are not read; all others are restored: hooks, and a module's own, such as counters."""
_SIMPLE = {int, float, complex, bool, str, bytes, type(None), range, torch.dtype, torch.device}
"""Types of values without contents."""
_CONTAINERS = {list, deque, dict, defaultdict, OrderedDict, Counter, set}
_TYPES = (list, deque, dict, set)
_NAMESPACES = {types.SimpleNamespace, argparse.Namespace}
_OF_A_RUN = (Trainer, Strategy, FabricStrategy, Fabric, DataLoader, Optimizer)
"""Parts of a run, which may have classes of the user's too; they are restored elsewhere."""
_WRAPPERS = (DistributedDataParallel, _FabricModule)
"""Modules around a user's."""
_ALIVE = (
    *(threading.Thread, BaseProcess, io.IOBase, socket.socket, queue.Queue, threading.Event),
    *(type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Semaphore),
    *(threading.Barrier, queue.SimpleQueue, Executor, Future, Pool, subprocess.Popen),
)
"""Types with state outside of Python, such as threads and files; an object that holds one is not restored."""
_HOLDERS = (list, tuple, deque, dict, set)
_PROXIES = (weakref.ProxyType, weakref.CallableProxyType)
"""Proxies behave as another object, or raise once that was deleted."""
LARGEST, TENSORS = 2**26, 2**28
"""Limits in bytes of one copied tensor, and of all: in-place state of a step is small; data is not."""
OBJECTS = 2**14
"""Limit of containers and objects that are read, the nearest to the modules first."""


class Snapshot:
    """The state of modules, and of everything that they refer to.

    Args:
        modules: of the model.
        step: the user's step, which may close over other state.
    """

    def __init__(self, modules: Iterable[nn.Module], step: Any = None) -> None:
        self._seen: dict[int, Any] = {}  # keeps objects alive, so that ids stay unique
        self._held: list[tuple[Callable[[Any, Any], None], Any, Any]] = []
        self._put_back: list[Callable[[], None]] = []
        self._iterators: dict[int, tuple[Any, Any]] = {}
        self._generators: list[Any] = []
        self._alive: dict[int, bool] = {}
        self._kinds: dict[type, Callable[[Any], None] | None] = dict.fromkeys(_SIMPLE)
        self._slots: dict[type, dict[str, Any]] = {}
        self._left, self._bytes = OBJECTS, TENSORS
        self.modules: list[nn.Module] = []
        """All tensors found, in containers and objects as well."""
        self._next: deque[Any] = deque([*modules, step])
        while self._next:
            self._visit(self._next.popleft())
        self._kinds.clear()  # it refers to this object
        self._alive.clear()

    def restore(self) -> None:
        """Restore all contents, once; the snapshot is empty afterwards."""
        for write, x, had in reversed(self._held):
            write(x, had)
        for run in self._put_back:
            run()
        for each in (self._held, self._put_back, self._seen, self._iterators, self.modules):
            each.clear()
        self._generators.clear()

    # -- kinds of values ---------------------------------------------------------------------------------

    def _visit(self, x: Any) -> None:
        kind = type(x)
        if kind not in self._kinds:
            self._kinds[kind] = self._reader_of(kind)
        reader = self._kinds[kind]
        if reader is not None and id(x) not in self._seen:
            self._seen[id(x)] = x
            reader(x)

    def _reader_of(self, kind: type) -> Callable[[Any], None] | None:
        if issubclass(kind, (*_OF_A_RUN, *_ALIVE, *_WRAPPERS, *_PROXIES)):
            return None
        is_container = kind in _CONTAINERS or (_is_users(kind) and issubclass(kind, _TYPES))
        readers: list[tuple[bool, Callable[[Any], None]]] = [
            (issubclass(kind, (torch.Tensor, np.ndarray)), self._read_numbers),
            (issubclass(kind, GENERATORS), self._read_generator),
            (kind is Replay, self._replay),
            (issubclass(kind, nn.Module), self._read_module),
            (is_container, self._read_container),
            (issubclass(kind, (tuple, frozenset)), self._visit_all),
            (issubclass(kind, type), self._read_class),
            (kind in _FUNCTIONS, self._read_function),
        ]
        return next((reader for fits, reader in readers if fits), self._read_object)

    def _read_numbers(self, x: Any) -> None:
        """A tensor or an array; the engine handles parameters."""
        if not has_numbers(x) or x.nbytes > min(LARGEST, self._bytes):
            return
        if isinstance(x, np.ndarray):
            had, write = x.copy(), _fill
        else:
            had, write = x.clone(), restore_values
        self._bytes -= x.nbytes
        self._held.append((write, x, had))

    def _read_generator(self, x: Any) -> None:
        self._held.append((set_state, x, state_of(x)))
        self._generators.append(x)

    def _read_container(self, x: Any) -> None:
        if self._is_alive(x):
            return
        self._record(*_container(x))
        if type(x) not in _CONTAINERS:
            self._read_object(x)

    def _read_module(self, module: nn.Module) -> None:
        """A module's attributes and buffers, the states of a metric, and its submodules."""
        self.modules.append(module)
        own = vars(module)
        states = _states_of(module) if isinstance(module, Metric) else {}
        parameters = set(module._parameters)  # the engine handles their values

        def restore() -> None:
            own.update(states)
            for name in module._parameters.keys() - parameters:
                del module._parameters[name]

        self._put_back += [save_buffers(module), restore]
        self._record(own, _of_module(own), _write_attributes_of_module, counted=False)
        self._next.extend(base for base in type(module).__mro__ if _is_users(base))

    def _read_object(self, x: Any) -> None:
        """An object of a user's class, or one that has only simple values."""
        kind, own = type(x), getattr(x, "__dict__", None)
        values = own.values() if type(own) is dict else ()
        if _is_users(kind):
            if kind not in self._slots:
                self._slots[kind] = _slots_of(kind)
            slots = self._slots[kind]
            in_slots = _read(x, slots)
            if any(map(self._is_alive, (*values, *in_slots.values()))):
                return
            self._next.extend(base for base in kind.__mro__ if _is_users(base))
            if slots:
                self._record(x, in_slots, functools.partial(_write_slots, slots=slots))
        elif kind not in _NAMESPACES and not _is_simple(kind, values):
            return
        if type(own) is dict:
            self._record(own, dict(own), _write_attributes)

    def _read_class(self, cls: type) -> None:
        """The attributes of a class, and the closures of its functions."""
        if not _is_users(cls):
            return
        functions = [x.__func__ if type(x) in _METHODS else x for x in vars(cls).values()]
        properties = [x for x in functions if issubclass(type(x), property)]
        functions += [of for x in properties for of in (x.fget, x.fset) if of is not None]
        self._visit_all([x for x in functions if type(x) is types.FunctionType])
        names = set(vars(cls))
        notes = {
            name: x
            for name, x in vars(cls).items()
            if not name.startswith("__") and not callable(x) and not hasattr(type(x), "__get__")
        }
        self._record(cls, notes, functools.partial(_write_class, names=names))

    def _read_function(self, x: Any) -> None:
        """Closures, defaults and attributes of a function."""
        if isinstance(x, functools.partial):
            self._visit_all((x.func, x.args, x.keywords))
        elif isinstance(x, types.MethodType):
            self._visit_all((x.__self__, x.__func__))
        elif isinstance(x, types.CellType):
            self._record(x, _read(x, _CELL), functools.partial(_write_slots, slots=_CELL))
        elif _is_users_module(x.__globals__.get("__name__")):
            self._visit_all((x.__closure__, x.__defaults__, x.__kwdefaults__))
            self._record(x.__dict__, dict(x.__dict__), _write_attributes)
        else:
            self._visit_all([getattr(x, "__wrapped__", None)])

    # -- what they refer to ------------------------------------------------------------------------------

    def _record(
        self, x: Any, had: Any, write: Callable[[Any, Any], None], *, counted: bool = True
    ) -> None:
        """Record the references of ``x``, which ``write`` restores; copies of iterators take their place."""
        values = had.values() if isinstance(had, dict) else had
        kinds = set(map(type, values))
        if any(map(_is_iterator, kinds)) and not isinstance(had, set):
            write(x, _mapped(had, self._substitute))
            self._held.append((lambda x, had: write(x, _mapped(had, self._original)), x, had))
        else:
            self._held.append((write, x, had))
        if not kinds <= _SIMPLE:
            self._visit_all(values, counted=counted)

    def _is_alive(self, x: Any) -> bool:
        """True for a thread or the like, or a container with one in it."""
        if issubclass(type(x), _ALIVE):
            return True
        if not issubclass(type(x), _HOLDERS):
            return False
        if id(x) not in self._alive:
            values = dict.values(x) if isinstance(x, dict) else x
            self._alive[id(x)] = any(issubclass(kind, _ALIVE) for kind in set(map(type, values)))
        return self._alive[id(x)]

    def _visit_all(self, values: Iterable[Any] | None, *, counted: bool = True) -> None:
        for value in values or ():
            if type(value) in _SIMPLE or id(value) in self._seen:
                continue
            if counted and self._left <= 0:
                return
            self._left -= counted
            self._next.append(value)

    def _substitute(self, x: Any) -> Any:
        """The substitute of a value until the snapshot is restored."""
        if not _is_iterator(type(x)):
            return x
        if id(x) not in self._iterators:
            self._iterators[id(x)] = x, replayable(x) if _is_its_iterator(x) else x
        stand_in = self._iterators[id(x)][1]
        if type(stand_in) is Replay:
            self._replay(stand_in)
        elif stand_in is not x:
            self._visit_all(x.__reduce__()[1])  # the iterated object
        return stand_in

    def _replay(self, x: Replay) -> None:
        if id(x) not in self._iterators:
            self._iterators[id(x)] = x, x
            x.begin(self._generators)
            self._put_back.append(x.rewind)

    def _original(self, x: Any) -> Any:
        """The value to restore: the object itself, unless it was drawn from."""
        stand_in = self._iterators.get(id(x), (x, x))[1]
        return stand_in if type(stand_in) is Replay and stand_in.is_ahead else x


_METHODS = {staticmethod, classmethod}
_FUNCTIONS = {types.FunctionType, types.MethodType, types.CellType, functools.partial}
_CELL = {"cell_contents": vars(types.CellType)["cell_contents"]}


# -- whose classes -------------------------------------------------------------------------------------


def _is_users(cls: type) -> bool:
    """True if instances of a class are read: not those of Python and installed packages."""
    return _is_users_module(cls.__module__)


@functools.cache
def _is_users_module(name: Any) -> bool:
    top = str(name).partition(".")[0]
    if is_library(str(name)) or top == "lightning_cp" or top in sys.stdlib_module_names:
        return False
    path = getattr(sys.modules.get(str(name)), "__file__", None)
    return top == "__main__" if path is None else "-packages" not in path


def _is_simple(kind: type, values: Iterable[Any]) -> bool:
    """True if an object of an installed package has only numbers, such as an average."""
    if is_library(kind.__module__) or kind.__module__.startswith("lightning_cp."):
        return False
    return {type(x) for x in values} <= _SIMPLE | {torch.Tensor}


def _is_iterator(kind: type) -> bool:
    """True for an iterator that does not hold its position in attributes of a user's class."""
    if not hasattr(kind, "__next__") or not hasattr(kind, "__iter__") or kind is Replay:
        return False
    if issubclass(kind, (io.IOBase, *_OF_A_RUN, *_PROXIES)):
        return False
    return not _is_users(kind) and not kind.__module__.startswith(
        ("lightning", "pytorch_lightning")
    )


def _is_its_iterator(x: Any) -> bool:
    """True if a loop over it draws from it, not from another: a package's proxy may act for an object."""
    try:
        return iter(x) is x
    except Exception:  # any type: the code is the user's
        return False


# -- reading and writing -------------------------------------------------------------------------------


def _mapped(had: Any, of: Callable[[Any], Any]) -> Any:
    """The same list or dict, with mapped values."""
    if isinstance(had, dict):
        return {name: of(x) for name, x in had.items()}
    return [of(x) for x in had]


def _container(x: Any) -> tuple[Any, Any, Callable[[Any, Any], None]]:
    if isinstance(x, (list, deque)):
        return x, list(x), _write_list
    if isinstance(x, dict):
        return x, dict(x), _write_dict
    return x, set(x), _write_set


def _is_same(now: Iterable[Any], had: Iterable[Any]) -> bool:
    return all(map(operator.is_, now, had))


def _write_list(x: Any, had: list[Any]) -> None:
    if len(x) != len(had) or not _is_same(x, had):
        kind: Any = list if isinstance(x, list) else deque
        kind.clear(x)
        kind.extend(x, had)


def _write_dict(x: Any, had: dict[Any, Any]) -> None:
    if len(x) != len(had) or not _is_same(x, had) or not _is_same(x.values(), had.values()):
        kind: Any = OrderedDict if isinstance(x, OrderedDict) else dict
        kind.clear(x)
        dict.update(x, had) if kind is dict else kind.update(x, had)


def _write_set(x: Any, had: set[Any]) -> None:
    if x != had:
        set.clear(x)
        set.update(x, had)


def _write_attributes(own: dict[str, Any], had: dict[str, Any]) -> None:
    for name in own.keys() - had.keys():
        del own[name]
    own.update(had)


def _of_module(own: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in own.items() if name not in _OF_EVERY_MODULE}


def _write_attributes_of_module(own: dict[str, Any], had: dict[str, Any]) -> None:
    for name in own.keys() - had.keys() - _OF_EVERY_MODULE:
        del own[name]
    own.update(had)


def _slots_of(kind: type) -> dict[str, Any]:
    """Descriptors of the slots of the user's classes."""
    return {
        f"{base.__qualname__}.{name}": x
        for base in kind.__mro__
        if _is_users(base)
        for name, x in vars(base).items()
        if type(x) is types.MemberDescriptorType
    }


def _read(x: Any, slots: dict[str, Any]) -> dict[str, Any]:
    had: dict[str, Any] = {}
    for name, slot in slots.items():
        try:
            had[name] = slot.__get__(x)
        except (AttributeError, ValueError):  # an empty slot; ValueError for a cell
            continue
    return had


def _write_slots(x: Any, had: dict[str, Any], slots: dict[str, Any]) -> None:
    now = _read(x, slots)
    for name, slot in slots.items():
        if name not in had and name in now:
            slot.__delete__(x)
        elif name in had and now.get(name, slot) is not had[name]:
            slot.__set__(x, had[name])


def _write_class(cls: type, had: dict[str, Any], names: set[str]) -> None:
    for name in vars(cls).keys() - names:
        if not name.startswith("__"):
            type.__delattr__(cls, name)
    for name, value in had.items():
        if vars(cls).get(name, cls) is not value:
            type.__setattr__(cls, name, value)


def _fill(x: np.ndarray[Any, Any], had: np.ndarray[Any, Any]) -> None:
    if x.shape == had.shape:
        np.copyto(x, had)


def restore_values(x: torch.Tensor, then: torch.Tensor) -> None:
    """Restore the values of a tensor, if they have changed."""
    with torch.no_grad():
        if x.shape == then.shape and not torch.equal(x, then):
            x.copy_(then)


def save_buffers(module: nn.Module) -> Callable[[], None]:
    """Record a module's buffers, also if a step replaces the tensors; return the function that
    restores them.
    """
    kept = dict(module._buffers)
    copies = {
        name: x.detach().clone() for name, x in kept.items() if x is not None and is_strided(x)
    }

    def restore() -> None:
        module._buffers.clear()
        module._buffers.update(kept)
        for name, then in copies.items():
            restore_values(module._buffers[name], then)  # type: ignore[arg-type]

    return restore


def _states_of(metric: Metric) -> dict[str, Any]:
    names = [*metric._defaults, "_update_count", "_computed", "_forward_cache"]
    return {name: copy.deepcopy(vars(metric)[name]) for name in names if name in vars(metric)}

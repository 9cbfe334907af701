"""Undoable changes of other code: one :class:`PatchSet` for attributes, methods and functions; module hooks.

A function is replaced in every module that holds it, however it was imported. Hooks of users' modules last
for a run: a pickle names nothing of this package, so it loads where the package is not installed.
"""

from __future__ import annotations

import copy
import gc
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MethodType, ModuleType
from typing import Any, NamedTuple

Function = Callable[..., Any]
Undo = Callable[[], None]

LINK = "_lightning_cp_link"
"""Attribute of a replacement: its :class:`ChainedPatch`."""

_INHERITED = object()
"""Original of an attribute that its owner only inherits; the undo deletes the replacement."""


def add_hook(
    register: Callable[..., Any], function: Callable[..., Any], **options: Any
) -> Callable[[], None]:
    """Register ``function`` by a module's ``register_forward_hook`` or the like; return its removal."""
    hook = ModuleHook(function)
    handle = register(hook, **options)

    def remove() -> None:
        handle.remove()
        hook.function = do_nothing  # deep copies still have the hook

    return remove


class ModuleHook:
    """A function that PyTorch calls around a module's forward.

    A deep copy of the module shares it for the rest of the run, because steps observe copies too; the hook of
    a pickle does nothing.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleHook:
        return self

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")  # accepts any arguments, and returns nothing


def do_nothing(*_: Any, **__: Any) -> None:
    """Do nothing, with any arguments."""


WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""Parts of names that PyTorch's wrappers insert."""


def strip_wrappers(name: str) -> str:
    """Remove the parts of a name that wrappers insert."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


@dataclass
class ChainedPatch:
    """The value that a replacement replaced. A function that is replaced everywhere calls it through here."""

    original: Any


class ReplacedFunction(NamedTuple):
    """A replaced function."""

    home: ModuleType
    """The module that defines it; it shows later replacements."""
    name: str
    ours: Function
    link: ChainedPatch


def original_function(function: Any) -> Any:
    """Return the function beneath all replacements of a function (not of a method), or itself."""
    while (link := getattr(function, LINK, None)) is not None:
        function = link.original
    return function


class PatchSet:
    """Replacements by one owner, undone in reverse order.

    Another owner may replace the same afterwards: that stays, and its undo restores what was there before
    both.
    """

    def __init__(self) -> None:
        self._undo: list[Undo] = []

    def __enter__(self) -> PatchSet:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def add(self, undo: Undo) -> None:
        """Add any other action to be undone with the rest."""
        self._undo.append(undo)

    def replace(self, owner: Any, name: str, make: Callable[[Function], Function]) -> None:
        """Replace a method by ``make(current method)``, on this object only."""
        self.put_method(owner, name, make(getattr(owner, name)))

    def put_method(
        self, owner: Any, name: str, value: Function, *, plain: Function | None = None
    ) -> None:
        """Replace a method on this object only; copies of the object have the original.

        Args:
            owner: a module, or any other object.
            name: the method's name.
            value: called without the owner.
            plain: the method of a copy, if the owner's class has no such method.
        """
        link = ChainedPatch(vars(owner).get(name, _INHERITED))
        self._undo.append(
            _write(owner, name, InstanceMethod(owner, name, value, link, plain), link)
        )

    def put_value(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute of an object, a module or a class."""
        link = ChainedPatch(vars(owner).get(name, _INHERITED))
        self._undo.append(_write(owner, name, value, link))

    def put_functions(self, replaced: Sequence[ReplacedFunction]) -> None:
        """Replace functions in all modules' globals, in one scan."""
        for one in replaced:
            setattr(one.ours, LINK, one.link)
        _replace_everywhere({one.link.original: one.ours for one in replaced})
        self._undo.append(lambda: _restore_everywhere(replaced))

    def undo(self) -> None:
        """Undo everything."""
        while self._undo:
            self._undo.pop()()


def _write(owner: Any, name: str, value: Any, link: ChainedPatch) -> Undo:
    plain = not isinstance(owner, type)
    write, erase = (object.__setattr__, object.__delattr__) if plain else (setattr, delattr)
    write(owner, name, value)

    def undo() -> None:
        if (current := vars(owner).get(name)) is not value:
            _relink(current, value, link.original)
        elif link.original is _INHERITED:
            erase(owner, name)
        else:
            write(owner, name, link.original)

    return undo


def _relink(current: Any, ours: Any, original: Any) -> None:
    """Make the later replacement of ``ours``, if any, replace the original instead."""
    while isinstance(link := getattr(current, LINK, None), ChainedPatch):
        if link.original is ours:
            link.original = original
        current = link.original


class InstanceMethod(partial[Any]):
    """A function in place of one instance's method; a copy of the instance has its original method.

    A pickle names nothing of this package, so it loads where the package is not installed.
    """

    def __new__(cls, owner: Any, name: str, value: Function, *_: object) -> InstanceMethod:
        return super().__new__(cls, value)

    def __init__(
        self, owner: Any, name: str, value: Function, link: ChainedPatch, plain: Function | None
    ) -> None:
        self._owner, self._name, self._plain = owner, name, plain
        self.__wrapped__ = getattr(value, "__wrapped__", value)  # Lightning asks what is overridden
        self.__name__ = getattr(value, "__name__", name)
        setattr(self, LINK, link)

    @property
    def _own(self) -> Any:
        original = getattr(self, LINK).original
        return self._plain if original is _INHERITED else original

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = copy.deepcopy(self._owner, memo)
        if self._own is not None:
            return copy.deepcopy(self._own, memo)
        method = getattr(type(self._owner), self._name, None)
        return None if method is None else MethodType(method, copied)

    def __reduce__(self) -> Any:
        if self._own is not None:
            return operator.getitem, ((self._own,), 0)
        return getattr, (
            self._owner,
            self._name,
            None,
        )  # of an instance without its state: its class's


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection in the block.

    A swap without a holder is undone when it is collected, which would change functions that another swap is
    about to replace.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def module_globals(without: tuple[str, ...] = ()) -> Iterator[tuple[ModuleType, dict[str, Any]]]:
    """Yield every loaded module except those with a prefix in ``without``, and its names.

    Other threads may add names meanwhile.
    """
    for key, module in list(sys.modules.items()):
        names = getattr(module, "__dict__", None)
        if isinstance(names, dict) and not key.startswith(without):
            yield module, names


def load_compiler_rules() -> None:
    """Make the compiler look up PyTorch's functions before their names refer to replacements.

    It looks them up once by name, and again after ``init_process_group``, and puts them into graphs
    unchanged.
    """
    rules = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None:
        rules.get_torch_obj_rule_map()


def _replace_everywhere(news: Mapping[Function, Function]) -> None:
    """Replace old functions by new ones in all modules' globals."""
    load_compiler_rules()
    by_identity = {id(old): new for old, new in news.items()}
    for module, names in module_globals():
        if not by_identity.keys().isdisjoint(map(id, list(names.values()))):
            for name, value in names.copy().items():
                if id(value) in by_identity:
                    setattr(module, name, by_identity[id(value)])


def _restore_everywhere(replaced: Sequence[ReplacedFunction]) -> None:
    """Restore the originals; a later swap of the same function then calls the original."""
    with without_garbage_collection():
        _replace_everywhere({one.ours: one.link.original for one in replaced})
        for home, name, ours, link in replaced:
            _relink(getattr(home, name), ours, link.original)


Patch = Callable[[], Undo]
"""Applies a patch, and returns its undo."""


class StepPatches:
    """Patches of a model, applied when a step begins and undone in reverse when it ends."""

    def __init__(self) -> None:
        self._patches: list[Patch] = []
        self._undo: list[Undo] = []
        self._reports: list[Callable[[], str | None]] = []

    def add(self, patch: Patch, report: Callable[[], str | None] | None = None) -> None:
        """Add a patch; ``report`` returns a line about its effect in a step, to be shown once."""
        self._patches.append(patch)
        if report is not None:
            self._reports.append(report)

    def begin(self) -> None:
        """Begin a step; end the previous one if that has not happened."""
        if self._undo:
            self.end()
        for patch in self._patches:
            self._undo.append(patch())

    def on_end(self, undo: Undo) -> None:
        """Add an action for the end of this step only."""
        self._undo.append(undo)

    def end(self) -> None:
        """End the step: undo the patches."""
        while self._undo:
            self._undo.pop()()

    def pop_reports(self) -> list[str]:
        """Return lines about the step that ends now, each kind once."""
        said: list[str] = []
        for report in list(self._reports):
            line = report()
            if line is not None:
                self._reports.remove(report)
                said.append(line)
        return said

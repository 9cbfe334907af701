"""A loader in front of another one: only the way through it is new."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class LoaderProxy:
    """Has everything that the loader has, also for those who read its ``__dict__``, as Fabric does.

    What is set is set on the loader: Lightning ends workers by setting ``_iterator``.
    """

    __slots__ = ("_loader",)

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __bool__(self) -> bool:
        return bool(self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # half made, or half unpickled
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(type(self), name):
            object.__setattr__(self, name, value)
        else:
            setattr(self._loader, name, value)

    @property
    def __class__(self) -> type:  # type: ignore[override]
        """The loader's own, at which Lightning and callbacks look with ``isinstance``.

        Lists and dicts are not taken for such: what goes through collections would go through the batches.
        """
        loader = object.__getattribute__(self, "_loader")
        return type(self) if isinstance(loader, (Sequence, Mapping)) else type(loader)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, and what comes of a pickle, is the loader itself: ranks are those of one run."""
        return _itself, (self._loader,)

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        return getattr(self._loader, "__dict__", {})


def _itself(loader: Any) -> Any:
    return loader

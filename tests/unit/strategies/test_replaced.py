"""What is replaced on objects of others is given back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_cp.utils.patching import PatchSet


class Plugin:
    """Somebody else's."""

    def answer(self) -> str:
        return "own"


def around(own: Callable[..., Any]) -> Callable[..., Any]:
    return lambda: f"around {own()}"


def test_the_method_comes_back() -> None:
    plugin, replaced = Plugin(), PatchSet()
    replaced.replace(plugin, "answer", around)
    assert plugin.answer() == "around own"
    replaced.undo()
    assert plugin.answer() == "own"
    assert not plugin.__dict__


def test_what_a_user_had_put_there_comes_back() -> None:
    plugin, replaced = Plugin(), PatchSet()
    plugin.answer = lambda: "user's"  # type: ignore[method-assign]
    replaced.replace(plugin, "answer", around)
    assert plugin.answer() == "around user's"
    replaced.undo()
    assert plugin.answer() == "user's"


def test_what_came_later_is_left_alone() -> None:
    plugin, first, second = Plugin(), PatchSet(), PatchSet()
    first.replace(plugin, "answer", around)
    second.replace(plugin, "answer", around)
    first.undo()
    assert plugin.answer() == "around around own"
    second.undo()
    assert plugin.answer() == "own"
    assert not plugin.__dict__


def test_values_come_back_to_objects_and_classes() -> None:
    plugin, kind = Plugin(), type("Kind", (Plugin,), {})
    with PatchSet() as patches:
        for owner in (plugin, kind):
            patches.put_value(owner, "answer", 1)
            patches.put_value(owner, "answer", 2)
            assert owner.answer == 2
    assert plugin.answer() == kind().answer() == "own"
    assert "answer" not in vars(plugin) | vars(kind)

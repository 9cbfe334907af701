"""Everything that a step of Python can note is put back in the same objects; what cannot be is left alone."""

from __future__ import annotations

import itertools
import sys
import threading
import types
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_cp.strategies.parity.snapshot import OBJECTS, Snapshot


class Holder(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


@dataclass(frozen=True)
class Frozen:
    counts: dict[str, int] = field(default_factory=dict)


class Noted(dict[str, Any]):
    """A dict of the user's with an attribute, which writes in its own way."""

    seen = 0

    def __setitem__(self, key: str, value: Any) -> None:
        raise AssertionError


class Empty:
    __slots__ = ("value",)


class Guarded:
    """A thread may change it meanwhile."""

    def __init__(self) -> None:
        self.lock, self.ready = threading.Lock(), [1]


class Own(pl.Trainer):
    def __init__(self) -> None:
        self.count = 0


def module_in(path: str) -> types.ModuleType:
    made = types.ModuleType("meters_of_a_package")
    made.__file__ = path
    exec("class Meter:\n    def __init__(self): self.count, self.others = 0, None", vars(made))
    return made


def after(value: Any, change: Callable[[Any], Any]) -> Any:
    """What a module has in its attribute after a snapshot, a change of the value and its end."""
    holder = Holder(value)
    before = holder.value
    snapshot = Snapshot([holder])
    change(holder.value)
    holder.value, holder.more = "another", 1  # type: ignore[assignment]
    snapshot.put_back()
    assert "more" not in vars(holder)
    assert holder.value is before
    return holder.value


def test_containers_and_objects() -> None:
    mixed = after([1, {"a": deque([2], 3)}], lambda x: (x.append(3), x[1]["a"].append(4)))
    assert mixed == [1, {"a": deque([2], 3)}]
    assert mixed[1]["a"].maxlen == 3
    ordered = after(OrderedDict(a=1, b=2), lambda x: x.move_to_end("a"))
    assert list(ordered) == ["a", "b"]
    assert list(after({"a": 1, "b": 2}, lambda x: x.update(a=x.pop("a")))) == ["a", "b"]
    assert after({1, 2}, lambda x: x.discard(1)) == {1, 2}
    assert after(Counter("ab"), lambda x: x.update("b"))["b"] == 1
    assert after((Frozen(),), lambda x: x[0].counts.update(a=1))[0].counts == {}
    assert not hasattr(after(Empty(), lambda x: setattr(x, "value", 1)), "value")
    noted = after(Noted(a=1), lambda x: (x.update(a=2), vars(x).update(seen=3)))
    assert (noted, noted.seen) == ({"a": 1}, 0)
    assert not after(np.zeros(2), lambda x: x.fill(1)).any()
    assert not after([torch.zeros(2)], lambda x: x[0].fill_(1))[0].any()
    assert after(types.SimpleNamespace(a=1), lambda x: vars(x).update(a=2)).a == 1
    after([iter([1, 2])], lambda x: x.clear())


def endless() -> Iterator[int]:
    yield from itertools.count()


@pytest.mark.parametrize(
    ("make", "is_replayed"),
    [
        (lambda: iter([0, 1, 2, 3]), False),
        (lambda: iter(range(9)), False),
        (itertools.count, False),
        (endless, True),
        (lambda: zip(itertools.count(), strict=True), True),
        (lambda: map(int, itertools.count()), True),
        (lambda: iter(DataLoader(range(9), batch_size=None)), True),  # type: ignore[arg-type]
    ],
)
def test_iterators(make: Callable[[], Iterator[Any]], is_replayed: bool) -> None:
    """Checks draw, then the run draws the same; one that is copied, or not drawn from, stays the user's."""
    first, own = make(), make()
    holder = Holder(first)
    holder.again = [first]  # type: ignore[assignment]
    for draws in (0, 3, 1):
        snapshot, want = Snapshot([holder]), [next(own) for _ in range(bool(draws))]
        drawn = [next(holder.again[0] if at % 2 else holder.value) for at in range(draws)]
        snapshot.put_back()
        assert drawn[:1] == want
        assert holder.again[0] is holder.value
        assert (holder.value is first) == (not is_replayed or draws == 0)
        assert [next(holder.value) for _ in want] == want
    assert [next(holder.again[0]), next(holder.value)] == [next(own), next(own)]


def test_what_cannot_be_put_back_is_left_alone() -> None:
    assert after(Guarded(), lambda x: x.ready.append(2)).ready == [1, 2]
    assert after(Own(), lambda x: setattr(x, "count", 1)).count == 1
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter])
    assert after(optimizer, lambda x: x.param_groups[0].update(lr=3.0)).param_groups[0]["lr"] == 3.0


def test_packages_have_numbers_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """An average's, say; an object of a package that holds others may be anything."""
    made = module_in("/lib/python3/site-packages/meters_of_a_package.py")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    assert after(made.Meter(), lambda x: setattr(x, "count", 1)).count == 0
    other = made.Meter()
    other.others = []
    assert after(other, lambda x: setattr(x, "count", 1)).count == 1


def test_large_data_is_not_looked_into() -> None:
    data = [{"ids": [at], "length": 1} for at in range(4 * OBJECTS)]
    entries = list(data)
    holder = Holder([data, {"near": 1}])
    snapshot = Snapshot([holder])
    assert snapshot.size < OBJECTS + 50
    data.reverse()
    data.pop()
    holder.value[1]["near"] = 2
    snapshot.put_back()
    assert holder.value[1] == {"near": 1}
    assert len(data) == len(entries)
    assert all(a is b for a, b in zip(data, entries, strict=True))

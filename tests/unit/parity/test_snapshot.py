"""Everything that a step of Python can note is put back in the same objects; what cannot be is left alone."""

from __future__ import annotations

import itertools
import operator
import queue
import random
import sys
import threading
import types
import warnings
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_cp.parity.restore import restore_after
from lightning_cp.parity.snapshot import OBJECTS, Snapshot


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


class GuardedInSlots:
    __slots__ = ("lock", "ready")

    def __init__(self) -> None:
        self.lock, self.ready = threading.Lock(), [1]


class Pooled:
    """What its thread has done is done."""

    def __init__(self, of: Any) -> None:
        self.of, self.ready = of, [1]


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
    snapshot.restore()
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
        snapshot.restore()
        assert drawn[:1] == want
        assert holder.again[0] is holder.value
        assert (holder.value is first) == (not is_replayed or draws == 0)
        assert [next(holder.value) for _ in want] == want
    assert [next(holder.again[0]), next(holder.value)] == [next(own), next(own)]


def test_what_cannot_be_put_back_is_left_alone() -> None:
    with ThreadPoolExecutor(1) as pool:
        locked: dict[str, Any] = {"of": threading.Lock()}
        holders = [pool, queue.SimpleQueue(), locked, [Future()]]
        objects = [Guarded(), GuardedInSlots(), *map(Pooled, holders)]
        for each in objects:
            assert after(each, lambda x: x.ready.append(2)).ready == [1, 2]
        assert after(locked, lambda x: x.update(ready=1))["ready"] == 1
    assert after(Own(), lambda x: setattr(x, "count", 1)).count == 1
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter])
    assert after(optimizer, lambda x: x.param_groups[0].update(lr=3.0)).param_groups[0]["lr"] == 3.0


def sparse() -> list[torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that they are young
        eye, parts = torch.eye(2), [torch.ones(2), torch.ones(3)]
        nested = [torch.nested.nested_tensor(parts, layout=x) for x in (None, torch.jagged)]
        return [eye.to_sparse(), eye.to_sparse_csr(), *nested]


def test_tensors_that_cannot_be_compared_end_nothing() -> None:
    for x in sparse():
        after([x], lambda x: x.append(1))
        holder = Holder(None)
        holder.register_buffer("of", x)
        Snapshot([holder]).restore()
        assert holder.of is x


def test_weak_references() -> None:
    """One is called and drawn from as before, and is left alone when its object is gone."""
    target, gone = Pooled(None), Pooled(None)
    proxies = [weakref.proxy(target), weakref.proxy(Guarded.__init__), weakref.proxy(gone)]
    holder = Holder(list(proxies))
    Pooled.proxy = proxies[2]  # type: ignore[attr-defined]
    holder.target = target  # type: ignore[assignment]
    del gone
    snapshot = Snapshot([holder])
    assert all(map(operator.is_, holder.value, proxies))
    snapshot.restore()
    assert all(map(operator.is_, holder.value, proxies))
    del Pooled.proxy  # type: ignore[attr-defined]


class Counting(nn.Module):
    """Counts in an attribute that it makes."""

    def forward(self) -> int:
        kind: Any = type(self)
        if not hasattr(kind, "count"):
            kind.count = 0
        kind.count += 1
        return kind.count


def test_attributes_of_a_class_that_a_step_makes() -> None:
    module = Counting()
    for _ in range(2):
        snapshot = Snapshot([module])
        assert module() == 1
        snapshot.restore()
    assert not hasattr(Counting, "count")


def test_an_iterator_that_was_drawn_from_is_what_it_was() -> None:
    holder = Holder(iter(DataLoader(range(6), batch_size=2)))  # type: ignore[arg-type]
    snapshot = Snapshot([holder])
    next(holder.value)
    snapshot.restore()
    assert len(holder.value) == 3
    holder.value = endless()
    snapshot = Snapshot([holder])
    assert (bool(holder.value), list(itertools.islice(holder.value, 2))) == (True, [0, 1])
    snapshot.restore()
    with pytest.raises(TypeError):
        len(holder.value)  # type: ignore[arg-type]


def draws(of: str, generator: Any) -> Iterator[float]:
    kinds: dict[str, Callable[[], Any]] = {
        "torch": lambda: torch.rand(()),
        "python": random.random,
        "numpy": np.random.rand,
        "own": lambda: torch.rand((), generator=generator),
        "numpy's own": generator.random if of == "numpy's own" else list,
    }
    while True:
        yield float(kinds[of]())


@pytest.mark.parametrize("of", ["torch", "python", "numpy", "own", "numpy's own"])
def test_random_numbers_of_an_iterator(of: str) -> None:
    """Numbers that an iterator draws in two checks are drawn for the run."""

    def run(checks: int) -> list[float]:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        holder = Holder(np.random.default_rng(1) if of == "numpy's own" else torch.Generator())
        holder.it = draws(of, holder.value)  # type: ignore[assignment]

        def step() -> list[float]:
            return [next(holder.it), next(holder.it), next(draws(of, holder.value))]  # type: ignore[call-overload]

        for _ in range(checks):
            with restore_after(holder):
                step()
        return step() + step()

    assert run(2) == run(0)


def test_values_that_a_step_changes_come_unchanged() -> None:
    """The same objects too: a step may write to a memory that it goes around."""
    memory, drawn = [torch.ones(2), torch.ones(2)], list[Any]()
    holder = Holder(itertools.cycle(memory))
    listed = [torch.ones(2)]
    holder.listed = iter(listed)  # type: ignore[assignment]
    holder.batches = ({"x": torch.ones(2), "n": np.ones(2)} for _ in range(9))  # type: ignore[assignment]
    holder.parameters_ = itertools.cycle([nn.Parameter(torch.ones(1))])  # type: ignore[assignment]
    for _ in range(2):
        snapshot = Snapshot([holder])
        next(holder.value).mul_(3)
        next(holder.listed).mul_(3)
        batch = next(holder.batches)
        assert float(batch.pop("x").mul_(2).sum() + batch["n"].sum()) == 6
        batch["n"] *= 2
        drawn.append(next(holder.parameters_))
        snapshot.restore()
    assert next(holder.value) is memory[0]
    assert next(holder.listed) is listed[0]
    assert torch.equal(listed[0], torch.ones(2))
    assert torch.equal(memory[0], torch.ones(2))
    batch = next(holder.batches)
    assert float(batch["x"].sum() + batch["n"].sum()) == 4
    parameter = next(holder.parameters_)
    assert all(x is parameter for x in drawn)

    def scales() -> Iterator[torch.Tensor]:
        while True:
            yield holder.scale.mul_(0.5)  # type: ignore[operator]

    holder.scale, holder.it = torch.ones(()), scales()  # type: ignore[assignment]
    snapshot = Snapshot([holder])
    assert float(next(holder.it)) == 0.5
    snapshot.restore()
    assert float(next(holder.it)) == 0.5


def test_a_large_teacher_in_a_list_takes_no_room() -> None:
    """Frozen parameters are put back up to as many numbers as are trained, submodules first."""
    holder = Holder([nn.Linear(64, 64).requires_grad_(False)])
    holder.net, holder.ema = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
    before = [x.clone() for x in holder.ema.parameters()]
    with restore_after(holder):
        for x in (*holder.ema.parameters(), *holder.value[0].parameters()):
            x.data.add_(1)
    assert all(map(torch.equal, holder.ema.parameters(), before))


def test_packages_have_numbers_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """An average's, say; an object of a package that holds others may be anything."""
    made = module_in("/lib/python3/site-packages/meters_of_a_package.py")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    assert after(made.Meter(), lambda x: setattr(x, "count", 1)).count == 0
    other = made.Meter()
    other.others = []
    assert after(other, lambda x: setattr(x, "count", 1)).count == 1


@pytest.mark.nightly
def test_large_data_is_not_looked_into() -> None:
    data = [{"ids": [at], "length": 1} for at in range(4 * OBJECTS)]
    entries = list(data)
    holder = Holder([data, {"near": 1}])
    snapshot = Snapshot([holder])
    assert len(snapshot._held) < OBJECTS + 50
    data.reverse()
    data.pop()
    holder.value[1]["near"] = 2
    snapshot.restore()
    assert holder.value[1] == {"near": 1}
    assert len(data) == len(entries)
    assert all(a is b for a, b in zip(data, entries, strict=True))

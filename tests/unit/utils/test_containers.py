"""Walking containers: every tensor is found under its name, and the original is left as it was."""

from __future__ import annotations

import collections
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from lightning_cp.errors import ConfigError
from lightning_cp.utils.containers import is_container, map_tensors, tensors_of


class Pair(NamedTuple):
    """A named tuple with a default."""

    tokens: Any
    extra: Any = None


@dataclass
class Sample:
    """A dataclass whose constructor computes something."""

    tokens: Any
    name: str = "a"
    size: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.size = 7


@dataclass(frozen=True, slots=True)
class Frozen:
    """Cannot be assigned to, and has no __dict__."""

    tokens: Any
    weight: float = 0.5


class Renamed(list[Any]):
    """A list of the user's own."""


def tensor() -> torch.Tensor:
    return torch.arange(3.0)


def encoding(values: dict[str, Any]) -> Any:
    from transformers import BatchEncoding

    return BatchEncoding(values)


def output(values: dict[str, Any]) -> Any:
    from transformers.modeling_outputs import CausalLMOutputWithPast

    return CausalLMOutputWithPast(**values)


CONTAINERS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "dict": (lambda: {"x": tensor(), "note": "n"}, ["x"]),
    "integer keys": (lambda: {3: tensor()}, ["3"]),
    "ordered": (lambda: collections.OrderedDict(b=tensor(), a=tensor()), ["b", "a"]),
    "default": (lambda: collections.defaultdict(list, x=tensor()), ["x"]),
    "user dict": (lambda: collections.UserDict(x=tensor()), ["x"]),
    "read-only": (lambda: types.MappingProxyType({"x": tensor()}), ["x"]),
    "encoding": (lambda: encoding({"input_ids": tensor()}), ["input_ids"]),
    "model output": (lambda: output({"logits": tensor()}), ["logits"]),
    "tuple": (lambda: (tensor(), 1, tensor()), ["0", "2"]),
    "list": (lambda: [None, tensor()], ["1"]),
    "own list": (lambda: Renamed([tensor()]), ["0"]),
    "named tuple": (lambda: Pair(tensor(), {"y": tensor()}), ["tokens", "extra.y"]),
    "named tuple, default": (lambda: Pair(tensor()), ["tokens"]),
    "dataclass": (lambda: Sample(tensor()), ["tokens"]),
    "frozen dataclass": (lambda: Frozen(tensor()), ["tokens"]),
    "packed": (lambda: pack_sequence([tensor()]), ["data", "batch_sizes"]),
    "nested": (
        lambda: {"a": {"b": (tensor(), [Frozen(tensor())])}, "c": Pair(Sample(tensor()))},
        ["a.b.0", "a.b.1.0.tokens", "c.tokens.tokens"],
    ),
    "a bare tensor": (tensor, ["batch"]),
    "empty": (dict, []),
    "scalars": (lambda: [1, 2.0, True, "s", b"s", 1j, None, torch.Size([2])], []),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_tensor_is_visited_under_its_name_and_nothing_changes_in_place(name: str) -> None:
    make, names = CONTAINERS[name]
    value = make()
    before = [x for _, x in tensors_of(value)]
    versions = [x._version for x in before]
    assert [found for found, _ in tensors_of(value)] == names

    visited: list[str] = []

    def visit(at: str, x: torch.Tensor) -> torch.Tensor:
        visited.append(at)
        return x + 10

    mapped = map_tensors(value, visit)
    assert visited == names
    assert type(mapped) is type(value)
    after = list(tensors_of(mapped))
    assert [found for found, _ in after] == names
    for old, (_, new) in zip(before, after, strict=True):
        assert torch.equal(new, old + 10)
    assert all(x is y for x, (_, y) in zip(before, tensors_of(value), strict=True))
    assert [x._version for x in before] == versions


def test_what_is_not_a_tensor_stays() -> None:
    value = {
        "t": tensor(),
        "note": "n",
        "inner": Sample(tensor(), "b"),
        "f": Frozen(tensor(), 0.25),
    }
    mapped = map_tensors(value, lambda name, x: name)
    assert mapped == {
        "t": "t",
        "note": "n",
        "inner": Sample("inner.tokens", "b"),
        "f": Frozen("f.tokens", 0.25),
    }
    assert mapped["inner"].size == 7


def test_attributes_of_model_outputs_follow_their_keys() -> None:
    mapped = map_tensors(output({"logits": tensor()}), lambda name, x: x * 0)
    assert torch.equal(mapped.logits, torch.zeros(3))
    assert mapped.logits is mapped["logits"]


def test_packed_sequences_stay_usable() -> None:
    packed = pack_sequence([tensor()])
    mapped = map_tensors(packed, lambda name, x: x)
    assert isinstance(mapped, PackedSequence)
    assert mapped.data is packed.data


@pytest.mark.parametrize("value", [{"a": [object()]}, ({1, 2},), [range(3)]])
def test_unknown_objects_are_refused_by_place(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"cannot look for tensors inside '(a\.0|0)', a \w+"):
        map_tensors(value, lambda name, x: x)


def test_containers_and_others() -> None:
    assert all(is_container(make()) for name, (make, _) in CONTAINERS.items() if "bare" not in name)
    assert not any(is_container(x) for x in (tensor(), "text", 3, None, object(), Sample))

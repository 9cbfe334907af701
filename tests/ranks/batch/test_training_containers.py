"""Batches in every container: the run of one process, and the model sees what the loader gave."""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import default_collate

from lightning_cp import ContextParallelMixin
from lightning_cp.utils.containers import map_tensors, tensors_of
from tests.helpers.pool import run_ranks
from tests.helpers.strategies.small import (
    RING,
    ULYSSES,
    Batch,
    Settings,
    Small,
    close,
    loader,
    trainer_of,
    weights,
)


class Named(NamedTuple):
    input_ids: Any
    labels: Any


@dataclass
class Data:
    input_ids: Any
    labels: Any
    note: str = "n"


@dataclass(frozen=True, slots=True)
class Frozen:
    input_ids: Any
    labels: Any


def encoding(**values: Any) -> Any:
    from transformers import BatchEncoding

    return BatchEncoding(values)


def model_output(**values: Any) -> Any:
    from transformers.utils import ModelOutput

    return ModelOutput(**values)


def user_dict(**values: Any) -> Any:
    return collections.UserDict(values)


def default_dict(**values: Any) -> Any:
    return collections.defaultdict(list, values)


def as_tuple(**values: Any) -> Any:
    return tuple(values.values())


def as_list(**values: Any) -> Any:
    return list(values.values())


def nested(**values: Any) -> Any:
    return {
        "inputs": (values["input_ids"], ["a", "b"]),
        "targets": Data(None, values["labels"]),
        "n": 2,
    }


@dataclass(frozen=True)
class Kind:
    make: Callable[..., Any]
    ids: str = "input_ids"
    labels: str = "labels"


KINDS = {
    "dict": Kind(dict),
    "ordered": Kind(collections.OrderedDict),
    "default dict": Kind(default_dict),
    "user dict": Kind(user_dict),
    "encoding": Kind(encoding),
    "model output": Kind(model_output),
    "tuple": Kind(as_tuple, "0", "1"),
    "list": Kind(as_list, "0", "1"),
    "named tuple": Kind(Named),
    "dataclass": Kind(Data),
    "frozen dataclass": Kind(Frozen),
    "nested": Kind(nested, "inputs.0", "targets.labels"),
}


class Contained(ContextParallelMixin, Small):
    """Takes its tensors from the container that its loader made."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind
        self.steps = 0

    def loss(self, batch: Batch) -> torch.Tensor:
        assert isinstance(batch, type(self.kind.make(input_ids=0, labels=0)))
        tensors = dict(tensors_of(batch))
        ids, labels = tensors[self.kind.ids], tensors[self.kind.labels]
        self.steps += 1
        logits = self.model(ids, self.token_positions(ids))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def transfer_batch_to_device(self, batch: Batch, device: Any, dataloader_idx: int) -> Batch:
        if isinstance(batch, Frozen):  # Lightning cannot move these
            return map_tensors(batch, lambda _, x: x.to(device))
        return super().transfer_batch_to_device(batch, device, dataloader_idx)


def collated(name: str) -> Callable[[list[Any]], Any]:
    return lambda rows: KINDS[name].make(**default_collate(rows))


def contained(rank: int, world_size: int, settings: Settings | None, name: str) -> torch.Tensor:
    kind = KINDS[name]
    if settings is not None:
        dims = {kind.ids: 1, kind.labels: 1}
        settings = {**settings, "sequence_dims": dims, "label_key": kind.labels}
    module = Contained(kind)
    trainer_of(world_size, settings).fit(module, loader(8, collate_fn=collated(name)))
    assert module.steps == 4
    return weights(module)


@lru_cache(maxsize=1)
def plain() -> torch.Tensor:
    return run_ranks(1, contained, None, "dict")[0]


@pytest.mark.quick("frozen dataclass-check", "nested-broadcast")
@pytest.mark.parametrize(
    "settings", [ULYSSES, {**RING, "batch_sync": "broadcast"}], ids=["check", "broadcast"]
)
@pytest.mark.parametrize("name", KINDS)
def test_a_batch_in_any_container(name: str, settings: Settings) -> None:
    for got in run_ranks(2, contained, settings, name):
        close(got, plain())

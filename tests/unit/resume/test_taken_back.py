"""What a replay takes back besides gradients, in one process."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lightning_cp.resume.record import BufferCopies, CallbackStates
from tests.helpers.resume.runs import Statistics


class Counts(nn.Module):
    """Buffers that are changed where they lie, past their version, and by another tensor each time."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("added", torch.zeros(2))
        self.register_buffer("assigned", torch.zeros(2))
        self.register_buffer("data", torch.zeros(2))
        self.register_buffer("not_a_number", torch.zeros(2))
        self.register_buffer("grown", torch.zeros(0))
        self.statistics = Statistics().float()

    def step(self) -> None:
        self.added += 1  # type: ignore[operator]
        self.assigned = self.assigned + 1
        self.get_buffer("data").data.add_(1)
        self.get_buffer("not_a_number").data.copy_(torch.tensor([torch.nan, float(self.added[0])]))  # type: ignore[index]
        self.grown = torch.cat([self.get_buffer("grown"), torch.ones(1)])
        self.statistics.note(self.get_buffer("added")[:1])


class Names(nn.Module):
    """A module under three names, one of them within a wrapper that leaves itself out of a state's names."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(Counts())
        self.second = self.model[0]
        self.wrapped = checkpoint_wrapper(nn.Sequential(self.model[0]))

    def step(self) -> None:
        self.second.step()  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("kind", [Counts, Names])
def test_buffers_are_those_of_the_beginning_of_the_window(kind: type[Any]) -> None:
    module, buffers = kind(), BufferCopies()
    for _ in range(4):
        buffers.save([module])
        buffers.save([module])
        before = {name: x.clone() for name, x in module.state_dict().items()}
        for _ in range(3):
            module.step()
        found = buffers.replace_in(dict(module.state_dict()))
        assert found.keys() == before.keys()
        for name, x in before.items():
            assert torch.equal(found[name].nan_to_num(7), x.nan_to_num(7)), name
            if x.numel():
                assert not torch.equal(module.state_dict()[name].nan_to_num(7), x.nan_to_num(7)), (
                    name
                )


def test_what_is_no_buffer_is_left_as_it_is() -> None:
    module, buffers = nn.Sequential(nn.Linear(2, 2), Counts()), BufferCopies()
    buffers.save([module])
    module[1].step()  # type: ignore[operator]
    state = {**module.state_dict(), "extra": "said", "made": module[1].get_buffer("added").clone()}
    found = buffers.replace_in(state)
    for name in ("0.weight", "0.bias", "extra", "made"):
        assert found[name] is state[name]


def test_copies_are_made_once() -> None:
    """Every step may come here: values go over those of the step before."""
    module, buffers = Counts(), BufferCopies()
    places = set[int]()
    for _ in range(3):
        buffers.save([module])
        places.add(buffers.replace_in(module.state_dict())["data"].data_ptr())
        module.step()
    assert len(places) == 1


@dataclass
class Total:
    """A callback's own record."""

    rows: int = 0


class Keeps(pl.Callback):
    """Has some state, and counts how often any is asked for it."""

    asked = late = 0

    def __init__(self, **state: Any) -> None:
        self.state = state
        self.total = Total()

    @property
    def state_key(self) -> str:
        return f"{id(self)}"

    def state_dict(self) -> dict[str, Any]:
        Keeps.asked += 1
        return {**self.state, "rows": self.total.rows, "late": self.late} if self.state else {}


def test_states_of_callbacks_are_those_of_the_beginning_and_asked_for_when_saved() -> None:
    plain = Keeps(a=[1, (2.0, "x")], b=OrderedDict(c=[None, True]))
    whole, empty, silent = Keeps(a=[1, torch.ones(1)]), Keeps(), pl.Callback()
    trainer = pl.Trainer(
        callbacks=[plain, whole, empty, silent, ModelCheckpoint()],
        logger=False,
        enable_progress_bar=False,
        accelerator="cpu",
    )
    states, Keeps.asked = CallbackStates(), 0
    for _ in range(3):
        states.save(trainer)
    plain.state["a"].append(3)
    plain.state["b"]["c"].append(3)
    plain.total.rows += 1
    plain.late += 1  # an attribute of the class until now
    assert Keeps.asked == 0
    then = {"a": [1, (2.0, "x")], "b": {"c": [None, True]}, "rows": 0, "late": 0}
    assert states.states() == {plain.state_key: then}
    assert Keeps.asked == 3
    states.save(trainer)
    assert states.states() == {plain.state_key: {**plain.state, "rows": 1, "late": 1}}

"""The state of one kind of optimizer is not loaded into another one that has options of the same names."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.optim import Optimizer

from lightning_cp.checkpoint.restore import fit_state, kinds_of
from lightning_cp.errors import CheckpointError
from lightning_cp.fabric import UlyssesRingStrategy
from tests.helpers.pool import run_ranks
from tests.helpers.pool.environment import PoolEnvironment
from tests.helpers.strategies.small import RING, Small, loader, trainer_of

NAMES = ["weight", "bias"]
KINDS = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
ALIKE = {torch.optim.Adam, torch.optim.AdamW}
"""One is made from the other in PyTorch, and each sees to its own weight decay."""


class OfTheirs(torch.optim.Adam):
    """As PyTorch's, with something of its own beside it."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, **options)
        self.seen = 0


class Own(Optimizer):
    """Somebody's that has options of the names that RAdam's have, and keeps what it likes."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        names = torch.optim.RAdam([nn.Parameter(torch.zeros(1))]).defaults
        super().__init__(parameters, {**names, **options})

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["mine"] = torch.ones(3)


class Renamed(Own):
    """The same under another name."""


def stepped(kind: Any) -> Any:
    module = nn.Linear(2, 2)
    optimizer = kind(module.parameters(), lr=0.1)
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("noted", [True, False], ids=["our own", "of another program"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_told_from_any_other(kind: Any, noted: bool) -> None:
    """Also where nobody has noted what it was: then its options tell."""
    saved = stepped(kind)
    for other in KINDS:
        fresh = stepped(other)
        kinds = kinds_of(saved) if noted else []
        if other is kind or {kind, other} <= ALIKE:
            fresh.load_state_dict(fit_state(saved.state_dict(), fresh, NAMES, NAMES, kinds))
            fresh.step()
            continue
        with pytest.raises(CheckpointError, match="another kind of optimizer: "):
            fit_state(saved.state_dict(), fresh, NAMES, NAMES, kinds)


def test_what_was_noted_tells_kinds_apart_whose_options_do_not() -> None:
    """Of another version of PyTorch, say, which has other options."""
    saved = stepped(torch.optim.Adam)
    state = saved.state_dict()
    for group in state["param_groups"]:
        group["later"] = 1
    with pytest.raises(
        CheckpointError, match=r"of Adam, .* is RAdam\. The optimizer has not changed"
    ):
        fit_state(state, stepped(torch.optim.RAdam), NAMES, NAMES, kinds_of(saved))
    fit_state(state, stepped(torch.optim.Adam), NAMES, NAMES, kinds_of(saved))


@pytest.mark.parametrize("noted", [True, False], ids=["our own", "of another program"])
@pytest.mark.parametrize(
    ("kind", "other"),
    [
        *itertools.permutations((torch.optim.Adam, OfTheirs, torch.optim.AdamW), 2),
        *itertools.permutations((Own, Renamed), 2),
    ],
)
def test_what_does_the_same_is_loaded_under_any_name(kind: Any, other: Any, noted: bool) -> None:
    saved, fresh = stepped(kind), stepped(other)
    kinds = kinds_of(saved) if noted else []
    fresh.load_state_dict(fit_state(saved.state_dict(), fresh, NAMES, NAMES, kinds))
    fresh.step()


def test_schedulers_options_hide_no_kind() -> None:
    saved = stepped(torch.optim.Adam)
    torch.optim.lr_scheduler.StepLR(saved, 1)
    with pytest.raises(CheckpointError, match="another kind of optimizer: "):
        fit_state(saved.state_dict(), stepped(torch.optim.RAdam), NAMES, NAMES)


def saves_and_loads(rank: int, world: int) -> None:
    strategy = UlyssesRingStrategy(**RING)
    fabric: Any = Fabric(
        accelerator="cpu", devices=world, strategy=strategy, plugins=[PoolEnvironment()]
    )
    fabric.launch()
    module = nn.Linear(2, 2)
    model, optimizer = fabric.setup(module, OfTheirs(module.parameters(), lr=0.1))
    for group in optimizer.param_groups:
        group["later"] = 1
    fabric.save("a", {"model": model, "optimizer": optimizer})
    other, same = torch.optim.RAdam(module.parameters()), torch.optim.Adam(module.parameters())
    with pytest.raises(CheckpointError, match=r"of Adam, .* is RAdam"):
        fabric.load("a", {"model": model, "optimizer": other})
    fabric.load("a", {"model": model, "optimizer": same})
    assert same.param_groups[0]["lr"] == 0.1


@pytest.mark.nightly
def test_fabric_notes_the_kind() -> None:
    run_ranks(2, saves_and_loads)


def fits(rank: int, world: int) -> None:
    class Trained(Small):
        kind: Any = OfTheirs

        def configure_optimizers(self) -> Any:
            return self.kind(self.parameters(), lr=0.01)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["optimizer_states"][0]["param_groups"][0]["later"] = 1

    trainer = trainer_of(world, RING, max_steps=1)
    trainer.fit(Trained(), loader(1))
    trainer.save_checkpoint("a")
    other = Trained()
    other.kind = torch.optim.RAdam
    with pytest.raises(CheckpointError, match=r"of Adam, .* is RAdam"):
        trainer_of(world, RING, max_steps=2).fit(other, loader(2), ckpt_path="a")


@pytest.mark.nightly
def test_the_trainer_notes_the_kind() -> None:
    run_ranks(2, fits)

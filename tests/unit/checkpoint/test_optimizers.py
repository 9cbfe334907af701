"""Optimizers whose state has other shapes than their parameters, or is loaded with some of the models."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_cp.checkpoint.read import open_checkpoint
from lightning_cp.checkpoint.restore import fit_state, named_parameters, names_of, templates_for
from lightning_cp.checkpoint.save import save_checkpoint
from lightning_cp.errors import CheckpointError
from lightning_cp.strategies.fabric_checkpoints import _restore
from tests.helpers.checkpoint.states import same


class Factored(torch.optim.Adafactor):
    """One that is not PyTorch's own: nothing is known of what it keeps."""


def stepped(module: nn.Module, kind: Any) -> Any:
    optimizer = kind(module.parameters(), lr=0.1)
    module(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, Factored, torch.optim.AdamW])
@pytest.mark.parametrize("again", [False, True], ids=["new", "stepped"])
def test_what_an_optimizer_keeps_comes_back(kind: Any, again: bool, tmp_path: Path) -> None:
    """Adafactor keeps a row and a column for a matrix."""
    module = nn.Linear(4, 3)
    names = [name for name, _ in module.named_parameters()]
    want = copy.deepcopy(stepped(module, kind).state_dict())
    save_checkpoint({"o": want}, tmp_path / "a")
    found = open_checkpoint(tmp_path / "a").read()["o"]
    optimizer = stepped(module, kind) if again else kind(module.parameters())
    optimizer.load_state_dict(fit_state(found, optimizer, names, names))
    assert same(optimizer.state_dict(), want)


@pytest.mark.parametrize(
    ("kind", "again"),
    [(torch.optim.AdamW, False), (torch.optim.Adafactor, False), (Factored, True)],
)
def test_the_state_of_other_shapes_is_refused(kind: Any, again: bool) -> None:
    found = stepped(nn.Linear(4, 3), kind).state_dict()
    module = nn.Linear(4, 5)
    optimizer = stepped(module, kind) if again else kind(module.parameters())
    with pytest.raises(CheckpointError, match=r"the optimizer's \w+ of \w+ has shape \[3"):
        fit_state(found, optimizer, ["weight", "bias"], ["weight", "bias"])


def stepped_on(modules: dict[str, nn.Module]) -> torch.optim.Optimizer:
    """In another order than the modules'."""
    parameters = [x for module in modules.values() for x in module.parameters()][::-1]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    sum((x.square().sum() for x in parameters), torch.zeros(())).backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(("saved", "loaded"), [("gd", "g"), ("g", "gd"), ("g", "g"), ("gd", "gd")])
def test_an_optimizer_of_some_of_the_models(saved: str, loaded: str) -> None:
    """Names go with the module's key where there are several modules, which the other side need not have."""
    modules: dict[str, nn.Module] = {key: nn.Linear(2, 2) for key in "gd"}
    common = {key: modules[key] for key in saved if key in loaded}
    optimizer = stepped_on(common)
    named = named_parameters({key: modules[key] for key in saved})
    checkpoint: dict[str, Any] = {key: modules[key].state_dict() for key in "gd"}
    checkpoint["o"] = optimizer.state_dict()
    own = [x for module in common.values() for x in module.parameters()]
    fresh = torch.optim.AdamW(own, lr=0.1)
    into = {**{key: modules[key] for key in loaded}, "o": fresh}
    names = names_of(optimizer, named)
    template = templates_for({key: modules[key] for key in loaded}, {("o",): (fresh, names)})
    assert template(("o", "state", 0, "exp_avg")) is own[-1]
    _restore(into, checkpoint, {"o": names}, {}, strict=True)
    for parameter in own:
        assert same(fresh.state[parameter], optimizer.state[parameter])

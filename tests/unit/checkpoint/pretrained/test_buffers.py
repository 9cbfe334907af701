"""Buffers that no checkpoint holds are made again, of any type, or the load is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from lightning_cp.errors import CheckpointError
from tests.helpers.checkpoint.pretrained.models import load, refuse


class Unsaved(nn.Module):
    """A buffer that no checkpoint holds."""

    rates: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("rates", torch.arange(3.0), persistent=False)


class Sets(Unsaved):
    """Knows how it is made."""

    def reset_buffers(self) -> None:
        self.rates = torch.arange(3.0, device=self.rates.device)


class Kinds(nn.Module):
    """Buffers of types that have no NaN, with the values that memory has by chance."""

    def __init__(self, forgets: str = "") -> None:
        super().__init__()
        self.forgets = forgets
        self.weight = nn.Parameter(torch.ones(2))
        for name, value in self.values().items():
            self.register_buffer(name, value, persistent=False)

    def values(self) -> dict[str, torch.Tensor]:
        shuffled = torch.randperm(4, device=self.weight.device)
        return {
            "mask": torch.tensor([True, False, True]),
            "bytes": torch.tensor([0, 1, 0], dtype=torch.uint8),
            "order": shuffled,
            "eight": torch.ones(2).to(torch.float8_e4m3fn),
        }

    def reset_buffers(self) -> None:
        with torch.device(self.weight.device):
            for name, value in self.values().items():
                if name != self.forgets:
                    setattr(self, name, value)


class Forgets(Unsaved):
    """Says so, and does not."""

    def reset_buffers(self) -> None:
        return


def test_buffers_that_are_not_saved_are_made_again(tmp_path: Path) -> None:
    save_file({"weight": torch.full((2,), 5.0)}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        models = [Unsaved(), Sets(), Forgets()]
    refuse(models[0], tmp_path, r"\(Unsaved\) has buffers .* reset_buffers\(\)")
    load(models[1], tmp_path)
    assert models[1].rates.tolist() == [0, 1, 2]
    with pytest.raises(CheckpointError, match="Forgets left its rates without a value"):
        load(models[2], tmp_path)
    load(models[0], tmp_path, initialize=lambda module: module.rates.copy_(torch.arange(3.0)))
    assert models[0].rates.tolist() == [0, 1, 2]


def test_what_a_failed_load_left_without_values_gets_them_in_the_next(tmp_path: Path) -> None:
    save_file({"weight": torch.full((2,), 5.0)}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = Forgets()
    for _ in range(2):  # it has memory by the second time
        with pytest.raises(CheckpointError, match="Forgets left its rates without a value"):
            load(model, tmp_path)
    load(model, tmp_path, initialize=lambda module: module.rates.copy_(torch.arange(3.0)))
    assert model.rates.tolist() == [0, 1, 2]
    load(model, tmp_path)  # it has values now


@pytest.mark.parametrize("forgets", ["", "mask", "bytes", "order", "eight"])
def test_buffers_of_any_type_are_made_again(forgets: str, tmp_path: Path) -> None:
    save_file({"weight": torch.full((2,), 5.0)}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model: Any = Kinds(forgets)
    if forgets:
        with pytest.raises(CheckpointError, match=f"Kinds left its {forgets} without a value"):
            load(model, tmp_path)
        return
    torch.manual_seed(3)
    load(model, tmp_path)
    assert model.mask.tolist() == [True, False, True]
    assert model.bytes.tolist() == [0, 1, 0]
    assert model.eight.float().tolist() == [1, 1]
    after = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(model.order, torch.randperm(4))  # drawn as if once
    assert torch.equal(torch.rand(1), after)

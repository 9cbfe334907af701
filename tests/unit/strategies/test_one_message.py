"""Mistakes of a user that are answered by one message with the way out."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from lightning_cp.apps.train.run import instantiate_part
from lightning_cp.attention.plan import check_inputs
from lightning_cp.errors import ConfigError, ShapeError
from lightning_cp.layout import SequenceLayout
from lightning_cp.parity.restore import restore_after


@pytest.mark.parametrize("length", [16, 36])
def test_rows_of_another_call_in_the_middle_of_a_step(length: int) -> None:
    layout, x = SequenceLayout(36, ring_size=2, ulysses_size=1), torch.zeros(1, length, 4, 8)
    with pytest.raises(ShapeError, match=r"belongs between steps.*fabric\.strategy\.end_step"):
        check_inputs(x, x, x, layout)


@pytest.mark.parametrize(
    ("target", "given", "match"),
    [
        (
            "lightning.Trainer",
            {"accelerator": "cpu", "devices": 0},
            "trainer cannot be made.*devices=0",
        ),
        (
            "torch.nn.Linear",
            {"in_features": "abc", "out_features": 2},
            "trainer cannot be made.*TypeError",
        ),
    ],
)
def test_settings_that_cannot_be_used(target: str, given: dict[str, object], match: str) -> None:
    config = OmegaConf.create({"trainer": {"_target_": target, **given}})
    with pytest.raises(ConfigError, match=match):
        instantiate_part(config, "trainer")


@pytest.fixture
def every_time() -> Iterator[None]:
    """PyTorch warns each time, and not once in a process."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)


@pytest.mark.usefixtures("every_time")
def test_a_number_of_a_loss_does_not_warn_of_a_line_of_ours() -> None:
    model = nn.Linear(2, 2)
    with restore_after(model), warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = model(torch.ones(1, 2)).sum()
        assert float(loss) == loss.item()
        assert int(loss * 0 + 3.5) == 3

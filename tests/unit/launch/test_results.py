"""What is sent of a module, and what another one of the same class takes of it."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_cp.checkpoint.checkpoint_io import PlainCheckpointIO
from lightning_cp.launch.worker_results import receive_state, send_full_state


class Module(nn.Module):
    """Ties, buffers of both kinds, and a state of its own."""

    table: torch.Tensor
    cache: torch.Tensor

    def __init__(self, value: float, extra: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.outer = nn.Linear(2, 2)
        self.outer.weight = self.inner.weight
        self.register_buffer("table", torch.full((3,), value))
        self.register_buffer("cache", torch.full((int(value),), value), persistent=False)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def sent(module: nn.Module, folder: Path) -> Any:
    """By way of the file that workers write."""
    with send_full_state(module, keeps=True):
        PlainCheckpointIO().save_checkpoint(module.state_dict(), folder / "sent")
    return PlainCheckpointIO().load_checkpoint(folder / "sent")


def test_all_of_a_state(tmp_path: Path) -> None:
    trained, own = Module(2.0, {"counts": np.arange(3)}), Module(1.0, None)
    with receive_state(own):
        own.load_state_dict(sent(trained, tmp_path), strict=False)
    (tmp_path / "sent").unlink()
    for name, x in trained.named_parameters(remove_duplicate=False):
        assert torch.equal(own.get_parameter(name), x), name
    assert own.outer.weight is own.inner.weight
    assert own.table.tolist() == [2.0] * 3
    assert own.cache.tolist() == [2.0] * 2  # not saved, and longer than it was
    assert "cache" not in own.state_dict()
    assert own.extra["counts"].tolist() == [0, 1, 2]
    assert own.load_state_dict(trained.state_dict())  # its own again


def test_modules_without_values_get_them(tmp_path: Path) -> None:
    trained = Module(2.0, None)
    with torch.device("meta"):
        own = Module(1.0, None)
    with receive_state(own):
        own.load_state_dict(sent(trained, tmp_path), strict=False)
    assert own.outer.weight is own.inner.weight
    for got, want in zip(
        [*own.parameters(), *own.buffers()],
        [*trained.parameters(), *trained.buffers()],
        strict=True,
    ):
        assert torch.equal(got, want)


def test_tied_weights_are_sent_once(tmp_path: Path) -> None:
    size = {}
    for tied in (True, False):
        module = nn.ModuleList([nn.Linear(200, 200, bias=False), nn.Linear(200, 200, bias=False)])
        if tied:
            module[1].weight = module[0].weight
        sent(module, tmp_path)
        size[tied] = (tmp_path / "sent").stat().st_size
    assert size[False] - size[True] > 150_000


def test_what_does_not_come_back_is_said(tmp_path: Path) -> None:
    trained, own = Module(2.0, io.StringIO()), Module(1.0, "own")
    trained.add_module("more", nn.Linear(1, 1))
    with pytest.warns(UserWarning, match=r"_extra_state of the module is not returned"):
        state = sent(trained, tmp_path)
    with (
        receive_state(own),
        pytest.warns(UserWarning, match=r"trained more.weight, more.bias, which"),
    ):
        own.load_state_dict(state, strict=False)
    assert own.extra == "own"
    assert torch.equal(own.inner.weight, trained.inner.weight)


def test_ranks_that_send_nothing_keep_nothing() -> None:
    module = Module(2.0, None)
    with warnings.catch_warnings(), send_full_state(module, keeps=False):
        warnings.simplefilter("error")
        assert module.state_dict() == {}

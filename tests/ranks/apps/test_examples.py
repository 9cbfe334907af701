"""Examples that no other test or check runs."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from benchmarks.row_losses import MODELS
from tests.helpers.installed import installed_path
from tests.helpers.launch.start import all_succeeded, ranks, torchrun_variables
from tests.helpers.models.zoo import use_torchs_norms
from tests.helpers.pool import run_ranks
from tests.helpers.strategies.small import RING, Settings, trainer_of, weights

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.nightly
def test_attention_alone_equals_one_process(tmp_path: Path) -> None:
    path = {"PYTHONPATH": installed_path(tmp_path), "OMP_NUM_THREADS": "1"}
    variables = [{**own, **path} for own in torchrun_variables(4)]
    done = all_succeeded(ranks(tmp_path, variables, EXAMPLES / "attention_minimal.py"))
    printed = "".join(one.output for one in done)
    found = re.search(r"largest difference from one process: (\S+)", printed)
    assert found
    assert 0.0 < float(found[1]) < 5e-6


def test_a_plain_model_has_the_losses_of_one_process(tmp_path: Path) -> None:
    path = {"PYTHONPATH": installed_path(tmp_path), "OMP_NUM_THREADS": "1"}
    variables = [{**own, **path} for own in torchrun_variables(2)]
    first, _ = all_succeeded(ranks(tmp_path, variables, EXAMPLES / "trainer_plain.py"))
    found = [float(loss) for loss in re.findall(r"^step .* loss (\S+)", first.output, re.MULTILINE)]
    assert found == pytest.approx(losses_of_plain(), abs=1e-5)
    assert "parity: one process and context parallel agree" in first.output


@pytest.mark.quick("reward")
@pytest.mark.parametrize("name", MODELS)
def test_a_loss_prints_the_numbers_of_one_process(name: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": installed_path(tmp_path), "OMP_NUM_THREADS": "1"}
    lines: list[list[str]] = []
    for devices in ("1", "2"):
        program = [sys.executable, str(EXAMPLES / f"{name}.py"), "--devices", devices]
        done = subprocess.run(
            program, env=environment, capture_output=True, text=True, timeout=120, check=True
        )
        lines.append(re.findall(r"^step .* loss .*$", done.stdout, re.MULTILINE))
    assert len(lines[0]) >= 4
    assert lines[0] == lines[1]


def changes(rank: int, world_size: int, name: str, settings: Settings, data: int) -> torch.Tensor:
    """The change of the example's weights in its first batches, of which ``data`` ranks have rows each."""
    kind, make_batches = MODELS[name]
    example = runpy.run_path(str(EXAMPLES / f"{name}.py"))
    torch.manual_seed(0)
    module = example[kind]()
    use_torchs_norms(module)
    before = weights(module.double())
    batches: Any = example[make_batches]()[:4]
    if data > 1:
        own = slice(*(4 // data * (rank * data // world_size + at) for at in (0, 1)))
        batches = [{key: x[own] for key, x in batch.items()} for batch in batches]
    torch.set_default_dtype(torch.float64)
    labels = "auto" if name == "classification" else "none"
    settings = {**settings, "labels": labels, "parity_check": "off", "data_parallel_size": data}
    trainer = trainer_of(world_size, settings, precision="64-true")
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return weights(module) - before


@pytest.mark.filterwarnings("ignore:Found .* module.* in eval mode:UserWarning")
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", MODELS)
def test_a_loss_trains_the_weights_of_one_process(name: str, ranks: int) -> None:
    (want,) = run_ranks(1, changes, name, {}, 1)
    assert want.norm() > 0.01
    for got in run_ranks(ranks, changes, name, {}, 1):
        assert (got - want).norm() < 1e-10 * want.norm()


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:Found .* module.* in eval mode:UserWarning")
def test_grpo_with_a_group_on_two_data_ranks() -> None:
    """Its advantages are of rows of all data ranks."""
    (want,) = run_ranks(1, changes, "grpo", {}, 1)
    for got in run_ranks(4, changes, "grpo", RING, 2):
        assert (got - want).norm() < 1e-10 * want.norm()


def losses_of_plain() -> list[float]:
    """The example's model and rows in a loop of plain PyTorch, with positions from 0."""
    example, losses = runpy.run_path(str(EXAMPLES / "trainer_plain.py")), []
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = example["Model"]()
    model.log = lambda name, loss: losses.append(loss.item())
    optimizer = model.configure_optimizers()
    for index, row in enumerate(example["rows"]()):
        batch = default_collate([row])
        loss = model.training_step({**batch, "position_ids": torch.arange(512)[None]}, index)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses

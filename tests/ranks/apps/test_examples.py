"""Examples that no other test or check runs."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import default_collate

from tests.helpers.installed import installed_path
from tests.helpers.launch.start import all_succeeded, ranks, torchrun_variables

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


@pytest.mark.nightly
def test_a_plain_model_has_the_losses_of_one_process(tmp_path: Path) -> None:
    path = {"PYTHONPATH": installed_path(tmp_path), "OMP_NUM_THREADS": "1"}
    variables = [{**own, **path} for own in torchrun_variables(2)]
    first, _ = all_succeeded(ranks(tmp_path, variables, EXAMPLES / "trainer_plain.py"))
    found = [float(loss) for loss in re.findall(r"^step .* loss (\S+)", first.output, re.MULTILINE)]
    assert found == pytest.approx(losses_of_plain(), abs=1e-5)
    assert "parity: one process and context parallel agree" in first.output


LOSSES = ["classification", "diffusion", "distillation", "dpo", "grpo", "reward"]


@pytest.mark.quick("grpo")
@pytest.mark.parametrize("name", LOSSES)
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

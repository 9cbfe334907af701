"""``fabric run``: torchrun, and what its options say in variables; a real one is in ``test_programs``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.launch.expected import came_to_the_same
from tests.helpers.launch.start import SCRIPTS, Done, all_succeeded, ranks, torchrun_variables

OPTIONS = {"LT_CLI_USED": "1", "LT_ACCELERATOR": "cpu", "LT_DEVICES": "2", "LT_NUM_NODES": "1"}


def fabric_run(folder: Path, script: str, **options: str) -> list[Done]:
    """``fabric run <options> <script>``."""
    own = [{**one, **OPTIONS, **options} for one in torchrun_variables(2)]
    return ranks(folder, own, SCRIPTS / script, folder)


@pytest.mark.nightly
def test_the_name_on_the_command_line(tmp_path: Path) -> None:
    all_succeeded(fabric_run(tmp_path, "fabric.py", LT_STRATEGY="ulysses_ring"))
    came_to_the_same(tmp_path)


@pytest.mark.nightly
def test_the_strategy_in_the_script(tmp_path: Path) -> None:
    all_succeeded(fabric_run(tmp_path, "fabric_settings.py"))
    came_to_the_same(tmp_path, mode="ring")


def test_one_in_each_is_lightning_s_error(tmp_path: Path) -> None:
    for one in fabric_run(tmp_path, "fabric_settings.py", LT_STRATEGY="ulysses_ring"):
        assert one.status == 1
        assert "conflicts with the value `--strategy=ulysses_ring`" in one.output

"""Any Hydra application can say ``+strategy=ulysses_ring``, sees nothing else of ours, and stays light."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lightning_cp import UlyssesRingStrategy
from lightning_cp.config import GROUPS
from lightning_cp.utils.run_folder import config_dir
from tests.helpers.launch.programs import program, run
from tests.ranks.launch.test_launcher import said


def users_app(folder: Path) -> Path:
    """An application with configs of its own, in which ``strategy=ring`` is something else."""
    (folder / "conf" / "strategy").mkdir(parents=True)
    (folder / "conf" / "strategy" / "ring.yaml").write_text("mine: true\n")
    return program(folder, configs="conf")


@pytest.mark.nightly
def test_the_strategy_is_found_by_any_application(tmp_path: Path) -> None:
    done = run(tmp_path, users_app(tmp_path), "+strategy=ulysses_ring", "strategy.ulysses_size=2")
    (job,) = said(done)
    assert job["config"]["strategy"]["_target_"] == "lightning_cp.UlyssesRingStrategy"
    assert job["config"]["strategy"]["ulysses_size"] == 2
    assert job["heavy"] == []


@pytest.mark.nightly
def test_the_applications_own_configs_come_first_and_ours_do_not_show(tmp_path: Path) -> None:
    app = users_app(tmp_path)
    (job,) = said(run(tmp_path, app, "+strategy=ring"))
    assert job["config"]["strategy"] == {"mine": True}
    done = run(tmp_path, app, "+strategy=hybrid")
    assert done.returncode == 1
    assert "Could not find 'strategy/hybrid'" in done.stderr
    (job,) = said(run(tmp_path, app, "+trainer=cpu", "+experiment=smoke"))
    assert job["config"] == {"trainer": "cpu", "experiment": "smoke"}  # values, not groups


def test_the_config_has_every_setting_at_its_default() -> None:
    file = config_dir() / "search_path" / "strategy" / "ulysses_ring.yaml"
    written = OmegaConf.to_container(OmegaConf.load(file))
    assert isinstance(written, dict)
    assert written.pop("_target_") == "lightning_cp.UlyssesRingStrategy"
    parameters = inspect.signature(UlyssesRingStrategy).parameters.values()
    settings = [p for p in parameters if p.kind != p.VAR_KEYWORD and p.name not in GROUPS]
    assert written == {p.name: p.default for p in settings}


@pytest.mark.nightly
def test_plugins_load_neither_torch_nor_lightning(tmp_path: Path) -> None:
    code = """
import json, sys
from hydra.core.plugins import Plugins
names = sorted(plugin.__name__ for plugin in Plugins.instance().discover())
print(json.dumps([names, sorted({"torch", "lightning", "numpy"} & set(sys.modules))]))
"""
    done = run(tmp_path, "-c", code)
    names, heavy = json.loads(done.stdout)
    assert {"FreshProcessLauncher", "UlyssesRingSearchPath"} <= set(names)
    assert heavy == []
    assert done.stderr == ""  # Hydra reports plugins that warn

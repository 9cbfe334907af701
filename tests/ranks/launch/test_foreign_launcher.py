"""Under another launcher the strategy refuses to start ranks that would run the whole sweep again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment

from lightning_cp.errors import ConfigError
from lightning_cp.launch.ranks import check_sweep_launcher
from lightning_cp.utils.run_folder import config_dir
from tests.helpers.launch.programs import run
from tests.nightly.apps.test_train import SMALL

JOBLIB = (
    "hydra.launcher._target_=hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher"
)


@pytest.fixture
def sweep(request: pytest.FixtureRequest) -> Iterator[None]:
    """As inside a job; the parameter is Hydra's overrides."""
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        config = compose("train", overrides=list(request.param), return_hydra_config=True)
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(config)
    yield
    HydraConfig.instance().cfg = before


MULTIRUN = "hydra.mode=MULTIRUN"
BASIC = (MULTIRUN, "hydra/launcher=basic")


@pytest.mark.parametrize(
    ("sweep", "name"),
    [(BASIC, "BasicLauncher"), ((MULTIRUN, JOBLIB), "JoblibLauncher")],
    indirect=["sweep"],
    ids=["basic", "joblib"],
)
def test_other_launchers_are_refused_by_name(sweep: None, name: str) -> None:
    match = f"started by {name}.*The 4 processes .*Add hydra/launcher=lightning_cp"
    with pytest.raises(ConfigError, match=match):
        check_sweep_launcher(LightningEnvironment(), "popen", 4)


@pytest.mark.parametrize("sweep", [BASIC], indirect=True)
def test_what_starts_no_program_again_is_fine(sweep: None) -> None:
    check_sweep_launcher(LightningEnvironment(), "popen", 1)
    check_sweep_launcher(LightningEnvironment(), "fork", 4)
    check_sweep_launcher(TorchElasticEnvironment(), "popen", 4)


@pytest.mark.parametrize("sweep", [("hydra.mode=RUN",)], indirect=True)
def test_a_single_run_is_fine(sweep: None) -> None:
    check_sweep_launcher(LightningEnvironment(), "popen", 4)


def test_no_hydra_is_fine() -> None:
    assert not HydraConfig.initialized()
    check_sweep_launcher(LightningEnvironment(), "popen", 4)


@pytest.mark.nightly
def test_a_sweep_with_hydras_own_launcher_fails_at_once(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        *("-m", "lightning_cp.train", "-m", *SMALL, "hydra/launcher=basic"),
        *("strategy=ring", "trainer.devices=2,4"),
        timeout=250,
    )
    assert done.returncode == 1
    assert (
        done.stderr.count("ConfigError: this job of a Hydra sweep was started by BasicLauncher")
        == 1
    )
    assert "context parallel:" not in done.stdout

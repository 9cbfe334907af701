"""What may be asked for, and where steps begin and end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import lightning_cp.fabric
from lightning_cp import UlyssesRingStrategy
from lightning_cp.config import StrategyConfig
from lightning_cp.errors import ConfigError


@pytest.mark.parametrize("profile", [0, -1, True, 2.5, "first", "3", [], [3, 3], [1, 0], {3: 4}])
@pytest.mark.parametrize("strategy", [UlyssesRingStrategy, lightning_cp.fabric.UlyssesRingStrategy])
def test_what_names_no_steps_is_refused(strategy: Any, profile: Any) -> None:
    match = r"profile must be a training step, counted from 1, .* profile=3 records the third"
    with pytest.raises(ConfigError, match=match):
        strategy(profile=profile)


def test_steps_in_order() -> None:
    assert StrategyConfig().profiled_steps == ()
    assert StrategyConfig(profile=3).profiled_steps == (3,)
    assert StrategyConfig(profile=(100, 3)).profiled_steps == (3, 100)
    assert StrategyConfig(profile=OmegaConf.create([100, 3])).profiled_steps == (3, 100)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"profile_folder": "x"}, r"profile_folder='x' says where .* Say which, profile=3"),
        ({"profile": 3, "profile_folder": 3}, r"profile_folder must be a path, or None, got 3"),
        ({"profile": 3, "profile_folder": ""}, r"profile_folder must be a path, or None, got ''"),
        (
            {"profile": 3, "profile_folder": f"{__file__}/x"},
            r"profile_folder='.*/x' cannot be made: '.*\.py' is not a folder\. Name another one",
        ),
        (
            {"profile": 3, "exchange": "ring_flash_attn"},
            r"profile= shows the hops of our exchanges, .* Use exchange='ring'",
        ),
    ],
)
def test_contradictions(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        UlyssesRingStrategy(**settings)


def test_a_folder_may_be_a_path() -> None:
    recorder = UlyssesRingStrategy(profile=1, profile_folder=Path("there")).runtime.records.recorder  # type: ignore[arg-type]
    assert recorder.folder == Path("there")

"""Importing the package is cheap, and Lightning knows the strategy by name whichever comes first."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lightning_cp
from lightning_cp import _autoload

ROOT = Path(__file__).parents[1]

PUBLIC = [
    "AttentionSpec",
    "ContextParallelCallback",
    "ContextParallelMesh",
    "ContextParallelMixin",
    "Documents",
    "SequenceLayout",
    "UlyssesRingStrategy",
    "context_parallel_attention",
    "keep_attention",
]


def python(code: str) -> str:
    """What a fresh interpreter prints."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


FIRST_US = """
import sys
import lightning_cp
heavy = {"torch", "lightning", "numpy", "transformers"} & {name.split(".")[0] for name in sys.modules}
assert not heavy, heavy
assert set(lightning_cp.__all__) <= set(dir(lightning_cp))
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import StrategyRegistry
assert not any(type(finder).__module__ == "lightning_cp._autoload" for finder in sys.meta_path)
trainer = Trainer(strategy="ulysses_ring", accelerator="cpu", devices=1, logger=False)
assert type(trainer.strategy) is lightning_cp.UlyssesRingStrategy
import inspect, lightning.pytorch.strategies as strategies
assert "StrategyRegistry" in inspect.getsource(strategies)
print(StrategyRegistry.available_strategies().count("ulysses_ring"))
"""

FIRST_LIGHTNING = """
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import StrategyRegistry
assert "ulysses_ring" not in StrategyRegistry
import lightning_cp
trainer = Trainer(strategy="ulysses_ring", accelerator="cpu", devices=1, logger=False)
assert type(trainer.strategy) is lightning_cp.UlyssesRingStrategy
print(StrategyRegistry.available_strategies().count("ulysses_ring"))
"""

WITHOUT_LIGHTNING = """
import sys
sys.modules["lightning"] = None
import lightning_cp
needs = {"UlyssesRingStrategy", "ContextParallelCallback"}
print(sorted(name for name in lightning_cp.__all__ if name not in needs and getattr(lightning_cp, name)))
"""


def test_imported_before_lightning() -> None:
    assert python(FIRST_US).endswith("1")


def test_imported_after_lightning() -> None:
    assert python(FIRST_LIGHTNING).endswith("1")


def test_the_core_works_without_lightning() -> None:
    needs = {"UlyssesRingStrategy", "ContextParallelCallback"}
    assert python(WITHOUT_LIGHTNING) == str([name for name in PUBLIC if name not in needs])


def test_every_public_name_resolves() -> None:
    assert lightning_cp.__all__ == PUBLIC
    assert set(PUBLIC) <= set(dir(lightning_cp))
    for name in PUBLIC:
        assert getattr(lightning_cp, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'UlysesRingStrategy'"):
        _ = lightning_cp.UlysesRingStrategy  # type: ignore[attr-defined]


def test_the_name_is_registered_once_however_often() -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    before = StrategyRegistry["ulysses_ring"]
    for _ in range(2):
        importlib.reload(lightning_cp)
        _autoload.register_when_loaded()
    assert StrategyRegistry["ulysses_ring"] is before
    assert StrategyRegistry.available_strategies().count("ulysses_ring") == 1
    assert not any(isinstance(finder, _autoload._Finder) for finder in sys.meta_path)


class Registry(dict[str, Any]):
    """As much of Lightning's registry as is used."""

    def register(self, name: str, strategy: Any, description: str = "") -> None:
        assert name not in self
        self[name] = strategy


@pytest.fixture
def fake_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package that stands for Lightning and is not loaded yet."""
    (tmp_path / "fake_lightning").mkdir()
    (tmp_path / "fake_lightning" / "__init__.py").write_text("")
    code = "from tests.test_import import Registry\nStrategyRegistry = Registry()\n"
    (tmp_path / "fake_lightning" / "strategies.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(_autoload, "REGISTRY_MODULE", "fake_lightning.strategies")
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    return "fake_lightning.strategies"


def test_the_finder_waits_for_the_registry_and_leaves(fake_lightning: str) -> None:
    for _ in range(2):
        _autoload.register_when_loaded()
    waiting = [finder for finder in sys.meta_path if isinstance(finder, _autoload._Finder)]
    assert len(waiting) == 1
    assert importlib.import_module("fake_lightning")  # others are found as ever
    try:
        module = importlib.import_module(fake_lightning)
        assert list(module.StrategyRegistry) == ["ulysses_ring"]
        assert not set(waiting) & set(sys.meta_path)
        assert module.__spec__ is not None
        assert module.__spec__.loader.get_source(fake_lightning).startswith("from tests")  # type: ignore[union-attr]
    finally:
        for name in (fake_lightning, "fake_lightning"):
            sys.modules.pop(name, None)


def test_unknown_options_by_name() -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    from lightning_cp.errors import ConfigError

    made = StrategyRegistry.get("ulysses_ring")
    assert type(made) is lightning_cp.UlyssesRingStrategy
    factory = StrategyRegistry["ulysses_ring"]["strategy"]
    assert factory(ring_size=2, ulysses_size=1)._core.settings.ring_size == 2
    with pytest.raises(ConfigError, match=r"rings\. Did you mean ring_size instead of rings"):
        factory(rings=2)

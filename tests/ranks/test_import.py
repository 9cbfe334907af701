"""Importing the package is cheap, and Lightning knows the strategy by name whichever comes first."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.fabric import Fabric

import lightning_cp
from lightning_cp import _autoload
from lightning_cp.fabric import UlyssesRingStrategy as FabricStrategy
from tests.helpers.installed import installed_path

ROOT = Path(__file__).parents[2]

PUBLIC = [
    "AttentionSpec",
    "ContextParallelCallback",
    "ContextParallelMesh",
    "ContextParallelMixin",
    "Documents",
    "SequenceLayout",
    "ThroughputCallback",
    "UlyssesRingStrategy",
    "context_parallel_attention",
    "keep_attention",
    "linear_cross_entropy",
]


def python(code: str, **environment: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
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
needs = {"UlyssesRingStrategy", "ContextParallelCallback", "ThroughputCallback"}
print(sorted(name for name in lightning_cp.__all__ if name not in needs and getattr(lightning_cp, name)))
"""


FEW_MODULES = """
import sys
from lightning_cp{} import UlyssesRingStrategy
UlyssesRingStrategy()
print(sum(name.startswith("lightning_cp") for name in sys.modules))
"""


@pytest.mark.quick("")
@pytest.mark.parametrize("of", ["", ".fabric"])
def test_a_strategy_loads_few_modules(of: str) -> None:
    assert 50 < int(python(FEW_MODULES.format(of))) <= 150


@pytest.mark.nightly
def test_imported_before_lightning() -> None:
    assert python(FIRST_US).endswith("1")


@pytest.mark.nightly
def test_imported_after_lightning() -> None:
    # Installed, the names would be known already.
    assert python(FIRST_LIGHTNING, TORCH_DEVICE_BACKEND_AUTOLOAD="0").endswith("1")


@pytest.mark.nightly
def test_the_core_works_without_lightning() -> None:
    needs = {"UlyssesRingStrategy", "ContextParallelCallback", "ThroughputCallback"}
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
    for name in (*_autoload.NAMES, *_autoload.ALIASES):
        assert StrategyRegistry.available_strategies().count(name) == 1
    assert sum(isinstance(finder, _autoload._Finder) for finder in sys.meta_path) <= 1


@pytest.mark.parametrize("name", ["UlyssesRingStrategy", "ulysses-ring", "context_parallel"])
def test_other_names_as_lightning_looks_them_up(name: str) -> None:
    """It does so in lower case, where jsonargparse has found no class of the name."""
    trainer = pl.Trainer(strategy=name, accelerator="cpu", devices=1, logger=False)
    assert isinstance(trainer.strategy, lightning_cp.UlyssesRingStrategy)
    fabric = Fabric(strategy=name, accelerator="cpu", devices=1)
    assert isinstance(fabric.strategy, FabricStrategy)


class Registry(dict[str, Any]):
    """As much of Lightning's registry as is used."""

    def register(self, name: str, strategy: Any, description: str = "", **options: Any) -> None:
        assert name not in self
        self[name] = {"strategy": strategy, **options}


@pytest.fixture
def fake_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package that stands for Lightning and is not loaded yet."""
    (tmp_path / "fake_lightning").mkdir()
    (tmp_path / "fake_lightning" / "__init__.py").write_text("")
    code = "from tests.ranks.test_import import Registry\nStrategyRegistry = Registry()\n"
    (tmp_path / "fake_lightning" / "strategies.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    registries = {"fake_lightning.strategies": ("StrategyRegistry", dict)}
    monkeypatch.setattr(_autoload, "REGISTRIES", registries)
    others = [finder for finder in sys.meta_path if not isinstance(finder, _autoload._Finder)]
    monkeypatch.setattr(sys, "meta_path", others)
    return "fake_lightning.strategies"


def test_the_finder_waits_for_the_registry_and_leaves(fake_lightning: str) -> None:
    for _ in range(2):
        _autoload.register_when_loaded()
    waiting = [finder for finder in sys.meta_path if isinstance(finder, _autoload._Finder)]
    assert len(waiting) == 1
    assert importlib.import_module("fake_lightning")  # others are found as ever
    try:
        module = importlib.import_module(fake_lightning)
        methods = {name: made["start_method"] for name, made in module.StrategyRegistry.items()}
        assert methods == {**_autoload.NAMES, **dict.fromkeys(_autoload.ALIASES, "popen")}
        assert not set(waiting) & set(sys.meta_path)
        assert module.__spec__ is not None
        assert module.__spec__.loader.get_source(fake_lightning).startswith("from tests")  # type: ignore[union-attr]
    finally:
        for name in (fake_lightning, "fake_lightning"):
            sys.modules.pop(name, None)


# -- without an import ------------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """An environment that finds this package's entry points, installed or not."""
    return {"PYTHONPATH": installed_path(tmp_path)}


BY_NAME_ALONE = """
from lightning.pytorch import Trainer
from lightning.fabric import Fabric
for name in ("ulysses_ring", "ulysses_ring_spawn", "ulysses_ring_fork"):
    quiet = dict(accelerator="cpu", devices=1, strategy=name)
    trainer = Trainer(logger=False, enable_model_summary=False, **quiet)
    fabric = Fabric(**quiet)
    print(type(trainer.strategy).__module__, trainer.strategy._start_method, end=" ")
    print(type(fabric.strategy).__module__, fabric.strategy._start_method)
"""

NAMES_ARE_KNOWN = """
import torch
from lightning.pytorch.strategies import StrategyRegistry
print("ulysses_ring" in StrategyRegistry)
"""

MIRROR = """
import {mirror}
from lightning_cp.errors import ConfigError
try:
    {call}
except ConfigError as error:
    print(error)
"""


@pytest.mark.nightly
def test_by_name_alone(installed: dict[str, str]) -> None:
    *_, popen, spawn, fork = python(BY_NAME_ALONE, **installed).splitlines()
    for line, method in ((popen, "popen"), (spawn, "spawn"), (fork, "fork")):
        want = f"lightning_cp.strategies.trainer {method} lightning_cp.strategies.fabric {method}"
        assert line == want


@pytest.mark.nightly
def test_torch_s_own_variable_turns_it_off(installed: dict[str, str]) -> None:
    assert python(NAMES_ARE_KNOWN, **installed) == "True"
    assert python(NAMES_ARE_KNOWN, **installed, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "False"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("mirror", "call", "works"),
    [
        (
            "pytorch_lightning",
            "pytorch_lightning.Trainer(strategy='ulysses_ring', accelerator='cpu', devices=2)",
            "lightning.pytorch",
        ),
        (
            "lightning_fabric",
            "lightning_fabric.Fabric(strategy='ulysses_ring', accelerator='cpu', devices=2)",
            "lightning.fabric",
        ),
    ],
)
def test_the_mirror_namespaces_say_that_they_do_not_work(
    mirror: str, call: str, works: str, installed: dict[str, str]
) -> None:
    pytest.importorskip(mirror)
    said = python(MIRROR.format(mirror=mirror, call=call), **installed)
    assert f"Import {works} instead of {mirror}" in said


def test_autoload_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(_autoload, "register_when_loaded", fail)
    _autoload.autoload()


def test_unknown_options_by_name() -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    from lightning_cp.errors import ConfigError

    made = StrategyRegistry.get("ulysses_ring")
    assert type(made) is lightning_cp.UlyssesRingStrategy
    factory = StrategyRegistry["ulysses_ring"]["strategy"]
    assert factory(ring_size=2, ulysses_size=1).runtime.settings.ring_size == 2
    with pytest.raises(ConfigError, match=r"rings\. Did you mean ring_size instead of rings"):
        factory(rings=2)


@pytest.mark.nightly
def test_kernels_are_listed_without_importing_triton() -> None:
    code = (
        "import sys; from lightning_cp.kernels.select import kernels; kernels()['triton'].capabilities;"
        "assert 'triton' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr

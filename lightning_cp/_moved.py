"""Old names of modules: they stay importable, and ``python -m`` of them works, at the same objects.

Asked before Python's own finders: these would find the files of a moved package under its old name, and run
them once more.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from importlib import import_module
from types import CodeType, ModuleType
from typing import Any

MOVED = {
    "lightning_cp.compare": "lightning_cp.apps.compare",
    "lightning_cp.data": "lightning_cp.apps.data",
    "lightning_cp.doctor": "lightning_cp.apps.doctor",
    "lightning_cp.plan": "lightning_cp.apps.plan",
    "lightning_cp.train": "lightning_cp.apps.train",
    "lightning_cp.train.module": "lightning_cp.apps.train.model",
    "lightning_cp.train.networks": "lightning_cp.apps.train.model",
    "lightning_cp.models.hf.own_attention": "lightning_cp.models.hf.bloom_falcon",
    "lightning_cp.optim.rows": "lightning_cp.optim.placement",
    "lightning_cp.planner.measured_machine": "lightning_cp.planner.machines",
    "lightning_cp.strategies.engines.tensor_parallel": "lightning_cp.engines.tensor_parallel",
    "lightning_cp.strategies.engines": "lightning_cp.engines",
    "lightning_cp.bench.balance": "benchmarks.balance",
    "lightning_cp.bench.cpu_ratio": "benchmarks.cpu_ratio",
    "lightning_cp.bench.gpu_check": "benchmarks.gpu_check",
    "lightning_cp.bench.length": "benchmarks.length",
    "lightning_cp.bench.loading": "benchmarks.loading",
    "lightning_cp.bench.loss": "benchmarks.loss",
    "lightning_cp.bench.memory": "benchmarks.attention_memory",
    "lightning_cp.bench.rank_flops": "benchmarks.rank_flops",
    "lightning_cp.bench.replay": "benchmarks.replay",
    "lightning_cp.bench.side_by_side": "benchmarks.side_by_side",
    "lightning_cp.bench.step_overhead": "benchmarks.step_overhead",
    "lightning_cp.plan.measured_cost": "benchmarks.plan_validation.cost",
    "lightning_cp.apps.compare.matrix": "lightning_cp.apps.compare.__main__",
    "lightning_cp.apps.data.corpus": "lightning_cp.apps.data",
    "lightning_cp.apps.data.module": "lightning_cp.apps.data",
    "lightning_cp.apps.train.failure": "lightning_cp.apps.train.report",
    "lightning_cp.apps.train.callbacks": "lightning_cp.apps.train.run",
    "lightning_cp.planner.advice": "lightning_cp.apps.plan.report",
    "lightning_cp.bench.tables": "lightning_cp.bench.suites",
    "lightning_cp.bench.overheads": "lightning_cp.bench.model_step",
    "lightning_cp.checkpoint.sharded": "lightning_cp.checkpoint.shards",
    "lightning_cp.strategies.undeclared": "lightning_cp.strategies.declarations",
    "lightning_cp.engines.ddp_options": "lightning_cp.engines.ddp_comm_hook",
    "lightning_cp.checkpoint.latest": "lightning_cp.checkpoint.read",
    "lightning_cp.checkpoint.tensors": "lightning_cp.checkpoint.reshard",
    "lightning_cp.checkpoint.shard_file": "lightning_cp.checkpoint.shards",
    "lightning_cp.checkpoint.pretrained.dcp": "lightning_cp.checkpoint.pretrained.reader",
    "lightning_cp.models.loss_functions": "lightning_cp.models.swap",
    "lightning_cp.optim.exchange": "lightning_cp.optim.matrix_step",
    "lightning_cp.optim.settings": "lightning_cp.optim.parameters",
    "lightning_cp.parity.uneven": "lightning_cp.parity.batches",
    "lightning_cp.profile.trace": "lightning_cp.profile.timeline",
    "lightning_cp.profile.summary": "lightning_cp.profile.report",
    "lightning_cp.throughput.options": "lightning_cp.throughput.step_flops",
    "lightning_cp.batch.declarations": "lightning_cp.batch.read",
    "lightning_cp.batch.shard": "lightning_cp.batch.sharder",
    "lightning_cp.batch.undeclared": "lightning_cp.batch.read",
    "lightning_cp.bench.report": "lightning_cp.bench.suites",
    "lightning_cp.kernels.aten_cpu": "lightning_cp.kernels.aten",
    "lightning_cp.kernels.aten_cuda": "lightning_cp.kernels.aten",
    "lightning_cp.comm.ring": "lightning_cp.comm.transfer",
    "lightning_cp.throughput.work": "lightning_cp.throughput.step_flops",
}
"""Old name -> present name, of a module or of a package with all that is in it."""


def install() -> None:
    """Install the finder of old names before Python's own finders."""
    if not any(isinstance(finder, _MovedFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _MovedFinder())


def present_name(old: str) -> str | None:
    """Return the present name of a module; ``None`` if the name is not an old one."""
    if not old.startswith("lightning_cp."):
        return None
    package, rest = old, ""
    while package:
        if package in MOVED:
            present = MOVED[package] + rest
            return present_name(present) or present
        package, dot, last = package.rpartition(".")
        rest = dot + last + rest
    return None


class _MovedFinder(importlib.abc.MetaPathFinder):
    """Finds old names of modules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        name = present_name(fullname)
        if name is None:
            return None
        if name.startswith("benchmarks.") and importlib.util.find_spec("benchmarks") is None:
            raise ModuleNotFoundError(
                f"{fullname} is now {name}, which an installed package does not contain. "
                f"Run python -m {name} in a checkout of the project.",
                name=fullname,
            )
        found = importlib.util.find_spec(name)
        if found is None:
            return None
        is_package = found.submodule_search_locations is not None
        return importlib.machinery.ModuleSpec(
            fullname, _MovedLoader(found), origin=found.origin, is_package=is_package
        )


class _MovedLoader(importlib.abc.InspectLoader):
    """Loads an old name as the module of the present name."""

    def __init__(self, present: importlib.machinery.ModuleSpec) -> None:
        self._present = present

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return import_module(self._present.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._present  # the import of the old name replaced it

    def get_code(self, fullname: str) -> CodeType | None:
        loader: Any = self._present.loader
        return loader.get_code(self._present.name)

    def get_source(self, fullname: str) -> str | None:
        loader: Any = self._present.loader
        return loader.get_source(self._present.name)

    def is_package(self, fullname: str) -> bool:
        return self._present.submodule_search_locations is not None

"""Lightning's own test suites with this package's strategy in place of ``ddp``.

A pytest plugin that maps strategies, and the command that runs the suites with it. The suites are not part of
this repository: check out the tag of Lightning that is installed, and point ``--suites`` to its ``tests``.

    python -m tests.nightly.lightning_suites run --suites LIGHTNING/tests --results results.jsonl
    python -m tests.nightly.lightning_suites run --suites LIGHTNING/tests --results results.jsonl --standalone
    python -m tests.nightly.lightning_suites report --results results.jsonl

``run`` runs every folder with ``ulysses_ring``, then each test that failed with plain ``ddp``. The same
command resumes a run that ended early. ``report`` counts the tests in which a strategy was mapped, and exits
with 1 if a test fails that passes with ``ddp`` and is not in ``BY_DESIGN``. The suites need
pytest-rerunfailures, pytest-random-order, cloudpickle, scikit-learn, psutil, pandas, onnx, onnxscript and
tensorboardX besides.

Every ``Trainer`` and ``Fabric`` on CPU is mapped: one device gets ``ulysses_ring``; a strategy of the ``ddp``
family with N processes gets ``context_parallel_size=1, data_parallel_size=N``, with the start method it had.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

_MOCKED = (
    "the test mocks the process group away, over which ranks compare what they were started with"
)
_CLASS = (
    "a callback whose state_key is a class: checkpoints hold no classes, so that no pickle is read"
)
_SAVING = (
    "the test mocks torch.save or TorchCheckpointIO, or counts their calls: checkpoints are written by other "
    "code"
)
_SAMPLER = (
    "with one data rank the samples come in one process's order, without a DistributedSampler, so that any "
    "number of ranks that share samples has one loss curve"
)
_RESUME = (
    "a run resumes within an epoch at the sample where it was saved, and a batch that an error has ended "
    "counts as not begun; DDP begins the epoch's loader again, and counts it twice"
)
_NAME = "the text of a warning names the loader's class, which is ours"
_SIGNAL = (
    "after a SIGTERM all ranks end with the same step, which they save; DDP ends wherever it is"
)
_KEPT = "a checkpoint holds more: keys of ours, by which a run resumes within an epoch"
_CALLBACKS = "two callbacks of ours are in the Trainer's list as long as a run lasts"
_NAMES = "our strategies are in Lightning's registry"
_BACKWARD = "the loss is weighted in fabric.backward, which has to be called"
BY_DESIGN: dict[str, str] = {
    **dict.fromkeys(
        (
            "test_set_timeout",
            "test_device_id_passed_for_cuda_devices_pytorch",
            "test_device_id_passed_for_cuda_devices",
            "test_ddp_extra_kwargs",
            "test_ddp_module_state_dict",
            "test_setup_with_cuda_stream",
            "test_fabric.py::test_setup_module",
        ),
        _MOCKED,
    ),
    "test_resume_callback_state_saved_by_type_stateful": _CLASS,
    **dict.fromkeys(
        (
            "test_default_checkpoint_freq",
            "test_top_k",
            "test_model_checkpoint_no_extraneous_invocations",
            "test_trainer_save_checkpoint_storage_options",
        ),
        _SAVING,
    ),
    **dict.fromkeys(
        (
            "test_replace_distributed_sampler",
            "test_prediction_loop_batch_sampler_set_epoch_called",
        ),
        _SAMPLER,
    ),
    **dict.fromkeys(
        (
            "test_fit_loop_save_and_restore_dataloaders",
            "test_resume_mid_epoch_warning",
            "test_loop_state_on_exception",
            "test_fit_can_fail_during_validation",
            "test_restarting_mid_epoch_raises_warning",
        ),
        _RESUME,
    ),
    "test_warning_on_zero_len_dataloader": _NAME,
    "test_auto_restart_under_signal": _SIGNAL,
    "test_load_from_checkpoint_hook_calls": _KEPT,
    "test_callbacks_state_fit_ckpt_path": _CALLBACKS,
    "test_available_strategies_in_registry": _NAMES,
    "test_run_get_supported_strategies": _NAMES,
    "test_backward_required": _BACKWARD,
}
"""Tests that fail by design: the end of a test's name -> the reason, as in docs/guides/trainer.md."""

FOLDERS = (
    *(
        "strategies",
        "trainer",
        "callbacks",
        "loops",
        "checkpointing",
        "loggers",
        "models",
        "utilities",
    ),
)
OURS, BASELINE = "ulysses_ring", "ddp"
_STRATEGY, _RESULTS = "LIGHTNING_SUITES_STRATEGY", "LIGHTNING_SUITES_RESULTS"
_SECONDS = 60
"""Of a test."""


# -- the plugin ----------------------------------------------------------------------------------


class Mapping:
    """The strategies that were mapped since the last ``take``: the number of processes of each."""

    def __init__(self) -> None:
        self._worlds: list[int] = []

    def note(self, world: int) -> None:
        """One strategy of so many processes."""
        self._worlds.append(world)

    def take(self) -> list[int]:
        """What was noted, once."""
        worlds, self._worlds = self._worlds, []
        return worlds


MAPPING = Mapping()


def map_strategies(strategy: str) -> None:
    """Have every connector choose the strategy that is tested."""
    import lightning.fabric.connector as fabric
    import lightning.fabric.strategies as fabric_strategies
    import lightning.pytorch.strategies as trainer_strategies
    import lightning.pytorch.trainer.connectors.accelerator_connector as trainer
    from lightning.fabric.strategies.launchers import subprocess_script

    from lightning_cp.fabric import UlyssesRingStrategy as FabricStrategy
    from lightning_cp.strategies.trainer import UlyssesRingStrategy as TrainerStrategy

    connectors: list[tuple[Any, Any, Any, Any]] = [
        (
            trainer._AcceleratorConnector,
            trainer_strategies,
            trainer_strategies.StrategyRegistry,
            TrainerStrategy,
        ),
        (fabric._Connector, fabric_strategies, fabric_strategies.STRATEGY_REGISTRY, FabricStrategy),
    ]
    # Tests wait for its end, so each would take the 5 s for which it sleeps.
    subprocess_script._ChildProcessObserver.__init__.__defaults__ = (0.1,)
    for connector, strategies, registry, ours in connectors:
        plain, kind = strategies.DDPStrategy, strategies.DDPStrategy
        if strategy == OURS:
            kind = strategies.DDPStrategy = __getattr__(_STAND_INS[ours.__module__])
            for entry in registry.values():
                entry["strategy"] = kind if entry["strategy"] is plain else entry["strategy"]
        _map(connector, strategies.SingleDeviceStrategy, kind)


def _map(connector: Any, single: type, kind: Any) -> None:
    own = connector._init_strategy

    def _init_strategy(self: Any) -> None:
        own(self)
        strategy, world = self.strategy, len(self._parallel_devices) * self._num_nodes_flag
        if type(strategy) is single and strategy.root_device.type == "cpu":
            MAPPING.note(1)
            self.strategy = self._strategy_flag = kind()
        elif isinstance(strategy, kind):
            MAPPING.note(world)
            if hasattr(strategy, "of_processes"):
                strategy.of_processes(world)

    connector._init_strategy = _init_strategy


def _stand_in(ours: Any) -> Any:
    """A class in place of ``DDPStrategy``, for tests that make one: its number of processes comes later."""

    def of_processes(self: Any, world: int) -> None:
        if world > 1 and self.data_parallel_size != world:
            initialize(self, **self._given, world=world)

    def initialize(self: Any, *args: Any, world: int = 1, **kwargs: Any) -> None:
        names = ("accelerator", "parallel_devices", "cluster_environment")
        kwargs |= dict(zip(names, args, strict=False))
        self._given = kwargs
        world = max(world, len(kwargs.get("parallel_devices") or []))
        sizes = {"context_parallel_size": 1, "data_parallel_size": world} if world > 1 else {}
        ours.__init__(self, **(sizes | kwargs))

    made = type(
        _STAND_INS[ours.__module__],
        (ours,),
        {"__init__": initialize, "of_processes": of_processes, "__module__": __name__},
    )
    made.__name__ = "DDPStrategy"  # tests are named after it; pickle looks for the other name
    return made


_STAND_INS = {
    "lightning_cp.strategies.trainer": "DDPStrategyOfTrainer",
    "lightning_cp.strategies.fabric": "DDPStrategyOfFabric",
}


def __getattr__(name: str) -> Any:
    """A stand-in, when it is first asked for: spawned workers look it up in a module of their own."""
    for module, known in _STAND_INS.items():
        if known == name:
            made = _stand_in(importlib.import_module(module).UlyssesRingStrategy)
            return globals().setdefault(name, made)
    raise AttributeError(name)


def pytest_configure(config: pytest.Config) -> None:
    """Before test modules are imported."""
    map_strategies(os.environ[_STRATEGY])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out the tests whose result is known."""
    path = Path(os.environ[_RESULTS])
    done = {row["test"] for row in _rows(path) if row["strategy"] == os.environ[_STRATEGY]}
    items[:] = [item for item in items if item.nodeid not in done]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test that ends its process has a result, too."""
    MAPPING.take()
    begun = {
        "outcome": "crashed",
        "worlds": [],
        "seconds": 0.0,
        "error": "the process ended in this test",
    }
    _write(item.nodeid, begun)
    yield


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[None]:
    """Write what came of a phase; the last row of a test counts."""
    result: Any = yield
    report = result.get_result()
    before = item.stash.get(_ROW, None)
    worlds = sorted({*MAPPING.take(), *(before["worlds"] if before else [])})
    outcome = "xfailed" if hasattr(report, "wasxfail") and report.skipped else report.outcome
    row = {"outcome": outcome, "worlds": worlds, "seconds": round(report.duration, 2), "error": ""}
    if report.failed:
        row["error"] = f"{call.excinfo.typename}: {call.excinfo.value}"[:2000]
        row["trace"] = str(report.longrepr)[-6000:]
    if before and before["outcome"] != "passed":
        row = {**before, "worlds": worlds}
    item.stash[_ROW] = row
    if report.when == "teardown":
        _write(item.nodeid, row)


_ROW: pytest.StashKey[dict[str, Any]] = pytest.StashKey()


def _write(test: str, row: dict[str, Any]) -> None:
    with Path(os.environ[_RESULTS]).open("a") as file:
        file.write(json.dumps({"test": test, "strategy": os.environ[_STRATEGY], **row}) + "\n")


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _last(path: Path, strategy: str) -> dict[str, dict[str, Any]]:
    """Test -> its last row."""
    return {row["test"]: row for row in _rows(path) if row["strategy"] == strategy}


# -- the command ---------------------------------------------------------------------------------


def run(suites: Path, results: Path, only: Sequence[str], *, standalone: bool) -> None:
    """Run the suites with ours, then what failed with plain ``ddp``."""
    targets = list(only) or [
        *(f"tests_pytorch/{name}" for name in FOLDERS),
        "tests_fabric",
    ]
    start: Callable[..., int] = _starter(suites, results, standalone=standalone)
    for target in targets:
        if standalone:
            for test in _collected(suites, target):
                start(OURS, [test])
        else:
            _to_the_end(start, OURS, [target], results)
    known = _last(results, BASELINE)
    rows = _last(results, OURS)
    failed = [test for test, row in rows.items() if is_failure(row) and test not in known]
    for tests in [[test] for test in failed] if standalone else [failed] * bool(failed):
        _to_the_end(start, BASELINE, tests, results)


def _to_the_end(start: Callable[..., int], strategy: str, tests: list[str], results: Path) -> None:
    written = -1
    while start(strategy, tests) not in _FINISHED and len(_rows(results)) > written:
        written = len(_rows(results))
        print(f"{tests[0]}: the process ended in a test; the next one resumes", flush=True)


_FINISHED = (0, 1, 4, 5)
"""What pytest exits with: 4: a target is missing, 5: nothing is left to be run."""


def _starter(suites: Path, results: Path, *, standalone: bool) -> Callable[[str, list[str]], int]:
    results = results.resolve()
    log = results.with_suffix(".log")

    def start(strategy: str, tests: list[str]) -> int:
        environment = {
            **os.environ,
            _STRATEGY: strategy,
            _RESULTS: str(results),
            "OMP_NUM_THREADS": "1",
        }
        environment["PL_RUN_STANDALONE_TESTS"] = str(int(standalone))
        options = ["-q", "-x"] if standalone else ["-q"]
        options += [
            "-p",
            __spec__.name,
            "-p",
            "no:cacheprovider",
            "--continue-on-collection-errors",
            f"--timeout={_SECONDS}",
            "--rootdir=.",
        ]
        with log.open("a") as file:
            command = [sys.executable, "-m", "pytest", *options, *tests]
            return subprocess.call(command, cwd=suites, env=environment, stdout=file, stderr=file)

    return start


def _collected(suites: Path, target: str) -> list[str]:
    """The tests of a target that must have a process of their own."""
    environment = {**os.environ, "PL_RUN_STANDALONE_TESTS": "1"}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--rootdir=.", target]
    listed = subprocess.run(
        command, cwd=suites, env=environment, capture_output=True, text=True, check=False
    )
    return [line for line in listed.stdout.splitlines() if "::" in line]


def is_failure(row: dict[str, Any]) -> bool:
    """Whether a result counts as one."""
    return row["outcome"] in ("failed", "crashed")


def report(results: Path) -> int:
    """Print the counts; the number of tests that fail and pass with ``ddp``, but by design."""
    ours, plain = _last(results, OURS), _last(results, BASELINE)
    left = 0
    kinds = {
        "one device": lambda worlds: max(worlds) == 1,
        "two processes": lambda worlds: max(worlds) > 1,
    }
    for kind, holds in kinds.items():
        rows = {
            test: row
            for test, row in ours.items()
            if row["outcome"] not in ("skipped", "xfailed")
            and row["worlds"]
            and holds(row["worlds"])
        }
        failed = {test for test, row in rows.items() if is_failure(row)}
        same = {test for test in failed if test in plain and is_failure(plain[test])}
        meant = {test for test in failed - same if reason_of(test)}
        rest = sorted(failed - same - meant)
        left += len(rest)
        passed = len(rows) - len(failed)
        print(
            f"{kind}: {len(rows)} run, {passed} passed, {len(same)} fail with ddp too, "
            f"{len(meant)} fail by design, {len(rest)} left"
        )
        for test in sorted(meant):
            print(f"  by design: {test}: {reason_of(test)}")
        for test in rest:
            print(f"  left: {test}\n      {rows[test]['error'].splitlines()[:1]}")
    return left


def reason_of(test: str) -> str | None:
    """Why a test fails by design, if it does."""
    return next(
        (reason for name, reason in BY_DESIGN.items() if test.partition("[")[0].endswith(name)),
        None,
    )


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.nightly.lightning_suites", description=__doc__
    )
    parser.add_argument("what", choices=("run", "report"))
    parser.add_argument("--suites", type=Path, help="Lightning's folder `tests`")
    parser.add_argument(
        "--results", type=Path, required=True, help="a file of JSON lines, which is added to"
    )
    parser.add_argument(
        "--standalone", action="store_true", help="run the tests that Lightning runs alone"
    )
    parser.add_argument(
        "--only", nargs="*", default=(), help="targets within the suites; all by default"
    )
    options = parser.parse_args()
    if options.what == "run":
        begun = time.monotonic()
        run(options.suites, options.results, options.only, standalone=options.standalone)
        print(f"{time.monotonic() - begun:.0f} s")
    return int(report(options.results) > 0)


if __name__ == "__main__":
    sys.exit(main())

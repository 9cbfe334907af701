"""What every test relies on: one thread, property settings, and no process left behind."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

if not torch.cuda.is_available():
    # Before triton is imported, here and in the ranks; Lightning imports it.
    os.environ["TRITON_INTERPRET"] = "1"

from lightning_cp.attention import api
from tests.helpers import pool
from tests.helpers.pool.isolation import GC_THRESHOLD
from tests.helpers.suites import mark_others_nightly

pytest_plugins = ["tests.helpers.launch.variables"]

NIGHTLY = Path(__file__).parent / "nightly"
LONGEST = ("test_snippets.py", "test_examples.py")
"""Files of tests that take a minute each: they come first, so that no worker is alone with one at the end."""

torch.set_num_threads(1)
gc.disable()  # until all tests are collected, which makes no garbage
# A shell that starts this in the background, or nohup, leaves these ignored, also in what tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
# Nothing that depends on how busy the machine is: no deadline, no check of the generating speed.
settings.register_profile(
    "suite", max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("quick", settings.get_profile("suite"), max_examples=60)
# For tests.nightly.mutants: that an example fails is enough, the simplest one takes long to find.
settings.register_profile(
    "any_failure", settings.get_profile("quick"), phases=[Phase.explicit, Phase.generate]
)
settings.load_profile("suite")


def pytest_configure(config: pytest.Config) -> None:
    """The quick suite tries fewer examples, unless a profile is asked for."""
    is_quick = config.getoption("markexpr") == "not nightly"
    if is_quick and not config.getoption("--hypothesis-profile", default=None):
        settings.load_profile("quick")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests that stand in ``nightly`` are nightly."""
    if NIGHTLY in item.path.parents:
        item.add_marker(pytest.mark.nightly)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest tests first; the others keep their order."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_collection_finish() -> None:
    """What is there by now stays: garbage is searched among what tests make."""
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLD)
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, Any, Any]:
    """All cells of a test are here at once, also if the command line names one of them."""
    made = yield
    if isinstance(made, list):
        mark_others_nightly(made)
    return made


@pytest.fixture(autouse=True)
def _no_group_here() -> Iterator[None]:
    """Later tests would see a process group that one makes in this process; ``run_ranks(1, ...)`` has one."""
    yield
    assert not torch.distributed.is_initialized()


@pytest.fixture(autouse=True)
def _no_step_here() -> Iterator[None]:
    """A step that a test leaves here ends when it is collected; later tests would be within it."""
    yield
    if any(ref() is not None for ref in api._steps):
        gc.collect()


@pytest.fixture(autouse=True)
def _own_dtype() -> Iterator[None]:
    """A test that makes a float64 module here leaves the default to the next one."""
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the ranks, after the last test and after Ctrl-C alike."""
    pool.shut_down()

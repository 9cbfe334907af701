"""A run that is saved, and one that begins from what was saved, are the same run: bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.pool import run_ranks
from tests.helpers.resume.runs import Outcome, run
from tests.helpers.strategies.small import HYBRID, RING

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*")

# Hook, batches over all epochs, batches that the resumed run does not repeat, options.
Cell = tuple[str, int, int, dict[str, Any]]
BATCH, EPOCH, VALIDATION = "on_train_batch_end", "on_train_epoch_end", "on_validation_end"
QUICK: dict[str, Cell] = {
    "mid-epoch": (BATCH, 3, 3, {}),
    "epoch end": (EPOCH, 10, 10, {}),
    "next epoch": (BATCH, 11, 11, {}),
    "inside a window": (BATCH, 5, 3, {"accumulate_grad_batches": 3}),
    "before a validation": (BATCH, 4, 4, {"val_check_interval": 4}),
}
THREE: dict[str, Any] = {"accumulate_grad_batches": 3}
SLOW: dict[str, Cell] = {
    "last batch": (BATCH, 10, 10, {}),
    "validation at the end of an epoch": (VALIDATION, 10, 10, {}),
    "validation within an epoch": (VALIDATION, 4, 4, {"val_check_interval": 4}),
    "inside a validation": ("on_validation_epoch_end", 4, 4, {"val_check_interval": 4}),
    "validation inside a window": (VALIDATION, 4, 3, {**THREE, "val_check_interval": 4}),
    "first window": (BATCH, 1, 0, THREE),
    "first window of an epoch": (BATCH, 11, 10, THREE),
    "window cut by the epoch": (BATCH, 10, 10, THREE),
    "epoch end, so many steps": (EPOCH, 10, 10, {"max_steps": 16}),
    "end of an epoch that ends the run": (EPOCH, 6, 6, {"max_steps": 6, "then": {"max_steps": 16}}),
    "limited epochs": (BATCH, 5, 5, {"limit_train_batches": 5}),
    "in a step": ("on_before_zero_grad", 7, 6, THREE),
    "in a step, no window": ("on_before_zero_grad", 7, 6, {}),
    "after backward, no window": ("on_after_backward", 7, 6, {}),
    "batch begun, no window": ("on_train_batch_start", 7, 6, {}),
    **{
        f"{train}, {name}": (hook, count, count, {"train": train})
        for train in ("ordered", "own generator", "stream", "stateful stream")
        for name, hook, count in (
            ("mid-epoch", BATCH, 6),
            ("last batch", BATCH, 10),
            ("end", EPOCH, 10),
        )
    },
    **{
        f"{train}, window": (BATCH, 15, 13, {"train": train, **THREE})
        for train in ("own generator", "stream", "stateful stream")
    },
}


def compare(cell: Cell, world: int, settings: dict[str, Any], path: Path) -> list[Outcome]:
    """Run whole and from the checkpoint, whose process has drawn other numbers before."""
    hook, count, since, given = cell
    options = dict(given)
    then = {**options, **options.pop("then", {})}
    then.pop("then", None)
    whole = run_ranks(world, run, settings, (hook, count, path), **options)
    if "then" in given:
        whole = run_ranks(world, run, settings, **then)
    rest = run_ranks(world, run, settings, None, path, 77, **then)
    for one, other in zip(whole, rest, strict=True):
        assert other.seen == one.seen[since:], "samples"
        assert other.losses == one.losses[since:], "losses"
        left = one.validated[len(one.validated) - len(other.validated) :]
        assert repr(other.validated) == repr(left), "validation"  # some ranks have no target: NaN
        assert other.validated or "max_steps" in then, "the resumed run validates"
        for name in ("weights", "optimizer", "random", "counters"):
            assert getattr(other, name) == getattr(one, name), name
        kept = one.logged if other.validated else other.logged  # what was logged is not saved
        assert other.logged == {key: one.logged[key] for key in kept}, "logged"
    return rest


@pytest.mark.quick("inside a window", "mid-epoch", "before a validation")
@pytest.mark.parametrize("name", QUICK)
def test_goes_on_as_if_nothing_had_happened(name: str, tmp_path: Path) -> None:
    compare(QUICK[name], 2, RING, tmp_path / "saved.ckpt")


@pytest.mark.quick("in a step, no window")
@pytest.mark.parametrize("name", SLOW)
def test_wherever_it_was_saved(name: str, tmp_path: Path) -> None:
    compare(SLOW[name], 2, RING, tmp_path / "saved.ckpt")


MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "hybrid": (4, HYBRID),
    "small buckets": (4, {**HYBRID, "bucket_cap_mb": 0.01}),
    "fsdp": (4, {**RING, "data_parallel": "fsdp", "data_parallel_size": 2}),
    "fsdp in shards": (2, {**RING, "data_parallel": "fsdp", "checkpoint": "sharded"}),
    "hsdp": (
        4,
        {
            **RING,
            "data_parallel": "hsdp",
            "data_parallel_size": 2,
            "data_parallel_replicate_size": 2,
        },
    ),
    "zero1": (2, {**RING, "data_parallel": "zero1"}),
    "data parallel": (4, {**RING, "data_parallel_size": 2}),
    "one rank reads": (2, {**RING, "batch_sync": "broadcast"}),
    "every target alike": (4, {**RING, "data_parallel_size": 2, "token_weighting": "global"}),
}


@pytest.mark.nightly
@pytest.mark.parametrize("stop", QUICK)
@pytest.mark.parametrize("mesh", MESHES)
def test_on_any_mesh(mesh: str, stop: str, tmp_path: Path) -> None:
    compare(QUICK[stop], *MESHES[mesh], tmp_path / "saved.ckpt")

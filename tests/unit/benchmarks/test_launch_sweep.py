"""The sweep of block sizes, with stubbed times; and the table that it writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import launch_sweep
from benchmarks.launch_sweep import fastest, save
from lightning_cp.bench.methods import AttentionCase
from lightning_cp.kernels.merge import Accumulator
from lightning_cp.kernels.protocol import QKV, Output, Scores
from lightning_cp.kernels.reference import ReferenceKernel
from lightning_cp.kernels.triton.blocks import (
    TABLE,
    BlockConfig,
    BlockConfigs,
    Key,
    configs_for,
    load,
    target_of,
)

CASE = AttentionCase(64, 1, heads=4, kv_heads=2, dtype=torch.bfloat16)
BEST = BlockConfigs(
    BlockConfig(128, 128, 8, 3), BlockConfig(64, 32, 4, 1), BlockConfig(64, 64, 8, 2)
)


def seconds(case: AttentionCase, configs: BlockConfigs, kernel: str) -> float | None:
    """Less the nearer a kernel's blocks are to the best; what needs three stages and 128 tokens fails."""
    one, best = getattr(configs, kernel), getattr(BEST, kernel)
    if one.own == 128 and one.stages == 3 and kernel != "forward":
        return None
    return 1.0 + sum(abs(x - y) for x, y in zip(one, best, strict=True)) + case.head_dim


def test_each_kernel_gets_its_fastest_blocks() -> None:
    found = launch_sweep.swept(CASE, (64, 128), 90, seconds)
    assert found == {Key(90, "half", 64): BEST, Key(90, "half", 128): BEST}
    single = launch_sweep.swept(replace(CASE, dtype=torch.float32), (64,), 80, seconds)
    assert single.keys() == {Key(80, "single", 64)}


class ScaledKernel(ReferenceKernel):
    """Has other results with 64 queries in a block, as a miscompiled kernel would."""

    def __init__(self, configs: BlockConfigs) -> None:
        super().__init__()
        self._wrong = configs

    def forward(self, inputs: QKV, tiles: Any, scores: Scores, state: Accumulator) -> None:
        factor = 1.1 if self._wrong.forward.own == 64 else 1.0
        super().forward(inputs._replace(v=inputs.v * factor), tiles, scores, state)

    def backward(
        self, merged: Output, inputs: QKV, tiles: Any, scores: Scores, gradients: Any
    ) -> None:
        factor = float("nan") if self._wrong.keys.own == 64 else 1.0
        super().backward(merged, inputs._replace(q=inputs.q * factor), tiles, scores, gradients)


@pytest.mark.parametrize("kernel", ["forward", "keys"])
def test_fast_blocks_with_wrong_results_are_left_out(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_sweep, "TritonFA2", ScaledKernel)
    right, wrong = BlockConfig(128, 32, 8, 3), BlockConfig(64, 32, 8, 3)
    configs = BlockConfigs(right, right, right)
    case = replace(CASE, dtype=torch.float32)
    assert launch_sweep.seconds_of(case, configs, kernel)
    with pytest.warns(
        UserWarning, match=rf"^{kernel} with .* is wrong on this GPU: relative error"
    ):
        assert launch_sweep.seconds_of(case, configs._replace(**{kernel: wrong}), kernel) is None


def test_equal_times_keep_the_table() -> None:
    found = launch_sweep.swept(CASE, (64,), 90, lambda *_: 1.0)
    assert found[Key(90, "half", 64)] == configs_for(torch.bfloat16, 64, 90)


def test_a_table_is_written_beside_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(launch_sweep, "seconds_of", seconds)
    launch_sweep.write_table(CASE, tmp_path / "blocks.json")
    written, before = load(tmp_path / "blocks.json"), load(TABLE)
    assert written[Key(90, "half", 128)] == BEST
    others = [key for key in before if key[:2] != (90, "half") or key.head_dim == 32]
    assert {key: written[key] for key in others} == {key: before[key] for key in others}
    assert written.keys() == before.keys()


def test_a_table_of_one_head_dim_keeps_those_of_others(tmp_path: Path) -> None:
    file = tmp_path / "blocks.json"
    launch_sweep.write_table(CASE, file, (64,), seconds, target=90)
    launch_sweep.write_table(CASE, file, (128,), seconds, target=90)
    assert load(file)[Key(90, "half", 64)] == load(file)[Key(90, "half", 128)] == BEST


def test_a_sweep_without_time_still_times_the_table_s_blocks() -> None:
    sweep = launch_sweep.TimedSweep(seconds, seconds=0.0)
    found = launch_sweep.swept(CASE, (64,), 90, sweep)
    assert found[Key(90, "half", 64)] == configs_for(torch.bfloat16, 64, 90)
    assert [(row.timed, row.left) for row in sweep.rows()] == [
        (1, row.left) for row in sweep.rows()
    ]
    assert all(row.left >= len(launch_sweep.CANDIDATES) - 1 for row in sweep.rows())


def test_rows_say_what_was_gained_and_what_does_not_run() -> None:
    sweep = launch_sweep.TimedSweep(seconds)
    launch_sweep.swept(CASE, (64,), 90, sweep)
    forward, queries, keys = sweep.rows()
    assert [row.best for row in (forward, queries, keys)] == list(BEST)
    assert forward.best_ms == 1e3 * 65.0
    assert queries.impossible > 0 == forward.impossible
    assert not any(row.failed or row.left for row in (forward, queries, keys))
    assert len(launch_sweep.launch_cells(forward)) == len(launch_sweep.LAUNCH_HEAD)


def test_blocks_of_the_table_that_do_not_run_are_a_failure() -> None:
    def not_first(case: AttentionCase, configs: BlockConfigs, kernel: str) -> float | None:
        own = configs == configs_for(torch.bfloat16, 64, 90)
        return None if own and kernel == "forward" else seconds(case, configs, kernel)

    sweep = launch_sweep.TimedSweep(not_first)
    launch_sweep.swept(CASE, (64,), 90, sweep)
    assert [row.failed for row in sweep.rows()] == [True, False, False]
    assert "does not run" in launch_sweep.launch_cells(sweep.rows()[0])


def test_the_table_is_as_it_is_written(tmp_path: Path) -> None:
    save(load(TABLE), tmp_path / "blocks.json")
    assert (tmp_path / "blocks.json").read_text() == TABLE.read_text()


def test_nothing_runs() -> None:
    with pytest.raises(ValueError, match="no candidate runs on this device"):
        fastest([BlockConfig(16, 16)], lambda _: None)


def test_the_interpreter_runs_a_pass() -> None:
    time = launch_sweep.seconds_of(
        replace(CASE, tokens=32, head_dim=32, dtype=torch.float32),
        BlockConfigs(*[BlockConfig(32, 32)] * 3),
        "queries",
    )
    assert time is not None
    assert time > 0


@pytest.mark.parametrize(
    ("capability", "target"),
    [((8, 0), 80), ((8, 9), 80), ((9, 0), 90), ((10, 0), 100), ((10, 3), 100), ((12, 0), 80)],
)
def test_targets(capability: tuple[int, int], target: int) -> None:
    assert target_of(capability) == target
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for head_dim in (8, 64, 96, 256):
            assert configs_for(dtype, head_dim, target).forward.own >= 16

"""A machine of a ``hardware.json``: what was measured arrives, and what was not is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_cp.bench.compute import ComputeRow
from lightning_cp.bench.hardware_json import (
    compute_rates,
    kernel_lengths,
    kernel_rates,
    link_rates,
    overhead_rates,
)
from lightning_cp.bench.kernels import KernelRow
from lightning_cp.bench.links import LinkRow
from lightning_cp.bench.model_step import OverheadRow
from lightning_cp.errors import ConfigError
from lightning_cp.planner.hardware import Hardware, OverheadRate
from lightning_cp.planner.machines import machine_of_hardware, machine_of_measured, nearest_ranks
from tests.helpers.planner.measured import MEASURED


def test_round_trip(tmp_path: Path) -> None:
    MEASURED.save(tmp_path / "hardware.json")
    assert Hardware.load(tmp_path / "hardware.json") == MEASURED
    assert machine_of_measured(tmp_path / "hardware.json") == machine_of_hardware(MEASURED)


def test_a_file_of_before(tmp_path: Path) -> None:
    """It has kernels and links alone, and is read; a planner needs more, and says so."""
    file = tmp_path / "hardware.json"
    MEASURED.save(file)
    given = json.loads(file.read_text())
    for name in ("kernel_lengths", "compute", "overheads"):
        del given[name]
    for link in given["links"]:
        del link["cpu_seconds_per_gigabyte"]
    file.write_text(json.dumps(given))
    before = Hardware.load(file)
    assert before.kernels == MEASURED.kernels
    assert before.links[0].cpu_seconds_per_gigabyte is None
    assert not before.compute
    with pytest.raises(ConfigError, match=r"besides attention was not measured, only: none"):
        machine_of_hardware(before)


def test_what_was_measured_arrives() -> None:
    machine = machine_of_hardware(MEASURED)
    assert machine.matmul_flops == 0.13e12
    assert machine.memory_bandwidth == 8e9
    assert (machine.loss_bandwidth, machine.optimizer_bandwidth) == (10e9, 7e9)
    assert (machine.attention_forward, machine.attention_backward) == (0.08e12, 0.1e12)
    assert [tile.tokens for tile in machine.tiles if tile.mask == "causal"] == [256, 4096]
    assert machine.node_link == machine.net_link == 0.5e9  # the slowest of what attention uses
    assert (machine.layer_seconds, machine.step_seconds) == (1e-3, 2e-3)
    assert nearest_ranks(machine.sharing, 4).seconds == pytest.approx(6e-3)
    assert machine.is_cpu
    assert machine.memory == MEASURED.memory_bytes


def test_without_overheads_there_are_none() -> None:
    machine = machine_of_hardware(replace(MEASURED, overheads=()))
    assert (machine.layer_seconds, machine.step_seconds, machine.sharing) == (0.0, 0.0, ())


@pytest.mark.parametrize(
    ("wanted", "match"),
    [
        ({"dtype": "bfloat16"}, r"with bfloat16, only: float32\. Measure it.* dtype=bfloat16"),
        ({"head_dim": 128}, r"no kernel was measured with float32, head dim 128.*head_dim=128"),
    ],
)
def test_what_was_not_measured(wanted: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        machine_of_hardware(MEASURED, **wanted)  # type: ignore[arg-type]


def test_links_that_were_not_measured() -> None:
    with pytest.raises(ConfigError, match="links of a CPU were not measured, which takes two"):
        machine_of_hardware(replace(MEASURED, links=MEASURED.links[-1:]))


def test_rates_of_rows() -> None:
    kernels = [
        KernelRow(kernel, "float32", 8, 4, 2, "causal", tokens, None, 1, 1, rate, rate, rate, 0)
        for kernel, tokens, rate in (("a", 64, 1.0), ("a", 128, 3.0), ("b", 64, 2.0))
    ]
    assert [rate.tokens for rate in kernel_rates(kernels)] == [128]
    assert [(rate.kernel, rate.tokens) for rate in kernel_lengths(kernels)] == [
        ("a", 64),
        ("a", 128),
    ]
    shape = ("float32", 32)
    rows = [
        ComputeRow("products", *shape, 64, 1.0, 4e12, 0, None),
        ComputeRow("products", *shape, 128, 3.0, 8e12, 0, None),
        *(ComputeRow(what, *shape, 64, 0.5, 0, 2e9, None) for what in ("layer", "loss")),
        ComputeRow("optimizer", *shape, 64, 0.5, 0, 1e9, None),
    ]
    (compute,) = compute_rates(rows)
    assert (compute.product_tflops, compute.layer_gigabytes_per_second) == (3.0, 4.0)
    assert compute.optimizer_gigabytes_per_second == 2.0


def test_what_a_byte_takes_of_a_processor() -> None:
    """A nanosecond a byte, whatever a call takes; of none nothing is known."""
    seconds = ((0, 256, 1e-3), (1, 10**6, 2e-3), (2, 4 * 10**6, 5e-3), (3, 10**7, 11e-3))
    rows = [LinkRow("ring", "p2p", 1, 2, *row[:2], 1.0, 1.0, None, row[2]) for row in seconds]
    (rate,) = link_rates(rows)
    assert rate.cpu_seconds_per_gigabyte == pytest.approx(1.0, rel=1e-3)
    (rate,) = link_rates([replace(row, cpu_seconds=None) for row in rows])
    assert rate.cpu_seconds_per_gigabyte is None


def test_what_a_call_takes() -> None:
    """What a layer takes more than alone, by call; nothing where that is nothing."""
    rows = [
        OverheadRow("alone", 1, 1e-3, 2e-3, 0, None),
        OverheadRow("ring", 2, 4e-3, 5e-3, 3, None),
        OverheadRow("ulysses", 2, 0.9e-3, 5e-3, 4, None),
    ]
    ring, ulysses = overhead_rates(rows)[1:]
    assert ring == OverheadRate("ring", 2, 4e-3, 5e-3, 3e-3 / 3)
    assert ulysses.call_seconds is None

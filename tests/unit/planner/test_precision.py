"""What is computed with decides how fast: float32 has a peak of its own, or is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_cp.apps.plan.report import summary
from lightning_cp.errors import ConfigError
from lightning_cp.planner.machines import MACHINES, machine_of_hardware
from lightning_cp.planner.search import Limits, MethodPlan, search
from tests.helpers.planner.measured import MEASURED
from tests.unit.planner.test_search import FREE, job

FLOAT32 = {"a100": 19.5e12, "h100": 67e12, "h200": 67e12, "b200": 75e12}
"""Data sheets', without TF32."""


def best(limits: Limits = FREE, **changed: Any) -> MethodPlan:
    return search(job(**{"seq_len": 8192, "global_batch": 16, **changed}), limits).plans[0]


@pytest.mark.nightly
@pytest.mark.parametrize("name", FLOAT32)
def test_float32_is_timed_with_its_own_peak(name: str) -> None:
    machine = MACHINES[name]
    slow = best(machine=machine, precision="fp32")
    quick = best(machine=machine)
    ratio = machine.peak_flops / FLOAT32[name]
    computed = [plan.seconds.matmul + plan.seconds.attention for plan in (quick, slow)]
    assert computed[1] > 0.7 * ratio * computed[0]  # what is recomputed may differ
    job_ = slow.case.job
    flops = slow.mfu * slow.seconds.total * job_.devices
    assert flops == pytest.approx(
        quick.mfu * quick.seconds.total * job_.devices * machine.peak_flops / FLOAT32[name]
    )
    assert slow.mfu < 0.7


@pytest.mark.nightly
def test_the_peak_is_named() -> None:
    asked = {"seq_len": 8192, "global_batch": 16}
    told = [
        summary(search(job(precision=precision, **asked), FREE), 1)
        for precision in ("bf16-mixed", "fp32")
    ]
    assert "over the data sheet's 989 TFLOP/s in bfloat16" in told[0]
    assert "over the data sheet's 67 TFLOP/s in float32 without TF32" in told[1]
    assert "float32" not in told[0]
    measured = replace(machine_of_hardware(MEASURED), memory=1 << 40)
    told = [summary(search(job(precision="fp32", machine=measured, **asked), FREE), 1)]
    assert "data sheet" not in told[0]
    assert "over the 0.13 TFLOP/s that products were measured to reach in float32" in told[0]


def test_float32_is_refused_where_no_figure_is_published() -> None:
    with pytest.raises(ConfigError, match=r"precision=fp32: .*tpu_v4.*What would work: bf16-mixed"):
        job(machine=MACHINES["tpu_v4"], precision="fp32")
    assert job(machine=MACHINES["tpu_v4"], precision="fp32", optimizer="none")  # nothing is timed


def test_a_file_without_kernels_says_so() -> None:
    with pytest.raises(ConfigError, match="kernels of a CPU is empty"):
        machine_of_hardware(replace(MEASURED, kernels=()))


@pytest.mark.nightly
def test_what_was_measured_of_another_dtype_is_said() -> None:
    other = machine_of_hardware(MEASURED, wanted="bfloat16")
    assert other.assumed == "bfloat16 was not measured there: float32's times are taken"
    assert not machine_of_hardware(MEASURED, wanted="float32").assumed
    machine = replace(other, memory=1 << 40)
    found = search(job(machine=machine, seq_len=8192, global_batch=16), FREE)
    assert other.assumed in summary(found, 1)

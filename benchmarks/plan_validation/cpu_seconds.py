"""CPU-seconds of a training step on CPU, of all ranks together, from the planner's terms.

Communication is work of the processor there: hidden and exposed communication of ``step_seconds`` is replaced
by its CPU time, and work adds up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from lightning_cp.errors import ConfigError
from lightning_cp.layout import Traffic
from lightning_cp.layout.axes import Flat
from lightning_cp.planner.attention import AttentionCost
from lightning_cp.planner.hardware import Hardware, LinkRate
from lightning_cp.planner.job import PlanCase
from lightning_cp.planner.machines import GIGA
from lightning_cp.planner.time_model import parameter_traffic, step_seconds

BUCKET_PASSES = 4
"""Reads and writes of a gradient by an engine that copies it to its send buffer and back."""
COLLECTIVES = {
    "all-to-all": ("all_to_all_calls", "all_to_all_bytes"),
    "p2p": ("p2p_messages", "p2p_bytes"),
    "all-gather": ("all_gather_calls", "all_gather_bytes"),
    "reduce-scatter": ("reduce_scatter_calls", "reduce_scatter_bytes"),
}
"""Attention's collectives, with their fields of ``Traffic``."""
MODE_COLLECTIVES = {
    "ulysses": ("all-to-all",),
    "ring": ("p2p",),
    "zigzag_llama3": ("all-gather", "reduce-scatter"),
}
"""Collectives of a mode's layers."""


@dataclass(frozen=True)
class SendCost:
    """CPU time of a collective on a rank."""

    collective: str
    ranks: int
    """Size of the measured group."""
    call_seconds: float
    """Seconds of each call, with the work around it."""
    seconds_per_byte: float
    """Seconds of each byte that the rank sends; it receives as many."""


def send_costs(hardware: Hardware) -> tuple[SendCost, ...]:
    """Return the CPU time of each collective, where it was measured."""
    return tuple(
        SendCost(
            rate.collective,
            rate.ranks,
            _call_seconds(hardware, rate),
            rate.cpu_seconds_per_gigabyte / GIGA,
        )
        for rate in hardware.links
        if rate.cpu_seconds_per_gigabyte is not None
    )


def _call_seconds(hardware: Hardware, link: LinkRate) -> float:
    """Return the seconds of a call in a group of as many ranks; 0 if not measured."""
    for rate in hardware.overheads:
        if link.collective in MODE_COLLECTIVES.get(rate.mode, ()) and rate.ranks == link.ranks:
            return rate.call_seconds or 0.0
    return 0.0


@dataclass(frozen=True)
class CpuSeconds:
    """CPU-seconds of one step, of all ranks together."""

    products: float
    attention: float
    memory: float
    """Norms, activations, the loss."""
    optimizer: float
    fixed: float
    """Python and launches of layers and of the step."""
    exchange: float
    """Attention's exchanges: calls, and bytes."""
    gradients: float
    """Copies of gradients to send buffers, and their reduction."""

    @property
    def total(self) -> float:
        """CPU-seconds of the step."""
        return sum(getattr(self, field.name) for field in fields(self))


def cpu_seconds(
    case: PlanCase, attention: Mapping[int | None, AttentionCost], sending: Sequence[SendCost]
) -> CpuSeconds:
    """Return the CPU-seconds of all ranks: ranks times the busiest one's compute and the first one's traffic.

    Args:
        case: the job and the choice, which is ``ddp`` without tensor parallelism.
        attention: by the layers' windows.
        sending: the machine's ``send_costs``.

    Raises:
        ConfigError: an unsupported choice, or the CPU time of a collective was not measured.
    """
    choice, ranks = case.choice, case.choice.mesh.devices
    if choice.engine != "ddp" or choice.mesh.tp > 1:
        raise ConfigError(
            f"CPU-seconds are counted of engine=ddp without tensor parallelism, got {choice.engine} and "
            f"tp={choice.mesh.tp}. "
            "Ask for engine=ddp and tp=1."
        )
    computing = step_seconds(case, dict(attention))
    return CpuSeconds(
        ranks * computing.matmul,
        ranks * computing.attention,
        ranks * computing.memory,
        ranks * computing.optimizer,
        ranks * computing.fixed,
        ranks * case.sequences * _exchange(case, attention, sending),
        ranks * _gradients(case, sending),
    )


def _exchange(
    case: PlanCase, attention: Mapping[int | None, AttentionCost], sending: Sequence[SendCost]
) -> float:
    """Return the CPU-seconds of attention's exchanges, for one rank and one sequence."""
    total = 0.0
    again = case.choice.checkpointing == "blocks"
    for window, count in case.job.model.windows.items():
        forward, backward = attention[window].traffic
        total += count * _sent(case, forward, sending) * (1 + again)
        total += count * _sent(case, backward, sending)
    return total


def _sent(case: PlanCase, traffic: Traffic, sending: Sequence[SendCost]) -> float:
    total = 0.0
    for collective, (calls, nbytes) in COLLECTIVES.items():
        if getattr(traffic, calls):
            each = _send_cost(case, collective, sending)
            total += getattr(traffic, calls) * each.call_seconds
            total += getattr(traffic, nbytes) * each.seconds_per_byte
    return total


def bucket_bytes_moved(parameters: float, itemsize: int) -> float:
    """Return the traffic of gradients that an engine copies to its send buffer, and back."""
    return parameters * itemsize * BUCKET_PASSES


def _gradients(case: PlanCase, sending: Sequence[SendCost]) -> float:
    """Return the CPU-seconds of one rank's gradients: copies to buckets and back (always), and sums."""
    job = case.job
    bandwidth = job.machine.optimizer_bandwidth or job.machine.memory_bandwidth
    copied = bucket_bytes_moved(job.model.num_parameters, job.itemsize) / bandwidth
    if case.choice.mesh.devices == 1:
        return copied
    sent = parameter_traffic(case, tuple(job.model.parameters)).reduced
    return copied + sent * _send_cost(case, "all-reduce", sending).seconds_per_byte


def _send_cost(case: PlanCase, collective: str, sending: Sequence[SendCost]) -> SendCost:
    """Return the cost that was measured with the nearest number of ranks."""
    machine, mesh = case.job.machine, case.choice.mesh
    sizes = {"all-to-all": mesh.ulysses, "all-reduce": mesh.size(Flat.LOSS)}
    ranks = sizes.get(collective, mesh.ring)
    found = [each for each in sending if each.collective == collective]
    if found:
        return min(found, key=lambda each: abs(math.log(each.ranks / ranks)))
    raise ConfigError(
        f"what {collective} takes of a processor was not measured on {machine.name}. Measure it with two "
        "devices or more: python -m lightning_cp.bench 'suites=[kernels,links,compute,overheads]' device=cpu"
    )

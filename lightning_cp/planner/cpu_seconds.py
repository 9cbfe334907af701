"""What a training step takes of processors: on CPU, where sending and waiting for it are work too.

The terms are those of :func:`~lightning_cp.planner.seconds.step_seconds`; what it hides behind computing or
counts as waiting is replaced by what it costs a processor. Nothing is hidden, since work adds up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from lightning_cp.axes import Flat
from lightning_cp.errors import ConfigError
from lightning_cp.layout import Traffic
from lightning_cp.planner.attention import AttentionCost
from lightning_cp.planner.job import Case
from lightning_cp.planner.machines import Sending, of_nearest
from lightning_cp.planner.moved import bucket_moved
from lightning_cp.planner.seconds import step_seconds
from lightning_cp.planner.wire import parameter_bytes

COLLECTIVES = {
    "all-to-all": ("all_to_all_calls", "all_to_all_bytes"),
    "p2p": ("p2p_messages", "p2p_bytes"),
    "all-gather": ("all_gather_calls", "all_gather_bytes"),
    "reduce-scatter": ("reduce_scatter_calls", "reduce_scatter_bytes"),
}
"""Of attention, with how its traffic counts them."""


@dataclass(frozen=True)
class CpuSeconds:
    """Of one step, of all ranks together."""

    products: float
    attention: float
    memory: float
    """Norms, activations, the loss."""
    optimizer: float
    fixed: float
    """Python and launches of layers and of the step."""
    exchange: float
    """Attention's: calls, and bytes."""
    gradients: float
    """Copying them to what is sent, and adding them."""

    @property
    def total(self) -> float:
        """All of it."""
        return sum(getattr(self, field.name) for field in fields(self))


def cpu_seconds(case: Case, attention: Mapping[int | None, AttentionCost]) -> CpuSeconds:
    """Of all ranks together: as many times what the busiest one computes and the first one sends.

    Args:
        case: the job and the choice, which is ``ddp`` without tensor parallelism.
        attention: by the layers' windows.

    Raises:
        ConfigError: a choice that is not counted, or what sending costs was not measured.
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
        ranks * case.sequences * _exchange(case, attention),
        ranks * _gradients(case),
    )


def _exchange(case: Case, attention: Mapping[int | None, AttentionCost]) -> float:
    """Of one rank and one sequence."""
    total = 0.0
    again = case.choice.checkpointing == "blocks"
    for window, count in case.job.model.windows.items():
        forward, backward = attention[window].traffic
        total += count * (_sent(case, forward) * (1 + again) + _sent(case, backward))
    return total


def _sent(case: Case, traffic: Traffic) -> float:
    total = 0.0
    for collective, (calls, nbytes) in COLLECTIVES.items():
        if getattr(traffic, calls):
            each = _sending(case, collective)
            total += getattr(traffic, calls) * each.call_seconds
            total += getattr(traffic, nbytes) * each.seconds_per_byte
    return total


def _gradients(case: Case) -> float:
    """Of one rank: all are copied to buckets and back, also where nobody else has any."""
    job = case.job
    bandwidth = job.machine.optimizer_bandwidth or job.machine.memory_bandwidth
    copied = bucket_moved(job.model.num_parameters, job.itemsize) / bandwidth
    if case.choice.mesh.devices == 1:
        return copied
    sent = parameter_bytes(case, tuple(job.model.parameters)).reduced
    return copied + sent * _sending(case, "all-reduce").seconds_per_byte


def _sending(case: Case, collective: str) -> Sending:
    machine, mesh = case.job.machine, case.choice.mesh
    ranks = {"all-to-all": mesh.ulysses, "all-reduce": mesh.size(Flat.LOSS)}
    found = [sending for sending in machine.sending if sending.collective == collective]
    if found:
        return of_nearest(found, ranks.get(collective, mesh.ring))
    raise ConfigError(
        f"what {collective} takes of a processor was not measured on {machine.name}. Measure it with two "
        "devices or more: python -m lightning_cp.bench 'suites=[kernels,links,compute,overheads]' device=cpu"
    )

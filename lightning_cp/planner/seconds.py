"""How long a training step takes, from what is computed, sent and hidden.

Per layer and sequence, forward: matrix products, attention with its exchange over the ring (of every hop the
longer of computing and sending counts), what is read and written around them, the exchanges that nothing
hides (Ulysses, tensor parallel), and of gathering the next layer what takes longer than all that. Backward
has twice the products, adds gradients to what travels, and computes again what was not kept.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from lightning_cp.axes import Axis, Flat
from lightning_cp.planner.activations import kept_per_layer
from lightning_cp.planner.attention import AttentionCost
from lightning_cp.planner.job import Case
from lightning_cp.planner.machines import of_nearest
from lightning_cp.planner.model import Layer
from lightning_cp.planner.moved import layer_moved, loss_moved, optimizer_moved
from lightning_cp.planner.rank_step import rank_step
from lightning_cp.planner.wire import (
    gathers_of_layer,
    gathers_of_own,
    parameter_bytes,
    tensor_parallel_bytes,
    tensor_sums,
)


@dataclass(frozen=True)
class Seconds:
    """Of one step, of the slowest rank; all that is not computing is what computing does not hide."""

    matmul: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    """Norms, activations, the loss: what is read and written beside products."""
    ring: float = 0.0
    ulysses: float = 0.0
    tensor_parallel: float = 0.0
    parameters: float = 0.0
    """Gathering them, and reducing their gradients."""
    offload: float = 0.0
    optimizer: float = 0.0
    fixed: float = 0.0
    """Python and launches, where they were measured."""

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def times(self, factor: float) -> Seconds:
        """All of it, so many times."""
        return Seconds(*(factor * getattr(self, f.name) for f in fields(self)))

    @property
    def computing(self) -> float:
        """What a device that never waits would need."""
        return self.matmul + self.attention + self.memory + self.optimizer + self.fixed

    @property
    def exposed(self) -> float:
        """Waiting for messages."""
        return self.ring + self.ulysses + self.tensor_parallel + self.parameters + self.offload

    @property
    def total(self) -> float:
        """All of it."""
        return self.computing + self.exposed


def step_seconds(case: Case, attention: dict[int | None, AttentionCost]) -> Seconds:
    """Of a step.

    Args:
        case: the job and the choice.
        attention: by the layers' windows.
    """
    sequence = _around(case)
    for window, count in case.job.model.windows.items():
        sequence += _layer(case, attention[window]).times(count)
    return sequence.times(case.sequences) + _once(case)


def _layer(case: Case, cost: AttentionCost) -> Seconds:
    """One layer's forward and backward of one sequence."""
    job, choice, machine = case.job, case.choice, case.job.timed
    layer = job.model.layers[0]
    recomputes = choice.checkpointing != "none"
    again = choice.checkpointing == "blocks"
    product = 2 * job.model.layer_products / choice.mesh.tp * case.local_tokens
    product /= machine.matmul_flops
    products = (1 + recomputes + 2) * product
    if choice.tiled_mlp:  # once more, in backward
        products += product * _mlp_share(layer)
    memory = layer_moved(rank_step(case)) / machine.memory_bandwidth
    attention = cost.computing.step(again=again)
    ring = cost.over_ring.step(again=again) - attention
    ulysses = cost.ulysses.step(again=again)
    tensor = _tensor_parallel(case)
    computing = products + attention + memory
    return Seconds(
        matmul=products,
        attention=attention,
        memory=memory,
        ring=ring,
        ulysses=ulysses,
        tensor_parallel=tensor,
        parameters=_parameters(case, layer, computing),
        offload=_offload(case, computing),
        fixed=machine.layer_seconds,
    )


def _mlp_share(layer: Layer) -> float:
    """Of a layer's products, those of its MLP."""
    total = sum(one.numel for one in layer.parameters if len(one.shape) > 1)
    mlp = sum(
        one.numel for one in layer.parameters if len(one.shape) > 1 and one.name.startswith("mlp.")
    )
    return mlp / total


def _tensor_parallel(case: Case) -> float:
    sums = tensor_sums(case)
    if not sums:
        return 0.0
    machine = case.job.machine
    link = machine.link(crosses=case.crosses_nodes(Axis.TP))
    each = tensor_parallel_bytes(case) / link + machine.latency
    return sums * each


def _parameters(case: Case, layer: Layer, computing: float) -> float:
    """What takes longer than computing of gathering a layer, and of reducing its gradients once a step."""
    choice, machine = case.choice, case.job.machine
    if choice.engine == "ddp":
        return 0.0
    moved = parameter_bytes(case, layer.parameters)
    link = machine.link(crosses=_shards_cross(case))
    moving = gathers_of_layer(case) * (moved.gathered / link + machine.latency)
    moving = (moving + moved.reduced / link + machine.latency) / case.sequences
    return max(0.0, moving - computing)


def _shards_cross(case: Case) -> bool:
    choice = case.choice
    flat = Flat.LOSS if choice.engine in ("zero1", "ddp") else Flat.FSDP
    return case.crosses_nodes(flat)


def _offload(case: Case, computing: float) -> float:
    """What takes longer than computing of copying what is kept to the host and back."""
    if not case.choice.offload:
        return 0.0
    kept = kept_per_layer(rank_step(case))
    copied = 2 * kept * case.local_tokens / case.job.machine.host_link
    return max(0.0, copied - computing)


def _around(case: Case) -> Seconds:
    """The head and the loss, of one sequence."""
    job, choice = case.job, case.choice
    product = 2 * job.model.head_products / choice.mesh.tp * case.local_tokens
    times = 4 if choice.chunked_loss else 3
    moved = loss_moved(job.model.vocabulary, case.local_tokens) / choice.mesh.tp
    bandwidth = job.machine.loss_bandwidth or job.machine.memory_bandwidth
    return Seconds(
        matmul=times * product / job.timed.matmul_flops,
        memory=moved / bandwidth,
    )


def _once(case: Case) -> Seconds:
    """Per step: the optimizer, and reductions that nothing hides."""
    job, choice, machine = case.job, case.choice, case.job.timed
    model = job.model
    link = machine.link(crosses=_shards_cross(case))
    own = parameter_bytes(case, (*model.before, *model.after))
    waiting = (own.gathered * gathers_of_own(case) + own.reduced) / link
    each, layers = parameter_bytes(case, model.layers[0].parameters), len(model.layers)
    if choice.engine == "ddp":  # buckets travel while backward goes on; the last one is waited for
        hidden = layers * each.reduced / link
        computing = 4 * model.layer_products * case.local_tokens * layers
        waiting += max(0.0, hidden - computing / machine.matmul_flops)
    between = machine.link(crosses=case.crosses_nodes(Axis.DP_REPLICATE))
    waiting += (layers * each.replicated + own.replicated) / between
    held = model.num_parameters / choice.mesh.tp / choice.shard_ranks
    touched = optimizer_moved(held, job.itemsize, job.optimizer)
    bandwidth = machine.optimizer_bandwidth or machine.memory_bandwidth
    fixed = machine.step_seconds
    if choice.mesh.cp > 1 and machine.sharing:
        fixed += of_nearest(machine.sharing, choice.mesh.cp).seconds
    return Seconds(parameters=waiting, optimizer=touched / bandwidth, fixed=fixed)

"""Time of a training step from its compute, memory traffic and bytes sent.

Per layer and sequence, forward: matrix products, attention with its exchange over the ring (the longer of
compute and transfer of every hop), memory traffic around them, the exchanges that nothing hides (Ulysses,
tensor parallel), and the part of gathering the next layer that exceeds all this. Backward has twice the
products, also sends gradients, and recomputes tensors that were not saved.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from lightning_cp.layout.axes import Axis, Flat
from lightning_cp.planner.activations import RankStep, layer_bytes, rank_step, saved_per_layer
from lightning_cp.planner.attention import AttentionCost
from lightning_cp.planner.job import OPTIMIZERS, PlanCase
from lightning_cp.planner.machines import nearest_ranks
from lightning_cp.planner.model import BlockSpec, Parameter

# Memory traffic besides matrix products. ``python -m lightning_cp.bench 'suites=[compute]'`` measures a
# device's rate in the same bytes, so traffic that they omit, such as repeated reads of an operator, is part
# of the rate.

READS_FORWARD, READS_BACKWARD = 2, 3
"""Reads and writes of a forward result: written and read; read again, and its gradient written and read."""
LOGIT_BYTES = 4
"""Bytes of a logit: the loss is computed in float32."""


@dataclass(frozen=True)
class CommVolume:
    """Bytes sent along one axis or group in a step, by the rank that sends most."""

    what: str
    axis: Axis | Flat
    sent: float
    """Bytes."""
    crosses: bool
    """The group has ranks on several nodes."""

    @property
    def link(self) -> str:
        """Class of the link."""
        return "between nodes" if self.crosses else "within a node"


@dataclass(frozen=True)
class ParameterTraffic:
    """Bytes that a layer's parameters send, in one pass."""

    gathered: float
    """Bytes to gather the parameters once."""
    reduced: float
    """Bytes to reduce the gradients."""
    replicated: float
    """Bytes to sum gradients between copies of the model."""


def parameter_traffic(case: PlanCase, parameters: tuple[Parameter, ...]) -> ParameterTraffic:
    """Return the traffic of parameters: a ring of N sends (N-1)/N to gather, and twice that to sum copies."""
    choice, job = case.choice, case.job
    numel = sum(one.numel // _num_parts(one, choice.mesh.tp) for one in parameters)
    cut, mesh = choice.shard_ranks, choice.mesh
    gathered = numel * job.compute_itemsize * (cut - 1) / cut
    reduced = numel * job.reduced_itemsize * (cut - 1) / cut
    if choice.engine == "ddp":
        ranks = mesh.size(Flat.LOSS)
        return ParameterTraffic(0.0, 2 * numel * job.itemsize * (ranks - 1) / ranks, 0.0)
    copies = mesh.dp_replicate if choice.engine == "hsdp" else 1
    added = 2 * numel / cut * job.reduced_itemsize * (copies - 1) / copies
    return ParameterTraffic(gathered, reduced, added)


def num_own_gathers(case: PlanCase) -> int:
    """Return how often a step gathers the model's own parameters; with ``zero1`` they stay whole."""
    return 1 if case.choice.engine == "zero1" else case.sequences


def num_layer_gathers(case: PlanCase) -> int:
    """Return how often a step gathers each layer: in forward, and in backward if it was freed in between."""
    return 1 if case.choice.engine == "zero1" else 2 * case.sequences


def _num_parts(one: Parameter, tp_size: int) -> int:
    return tp_size if one.is_shared(tp_size) else 1


def tensor_parallel_bytes(case: PlanCase) -> float:
    """Return the bytes of one sum of activations over ``tp`` ranks: a ring sends 2 (N-1)/N of the tensor."""
    tp, job = case.choice.mesh.tp, case.job
    entries = case.local_tokens * job.model.features
    return 2 * (tp - 1) / tp * entries * job.compute_itemsize


def comm_volumes(case: PlanCase, attention: dict[int | None, AttentionCost]) -> list[CommVolume]:
    """Return all traffic of a rank in a step.

    Args:
        case: the job and the choice.
        attention: by the layers' windows.
    """
    choice, model = case.choice, case.job.model
    recomputed = choice.checkpointing == "blocks"
    ring = ulysses = 0.0
    for window, count in model.windows.items():
        forward, backward = attention[window].traffic
        times = 2 if recomputed else 1
        ulysses += count * (times * forward.all_to_all_bytes + backward.all_to_all_bytes)
        of_ring = [one.total_bytes - one.all_to_all_bytes for one in (forward, backward)]
        ring += count * (times * of_ring[0] + of_ring[1])
    layers = len(model.layers)
    each = parameter_traffic(case, model.layers[0].parameters)
    own = parameter_traffic(case, (*model.before, *model.after))
    gathered = num_layer_gathers(case) * layers * each.gathered
    gathered += num_own_gathers(case) * own.gathered
    reduced = layers * each.reduced + own.reduced
    copies = layers * each.replicated + own.replicated
    sums = len(model.layers) * num_tensor_parallel_sums(case) + 2
    shards = Flat.LOSS if choice.engine in ("zero1", "ddp") else Flat.FSDP
    found = [
        ("keys and values", Axis.RING, case.sequences * ring),
        ("sequence for heads", Axis.ULYSSES, case.sequences * ulysses),
        (
            "activations of shared layers",
            Axis.TP,
            case.sequences * sums * tensor_parallel_bytes(case),
        ),
        ("parameters", shards, gathered),
        ("gradients", shards, reduced),
        ("gradients between copies", Axis.DP_REPLICATE, copies),
    ]
    return [
        CommVolume(what, axis, sent, case.crosses_nodes(axis)) for what, axis, sent in found if sent
    ]


def num_tensor_parallel_sums(case: PlanCase) -> int:
    """Count a layer's sums of activations over ``tp`` ranks: after attention and the MLP, in each pass."""
    if case.choice.mesh.tp == 1:
        return 0
    return 6 if case.choice.checkpointing != "none" else 4


def layer_bytes_moved(step: RankStep) -> float:
    """Return the traffic of a layer's norms, rotary positions, activations and residuals, both passes."""
    made = layer_bytes(replace(step, tiled_mlp=0)).total * step.tokens
    return ((1 + step.recomputes) * READS_FORWARD + READS_BACKWARD) * made


def loss_bytes_moved(vocabulary: int, tokens: int) -> float:
    """Return the traffic of the cross-entropy: logits, and log-probabilities."""
    return (READS_FORWARD + READS_BACKWARD) * 2 * LOGIT_BYTES * vocabulary * tokens


def optimizer_bytes_moved(parameters: float, itemsize: int, optimizer: str) -> float:
    """Return the traffic of the optimizer: parameter and states read and written, gradient read."""
    return parameters * itemsize * (2 * (1 + OPTIMIZERS[optimizer]) + 1)


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of one step on the slowest rank; communication counts only where compute does not hide it."""

    matmul: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    """Memory traffic besides products: norms, activations, the loss."""
    ring: float = 0.0
    ulysses: float = 0.0
    tensor_parallel: float = 0.0
    parameters: float = 0.0
    """Gathering parameters, and reducing their gradients."""
    offload: float = 0.0
    optimizer: float = 0.0
    fixed: float = 0.0
    """Python and launches, if measured."""

    def __add__(self, other: StepSeconds) -> StepSeconds:
        return StepSeconds(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def times(self, factor: float) -> StepSeconds:
        """Return the seconds multiplied by ``factor``."""
        return StepSeconds(*(factor * getattr(self, f.name) for f in fields(self)))

    @property
    def computing(self) -> float:
        """Seconds of a device that never waits."""
        return self.matmul + self.attention + self.memory + self.optimizer + self.fixed

    @property
    def exposed(self) -> float:
        """Seconds of waiting for messages."""
        return self.ring + self.ulysses + self.tensor_parallel + self.parameters + self.offload

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.computing + self.exposed


def step_seconds(case: PlanCase, attention: dict[int | None, AttentionCost]) -> StepSeconds:
    """Return the time of a step.

    Args:
        case: the job and the choice.
        attention: by the layers' windows.
    """
    sequence = _head_and_loss(case)
    for window, count in case.job.model.windows.items():
        sequence += _layer_seconds(case, attention[window]).times(count)
    return sequence.times(case.sequences) + _step_overhead(case)


def _layer_seconds(case: PlanCase, cost: AttentionCost) -> StepSeconds:
    """Return the time of one layer's forward and backward of one sequence."""
    job, choice, machine = case.job, case.choice, case.job.timed
    layer = job.model.layers[0]
    recomputes = choice.checkpointing != "none"
    again = choice.checkpointing == "blocks"
    product = 2 * job.model.layer_products / choice.mesh.tp * case.local_tokens
    product /= machine.matmul_flops
    products = (1 + recomputes + 2) * product
    if choice.tiled_mlp:  # recomputed in backward
        products += product * _mlp_fraction(layer)
    memory = layer_bytes_moved(rank_step(case)) / machine.memory_bandwidth
    in_forward = READS_FORWARD / ((1 + recomputes) * READS_FORWARD + READS_BACKWARD)
    forward = product + cost.computing.forward + in_forward * memory
    attention = cost.computing.step(again=again)
    ring = cost.over_ring.step(again=again) - attention
    ulysses = cost.ulysses.step(again=again)
    tensor = _tensor_parallel(case)
    computing = products + attention + memory
    return StepSeconds(
        matmul=products,
        attention=attention,
        memory=memory,
        ring=ring,
        ulysses=ulysses,
        tensor_parallel=tensor,
        parameters=_parameters(case, layer, computing),
        offload=_offload(case, forward, computing - forward),
        fixed=machine.layer_seconds,
    )


def _mlp_fraction(layer: BlockSpec) -> float:
    """Return the MLP's fraction of a layer's products."""
    total = sum(one.numel for one in layer.parameters if len(one.shape) > 1)
    mlp = sum(
        one.numel for one in layer.parameters if len(one.shape) > 1 and one.name.startswith("mlp.")
    )
    return mlp / total


def _tensor_parallel(case: PlanCase) -> float:
    sums = num_tensor_parallel_sums(case)
    if not sums:
        return 0.0
    machine = case.job.machine
    link = machine.link(crosses=case.crosses_nodes(Axis.TP))
    each = tensor_parallel_bytes(case) / link + machine.latency
    return sums * each


def _parameters(case: PlanCase, layer: BlockSpec, computing: float) -> float:
    """Return the time of gathering a layer, and of reducing its gradients once a step, beyond its compute."""
    choice, machine = case.choice, case.job.machine
    if choice.engine == "ddp":
        return 0.0
    moved = parameter_traffic(case, layer.parameters)
    link = machine.link(crosses=_shards_cross(case))
    moving = num_layer_gathers(case) * (moved.gathered / link + machine.latency)
    moving = (moving + moved.reduced / link + machine.latency) / case.sequences
    return max(0.0, moving - computing)


def _shards_cross(case: PlanCase) -> bool:
    choice = case.choice
    flat = Flat.LOSS if choice.engine in ("zero1", "ddp") else Flat.FSDP
    return case.crosses_nodes(flat)


def _offload(case: PlanCase, forward: float, backward: float) -> float:
    """Return the time of copying a layer's saved tensors, beyond the compute of forward and of backward."""
    if not case.choice.offload:
        return 0.0
    copied = saved_per_layer(rank_step(case)) * case.local_tokens / case.job.machine.host_link
    return max(0.0, copied - forward) + max(0.0, copied - backward)


def _head_and_loss(case: PlanCase) -> StepSeconds:
    """Return the time of the head and the loss, of one sequence, and of what arrives while nothing computes.

    That is the input of the last block: backward begins with it.
    """
    job, choice = case.job, case.choice
    product = 2 * job.model.head_products / choice.mesh.tp * case.local_tokens
    times = 4 if choice.chunked_loss else 3
    moved = loss_bytes_moved(job.model.vocabulary, case.local_tokens) / choice.mesh.tp
    bandwidth = job.machine.loss_bandwidth or job.machine.memory_bandwidth
    first = 0.0
    if choice.offload:
        first = rank_step(case).of_features * case.local_tokens / job.machine.host_link
    return StepSeconds(
        matmul=times * product / job.timed.matmul_flops,
        memory=moved / bandwidth,
        offload=first,
    )


def _step_overhead(case: PlanCase) -> StepSeconds:
    """Return the time per step of the optimizer, and of reductions that nothing hides."""
    job, choice, machine = case.job, case.choice, case.job.timed
    model = job.model
    link = machine.link(crosses=_shards_cross(case))
    own = parameter_traffic(case, (*model.before, *model.after))
    waiting = (own.gathered * num_own_gathers(case) + own.reduced) / link
    each, layers = parameter_traffic(case, model.layers[0].parameters), len(model.layers)
    if choice.engine == "ddp":  # buckets travel during backward
        hidden = layers * each.reduced / link
        computing = 4 * model.layer_products * case.local_tokens * layers
        waiting += max(0.0, hidden - computing / machine.matmul_flops)
    between = machine.link(crosses=case.crosses_nodes(Axis.DP_REPLICATE))
    waiting += (layers * each.replicated + own.replicated) / between
    held = model.num_parameters / choice.mesh.tp / choice.shard_ranks
    touched = optimizer_bytes_moved(held, job.itemsize, job.optimizer)
    bandwidth = machine.optimizer_bandwidth or machine.memory_bandwidth
    fixed = machine.step_seconds
    if choice.mesh.cp > 1 and machine.sharing:
        fixed += nearest_ranks(machine.sharing, choice.mesh.cp).seconds
    return StepSeconds(parameters=waiting, optimizer=touched / bandwidth, fixed=fixed)

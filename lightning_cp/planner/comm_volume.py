"""Bytes that a rank sends in a training step, by purpose and link."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_cp.layout.axes import Axis, Flat
from lightning_cp.planner.attention import AttentionCost
from lightning_cp.planner.job import PlanCase
from lightning_cp.planner.model import Parameter


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

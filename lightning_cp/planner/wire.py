"""Bytes that a rank sends in a training step, by what they are for and by the link that they take."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_cp.axes import Axis, Flat
from lightning_cp.planner.attention import AttentionCost
from lightning_cp.planner.job import Case
from lightning_cp.planner.model import Parameter


@dataclass(frozen=True)
class Flow:
    """What is sent along one axis or group in a step, by the rank that sends most."""

    what: str
    axis: Axis | Flat
    sent: float
    """Bytes."""
    crosses: bool
    """Whether some of the group's ranks are on other nodes."""

    @property
    def link(self) -> str:
        """Its class."""
        return "between nodes" if self.crosses else "within a node"


@dataclass(frozen=True)
class LayerBytes:
    """What the parameters of one layer send, in one pass."""

    gathered: float
    """To have them whole, once."""
    reduced: float
    """Their gradients."""
    replicated: float
    """Gradients between copies."""


def parameter_bytes(case: Case, parameters: tuple[Parameter, ...]) -> LayerBytes:
    """Of a ring of N ranks, each of which sends (N-1)/N of what is gathered, and twice that to add copies."""
    choice, job = case.choice, case.job
    numel = sum(one.numel // _parts(one, choice.mesh.tp) for one in parameters)
    cut, mesh = choice.shard_ranks, choice.mesh
    gathered = numel * job.compute_itemsize * (cut - 1) / cut
    reduced = numel * job.reduced_itemsize * (cut - 1) / cut
    if choice.engine == "ddp":
        ranks = mesh.size(Flat.LOSS)
        return LayerBytes(0.0, 2 * numel * job.itemsize * (ranks - 1) / ranks, 0.0)
    copies = mesh.dp_replicate if choice.engine == "hsdp" else 1
    added = 2 * numel / cut * job.reduced_itemsize * (copies - 1) / copies
    return LayerBytes(gathered, reduced, added)


def gathers_of_own(case: Case) -> int:
    """How often a step gathers the model's own parameters; ``zero1`` keeps all until the last sequence."""
    return 1 if case.choice.engine == "zero1" else case.sequences


def gathers_of_layer(case: Case) -> int:
    """How often a step gathers each layer: in forward, and in backward if it was freed in between."""
    return 1 if case.choice.engine == "zero1" else 2 * case.sequences


def _parts(one: Parameter, tp_size: int) -> int:
    return tp_size if one.is_shared(tp_size) else 1


def tensor_parallel_bytes(case: Case) -> float:
    """Of one layer's one sum of activations over ``tp`` ranks: a ring sends 2 (N-1)/N of the tensor."""
    tp, job = case.choice.mesh.tp, case.job
    entries = case.local_tokens * job.model.features
    return 2 * (tp - 1) / tp * entries * job.compute_itemsize


def flows(case: Case, attention: dict[int | None, AttentionCost]) -> list[Flow]:
    """All that a rank sends in a step.

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
    each = parameter_bytes(case, model.layers[0].parameters)
    own = parameter_bytes(case, (*model.before, *model.after))
    gathered = gathers_of_layer(case) * layers * each.gathered
    gathered += gathers_of_own(case) * own.gathered
    reduced = layers * each.reduced + own.reduced
    copies = layers * each.replicated + own.replicated
    sums = len(model.layers) * tensor_sums(case) + 2
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
    return [Flow(what, axis, sent, case.crosses_nodes(axis)) for what, axis, sent in found if sent]


def tensor_sums(case: Case) -> int:
    """Sums of activations over ``tp`` ranks of a layer: behind attention and the MLP, in each pass."""
    if case.choice.mesh.tp == 1:
        return 0
    return 6 if case.choice.checkpointing != "none" else 4

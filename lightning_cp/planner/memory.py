"""Peak memory of a rank in a training step, by kind, from the moments of the step that may be the peak.

Bytes of moments are in addition to the memory between steps (parameters, optimizer state). Every number is a
tensor, or several, of :mod:`lightning_cp.planner.activations` or of a parameter's shape; none is fitted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from lightning_cp.errors import ConfigError
from lightning_cp.planner.activations import (
    FLOAT32_BYTES,
    ActivationBytes,
    RankStep,
    batch_bytes,
    label_copy_bytes,
    layer_bytes,
    rank_step,
    saved_by_attention,
    saved_by_loss,
    saved_outside_layers,
    saved_per_layer,
    uses_pytorch_loss,
)
from lightning_cp.planner.attention import AttentionCost
from lightning_cp.planner.communicators import communicator_bytes
from lightning_cp.planner.job import OPTIMIZERS, PlanCase
from lightning_cp.planner.machines import GIB
from lightning_cp.planner.model import Model, Parameter, Shape
from lightning_cp.planner.state import ModelShapes, StateBytes, UnitBytes, state_bytes, unit_bytes

# Accuracy, by ``benchmarks/plan_validation/memory.py``: within 0.3% for Llamas, Qwen3 and Gemma2 (without
# windows or caps in attention), in bfloat16, float32 and both (``mixed_precision``), with ``ddp`` and
# ``fsdp``. For Mixtral the error is 1%, and 4% of the growth; where attention dominates, as with small MLPs,
# predictions are up to 5% too high. Not measured: tensor-parallel ranks, offloading, ``hsdp``, ``zero1``.
#
# Moments do not count: accumulated gradients of earlier sequences; autocast, which saves more than
# ``mixed_precision``; logits that the caller still refers to; operators' internal temporaries, the
# allocator's rounding and fragmentation.

ENGINES = ("ddp", "fsdp", "hsdp", "zero1")


@dataclass(frozen=True)
class MemoryMoment:
    """Bytes by kind at one moment of a step."""

    name: str
    layers: int = 0
    """Saved by layers, without the recomputed or new tensors of the layer in backward."""
    outside_layers: int = 0
    """Saved outside of layers."""
    working: int = 0
    """Saved and temporary tensors of the block, or norm, in backward."""
    attention: int = 0
    """Buffers and results of an attention call."""
    temporaries: int = 0
    """Temporary tensors of the optimizer's step."""
    loss: int = 0
    """Logits and derived tensors, the gradient of the head's input, sums of its weight's gradient."""
    gathered: int = 0
    """Whole parameters of units in use, and the receive buffer of the next one."""
    gradients: int = 0
    """Gradients of parameters, reduced and not yet reduced."""
    buffers: int = 0
    """Buffers of gradient reductions."""
    batch: int = 0
    """Ids, labels and positions."""

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes by name of the kind."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "name"}

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.by_kind.values())


def memory_moments(step: RankStep) -> list[MemoryMoment]:
    """Return the moments that may be the peak of forward and backward, in the order of a step.

    Raises:
        ConfigError: an unknown engine.
    """
    if step.engine not in ENGINES:
        raise ConfigError(
            f"engine must be one of {', '.join(ENGINES)}, got {step.engine!r}. Choose one of these."
        )
    units, last = unit_bytes(step), len(step.model.layers) - 1
    found = [*_around_loss(step, units)]
    # Between the second block and the last but one, all bytes change linearly.
    for at in sorted({0, min(1, last), max(last - 1, 0), last}, reverse=True):
        found += _in_block(step, units, at)
    found += _at_the_end(step, units)
    batch = batch_bytes(step) * step.tokens
    return [replace(one, batch=batch) for one in found]


@lru_cache(maxsize=1 << 14)
def peak_moment(step: RankStep) -> MemoryMoment:
    """Return the moment that needs most."""
    return max(memory_moments(step), key=lambda one: one.total)


def optimizer_moment(step: RankStep) -> MemoryMoment:
    """Return the optimizer's step: AdamW, one parameter at a time.

    ``foreach``, PyTorch's default on a GPU, makes one tensor like each parameter instead.
    """
    units = unit_bytes(step)
    batch = (batch_bytes(step) - label_copy_bytes(step)) * step.tokens
    made = {"temporaries": units.stepped, "gradients": units.all, "buffers": units.standing}
    return MemoryMoment("optimizer's step", batch=batch, **made)


def _around_loss(step: RankStep, units: UnitBytes) -> Iterator[MemoryMoment]:
    """Yield the end of forward, and the backward of the loss, of the head and of the last norm."""
    tokens = step.tokens
    layers = len(step.model.layers) * saved_per_layer(step) * tokens
    layers = 0 if step.recomputes and step.offload else layers
    around = {"gathered": units.own + units.arriving, "buffers": units.standing}
    names = ("forward, at the loss", "backward, at the loss", "backward, at the head")
    for name, loss in zip(names, _loss_bytes(step), strict=True):
        yield MemoryMoment(name, layers, saved_outside_layers(step) * tokens, loss=loss, **around)
    yield MemoryMoment(
        "backward, at the last norm",
        layers,
        step.of_rotary * tokens,
        working=_norm_backward(step) * tokens,
        gradients=units.head,
        **around,
    )


def _loss_bytes(step: RankStep) -> tuple[int, int, int]:
    """Return bytes beyond saved tensors: in forward, in backward, and at the head's weight gradient."""
    e, head = step.itemsize, step.vocabulary * step.model.features
    d_hidden = step.of_features * step.tokens
    made = (
        e if e < FLOAT32_BYTES else 0
    ) + FLOAT32_BYTES  # logits, and their float32 copy unless they are float32
    if not step.chunked_loss:
        logits = step.tokens * step.vocabulary
        # Besides the saved logarithms: the loss's gradient with respect to them, and to the logits.
        product = e * logits + e * head + d_hidden - saved_by_loss(step) * step.tokens
        return made * logits, 2 * FLOAT32_BYTES * logits, product
    chunk = min(step.chunked_loss, step.tokens)
    logits, whole = chunk * step.vocabulary, d_hidden + FLOAT32_BYTES * head
    if uses_pytorch_loss(step):
        return (
            FLOAT32_BYTES * logits,
            FLOAT32_BYTES * logits + chunk * step.of_features + whole,
            whole,
        )
    # The logits, in float32, their gradient, and its rounding; for a cap, saved tensors and their gradients.
    capped = 2 * (e + FLOAT32_BYTES) if step.capped else 0
    return (
        made * logits,
        (2 * e + 2 * FLOAT32_BYTES + capped) * logits + whole,
        e * (logits + head) + whole,
    )


def _norm_backward(step: RankStep) -> int:
    """Return the bytes per token of a norm's backward, six float32 tensors.

    These are its input, two products, and in the root's backward a quotient, a power and their product.
    """
    return 6 * FLOAT32_BYTES * step.model.features


def _in_block(step: RankStep, units: UnitBytes, at: int) -> Iterator[MemoryMoment]:
    """Yield the moments of the backward of block ``at``, up to the reduction of its gradients."""
    kept, through = layer_bytes(step), len(step.model.layers) - 1 - at
    layers, own = _before_and_own(step, kept, at)
    own += step.of_features  # the gradient of the block's output
    behind = kept.norms_behind // 2
    before_norm = own - behind - kept.mlp - kept.norm - kept.norm_output
    frame = MemoryMoment(
        "",
        layers * step.tokens,
        step.of_rotary * step.tokens,
        gathered=units.own + units.block + (units.arriving if at else 0),
        gradients=units.done(through),
        buffers=units.standing + (units.sums if through else 0),
    )

    def moment(where: str, working: int, gradients: int, attention: int = 0) -> MemoryMoment:
        return replace(
            frame,
            name=f"backward of block {at + 1} of {through + at + 1}, {where}",
            working=working,
            gradients=frame.gradients + gradients,
            attention=attention,
        )

    tokens, norm = step.tokens, _norm_backward(step)
    if behind:
        yield moment("at the norm behind the MLP", (own - behind + norm) * tokens, 0)
    yield moment("at its MLP", (own - behind) * tokens + _mlp_bytes(step, units), 0)
    yield moment("at the MLP's norm", (before_norm + norm) * tokens, units.of_mlp)
    d_out = (before_norm - behind + step.of_out) * tokens
    yield moment("at attention", d_out, units.behind_attention, step.attention[1])
    yield moment("at its first norm", (norm + step.of_features) * tokens, units.of_block)
    end = moment("at its end", step.of_features * tokens, units.of_block)
    gathered = units.own + (units.arriving if at else 0)
    yield replace(end, gathered=gathered, buffers=units.standing + units.sums)


def _before_and_own(step: RankStep, kept: ActivationBytes, at: int) -> tuple[int, int]:
    """Return bytes per token: saved by blocks up to ``at``, and additional ones of that block's backward."""
    each = saved_per_layer(step)
    if not step.recomputes:
        return at * each, kept.total
    shared = (
        step.of_features if step.itemsize == FLOAT32_BYTES else 0
    )  # a norm's input needs no copy
    shared += saved_by_attention(step) if step.keeps_attention else 0
    own = kept.total - shared
    if step.offload:  # the tensors of the block before arrive already
        return min(at, 1) * each, own + each
    return (at + 1) * each, own


def _mlp_bytes(step: RankStep, units: UnitBytes) -> int:
    """Return the bytes at the MLP's last product, whose gradient exists by then.

    Three new inner tensors replace the product's input; in tiles there are also sums of gradients. With
    experts the peak may be at the weighting of results instead.
    """
    tokens, inner, features = step.tokens, step.of_inner, step.of_features
    if step.model.experts:
        routed = step.model.experts_per_token * tokens
        weighted = (3 * FLOAT32_BYTES * step.model.features + features - 8) * routed
        return max(weighted, (2 * inner - features - 8) * routed + units.of_down)
    if not step.tiles:
        return 2 * inner * tokens + units.of_down
    in_tile = step.tiled_mlp * (6 * inner + 2 * features) + units.of_down
    return features * tokens + units.sums_of_tiles + max(in_tile, units.of_mlp)


def _at_the_end(step: RankStep, units: UnitBytes) -> Iterator[MemoryMoment]:
    """Yield the end of backward: the embedding's gradient with its sum with the head's if tied, and the
    reduction of the model's own gradients."""
    done, tied = units.done(len(step.model.layers)), step.model.tied
    d_out = step.of_features * step.tokens
    more = units.head + max(d_out, units.head if tied else 0)
    buffers = units.standing + units.sums
    yield MemoryMoment(
        "end of backward", gathered=units.own, gradients=done + more, buffers=buffers
    )
    whole = done + (0 if tied else units.head)
    buffers = units.standing + units.sums_of_own
    yield MemoryMoment("end of backward, the model's own", gradients=whole, buffers=buffers)


@dataclass(frozen=True)
class Memory:
    """Bytes of one device."""

    parameters: int
    """Between steps."""
    optimizer: int
    moment: MemoryMoment
    """The moment of the peak of a step."""
    accumulated: int
    """Whole gradients of earlier sequences."""
    communicators: int
    """Buffers of NCCL."""
    reserve: int
    capacity: int
    loading: int
    """Peak while a checkpoint is read: the rank's parameters, and its part of the largest tensor."""
    host: int
    """Bytes of the host for each device."""
    host_capacity: int

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes at the peak of a step, without the reserve."""
        now = self.moment
        return {
            "parameters": self.parameters,
            "optimizer": self.optimizer,
            "gathered parameters": now.gathered,
            "gradients": now.gradients + self.accumulated,
            "buffers of reductions": now.buffers,
            "activations": now.layers + now.outside_layers + now.working + now.batch,
            "optimizer's temporaries": now.temporaries,
            "attention buffers": now.attention,
            "logits and loss": now.loss,
            "communicators": self.communicators,
        }

    @property
    def total(self) -> int:
        """Bytes at the peak of a step, with the reserve."""
        return sum(self.by_kind.values()) + self.reserve

    @property
    def missing(self) -> int:
        """Bytes that do not fit on the device or its host; negative: free bytes."""
        device = self.fullest - self.capacity
        return max(device, self.host - self.host_capacity) if self.host else device

    @property
    def fullest(self) -> int:
        """Peak of a step, or of loading if that needs more."""
        return max(self.total, self.loading + self.reserve)

    @property
    def why(self) -> str:
        """Description of the bytes that do not fit, largest kinds first."""
        if self.host and self.missing == self.host - self.host_capacity:
            sizes = f"{self.host / GIB:,.1f} of {self.host_capacity / GIB:,.1f} a device"
            return f"{self.missing / GIB:,.1f} GiB too much in host memory: {sizes}"
        kinds = self.by_kind
        if self.fullest > self.total:
            kinds = {"parameters": self.parameters, "on its way": self.loading - self.parameters}
        largest = sorted(kinds.items(), key=lambda item: -item[1])[:3]
        shown = ", ".join(f"{kind} {size / GIB:,.1f}" for kind, size in largest if size)
        when = " while a checkpoint is loaded" if self.fullest > self.total else ""
        sizes = f"{self.fullest / GIB:,.1f} of {self.capacity / GIB:,.1f}{when}"
        return f"{self.missing / GIB:,.1f} GiB too much: {sizes} ({shown})"


def memory_between_steps(case: PlanCase) -> Memory:
    """Return the memory between steps, which is all there is if the model is only loaded."""
    job, choice, machine = case.job, case.choice, case.job.machine
    state = rank_state(case, 0)
    largest = _largest_part(job.model, choice.shard_ranks, choice.mesh.tp) * job.itemsize
    return Memory(
        state.parameters,
        state.optimizer if job.trains else 0,
        MemoryMoment("between steps"),
        0,
        0,
        machine.reserve,
        machine.memory,
        state.parameters + largest,
        0,
        machine.host_memory,
    )


def memory_of(case: PlanCase, attention: Mapping[int | None, AttentionCost]) -> Memory:
    """Return the peak memory of a case; without ``attention``, a lower bound."""
    held = memory_between_steps(case)
    if not case.job.trains:
        return held
    calls = [cost.memory for cost in attention.values()] or [(0, 0)]
    step = rank_step(case, (max(one[0] for one in calls), max(one[1] for one in calls)))
    stepping = optimizer_moment(step)
    if not case.job.machine.is_cpu:  # ``foreach``: a tensor for each parameter at once
        stepping = replace(stepping, temporaries=held.parameters)
    moment = max(peak_moment(step), stepping, key=lambda one: one.total)
    host = _pinned_bytes(step) * len(case.job.model.layers) if case.choice.offload else 0
    buffers = communicator_bytes(case)
    return replace(
        held, moment=moment, accumulated=_accumulated(case), communicators=buffers, host=host
    )


def _pinned_bytes(step: RankStep) -> int:
    """Return the host memory of a layer's offloaded tensors; pinned blocks are powers of two in PyTorch."""
    sizes = [step.of_features]
    if step.keeps_attention:
        sizes += [step.of_out, step.of_lse]
    return sum(1 << (size * step.tokens - 1).bit_length() for size in sizes)


def _accumulated(case: PlanCase) -> int:
    """Return the bytes of accumulated gradients, which sharding engines leave whole until the last sequence.

    With ``ddp`` they are whole anyway.
    """
    if case.sequences == 1 or case.choice.engine == "ddp":
        return 0
    return _num_entries(case.job.model, case.choice.mesh.tp) * case.job.reduced_itemsize


def rank_state(case: PlanCase, rank: int) -> StateBytes:
    """Return parameters, gradients and optimizer state of a rank of the mesh; the first one has the most."""
    job, choice = case.job, case.choice
    cut, tp = choice.shard_ranks, choice.mesh.tp
    place = rank // tp % cut  # copies of the model are on outer axes
    return _cached_state_bytes(
        job.model, choice.engine, place, cut, tp, job.itemsize, OPTIMIZERS[job.optimizer]
    )


@lru_cache(maxsize=4096)
def _cached_state_bytes(
    model: Model, engine: str, rank: int, ranks: int, tp_size: int, itemsize: int, states: int
) -> StateBytes:
    """Return a rank's state; optimizer state has the parameters' itemsize."""
    sizes = {"itemsize": itemsize, "states": states, "state_itemsize": itemsize}
    return state_bytes(local_shapes(model, tp_size), engine, rank=rank, ranks=ranks, **sizes)


@lru_cache(maxsize=64)
def local_shapes(model: Model, tp_size: int) -> ModelShapes:
    """Return the shapes of a tensor-parallel rank's part of each parameter."""

    def local(parameters: tuple[Parameter, ...]) -> tuple[Shape, ...]:
        return tuple(one.local_shape(tp_size) for one in parameters)

    return ModelShapes(
        local(model.before),
        tuple(local(layer.parameters) for layer in model.layers),
        local(model.after),
    )


@lru_cache(maxsize=64)
def _num_entries(model: Model, tp_size: int) -> int:
    """Count the entries of all parameters of a tensor-parallel rank."""
    shapes = local_shapes(model, tp_size)
    own = sum(math.prod(shape) for shape in (*shapes.before, *shapes.after))
    return own + sum(math.prod(shape) for block in shapes.blocks for shape in block)


@lru_cache(maxsize=1024)
def _largest_part(model: Model, ranks: int, tp_size: int) -> int:
    """Count the entries of the largest part of a tensor that a rank reads at once."""
    shapes = local_shapes(model, tp_size)
    each = {*shapes.before, *shapes.blocks[0], *shapes.after}
    return max(-(-shape[0] // ranks) * math.prod(shape[1:]) for shape in each)

"""The moments of a step in which a rank may need the most memory, and what is there in each.

Bytes beside what is there between steps, which are parameters and the optimizer's state. A step's peak is
the largest of its moments. Every number is a tensor, or several, of :mod:`lightning_cp.planner.activations`
or of a parameter's shape; none is fitted.

Measured (``plan/measured_step.py``) is the same to three in a thousand for Llamas, Qwen3 and Gemma2 (without
windows or caps in attention), in bfloat16, float32 and both (``mixed_precision``), ``ddp`` and ``fsdp``.
For Mixtral it is off by 1%, and growth by 4%; where attention decides, as beside small MLPs, up to 5% more
is said than needed. Not measured: tensor-parallel ranks, offloading, ``hsdp``, ``zero1``.

Not counted: gradients kept from sequences before (accumulation); autocast, under which more is kept than
with ``mixed_precision``; logits that the caller goes on holding; what operators take and give back within
themselves, the allocator's rounding and gaps, buffers of communication libraries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from lightning_cp.errors import ConfigError
from lightning_cp.planner.activations import (
    WIDE,
    LayerBytes,
    RankStep,
    batch_bytes,
    checked_bytes,
    kept_beside,
    kept_by_loss,
    kept_of_attention,
    kept_per_layer,
    layer_bytes,
    uses_pytorch_loss,
)
from lightning_cp.planner.units import Units, units_of

ENGINES = ("ddp", "fsdp", "hsdp", "zero1")


@dataclass(frozen=True)
class Moment:
    """Bytes by kind."""

    name: str
    layers: int = 0
    """Kept by layers, but for what is made again, or made new, in the one that is being differentiated."""
    beside: int = 0
    """Kept beside layers."""
    working: int = 0
    """Of the block, or norm, that is being differentiated: what it keeps, and what is made of it."""
    attention: int = 0
    """Buffers of an attention call, and its results."""
    temporaries: int = 0
    """Tensors that the optimizer makes in its step, and drops."""
    loss: int = 0
    """Logits and what is made of them, the gradient of what the head was given, sums of its weight's."""
    gathered: int = 0
    """Whole parameters of units in use, and the buffer in which the next one arrives."""
    gradients: int = 0
    """Of parameters: those that were added over ranks, and those that were not yet."""
    buffers: int = 0
    """In which gradients are added."""
    batch: int = 0
    """Ids, labels and positions."""

    @property
    def by_kind(self) -> dict[str, int]:
        """Names and bytes."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "name"}

    @property
    def total(self) -> int:
        """Bytes."""
        return sum(self.by_kind.values())


def moments(step: RankStep) -> list[Moment]:
    """All that may be the peak of forward and backward, in the order of a step.

    Raises:
        ConfigError: another engine.
    """
    if step.engine not in ENGINES:
        raise ConfigError(
            f"engine must be one of {', '.join(ENGINES)}, got {step.engine!r}. Choose one of these."
        )
    units, last = units_of(step), len(step.model.layers) - 1
    found = [*_around_loss(step, units)]
    # In between the second and the last but one, everything grows or shrinks evenly.
    for at in sorted({0, min(1, last), max(last - 1, 0), last}, reverse=True):
        found += _in_block(step, units, at)
    found += _at_the_end(step, units)
    batch = batch_bytes(step) * step.tokens
    return [replace(one, batch=batch) for one in found]


@lru_cache(maxsize=1 << 14)
def peak(step: RankStep) -> Moment:
    """The moment that needs most."""
    return max(moments(step), key=lambda one: one.total)


def optimizer_moment(step: RankStep) -> Moment:
    """The optimizer's step: of AdamW, one parameter at a time.

    ``foreach``, which PyTorch takes on a GPU, has one tensor like each parameter instead.
    """
    units = units_of(step)
    batch = (batch_bytes(step) - checked_bytes(step)) * step.tokens
    made = {"temporaries": units.stepped, "gradients": units.all, "buffers": units.standing}
    return Moment("optimizer's step", batch=batch, **made)


def _around_loss(step: RankStep, units: Units) -> Iterator[Moment]:
    """End of forward, backward of the loss, of the head and of the last norm."""
    tokens = step.tokens
    layers = len(step.model.layers) * kept_per_layer(step) * tokens
    layers = 0 if step.recomputes and step.offload else layers
    around = {"gathered": units.own + units.arriving, "buffers": units.standing}
    names = ("forward, at the loss", "backward, at the loss", "backward, at the head")
    for name, loss in zip(names, _loss(step), strict=True):
        yield Moment(name, layers, kept_beside(step) * tokens, loss=loss, **around)
    yield Moment(
        "backward, at the last norm",
        layers,
        step.of_rotary * tokens,
        working=_norm_backward(step) * tokens,
        gradients=units.head,
        **around,
    )


def _loss(step: RankStep) -> tuple[int, int, int]:
    """Beyond what is kept: in forward, in backward, and when the head's weight has its gradient."""
    e, head = step.itemsize, step.vocabulary * step.model.features
    d_hidden = step.of_features * step.tokens
    made = (e if e < WIDE else 0) + WIDE  # logits, unless they are float32; and in float32
    if not step.chunked_loss:
        logits = step.tokens * step.vocabulary
        # With the logarithms that are kept: the loss's gradient by them, and by the logits.
        product = e * logits + e * head + d_hidden - kept_by_loss(step) * step.tokens
        return made * logits, 2 * WIDE * logits, product
    chunk = min(step.chunked_loss, step.tokens)
    logits, whole = chunk * step.vocabulary, d_hidden + WIDE * head
    if uses_pytorch_loss(step):
        return WIDE * logits, WIDE * logits + chunk * step.of_features + whole, whole
    # The logits, in float32, their gradient, and that rounded; of a cap, what autograd keeps, and again.
    capped = 2 * (e + WIDE) if step.capped else 0
    return made * logits, (2 * e + 2 * WIDE + capped) * logits + whole, e * (logits + head) + whole


def _norm_backward(step: RankStep) -> int:
    """Per token, of float32 tensors: its input, two products, and of the root's backward a quotient, a power
    and what is made of both."""
    return 6 * WIDE * step.model.features


def _in_block(step: RankStep, units: Units, at: int) -> Iterator[Moment]:
    """Backward of block ``at``, from behind; at last its gradients are added, and it is sharded again."""
    kept, through = layer_bytes(step), len(step.model.layers) - 1 - at
    layers, own = _before_and_own(step, kept, at)
    own += step.of_features  # the gradient of what the block returned
    behind = kept.norms_behind // 2
    before_norm = own - behind - kept.mlp - kept.norm - kept.given
    frame = Moment(
        "",
        layers * step.tokens,
        step.of_rotary * step.tokens,
        gathered=units.own + units.block + (units.arriving if at else 0),
        gradients=units.done(through),
        buffers=units.standing + (units.sums if through else 0),
    )

    def moment(where: str, working: int, gradients: int, attention: int = 0) -> Moment:
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
    yield moment("at its MLP", (own - behind) * tokens + _mlp(step, units), 0)
    yield moment("at the MLP's norm", (before_norm + norm) * tokens, units.of_mlp)
    d_out = (before_norm - behind + step.of_out) * tokens
    yield moment("at attention", d_out, units.behind_attention, step.attention[1])
    yield moment("at its first norm", (norm + step.of_features) * tokens, units.of_block)
    end = moment("at its end", step.of_features * tokens, units.of_block)
    gathered = units.own + (units.arriving if at else 0)
    yield replace(end, gathered=gathered, buffers=units.standing + units.sums)


def _before_and_own(step: RankStep, kept: LayerBytes, at: int) -> tuple[int, int]:
    """Per token, what blocks keep up to ``at``, and what that block's backward finds beside."""
    each = kept_per_layer(step)
    if not step.recomputes:
        return at * each, kept.total
    shared = step.of_features if step.itemsize == WIDE else 0  # a norm's input needs no copy
    shared += kept_of_attention(step) if step.keeps_attention else 0
    own = kept.total - shared
    return (0, own + each) if step.offload else ((at + 1) * each, own)


def _mlp(step: RankStep, units: Units) -> int:
    """Behind the last product, whose gradient is there: three new tensors like those within, in place of
    what it was given. In tiles, sums of gradients too; with experts, or when results are weighted."""
    tokens, inner, features = step.tokens, step.of_inner, step.of_features
    if step.model.experts:
        routed = step.model.experts_per_token * tokens
        weighted = (3 * WIDE * step.model.features + features - 8) * routed
        return max(weighted, (2 * inner - features - 8) * routed + units.of_down)
    if not step.tiles:
        return 2 * inner * tokens + units.of_down
    in_tile = step.tiled_mlp * (6 * inner + 2 * features) + units.of_down
    return features * tokens + units.sums_of_tiles + max(in_tile, units.of_mlp)


def _at_the_end(step: RankStep, units: Units) -> Iterator[Moment]:
    """The embedding's gradient is there, then its sum with the head's if they are one; and the model's own
    gradients are added."""
    done, tied = units.done(len(step.model.layers)), step.model.tied
    d_out = step.of_features * step.tokens
    more = units.head + max(d_out, units.head if tied else 0)
    buffers = units.standing + units.sums
    yield Moment("end of backward", gathered=units.own, gradients=done + more, buffers=buffers)
    whole = done + (0 if tied else units.head)
    buffers = units.standing + units.sums_of_own
    yield Moment("end of backward, the model's own", gradients=whole, buffers=buffers)

"""The plan of an attention call: checked inputs, schedule and kernel, decided before any tensor moves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from lightning_cp.attention.ring_flash_attn_support import Delegate, delegate
from lightning_cp.attention.sinks import check_sinks
from lightning_cp.attention.spec import AttentionSpec
from lightning_cp.comm.all_to_all import HeadRanges
from lightning_cp.errors import ConfigError, ShapeError
from lightning_cp.kernels.auto import Platform, Tiles, tiles_of
from lightning_cp.kernels.protocol import Kernel, Request, Scores
from lightning_cp.kernels.select import select_kernel
from lightning_cp.layout import (
    GatheredSchedule,
    HeadBlock,
    HeadSplit,
    Hop,
    Schedule,
    SequenceLayout,
    gathered_schedule,
    schedule,
)
from lightning_cp.layout.exchange import Exchange, ring_hops
from lightning_cp.mesh import ContextParallelMesh

DEFAULT_EXCHANGE = Exchange()
_OTHER_ROWS_HINT = (
    " A call with other rows than the step's batch (a teacher of whole rows, text that is generated) belongs "
    "between steps: with Fabric call fabric.strategy.end_step() before it; in a LightningModule move it to "
    "on_train_batch_end, or to a hook that ends an epoch."
)


@dataclass(frozen=True)
class AttentionPlan:
    """This rank's place in the mesh, its heads and tiles, and the kernel that computes them."""

    mesh: ContextParallelMesh
    heads: HeadSplit
    schedule: Schedule
    scores: Scores
    kernel: Kernel
    exchange: Exchange = DEFAULT_EXCHANGE
    sinks: torch.Tensor | None = None
    """[H], sinks of all query heads."""
    negative: bool = False
    """The scale is below 0. Operators mask before they scale, which would turn -inf into +inf, so the queries
    are negated instead."""
    delegate: Delegate | None = None
    """Functions that compute the ring, with ``exchange="ring_flash_attn"``."""

    @cached_property
    def own_sinks(self) -> torch.Tensor | None:
        """Sinks [h] of this rank's query heads, detached."""
        if self.sinks is None:
            return None
        first, last = self.heads.q_range(self.ulysses_rank)
        return self.sinks.detach()[first:last]

    @property
    def ulysses_rank(self) -> int:
        """Rank in the Ulysses group."""
        return self.mesh.ulysses_rank

    @cached_property
    def hops(self) -> tuple[Hop, ...]:
        """Work of this ring rank on the keys of each ring rank, its own first."""
        return ring_hops(self.schedule, self.mesh.ring_rank, self.exchange.name)

    @cached_property
    def rotates(self) -> bool:
        """True if keys go around the ring from rank to rank, and the sums of their gradients too."""
        return self.exchange.name == "rotation"

    @property
    def gathered(self) -> GatheredSchedule:
        """Work of this ring rank once it has gathered all keys."""
        return gathered_schedule(self.schedule, self.mesh.ring_rank)

    @cached_property
    def block(self) -> HeadBlock:
        """This rank's heads in one block."""
        (block,) = self.blocks()
        return block

    def blocks(self, kv_heads: int | None = None) -> tuple[HeadBlock, ...]:
        """Return this rank's heads in blocks of at most ``kv_heads`` K/V heads; one block for ``None``."""
        return self.heads.blocks(self.mesh.ulysses_rank, kv_heads)

    @cached_property
    def message(self) -> tuple[HeadRanges, HeadRanges]:
        """Head ranges sent to each Ulysses rank: its query heads, and the K/V heads that these use."""
        ranks = range(self.heads.ulysses_size)
        return [self.heads.q_range(rank) for rank in ranks], [
            self.heads.kv_range(rank) for rank in ranks
        ]


def make_plan(
    q_BLHD: torch.Tensor,
    k_BLKD: torch.Tensor,
    v_BLKD: torch.Tensor,
    mesh: ContextParallelMesh,
    layout: SequenceLayout,
    spec: AttentionSpec,
    kernel: str,
    *,
    exchange: Exchange = DEFAULT_EXCHANGE,
    max_logits: bool = False,
    request: Request | None = None,
    varied: bool = False,
) -> AttentionPlan:
    """Check this rank's inputs and plan the call; moves nothing.

    ``request`` is the result of ``make_request``, if already known; ``varied``: see :class:`Tiles`.

    Raises:
        ShapeError: q, k and v do not fit each other or the layout, or slopes or sinks do not fit q.
        ConfigError: heads that do not split, a layout of another mesh, or no kernel for the request; or the
            exchange cannot be delegated.
    """
    check_call(q_BLHD, k_BLKD, v_BLKD, mesh, layout, spec)
    heads = HeadSplit(q_BLHD.shape[2], k_BLKD.shape[2], mesh.ulysses_size)
    whole = schedule(layout, None, spec.mask)
    if request is None:
        request = make_request(q_BLHD, v_BLKD, layout, spec, max_logits=max_logits)
    scale = spec.scale(q_BLHD.shape[3])
    every = Scores(abs(scale), spec.mask, float(spec.softcap), spec.alibi_slopes, max_logits)
    scores = every.of_heads(*heads.q_range(mesh.ulysses_rank))
    theirs: Delegate | None = None
    if exchange.name == "ring_flash_attn":
        theirs = delegate(q_BLHD, v_BLKD, layout, spec, kernel, max_logits=max_logits)
        kernel = "auto"  # not called
    platform = Platform.of_calls_on(request.device_type)
    chosen = _select(kernel, request, tiles_of(layout, varied=varied), platform)
    sinks, negative = spec.sinks, scale < 0
    return AttentionPlan(*(mesh, heads, whole, scores, chosen, exchange), sinks, negative, theirs)


def make_request(
    q_BLHD: torch.Tensor,
    v_BLKD: torch.Tensor,
    layout: SequenceLayout,
    spec: AttentionSpec,
    *,
    max_logits: bool = False,
) -> Request:
    """Return the requirements of a call on a kernel."""
    documents = layout.documents
    return Request(
        device_type=q_BLHD.device.type,
        dtype=q_BLHD.dtype,
        head_dim=q_BLHD.shape[3],
        masks=_mask_kinds(spec),
        needs=spec.needs | {"max_logits"} if max_logits else spec.needs,
        value_dim=v_BLKD.shape[3],
        packed=documents is not None and not documents.is_dense,
    )


@lru_cache(maxsize=64)
def _select(kernel: str, request: Request, tiles: Tiles, platform: Platform) -> Kernel:
    return select_kernel(kernel, request, tiles, platform)


def _mask_kinds(spec: AttentionSpec) -> frozenset[str]:
    """Return the mask kinds of this spec's tiles on any rank, so that all ranks choose the same kernel."""
    if spec.mask.window != (-1, -1):
        return frozenset({"full", "causal", "band"})
    return frozenset({"full", "causal"} if spec.causal else {"full"})


def check_call(
    q_BLHD: torch.Tensor,
    k_BLKD: torch.Tensor,
    v_BLKD: torch.Tensor,
    mesh: ContextParallelMesh,
    layout: SequenceLayout,
    spec: AttentionSpec,
) -> None:
    """Check that all arguments fit together.

    Raises:
        ShapeError: q, k and v do not fit each other or the layout, or slopes or sinks do not fit q.
        ConfigError: an argument of another type, or a layout of another mesh.
    """
    _check_types(layout=(layout, SequenceLayout))
    check_types(q_BLHD, k_BLKD, v_BLKD, spec)
    check_inputs(q_BLHD, k_BLKD, v_BLKD, layout)
    spec.check_slopes(q_BLHD)
    if spec.sinks is not None:
        check_sinks(spec.sinks, q_BLHD)
    mesh.check_layout(layout)


def check_types(q_BLHD: object, k_BLKD: object, v_BLKD: object, spec: object) -> None:
    """Check the types of a call's tensors and spec, and that tensors have four dimensions.

    Raises:
        ConfigError: an argument of another type.
        ShapeError: another number of dimensions.
    """
    tensors = {"q_BLHD": q_BLHD, "k_BLKD": k_BLKD, "v_BLKD": v_BLKD}
    _check_types(spec=(spec, AttentionSpec), **{n: (x, torch.Tensor) for n, x in tensors.items()})
    shapes = [tuple(x.shape) for x in tensors.values() if isinstance(x, torch.Tensor)]
    if {*map(len, shapes)} != {4}:
        raise ShapeError(
            f"q, k and v must be [batch, local tokens, heads, head dim], got {', '.join(map(str, shapes))}. "
            "Give q, k and v as this rank's part of one sequence, of one dtype and device."
        )


def _check_types(**arguments: tuple[object, type]) -> None:
    for name, (value, wanted) in arguments.items():
        if not isinstance(value, wanted):
            raise ConfigError(
                f"{name} must be a {wanted.__module__.partition('.')[0]} {wanted.__name__}, got "
                f"{type(value).__name__}. "
                "Pass such an object, or leave the argument out where it has a default."
            )


def check_mesh(mesh: object) -> None:
    """Check the type of ``mesh``, before ranks can agree.

    Raises:
        ConfigError: not a ``ContextParallelMesh``.
    """
    _check_types(mesh=(mesh, ContextParallelMesh))


def check_inputs(
    q_BLHD: torch.Tensor, k_BLKD: torch.Tensor, v_BLKD: torch.Tensor, layout: SequenceLayout
) -> None:
    """Check that q, k and v fit each other and the layout.

    Raises:
        ShapeError: naming all three tensors.
    """
    problem = _shape_problem(q_BLHD, k_BLKD, v_BLKD, layout)
    if problem is not None:
        is_other = q_BLHD.dim() == 4 and q_BLHD.shape[1] != layout.local_len
        shown = ", ".join(
            f"{name} {tuple(x.shape)} {x.dtype} on {x.device}"
            for name, x in (("q", q_BLHD), ("k", k_BLKD), ("v", v_BLKD))
        )
        raise ShapeError(
            f"{problem}, got {shown}. "
            "Give q, k and v as this rank's part of one sequence, of one dtype and device."
            f"{_OTHER_ROWS_HINT if is_other else ''}"
        )


def _shape_problem(
    q_BLHD: torch.Tensor, k_BLKD: torch.Tensor, v_BLKD: torch.Tensor, layout: SequenceLayout
) -> str | None:
    """Return the first problem of the shapes, or ``None``."""
    if 0 in (q_BLHD.shape[3], k_BLKD.shape[3], v_BLKD.shape[3]):
        return "the head dim must be at least 1"
    same_type = q_BLHD.dtype == k_BLKD.dtype == v_BLKD.dtype
    if not same_type or not q_BLHD.device == k_BLKD.device == v_BLKD.device:
        return "q, k and v must have one dtype and one device"
    if k_BLKD.shape[:3] != v_BLKD.shape[:3] or q_BLHD.shape[0] != k_BLKD.shape[0]:
        return "k and v must have equal shapes but for their head dims, and the batch size of q"
    if q_BLHD.shape[3] != k_BLKD.shape[3]:
        return "q and k must have the same head dim"
    if q_BLHD.shape[1] != k_BLKD.shape[1]:
        return "q and k must hold the same local tokens (cross-attention is not sharded)"
    if q_BLHD.shape[1] != layout.local_len:
        is_whole = q_BLHD.shape[1] in (layout.seq_len, layout.padded_len)
        begin = "this looks like the whole sequence: shard it first. The" if is_whole else "the"
        return (
            f"{begin} layout gives each rank {layout.local_len} of {layout.seq_len} tokens (padded to "
            f"{layout.padded_len})"
        )
    documents = layout.documents
    if documents is not None and documents.num_rows not in (1, q_BLHD.shape[0]):
        return f"documents describe {documents.num_rows} rows, but the batch has {q_BLHD.shape[0]}"
    return None

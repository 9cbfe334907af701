"""All-gather: every ring rank gathers all keys once, and sends their gradients home (zigzag_llama3).

Keys are gathered a few K/V heads at a time (``kv_heads_per_gather``), which bounds the memory: the next
heads are on their way while these are computed. What arrives in rank order is put into sequence order, so
that a chunk of queries needs one slice of it. *two_kernel* makes one kernel call per chunk on a view of its
slice, and gradients of overlapping slices add up where they lie; *fused* makes one call for all chunks, on
copies of their slices, and adds the copies' gradients up afterwards. Backward gathers the keys again
instead of keeping them (Grattafiori et al. 2024, arXiv 2407.21783, section 3.3.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

import torch

from lightning_cp.attention.keys import KeyGradients, Keys, kernel_keys, take, unpair
from lightning_cp.attention.plan import AttentionPlan
from lightning_cp.attention.sinks import Attended, finish
from lightning_cp.comm.all_gather import PendingShards, start_all_gather, start_reduce_scatter
from lightning_cp.kernels.api import QKV, Merged, accumulate_dtype
from lightning_cp.kernels.merge import Accumulator
from lightning_cp.kernels.sums import GradientSum, GradientSums
from lightning_cp.layout.heads import HeadBlock
from lightning_cp.layout.tiles import Ranges
from lightning_cp.mesh import Axis
from lightning_cp.named_ranges import named


def gather_forward(q_TBHD: torch.Tensor, keys: Keys, plan: AttentionPlan) -> Attended:
    """Attention of this rank's queries [T, B, h, D] over the whole sequence."""
    tokens, batch, heads, _ = q_TBHD.shape
    out = q_TBHD.new_empty(tokens, batch, heads, keys.value_dim)
    lse = q_TBHD.new_empty(batch, heads, tokens, dtype=accumulate_dtype(q_TBHD.dtype))
    peak = torch.empty_like(lse, dtype=torch.float32) if plan.scores.max_logits else None
    for block, kv in _gathered(keys, plan):
        queries = slice(*block.q)
        found = _attend(q_TBHD[:, :, queries].transpose(0, 1), kv, block, plan)
        del kv  # before the next heads are put into order
        out[:, :, queries] = found.out.transpose(0, 1)
        lse[:, queries] = found.lse
        if peak is not None and found.max_logits is not None:
            peak[:, queries] = found.max_logits
        del found  # before there is another one
    return Attended(out, lse, peak)


def _attend(
    q_BLHD: torch.Tensor, kv_SBKD: torch.Tensor, block: HeadBlock, plan: AttentionPlan
) -> Attended:
    """Attention of a block of heads over all keys in sequence order."""
    scores, key_dim = plan.scores.of_heads(*block.q), q_BLHD.shape[3]
    state = Accumulator(q_BLHD, accumulate_dtype(q_BLHD.dtype), kv_SBKD.shape[3] - key_dim)
    for index, call in enumerate(plan.gathered.calls(plan.exchange.forward)):
        k, v = kernel_keys(Keys((take(kv_SBKD, call.slices),), key_dim), block.kv_of_q)
        state.widen()
        with named("chunk {} compute", index):
            plan.kernel.forward(QKV(q_BLHD, k, v), call.tiles, scores, state)
    sinks = None if plan.own_sinks is None else plan.own_sinks[slice(*block.q)]
    return finish(state, q_BLHD.dtype, sinks, max_logits=scores.max_logits)


def gather_backward(
    dout_TBHD: torch.Tensor,
    q_TBHD: torch.Tensor,
    keys: Keys,
    out_TBHD: torch.Tensor,
    lse_BHT: torch.Tensor,
    plan: AttentionPlan,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of this rank's queries and of its own keys and values.

    Returns:
        ``dq``, ``dk`` and ``dv`` like q, k and v, in the dtype of the inputs: the sum of a head is
        complete once it is home, and rounded there. Only that of K/V heads which Ulysses ranks share is not,
        and stays in the accumulation dtype.
    """
    dtype = q_TBHD.dtype
    home = _GradientsHome(accumulate_dtype(dtype) if plan.heads.shares_kv else dtype, plan)
    dq: list[torch.Tensor] = []
    for block, kv in _gathered(keys, plan):
        queries = slice(*block.q)
        dout, q, out = (x[:, :, queries].transpose(0, 1) for x in (dout_TBHD, q_TBHD, out_TBHD))
        merged = Merged(dout, out, lse_BHT[:, queries])
        own, dkv = _differentiate(merged, q, kv, block, plan)
        del kv  # before the gradients are put into order
        dq.append(own.to(dtype).transpose(0, 1))
        del own
        home.leave(dkv)
        del dkv  # before the next ones are made
    return _all_heads(dq), *unpair(home.finish(), keys.key_dim)


def _all_heads(blocks_TBHD: list[torch.Tensor]) -> torch.Tensor:
    """All blocks of heads side by side; only those that are done took memory until now. Empties the list."""
    whole = blocks_TBHD[0] if len(blocks_TBHD) == 1 else torch.cat(blocks_TBHD, dim=2)
    blocks_TBHD.clear()
    return whole


def _differentiate(
    merged: Merged,
    q_BLHD: torch.Tensor,
    kv_SBKD: torch.Tensor,
    block: HeadBlock,
    plan: AttentionPlan,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``dq`` like q, and the gradients of all keys, pairs [S, B, k, D], in sequence order."""
    dq = GradientSum(q_BLHD, accumulate_dtype(q_BLHD.dtype))
    dkv = torch.zeros_like(kv_SBKD, dtype=dq.dtype)
    scores = plan.scores.of_heads(*block.q)
    for index, call in enumerate(plan.gathered.calls(plan.exchange.backward)):
        with (
            _SliceGradients(dkv, call.slices) as into,
            KeyGradients(
                Keys((take(kv_SBKD, call.slices),), q_BLHD.shape[3]),
                block.kv_of_q,
                dq.dtype,
                into=into,
            ) as (k, v, dk, dv),
            named("chunk {} compute", index),
        ):
            inputs, gradients = QKV(q_BLHD, k, v), GradientSums(dq, dk, dv)
            plan.kernel.backward(merged, inputs, call.tiles, scores, gradients)
    return dq.result, dkv


def _gathered(keys: Keys, plan: AttentionPlan) -> Iterator[tuple[HeadBlock, torch.Tensor]]:
    """All keys in sequence order, a block of heads at a time; the next block is posted first."""
    blocks, group = plan.blocks(plan.exchange.kv_heads_per_gather), plan.mesh.group(Axis.RING)
    shards = [keys.of_heads(*block.kv) for block in blocks]
    pending = start_all_gather(shards[0], group)
    for index, block in enumerate(blocks):
        arriving = pending
        if index + 1 < len(blocks):
            pending = start_all_gather(shards[index + 1], group)
        # Not kept in a variable here: who takes it decides how long it lives.
        yield block, _in_sequence_order(arriving, plan)


def _in_sequence_order(arriving: PendingShards, plan: AttentionPlan) -> torch.Tensor:
    gathered = arriving.wait()
    with named("copies"):
        return take(gathered, plan.gathered.rank_order)


class _SliceGradients:
    """Where the gradients of one call's keys add up: in place for one slice, else in a copy."""

    def __init__(self, dkv_TBKD: torch.Tensor, slices: Ranges) -> None:
        self._parts = [dkv_TBKD[start:end] for start, end in slices]

    def __enter__(self) -> torch.Tensor:
        if len(self._parts) == 1:
            return self._parts[0]
        self._copy = torch.cat([torch.zeros_like(part) for part in self._parts])
        return self._copy

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if len(self._parts) == 1 or kind is not None:
            return
        copies = self._copy.split([len(part) for part in self._parts])
        for part, copy in zip(self._parts, copies, strict=True):
            part += copy  # slices overlap: their gradients add up


class _GradientsHome:
    """Gradients of all keys on their way to the ranks that hold the keys."""

    def __init__(self, dtype: torch.dtype, plan: AttentionPlan) -> None:
        self._dtype = dtype
        self._blocks: list[torch.Tensor] = []
        self._group = plan.mesh.group(Axis.RING)
        self._order = plan.gathered.rank_order
        self._pending: PendingShards | None = None

    def leave(self, gradients_SBKD: torch.Tensor) -> None:
        """Send the gradients of a block of heads; take in those of the block before."""
        self._take_in()
        self._pending = start_reduce_scatter(gradients_SBKD, self._group, order=self._order)

    def finish(self) -> torch.Tensor:
        """The gradients of this rank's own keys."""
        self._take_in()
        return _all_heads(self._blocks)

    def _take_in(self) -> None:
        if self._pending is not None:
            self._blocks.append(self._pending.wait().to(self._dtype))
            self._pending = None

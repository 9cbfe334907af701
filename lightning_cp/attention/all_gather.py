"""Attention by all-gather: every ring rank gathers all keys once, and reduce-scatters their gradients.

This is zigzag_llama3. Keys are gathered a few K/V heads at a time (``kv_heads_per_gather``), which bounds the
memory: the next heads travel while these are computed. Gathered keys are reordered from rank order to
sequence order, so that a chunk of queries needs one slice of them. *two_kernel* makes one kernel call per
chunk on a view of its slice, and gradients of overlapping slices add up in place; *fused* makes one call for
all chunks, on copies of their slices, and adds up the copies' gradients afterwards. Backward gathers the keys
again instead of storing them (Grattafiori et al. 2024, arXiv 2407.21783, section 3.3.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

import torch

from lightning_cp.attention.keys import KeyGradients, Keys, kernel_keys, split_pair, take_ranges
from lightning_cp.attention.plan import AttentionPlan
from lightning_cp.attention.sinks import AttentionResult, finish_attention
from lightning_cp.comm.all_gather import PendingShards, start_all_gather, start_reduce_scatter
from lightning_cp.kernels.merge import Accumulator, GradientSum, GradientSums
from lightning_cp.kernels.protocol import QKV, Output, accumulate_dtype
from lightning_cp.layout.axes import Axis
from lightning_cp.layout.heads import HeadBlock
from lightning_cp.layout.tiles import Ranges
from lightning_cp.utils.tracing import profile_range


def gather_forward(q_TBHD: torch.Tensor, keys: Keys, plan: AttentionPlan) -> AttentionResult:
    """Compute attention of this rank's queries [T, B, h, D] over the whole sequence."""
    tokens, batch, heads, _ = q_TBHD.shape
    out = q_TBHD.new_empty(tokens, batch, heads, keys.value_dim)
    lse = q_TBHD.new_empty(batch, heads, tokens, dtype=accumulate_dtype(q_TBHD.dtype))
    peak = torch.empty_like(lse, dtype=torch.float32) if plan.scores.max_logits else None
    for block, kv in _gather_blocks(keys, plan):
        queries = slice(*block.q)
        result = _attend(q_TBHD[:, :, queries].transpose(0, 1), kv, block, plan)
        del kv  # before the next heads are reordered
        out[:, :, queries] = result.out.transpose(0, 1)
        lse[:, queries] = result.lse
        if peak is not None and result.max_logits is not None:
            peak[:, queries] = result.max_logits
        del result  # before the next one exists
    return AttentionResult(out, lse, peak)


def _attend(
    q_BLHD: torch.Tensor, kv_SBKD: torch.Tensor, block: HeadBlock, plan: AttentionPlan
) -> AttentionResult:
    """Compute attention of a block of heads over all keys in sequence order."""
    scores, key_dim = plan.scores.of_heads(*block.q), q_BLHD.shape[3]
    sinks = None if plan.own_sinks is None else plan.own_sinks[slice(*block.q)]
    dtype, value_dim = accumulate_dtype(q_BLHD.dtype), kv_SBKD.shape[3] - key_dim
    calls = plan.gathered.calls(plan.exchange.forward)
    state = Accumulator(q_BLHD, dtype, value_dim, single=sinks is None and len(calls) == 1)
    for index, call in enumerate(calls):
        k, v = kernel_keys(Keys((take_ranges(kv_SBKD, call.slices),), key_dim), block.kv_of_q)
        state.widen()
        with profile_range("chunk {} compute", index):
            plan.kernel.forward(QKV(q_BLHD, k, v), call.tiles, scores, state)
    return finish_attention(state, q_BLHD.dtype, sinks, max_logits=scores.max_logits)


def gather_backward(
    dout_TBHD: torch.Tensor,
    q_TBHD: torch.Tensor,
    keys: Keys,
    out_TBHD: torch.Tensor,
    lse_BHT: torch.Tensor,
    plan: AttentionPlan,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute gradients of this rank's queries, keys and values.

    Returns:
        ``dq``, ``dk`` and ``dv`` like q, k and v, in the dtype of the inputs: the sum of a head is complete
        on its owner, and rounded there. Sums of K/V heads that Ulysses ranks share are not complete, and
        stay in the accumulation dtype.
    """
    dtype = q_TBHD.dtype
    reduction = _GradientReduction(accumulate_dtype(dtype) if plan.heads.shares_kv else dtype, plan)
    dq: list[torch.Tensor] = []
    for block, kv in _gather_blocks(keys, plan):
        queries = slice(*block.q)
        dout, q, out = (x[:, :, queries].transpose(0, 1) for x in (dout_TBHD, q_TBHD, out_TBHD))
        merged = Output(dout, out, lse_BHT[:, queries])
        own, dkv = _differentiate(merged, q, kv, block, plan)
        del kv  # before the gradients are reordered
        dq.append(own.to(dtype).transpose(0, 1))
        del own
        reduction.send(dkv)
        del dkv  # before the next ones exist
    return _concatenate_heads(dq), *split_pair(reduction.finish(), keys.key_dim)


def _concatenate_heads(blocks_TBHD: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate all blocks of heads, and empty the list."""
    whole = blocks_TBHD[0] if len(blocks_TBHD) == 1 else torch.cat(blocks_TBHD, dim=2)
    blocks_TBHD.clear()
    return whole


def _differentiate(
    merged: Output,
    q_BLHD: torch.Tensor,
    kv_SBKD: torch.Tensor,
    block: HeadBlock,
    plan: AttentionPlan,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``dq`` like q, and the gradients of all keys, pairs [S, B, k, D], in sequence order."""
    dq = GradientSum(q_BLHD, accumulate_dtype(q_BLHD.dtype))
    dkv = torch.zeros_like(kv_SBKD, dtype=dq.dtype)
    scores = plan.scores.of_heads(*block.q)
    for index, call in enumerate(plan.gathered.calls(plan.exchange.backward)):
        with (
            _SliceGradients(dkv, call.slices) as into,
            KeyGradients(
                Keys((take_ranges(kv_SBKD, call.slices),), q_BLHD.shape[3]),
                block.kv_of_q,
                dq.dtype,
                into=into,
            ) as (k, v, dk, dv),
            profile_range("chunk {} compute", index),
        ):
            inputs, gradients = QKV(q_BLHD, k, v), GradientSums(dq, dk, dv)
            plan.kernel.backward(merged, inputs, call.tiles, scores, gradients)
    return dq.result, dkv


def _gather_blocks(keys: Keys, plan: AttentionPlan) -> Iterator[tuple[HeadBlock, torch.Tensor]]:
    """Yield all keys in sequence order, one block of heads at a time; posts the next block first."""
    blocks, group = plan.blocks(plan.exchange.kv_heads_per_gather), plan.mesh.group(Axis.RING)
    shards = [keys.of_heads(*block.kv) for block in blocks]
    pending = start_all_gather(shards[0], group)
    for index, block in enumerate(blocks):
        arriving = pending
        if index + 1 < len(blocks):
            pending = start_all_gather(shards[index + 1], group)
        # No variable here refers to the keys: the caller decides how long they live.
        yield block, _in_sequence_order(arriving, plan)


def _in_sequence_order(arriving: PendingShards, plan: AttentionPlan) -> torch.Tensor:
    gathered = arriving.wait()
    with profile_range("copies"):
        return take_ranges(gathered, plan.gathered.rank_order)


class _SliceGradients:
    """Memory for the sum of a call's key gradients: in place for one slice, else a copy."""

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
        copies = self._copy.split_with_sizes([len(part) for part in self._parts])
        for part, copy in zip(self._parts, copies, strict=True):
            part += copy  # slices overlap: their gradients add up


class _GradientReduction:
    """Reduce-scatter of the gradients of all keys to the ranks that hold the keys."""

    def __init__(self, dtype: torch.dtype, plan: AttentionPlan) -> None:
        self._dtype = dtype
        self._blocks: list[torch.Tensor] = []
        self._group = plan.mesh.group(Axis.RING)
        self._order = plan.gathered.rank_order
        self._pending: PendingShards | None = None

    def send(self, gradients_SBKD: torch.Tensor) -> None:
        """Send the gradients of a block of heads; receive those of the previous block."""
        self._receive()
        self._pending = start_reduce_scatter(gradients_SBKD, self._group, order=self._order)

    def finish(self) -> torch.Tensor:
        """Return the gradients of this rank's own keys."""
        self._receive()
        return _concatenate_heads(self._blocks)

    def _receive(self) -> None:
        if self._pending is not None:
            self._blocks.append(self._pending.wait().to(self._dtype))
            self._pending = None

"""Ring attention by the ring-flash-attn package, as an option and for comparison.

Only its functions of one pass are called, between this package's Ulysses exchanges, so that everything around
the ring (hybrid grids, stored results, the lse) is the same. The supported calls are those of
:mod:`lightning_cp.attention.ring_flash_attn_support`.
"""

from __future__ import annotations

import torch

from lightning_cp.attention.keys import KeyGradients, Keys, kernel_keys
from lightning_cp.attention.plan import AttentionPlan
from lightning_cp.attention.sinks import AttentionResult
from lightning_cp.kernels.protocol import accumulate_dtype
from lightning_cp.layout.axes import Axis
from lightning_cp.layout.tiles import ALL_ROWS


def ring_flash_attn_forward(
    q_TBHD: torch.Tensor, keys: Keys, plan: AttentionPlan
) -> AttentionResult:
    """Compute attention of this rank's queries [T, B, h, D] over the whole sequence."""
    assert plan.delegate is not None
    k, v = kernel_keys(keys, plan.block.kv_of_q)
    out_BTHD, lse_BHT = plan.delegate.forward(
        plan.mesh.group(Axis.RING),
        q_TBHD.transpose(0, 1),
        k.contiguous(),  # it sends them without a copy
        v.contiguous(),
        softmax_scale=plan.scores.softmax_scale,
        causal=plan.scores.mask.causal,
    )
    return AttentionResult(out_BTHD.transpose(0, 1), lse_BHT, None)


def ring_flash_attn_backward(
    dout_TBHD: torch.Tensor,
    q_TBHD: torch.Tensor,
    keys: Keys,
    out_TBHD: torch.Tensor,
    lse_BHT: torch.Tensor,
    plan: AttentionPlan,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute gradients of this rank's queries, keys and values.

    Returns:
        ``dq`` [T, B, h, D], ``dk`` and ``dv`` [T, B, k, D].
    """
    assert plan.delegate is not None
    gradients = KeyGradients(keys, plan.block.kv_of_q, accumulate_dtype(q_TBHD.dtype))
    with gradients as (k, v, dk, dv):
        dq_BTHD, own_dk, own_dv = plan.delegate.backward(
            plan.mesh.group(Axis.RING),
            dout_TBHD.transpose(0, 1),
            q_TBHD.transpose(0, 1),
            k.contiguous(),
            v.contiguous(),
            out_TBHD.transpose(0, 1),
            lse_BHT.contiguous(),  # flash-attn ignores its strides
            softmax_scale=plan.scores.softmax_scale,
            causal=plan.scores.mask.causal,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        dk.add(ALL_ROWS, 0, own_dk)
        dv.add(ALL_ROWS, 0, own_dv)
    own_dk, own_dv = (gradient.result.transpose(0, 1) for gradient in gradients.sums.both)
    return dq_BTHD.transpose(0, 1), own_dk, own_dv

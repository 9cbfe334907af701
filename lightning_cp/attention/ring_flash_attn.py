"""The ring, computed by the ring-flash-attn package: for those who want it, and for comparison.

Only its functions of one pass are called, between our own Ulysses exchanges, so that what surrounds the
ring (hybrid grids, kept results, the lse) is the same. See :mod:`lightning_cp.attention.delegate` for what
it is trusted with.
"""

from __future__ import annotations

import torch

from lightning_cp.attention.keys import KeyGradients, Keys, kernel_keys
from lightning_cp.attention.plan import AttentionPlan
from lightning_cp.attention.sinks import Attended
from lightning_cp.kernels.api import accumulate_dtype
from lightning_cp.layout.tiles import ALL_ROWS
from lightning_cp.mesh import Axis


def ring_flash_attn_forward(q_TBHD: torch.Tensor, keys: Keys, plan: AttentionPlan) -> Attended:
    """Attention of this rank's queries [T, B, h, D] over the whole sequence."""
    assert plan.delegate is not None
    (heads,) = plan.blocks()
    k, v = kernel_keys(keys, heads.kv_of_q)
    out_BTHD, lse_BHT = plan.delegate.forward(
        plan.mesh.group(Axis.RING),
        q_TBHD.transpose(0, 1),
        k.contiguous(),  # it sends them as they are
        v.contiguous(),
        softmax_scale=plan.scores.softmax_scale,
        causal=plan.scores.mask.causal,
    )
    return Attended(out_BTHD.transpose(0, 1), lse_BHT, None)


def ring_flash_attn_backward(
    dout_TBHD: torch.Tensor,
    q_TBHD: torch.Tensor,
    keys: Keys,
    out_TBHD: torch.Tensor,
    lse_BHT: torch.Tensor,
    plan: AttentionPlan,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of this rank's queries and of its own keys and values.

    Returns:
        ``dq`` [T, B, h, D], ``dk`` and ``dv`` [T, B, k, D].
    """
    assert plan.delegate is not None
    (heads,) = plan.blocks()
    gradients = KeyGradients(keys, heads.kv_of_q, accumulate_dtype(q_TBHD.dtype))
    with gradients as (k, v, dk, dv):
        dq_BTHD, own_dk, own_dv = plan.delegate.backward(
            plan.mesh.group(Axis.RING),
            dout_TBHD.transpose(0, 1),
            q_TBHD.transpose(0, 1),
            k.contiguous(),
            v.contiguous(),
            out_TBHD.transpose(0, 1),
            lse_BHT.contiguous(),  # flash-attn reads it as dense memory
            softmax_scale=plan.scores.softmax_scale,
            causal=plan.scores.mask.causal,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        dk.add(ALL_ROWS, 0, own_dk)
        dv.add(ALL_ROWS, 0, own_dv)
    own_dk, own_dv = (gradient.result.transpose(0, 1) for gradient in gradients.sums.both)
    return dq_BTHD.transpose(0, 1), own_dk, own_dv

"""context_parallel_attention: the one call."""

from __future__ import annotations

from typing import Literal, overload

import torch

from lightning_cp.attention.function import ContextParallelAttention
from lightning_cp.attention.keep import Stash, current_stash
from lightning_cp.attention.plan import AttentionPlan, make_plan
from lightning_cp.attention.spec import AttentionSpec
from lightning_cp.attention.ulysses import q_to_tokens
from lightning_cp.comm.agreement import agree, fingerprint
from lightning_cp.errors import ConfigError
from lightning_cp.layout import SequenceLayout
from lightning_cp.mesh import ContextParallelMesh, Flat

EXCHANGES = ("ring",)


@overload
def context_parallel_attention(
    q_BLHD: torch.Tensor,
    k_BLKD: torch.Tensor,
    v_BLKD: torch.Tensor,
    *,
    mesh: ContextParallelMesh,
    layout: SequenceLayout,
    spec: AttentionSpec | None = None,
    exchange: str = "ring",
    kernel: str = "auto",
    return_lse: Literal[False] = False,
) -> torch.Tensor: ...


@overload
def context_parallel_attention(
    q_BLHD: torch.Tensor,
    k_BLKD: torch.Tensor,
    v_BLKD: torch.Tensor,
    *,
    mesh: ContextParallelMesh,
    layout: SequenceLayout,
    spec: AttentionSpec | None = None,
    exchange: str = "ring",
    kernel: str = "auto",
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def context_parallel_attention(
    q_BLHD: torch.Tensor,
    k_BLKD: torch.Tensor,
    v_BLKD: torch.Tensor,
    *,
    mesh: ContextParallelMesh,
    layout: SequenceLayout,
    spec: AttentionSpec | None = None,
    exchange: str = "ring",
    kernel: str = "auto",
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention over the whole sequence, of which every rank holds the tokens ``layout`` gives it.

    All ranks of the cp group call it together. Before data moves they agree that they make the same
    call, so that a difference is an error on every rank.

    Args:
        q_BLHD: [batch, local tokens, heads, head dim].
        k_BLKD: [batch, local tokens, K/V heads, head dim]; heads a multiple of K/V heads.
        v_BLKD: like ``k_BLKD``.
        mesh: the process groups.
        layout: which tokens each rank holds, and their documents.
        spec: mask and score semantics; causal by default.
        exchange: how keys reach the queries over the ring axis: ``ring``.
        kernel: ``auto``, ``aten``, ``reference``, or one kernel's own name.
        return_lse: also return the log-sum-exp [B, H, L] (no gradient flows through it).

    Returns:
        ``out`` [B, L, H, D], and the lse if asked for. Tokens of padding get out 0 and lse -inf.

    Raises:
        ShapeError: q, k, v do not fit each other or the layout.
        ConfigError: heads that do not split, or nothing that can do what is asked.
        BatchMismatchError: ranks of the cp group make different calls.
        RankFailure: another rank's call was refused.
    """
    spec = spec or AttentionSpec()
    error: Exception | None = None
    plan: AttentionPlan | None = None
    facts: dict[str, int] = {}
    try:
        check_exchange(exchange)
        plan = make_plan(q_BLHD, k_BLKD, v_BLKD, mesh, layout, spec, kernel)
        facts = _facts(q_BLHD, k_BLKD, layout, spec, plan)
    except Exception as refused:  # any: a rank that raised alone would leave the others waiting
        error = refused
    stash = current_stash()
    agreed = stash is not None and stash.replaying  # when what is repeated now was recorded
    if mesh.cp_size > 1 and not agreed:
        group = mesh.control_group(Flat.CP)
        agree(facts, group, what="context_parallel_attention", error=error)
    if error is not None:
        raise error
    assert plan is not None
    return attend(q_BLHD, k_BLKD, v_BLKD, plan, return_lse=return_lse)


def attend(
    q_BLHD: torch.Tensor,
    k_BLKD: torch.Tensor,
    v_BLKD: torch.Tensor,
    plan: AttentionPlan,
    *,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Execute a plan that the ranks have agreed on already (once per batch, by the strategy)."""
    stash = current_stash()
    with torch.autocast(q_BLHD.device.type, enabled=False):  # kernels choose their own precision
        out, lse = ContextParallelAttention.apply(q_BLHD, k_BLKD, v_BLKD, plan, stash)  # type: ignore[misc]
    return (out, _lse_to_tokens(lse, plan, stash)) if return_lse else out


def _lse_to_tokens(lse_BHT: torch.Tensor, plan: AttentionPlan, stash: Stash | None) -> torch.Tensor:
    """The lse [B, H, L] of this rank's own tokens, from those [B, h, T] of its heads."""
    if stash is not None and stash.replaying:
        return stash.replay()[0]
    lse_TBH1 = lse_BHT.permute(2, 0, 1).unsqueeze(-1)
    lse_BHL = q_to_tokens(lse_TBH1, plan).squeeze(-1).transpose(1, 2)
    if stash is not None:
        stash.record(lse_BHL)
    return lse_BHL


def check_exchange(exchange: str) -> None:
    """Refuse an exchange that does not exist.

    Raises:
        ConfigError: naming those that do.
    """
    if exchange not in EXCHANGES:
        raise ConfigError(f"exchange must be one of {', '.join(EXCHANGES)}, got {exchange!r}.")


def _facts(
    q_BLHD: torch.Tensor,
    k_BLKD: torch.Tensor,
    layout: SequenceLayout,
    spec: AttentionSpec,
    plan: AttentionPlan,
) -> dict[str, int]:
    documents = layout.documents
    names = ("batch", "local tokens", "heads", "head dim")
    return {
        **dict(zip(names, q_BLHD.shape, strict=True)),
        "K/V heads": k_BLKD.shape[2],
        "dtype (checksum)": fingerprint(str(q_BLHD.dtype)),
        "sequence length": layout.seq_len,
        "layout (checksum)": fingerprint((layout.ring_size, layout.ulysses_size, layout.kind)),
        "documents (checksum)": fingerprint(documents.checksum if documents else 0),
        "mask (checksum)": fingerprint((spec.mask, spec.softmax_scale, spec.softcap)),
        "kernel (checksum)": fingerprint(plan.kernel.name),
    }

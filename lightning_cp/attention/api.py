"""``context_parallel_attention``, the public attention call, and the explanation of its kernel."""

from __future__ import annotations

import warnings
import weakref
from dataclasses import astuple
from functools import cache
from typing import Literal, Protocol, TypedDict, overload

import torch
import torch.distributed as dist
from typing_extensions import Unpack

from lightning_cp.attention.checkpointing import current_stash
from lightning_cp.attention.function import attend, cast_as_autocast
from lightning_cp.attention.plan import (
    AttentionPlan,
    check_call,
    check_mesh,
    check_types,
    make_plan,
    make_request,
)
from lightning_cp.attention.ring_flash_attn_support import DELEGATED_KERNELS, delegate
from lightning_cp.attention.spec import AttentionSpec
from lightning_cp.comm.consensus import check_equal, fingerprint
from lightning_cp.errors import ConfigError
from lightning_cp.kernels.auto import tiles_of
from lightning_cp.kernels.select import explain_kernels
from lightning_cp.layout import HeadSplit, SequenceLayout
from lightning_cp.layout.axes import Flat
from lightning_cp.layout.exchange import Exchange
from lightning_cp.mesh import ContextParallelMesh, SingleRankMesh
from lightning_cp.utils.tracing import exclude_from_compile


class AttentionStep(Protocol):
    """An active step of a strategy."""

    @property
    def intercepts(self) -> bool:
        """True if attention is over the whole sequence."""
        ...

    def attention(
        self, q_BLHD: torch.Tensor, k_BLKD: torch.Tensor, v_BLKD: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor: ...


_steps: list[weakref.ref[AttentionStep]] = []
"""The active steps, the latest last; weak, as a global must not keep a model alive."""
_had_steps: list[bool] = []
"""Not empty once a step has begun in this process."""


def begin_attention_step(step: AttentionStep) -> None:
    """Make calls of ``context_parallel_attention`` without a mesh those of this step."""
    _had_steps[:] = [True]
    _steps.append(weakref.ref(step))


def end_attention_step(step: AttentionStep) -> None:
    """End the step for ``context_parallel_attention``."""
    _steps[:] = [ref for ref in _steps if ref() not in (step, None)]


class _Options(TypedDict, total=False):
    """The arguments of every overload."""

    mesh: ContextParallelMesh | None
    layout: SequenceLayout | None
    spec: AttentionSpec | None
    exchange: str
    kernel: str
    forward_execution: str
    backward_execution: str
    kv_heads_per_gather: int | None
    key_gradients: str


@overload
def context_parallel_attention(
    q_BLHD: torch.Tensor,
    k_BLKD: torch.Tensor,
    v_BLKD: torch.Tensor,
    *,
    return_lse: Literal[False] = False,
    return_max_logits: Literal[False] = False,
    **options: Unpack[_Options],
) -> torch.Tensor: ...


@overload
def context_parallel_attention(
    q_BLHD: torch.Tensor,
    k_BLKD: torch.Tensor,
    v_BLKD: torch.Tensor,
    *,
    return_lse: Literal[True],
    return_max_logits: Literal[False] = False,
    **options: Unpack[_Options],
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def context_parallel_attention(
    q_BLHD: torch.Tensor,
    k_BLKD: torch.Tensor,
    v_BLKD: torch.Tensor,
    *,
    return_lse: bool = False,
    return_max_logits: Literal[True],
    **options: Unpack[_Options],
) -> tuple[torch.Tensor, ...]: ...


@exclude_from_compile
def context_parallel_attention(
    q_BLHD: torch.Tensor,
    k_BLKD: torch.Tensor,
    v_BLKD: torch.Tensor,
    *,
    mesh: ContextParallelMesh | None = None,
    layout: SequenceLayout | None = None,
    spec: AttentionSpec | None = None,
    exchange: str = "ring",
    kernel: str = "auto",
    forward_execution: str = "two_kernel",
    backward_execution: str = "two_kernel",
    kv_heads_per_gather: int | None = 1,
    key_gradients: str = "accumulate",
    return_lse: bool = False,
    return_max_logits: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Compute exact attention over the whole sequence; every rank passes the tokens that ``layout`` gives it.

    All ranks of the cp group call it together. Before data moves they agree that they make the same
    call, so that a difference is an error on every rank.

    A model under a strategy leaves ``mesh`` and ``layout`` out: within a step they are the step's,
    with the strategy's exchange and kernel; outside of a step, as in one process, these tokens are the whole
    sequence.

    Args:
        q_BLHD: [batch, local tokens, heads, head dim].
        k_BLKD: [batch, local tokens, K/V heads, head dim]; heads a multiple of K/V heads.
        v_BLKD: like ``k_BLKD``; its head dim, which is also that of ``out``, may be another.
        mesh: the process groups; given together with the layout, or neither.
        layout: the tokens of each rank, and their documents.
        spec: mask and score semantics; causal by default.
        exchange: of keys over the ring axis: ``ring``, ``rotation``, ``all_gather``, or
            ``ring_flash_attn``, which delegates it to the package of that name where that is exact
            (docs/guides/kernels.md).
        kernel: ``auto``, ``aten``, ``reference``, or one kernel's own name.
        forward_execution: of ``all_gather``, ``two_kernel`` or ``fused``; see :class:`Exchange`.
        backward_execution: likewise.
        kv_heads_per_gather: of ``all_gather``, K/V heads gathered at a time; ``None`` is all of them.
        key_gradients: of ``ring``, the dtype in which gradients of keys travel: see :class:`Exchange`.
        return_lse: also return the log-sum-exp [B, H, L], sinks included (no gradient flows through it).
        return_max_logits: also return the largest score of each query, as it enters the softmax and
            without sinks: float32 [B, H, L] (no gradient).

    Returns:
        ``out`` [B, L, H, D of v]; then the lse and the largest scores, if requested. Padding tokens get out 0
        and -inf.

    Raises:
        ShapeError: q, k, v do not fit each other or the layout, or slopes or sinks do not fit q.
        ConfigError: heads that do not split, or no implementation for the call.
        BatchMismatchError: ranks of the cp group make different calls.
        RankFailure: another rank's call was refused.
    """
    spec = AttentionSpec() if spec is None else spec
    if mesh is None and layout is None:
        settings = (exchange, kernel, forward_execution, backward_execution, kv_heads_per_gather)
        if (
            settings != _SETTINGS
            or key_gradients != "accumulate"
            or return_lse
            or return_max_logits
        ):
            raise ConfigError(_STEP_OPTIONS)
        return _attend_in_step(q_BLHD, k_BLKD, v_BLKD, spec)
    if mesh is None or layout is None:
        raise ConfigError(
            "context_parallel_attention was called with one of mesh= and layout=. Pass both, or neither in "
            "the step of a strategy."
        )
    check_mesh(mesh)
    error: Exception | None = None
    plan: AttentionPlan | None = None
    facts: dict[str, object] = {}
    try:
        executions = forward_execution, backward_execution
        how = Exchange(exchange, *executions, kv_heads_per_gather, key_gradients)
        plan = make_plan(
            *(q_BLHD, k_BLKD, v_BLKD, mesh, layout, spec, kernel),
            exchange=how,
            max_logits=return_max_logits,
        )
        facts = _facts((q_BLHD, k_BLKD, v_BLKD), layout, spec, plan)
        wanted = {"lse": return_lse, "max_logits": return_max_logits}
        facts["what is returned"] = ["out", *(name for name, asked in wanted.items() if asked)]
    except Exception as refused:  # any: a rank that raised alone would leave the others waiting
        error = refused
    _agree_on_call(mesh, facts, error)
    if error is not None:
        raise error
    assert plan is not None
    return attend(q_BLHD, k_BLKD, v_BLKD, plan, return_lse=return_lse)


_SETTINGS = ("ring", "auto", "two_kernel", "two_kernel", 1)
"""The defaults, which a call without a mesh has to leave."""
_STEP_OPTIONS = (
    "context_parallel_attention without mesh= and layout= takes a spec only: the exchange and the kernel are "
    "settings of the strategy, and neither lse nor the largest scores are returned. Leave these arguments "
    "out, or pass a mesh and a layout."
)


def _attend_in_step(
    q_BLHD: torch.Tensor, k_BLKD: torch.Tensor, v_BLKD: torch.Tensor, spec: AttentionSpec
) -> torch.Tensor:
    """Attend over the whole sequence of the active step, or over these tokens if there is none."""
    check_types(q_BLHD, k_BLKD, v_BLKD, spec)
    for step in (ref() for ref in reversed(_steps)):
        if step is not None and step.intercepts:
            return step.attention(q_BLHD, k_BLKD, v_BLKD, spec)
    _warn_without_step()
    q, k, v = cast_as_autocast(q_BLHD, k_BLKD, v_BLKD)
    layout = SequenceLayout(q.shape[1], 1, 1, "contiguous")
    plan = make_plan(q, k, v, SingleRankMesh(q.device.type), layout, spec, "auto")
    out = attend(q, k, v, plan)
    assert isinstance(out, torch.Tensor)
    return out


@cache
def _warn_without_step() -> None:
    """Warn once of a call on several ranks of which none has a strategy."""
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if ranks > 1 and not _had_steps:
        warnings.warn(
            "context_parallel_attention was called without mesh= and layout= in a process that no strategy "
            f"of this package has trained in, so each of {ranks} ranks attends over its own tokens. Pass "
            "both, or train with strategy='ulysses_ring'.",
            stacklevel=4,
        )


def explain(
    q_BLHD: torch.Tensor,
    k_BLKD: torch.Tensor,
    v_BLKD: torch.Tensor,
    *,
    mesh: ContextParallelMesh,
    layout: SequenceLayout,
    spec: AttentionSpec | None = None,
    exchange: str = "ring",
    kernel: str = "auto",
    return_max_logits: bool = False,
) -> str:
    """Explain the kernel of a call with these arguments, and the reason against each other one.

    Computes and communicates nothing; a single rank may call it.

    Raises:
        ShapeError: q, k, v do not fit each other or the layout, or slopes or sinks do not fit q.
        ConfigError: an unknown kernel or exchange, heads that do not split, a layout of another mesh, or a
            call that the package ``ring_flash_attn`` gets wrong.
    """
    check_mesh(mesh)
    spec = AttentionSpec() if spec is None else spec
    check_call(q_BLHD, k_BLKD, v_BLKD, mesh, layout, spec)
    HeadSplit(q_BLHD.shape[2], k_BLKD.shape[2], mesh.ulysses_size)  # checks that heads split
    if Exchange(exchange).name == "ring_flash_attn":
        delegate(q_BLHD, v_BLKD, layout, spec, kernel, max_logits=return_max_logits)
        return DELEGATED_KERNELS
    request = make_request(q_BLHD, v_BLKD, layout, spec, max_logits=return_max_logits)
    return explain_kernels(kernel, request, tiles_of(layout))


def _agree_on_call(
    mesh: ContextParallelMesh, facts: dict[str, object], error: Exception | None
) -> None:
    """Agree on a call with all ranks of the cp group: on its facts, or on the error of a refused call.

    Raises:
        BatchMismatchError: the calls differ.
        RankFailure: another rank's call was refused.
    """
    stash = current_stash()
    agreed = stash is not None and stash.replaying  # when the forward was recorded
    if mesh.sample_size == 1 or agreed:
        return
    check_equal(
        facts,
        mesh.control_group(Flat.CP),
        what="context_parallel_attention",
        error=error,
        remedy="All ranks of a context-parallel group make the same call, with the same settings.",
    )


def _facts(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    layout: SequenceLayout,
    spec: AttentionSpec,
    plan: AttentionPlan,
) -> dict[str, object]:
    """Return the values that must be equal on all ranks, as a message shows them."""
    q_BLHD, k_BLKD, v_BLKD = inputs
    documents = layout.documents
    names = ("batch", "local tokens", "heads", "head dim")
    reaches_back = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    return {
        **dict(zip(names, q_BLHD.shape, strict=True)),
        "K/V heads": k_BLKD.shape[2],
        "head dim of v": v_BLKD.shape[3],
        "dtype": q_BLHD.dtype,
        "sequence length": layout.seq_len,
        "layout": f"{layout.kind}, checksum {fingerprint(layout.checksum)}",
        "documents": f"checksum {fingerprint(documents.checksum)}" if documents else None,
        "causality and window": (spec.causal, plan.scores.mask.window),
        "softmax_scale": spec.softmax_scale,
        "softcap": spec.softcap,
        "alibi slopes": _shape(spec.alibi_slopes),
        "sinks": _shape(spec.sinks),
        "whether sinks are trained": spec.sinks is not None and spec.sinks.requires_grad,
        "exchange": astuple(plan.exchange),
        "whether backward comes through": reaches_back,
        "keep_attention": current_stash() is not None,
        "what is returned": [],
        "kernel": plan.kernel.name,
    }


def _shape(x: torch.Tensor | None) -> tuple[int, ...] | None:
    return None if x is None else tuple(x.shape)

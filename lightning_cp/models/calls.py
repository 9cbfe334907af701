"""The attention calls that a model makes, to be counted: with context parallelism or without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_cp.attention.plan import AttentionPlan
from lightning_cp.layout import Mask
from lightning_cp.models.expected import mask_of
from lightning_cp.models.sdpa import observe_sdpa
from lightning_cp.models.swap import hf_models, told
from lightning_cp.module_hooks import add_hook


class AttentionCall(NamedTuple):
    """Facts that the FLOPs of one call depend on, beside the documents of the batch."""

    rows: int
    length: int
    """Of the whole sequence."""
    mask: Mask | None
    """``None``: a dense mask was given, which nobody looks at."""
    heads: int
    """Query heads, of all ranks together."""
    query_dim: int
    value_dim: int

    def flops(self, pairs: int) -> int:
        """Of a forward over so many visible pairs of all rows: q.k and p.v, two FLOPs a multiply-add."""
        return 2 * self.heads * (self.query_dim + self.value_dim) * pairs


Tell = Callable[[AttentionCall, torch.Tensor], None]
"""Told of a call and its output."""


def shared_call(
    plan: AttentionPlan, q_BLHD: torch.Tensor, out_BLHD: torch.Tensor, sharing: int
) -> AttentionCall:
    """A call that came through context parallelism.

    Args:
        plan: how it is executed.
        q_BLHD: this rank's queries, before Ulysses.
        out_BLHD: what it returned, as wide as its values.
        sharing: tensor-parallel ranks, each of which has heads of its own.
    """
    rows, _, heads, dim = q_BLHD.shape
    length, mask = plan.schedule.layout.seq_len, plan.schedule.mask
    return AttentionCall(rows, length, mask, heads * sharing, dim, out_BLHD.shape[3])


def observe_calls(model: nn.Module, tell: Tell) -> Callable[[], None]:
    """Have ``tell`` see the attention of a model that is not swapped; returns what ends that.

    Attention modules of Hugging Face models tell causality, window and heads themselves, as each layer has
    them; of other models calls of ``scaled_dot_product_attention`` are seen.
    What is compiled is left alone: its calls are not made from Python.
    """
    if is_compiled(model):
        return lambda: None
    inside: list[nn.Module] = []

    def enter(module: nn.Module, *_: Any) -> None:
        inside.append(module)

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        inside.pop()
        out = output[0] if isinstance(output, tuple) else output
        if isinstance(out, torch.Tensor):  # not so where the module has raised
            tell(_call_of(module, out), out)

    def direct(query: Any, key: Any, attn_mask: Any, is_causal: bool, out: torch.Tensor) -> None:
        if inside or query.dim() != 4:
            return
        rows, heads, length, dim = query.shape
        is_known = attn_mask is None and length == key.shape[2]
        mask = Mask(is_causal) if is_known else None
        tell(AttentionCall(rows, length, mask, heads, dim, out.shape[3]), out)

    undo: list[Callable[[], None]] = [observe_sdpa(direct)]
    for root in hf_models(model):
        for module in _attention_modules(root):
            undo.append(add_hook(module.register_forward_pre_hook, enter))
            ends = {"with_kwargs": True, "always_call": True}
            undo.append(add_hook(module.register_forward_hook, leave, **ends))

    def end() -> None:
        while undo:
            undo.pop()()

    return end


def is_compiled(model: nn.Module) -> bool:
    """True if any part of a model is compiled, or all of it by the Trainer."""
    return any(
        type(part).__name__ == "OptimizedModule"
        or part._compiled_call_impl is not None
        or getattr(part, "_compiler_ctx", None) is not None
        for part in model.modules()
    )


def in_backward() -> bool:
    """True if this thread runs autograd's backward: what is called there is computed once more."""
    return torch._C._current_graph_task_id() != -1


def _attention_modules(root: nn.Module) -> list[nn.Module]:
    """The innermost modules that say whether they are causal, or are known to be (BLOOM)."""
    said = [x for x in root.modules() if isinstance(getattr(x, "is_causal", None), bool)]
    said += [x for x in root.modules() if type(x).__name__ == "BloomAttention"]
    return [x for x in said if not any(y in said for y in list(x.modules())[1:])]


def _call_of(module: Any, out_BLE: torch.Tensor) -> AttentionCall:
    rows, length = out_BLE.shape[:2]
    config = getattr(module, "config", None)
    heads = told(config, "num_attention_heads") or getattr(module, "num_heads", None)
    size = told(config, "head_dim") or getattr(module, "head_dim", None)
    if type(heads) is not int or not isinstance(size or told(config, "hidden_size"), int):
        return AttentionCall(rows, length, None, 0, 0, 0)
    mask = mask_of(module)
    if told(config, "attention_chunk_size"):  # Llama 4: neither causal nor a window
        mask = None
    own = getattr(module, "head_dim", None) or size or told(config, "hidden_size") // heads
    query, value = (getattr(module, name, own) for name in ("qk_head_dim", "v_head_dim"))
    return AttentionCall(rows, length, mask, heads, query, value)

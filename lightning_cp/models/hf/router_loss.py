"""Load-balancing losses of transformers' routers, over all tokens of the batch.

The loss is ``E sum_e f_e P_e`` (Switch Transformer, arXiv 2101.03961): ``f`` and ``P`` are an expert's share
of the choices and its mean probability, over all tokens. Both are made of sums, which ranks add up first.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from lightning_cp.layout.axes import Flat
from lightning_cp.loss.sequence import PartialSums
from lightning_cp.models.handle import SwapHandle
from lightning_cp.utils.patching import ChainedPatch, ReplacedFunction
from lightning_cp.utils.tensors import to_device
from lightning_cp.utils.tracing import exclude_from_compile

_NAME = "load_balancing_loss_func"


def load_balancing_loss(
    gate_logits: tuple[torch.Tensor, ...],
    experts: int,
    top_k: int,
    weights: torch.Tensor,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Return the loss of all ranks' tokens, the same on each; one all-reduce of ``2 experts + 1`` numbers.

    Args:
        gate_logits: [tokens, experts] of each layer, of this rank's tokens.
        experts: number of experts.
        top_k: experts of each token.
        weights: [tokens], 0 for padding.
        group: the ranks that share the sample.
    """
    wide = torch.promote_types(gate_logits[0].dtype, torch.float32)
    device = gate_logits[0].device
    weights = weights.to(device, wide)
    chosen, probability = (torch.zeros(experts, dtype=wide, device=device) for _ in range(2))
    for logits in gate_logits:
        shares = torch.softmax(logits.to(device), dim=-1)
        _, selected = torch.topk(shares, top_k, dim=-1)
        each = weights.repeat_interleave(top_k)
        chosen = chosen.scatter_add(0, selected.flatten(), each)
        probability = probability + (shares.to(wide) * weights[:, None]).sum(0)
    tokens = (weights.sum() * len(gate_logits)).expand(1)

    def finish(sums: torch.Tensor) -> torch.Tensor:
        f, p, count = sums[:experts].detach(), sums[experts:-1], sums[-1].detach()
        return (f / count * (p / count)).sum() * experts

    return PartialSums(torch.cat([chosen, probability, tokens]), finish).over(group)


def router_replacements(models: Iterable[Any], handle: SwapHandle) -> list[ReplacedFunction]:
    """Return the replacements of the load-balancing functions that Hugging Face models call.

    Functions of another kind than Mixtral's stay: their losses are refused as before.
    """
    homes = {sys.modules.get(type(model).__module__) for model in models}
    return [
        _replacement(home, handle)
        for home in homes
        if home is not None and _is_mixtrals(getattr(home, _NAME, None))
    ]


def _is_mixtrals(function: Any) -> bool:
    if function is None:
        return False
    from transformers.models.mixtral import modeling_mixtral

    known = getattr(modeling_mixtral, _NAME)
    codes = [getattr(each, "__wrapped__", each).__code__ for each in (function, known)]
    return codes[0].co_code == codes[1].co_code and codes[0].co_names == codes[1].co_names


def _replacement(home: Any, handle: SwapHandle) -> ReplacedFunction:
    original = getattr(home, _NAME)
    link = ChainedPatch(original)
    held = weakref.ref(handle)  # a global must not keep a model alive

    @functools.wraps(original)
    @exclude_from_compile
    def function(
        gate_logits: Any,
        num_experts: int | None = None,
        top_k: int = 2,
        attention_mask: torch.Tensor | None = None,
    ) -> Any:
        handle = held()
        state = None if handle is None else handle.state
        if handle is None or state is None or not isinstance(gate_logits, tuple):
            return link.original(gate_logits, num_experts, top_k, attention_mask)
        assert num_experts is not None
        layout, group = state.layout, handle.mesh.group(Flat.CP)
        real = layout.positions(handle.mesh.cp_rank) < layout.seq_len
        if attention_mask is None:
            rows = len(gate_logits[0]) // len(real)
            weights = to_device(real, gate_logits[0].device).repeat(rows)
        else:
            weights = (attention_mask * to_device(real, attention_mask.device)).flatten()
        loss = load_balancing_loss(gate_logits, num_experts, top_k, weights, group)
        handle.router_loss = loss.detach()
        return loss

    return ReplacedFunction(home, _NAME, function, link)


def router_coefficients(model: Any) -> set[float]:
    """Return the coefficients by which a model may multiply the loss of its routers."""
    owners = (model, model.config, model.config.get_text_config())
    names = ("router_aux_loss_coef", "aux_loss_coef")
    found = (getattr(owner, name, None) for owner in owners for name in names)
    return {float(each) for each in found if isinstance(each, int | float)}

"""Models take views of what attention returns, as they may of what PyTorch's own returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_cp.config import StrategyConfig
from lightning_cp.runtime.runtime import ContextParallelRuntime
from tests.helpers.pool import run_ranks


class Viewing(nn.Module):
    """Takes a view of the result, which tensors of other strides do not have."""

    num_heads = 4

    def __init__(self, kv_heads: int, heads_first: bool) -> None:
        super().__init__()
        self.kv_heads, self.heads_first = kv_heads, heads_first

    def forward(self, x_BLE: torch.Tensor) -> torch.Tensor:
        q_BHLD = x_BLE.unflatten(-1, (4, 8)).transpose(1, 2)
        if self.heads_first:  # in memory, as rotary embeddings leave it
            q_BHLD = q_BHLD.contiguous()
        k_BKLD = q_BHLD[:, : self.kv_heads]
        out_BHLD = nn.functional.scaled_dot_product_attention(
            q_BHLD, k_BKLD, k_BKLD, is_causal=True, enable_gqa=True
        )
        if self.heads_first:
            out_BHLD = out_BHLD.view(-1, *out_BHLD.shape[-2:]).view(out_BHLD.shape)
            return out_BHLD.transpose(1, 2).flatten(2)
        return out_BHLD.transpose(1, 2).view(x_BLE.shape)


def batch() -> dict[str, torch.Tensor]:
    x = torch.randn(3, 37, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return {"inputs_embeds": x, "labels": torch.ones(3, 37, dtype=torch.long)}


def viewed(rank: int, world_size: int, ulysses: int, ring: int, *kind: Any) -> torch.Tensor:
    model = Viewing(*kind)
    settings = StrategyConfig(ulysses_size=ulysses, ring_size=ring, labels="aligned")
    runtime = ContextParallelRuntime(settings)
    runtime.meshes.build(2, "cpu", None, model)
    try:
        runtime.attach(model, {}, needs_labels=True)
        local = runtime.shard(batch(), needs_labels=True)
        runtime.begin_step()
        return runtime.step.unshard_output(model(local["inputs_embeds"]), {})
    finally:
        runtime.detach()


@pytest.mark.quick("1-2-4-True")
@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(("ulysses", "ring"), [(1, 2), (2, 1)])
def test_views_of_what_attention_returns(
    ulysses: int, ring: int, kv_heads: int, heads_first: bool
) -> None:
    want = Viewing(kv_heads, heads_first)(batch()["inputs_embeds"])
    for got in run_ranks(2, viewed, ulysses, ring, kv_heads, heads_first, timeout=20):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)

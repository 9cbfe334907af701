"""Attention alone, without Lightning: two packed documents over 4 ranks, against one process.

Run it with ``torchrun --nproc-per-node 4 examples/attention_minimal.py``.
"""

from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F

from lightning_cp import (
    AttentionSpec,
    ContextParallelMesh,
    Documents,
    SequenceLayout,
    context_parallel_attention,
)
from lightning_cp.attention.api import explain

BATCH, SEQ_LEN, HEADS, KV_HEADS, HEAD_DIM = 2, 1000, 8, 2, 64
BOUNDARIES = [0, 700, SEQ_LEN]


def main() -> None:
    dist.init_process_group("gloo")
    mesh = ContextParallelMesh(ring_size=2, ulysses_size=2)
    documents = Documents.from_cu_seqlens(BOUNDARIES)
    layout = SequenceLayout(SEQ_LEN, ring_size=2, ulysses_size=2, documents=documents)

    torch.manual_seed(0)  # every rank makes the whole sequence, and keeps its part of it
    q = torch.randn(BATCH, SEQ_LEN, HEADS, HEAD_DIM)
    k, v = torch.randn(2, BATCH, SEQ_LEN, KV_HEADS, HEAD_DIM)
    parts = [mesh.shard(x, layout).requires_grad_() for x in (q, k, v)]
    out, lse = context_parallel_attention(
        *parts, mesh=mesh, layout=layout, spec=AttentionSpec(), return_lse=True
    )
    out.square().sum().backward()
    whole = mesh.unshard(out.detach(), layout, dim=1)

    if dist.get_rank() == 0:
        print(f"each rank: out {tuple(out.shape)}, lse {tuple(lse.shape)}")
        print(explain(*parts, mesh=mesh, layout=layout).splitlines()[0])
        print(
            f"largest difference from one process: {float((whole - alone(q, k, v)).abs().max()):.1e}"
        )
    dist.destroy_process_group()


def alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Each document by itself, in one process."""
    found: list[torch.Tensor] = []
    for start, end in pairwise(BOUNDARIES):
        queries, keys, values = (x[:, start:end].transpose(1, 2) for x in (q, k, v))
        attended = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, enable_gqa=True
        )
        found.append(attended.transpose(1, 2))
    return torch.cat(found, dim=1)


if __name__ == "__main__":
    main()

"""A Llama in plain PyTorch whose every operation runs in the dtype of its weights (float64 in tests)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class PlainLlama(nn.Module):
    """Embedding, pre-norm blocks with grouped-query attention and SwiGLU, and a head."""

    def __init__(
        self,
        vocab: int = 48,
        num_heads: int = 8,
        num_kv_heads: int = 2,
        head_dim: int = 8,
        layers: int = 2,
    ) -> None:
        super().__init__()
        hidden = num_heads * head_dim
        self.embed = nn.Embedding(vocab, hidden)
        self.blocks = nn.ModuleList(
            Block(hidden, num_heads, num_kv_heads, head_dim) for _ in range(layers)
        )
        self.norm = RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[B, L] tokens and their global positions -> [B, L, vocab]; causal without a [B, L, L] mask."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, positions, mask)
        return self.head(self.norm(x))


class Block(nn.Module):
    """Attention and a gated MLP, each behind a norm."""

    def __init__(self, hidden: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.q = nn.Linear(hidden, num_heads * head_dim, bias=False)
        self.k = nn.Linear(hidden, num_kv_heads * head_dim, bias=False)
        self.v = nn.Linear(hidden, num_kv_heads * head_dim, bias=False)
        self.o = nn.Linear(num_heads * head_dim, hidden, bias=False)
        self.up = nn.Linear(hidden, 2 * hidden, bias=False)
        self.gate = nn.Linear(hidden, 2 * hidden, bias=False)
        self.down = nn.Linear(2 * hidden, hidden, bias=False)
        self.norm1, self.norm2 = RMSNorm(hidden), RMSNorm(hidden)

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[B, L, hidden] -> [B, L, hidden]."""
        batch, length, _ = x.shape
        y = self.norm1(x)
        q = self.q(y).view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k(y).view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        v = self.v(y).view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        q, k = rotate(q, positions), rotate(k, positions)
        seen = None if mask is None else mask[:, None]
        a = F.scaled_dot_product_attention(q, k, v, seen, is_causal=mask is None, enable_gqa=True)
        x = x + self.o(a.transpose(1, 2).reshape(batch, length, -1))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in x's dtype."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [B, H, L, D] at global positions [B or 1, L]."""
    half = x.shape[-1] // 2
    rates = 10_000.0 ** (-torch.arange(half, dtype=x.dtype, device=x.device) / half)
    angles = positions[:, None, :, None].to(x.dtype) * rates
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)

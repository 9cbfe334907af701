"""FlashAttention-2 in Triton: host code, tables of tiles, and device code."""

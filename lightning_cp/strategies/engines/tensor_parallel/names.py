"""Names of the layers of llama-like models, and Hugging Face families that are known to be exact."""

from __future__ import annotations

ATTENTION = (
    ("q_proj", "k_proj", "v_proj", "o_proj"),
    ("q_proj", "k_proj", "v_proj", "out_proj"),
    ("q", "k", "v", "o"),
    ("wq", "wk", "wv", "wo"),
    ("query", "key", "value", "out"),
)
"""Linear layers that make queries, keys and values, and the one behind attention."""

FUSED_ATTENTION = (("qkv_proj", "o_proj"),)
"""The first makes queries, then keys, then values; only where it is known that they follow in this order."""

GATED_MLP = (
    ("gate_proj", "up_proj", "down_proj"),
    ("gate", "up", "down"),
    ("w1", "w3", "w2"),
)
"""Two that make the hidden features together, and the one behind."""

PLAIN_MLP = (("up_proj", "down_proj"), ("up", "down"), ("c_fc", "c_proj"), ("fc1", "fc2"))

FUSED_MLP = (("gate_up_proj", "down_proj"),)
"""The first makes gates, then ups; only where that is known."""

HEAD_NORMS = ("q_norm", "k_norm", "query_layernorm", "key_layernorm")
"""Norms of queries and keys; sharded where each head is normalised by itself."""

EMBEDDINGS = ("embed_tokens", "embed", "tok_embeddings", "token_embedding", "wte")
HEADS = ("lm_head", "head", "output", "unembed")

QUERY_HEADS = (
    "num_attention_heads",
    "num_heads",
    "n_heads",
    "n_head",
    "nhead",
    "num_q_heads",
    "heads",
)
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")
"""Attributes in which an attention module keeps counts of heads."""

KNOWN_TYPES = (
    "arcee",
    "cohere",
    "exaone4",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm",
    "glm4",
    "granite",
    "helium",
    "hunyuan_v1_dense",
    "llama",
    "ministral",
    "mistral",
    "nemotron",
    "olmo",
    "phi3",
    "qwen2",
    "qwen3",
    "seed_oss",
    "smollm3",
    "starcoder2",
)
"""``config.model_type`` of Hugging Face families that were compared with one process."""

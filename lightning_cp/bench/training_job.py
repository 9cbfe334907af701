"""The job whose steps are measured: its model, and its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lightning_cp.bench.case import log_normal
from lightning_cp.labels import IGNORED_LABEL

VOCAB = 256
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Job:
    """A Llama over bytes, as in ``configs/model/llama_small.yaml``, trained on random rows."""

    tokens: int = 4096
    packed: int = 0
    """Documents of log-normal lengths in each row, others in every row; 0 is one document."""
    hidden: int = 256
    layers: int = 2
    heads: int = 8
    kv_heads: int = 2
    seed: int = 0
    hooks: bool = False
    """There is a callback with a hook at batch ends, in which something might be logged."""

    def network(self) -> Any:
        """The model, with the same weights each time."""
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(self.seed)
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 11 // 4,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=self.tokens,
            use_cache=False,
        )
        return LlamaForCausalLM(config)

    def rows(self, count: int) -> list[Batch]:
        """Samples; packed ones have positions that restart, and no target where they do."""
        generator = torch.Generator().manual_seed(self.seed)
        found: list[Batch] = []
        for index in range(count):
            ids = torch.randint(0, VOCAB, (self.tokens,), generator=generator)
            row = {"input_ids": ids, "labels": ids.clone()}
            if self.packed:
                documents = log_normal(self.tokens, self.packed, self.seed + index, sigma=1.5)
                positions = torch.cat([torch.arange(e - s) for s, e in documents.rows[0]])
                row["labels"][positions == 0] = IGNORED_LABEL
                row["position_ids"] = positions
            found.append(row)
        return found

"""Networks for the doctor's command line."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Smeared(nn.Module):
    """A norm of a token and the one before it."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])


def llama_that_mixes(config: Any) -> nn.Module:
    """The network of the main job, its first norm another one."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(config)
    first: Any = model.model.layers[0]
    first.input_layernorm = Smeared(first.input_layernorm)
    return model

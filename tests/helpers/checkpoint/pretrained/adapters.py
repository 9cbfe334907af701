"""A model with an adapter, with the attributes by which peft's are known."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

IN, OUT, RANK = 1024, 512, 4


class Adapted(nn.Module):
    """A layer whose adapter has ordinary layers as parts."""

    adapter_layer_names = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "magnitude")

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(IN, OUT, bias=False).requires_grad_(False)
        self.r = {"default": RANK}
        self.lora_variant: dict[str, object] = {}
        self.lora_A = nn.ModuleDict({"default": nn.Linear(IN, RANK, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(RANK, OUT)})
        self.lora_embedding_A = nn.ParameterDict({"default": torch.rand(RANK, IN)})
        self.lora_embedding_B = nn.ParameterDict({"default": torch.rand(OUT, RANK)})
        self.magnitude = nn.ModuleDict()


class Network(nn.Module):
    """A model that has a way to initialise any layer, as transformers' have, and ways to save and merge."""

    def __init__(
        self, how: object = True, kind: str = "LORA", *, dora: bool = False, folder: str = "."
    ) -> None:
        super().__init__()
        self.layer = Adapted()
        self.folder = folder
        given = SimpleNamespace(peft_type=kind, init_lora_weights=how, use_dora=dora)
        self.peft_config = {"default": given}
        self.config = None
        self.active_adapters = ["default"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer.base_layer(x)

    def _init_weights(self, module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 9.0)

    def save_pretrained(self, folder: str, state_dict: dict[str, torch.Tensor]) -> None:
        place = Path(folder) / self.folder  # peft's of an adapter with another name than "default"
        place.mkdir(exist_ok=True)
        own = {name: x.clone() for name, x in state_dict.items()}  # tied ones share memory
        save_file(own, place / "adapter_model.safetensors")
        (place / "adapter_config.json").write_text("{}")

    def get_base_model(self) -> nn.Module:
        return self.layer

    def merge_and_unload(self, progressbar: bool = False, safe_merge: bool = False) -> Any:
        return self.layer.base_layer

    def merge_adapter(self, adapter_names: Any = None, safe_merge: bool = False) -> str:
        return "merged"

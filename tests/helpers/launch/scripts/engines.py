"""A user's script that trains with one engine after the other in workers: ``engines.py OUT HOW CASE...``.

For each it leaves what came back to the program, and what the ranks had: ``CASE.pt`` and ``CASE-ranks.pt``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.distributed.tensor import DTensor

from lightning_cp import UlyssesRingStrategy
from tests.helpers.launch.scripts.model import QUIET, Tiny, text

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {}),
    "fsdp": (2, {"data_parallel": "fsdp"}),
    "zero1": (2, {"data_parallel": "zero1"}),
    "hsdp": (
        4,
        {"data_parallel": "hsdp", "data_parallel_size": 2, "data_parallel_replicate_size": 2},
    ),
    "tensor": (4, {"data_parallel": "fsdp", "tensor_parallel_size": 2}),
    "meta": (2, {"data_parallel": "fsdp"}),
    "offload": (2, {"data_parallel": "fsdp", "cpu_offload": True}),
}
"""Ranks, and what the strategy is told; ``meta`` is a module that has no values in the program."""


class Counting(Tiny):
    """Has tied weights, and a buffer that training changes."""

    seen: torch.Tensor

    def __init__(self, out: str = "") -> None:
        super().__init__()
        self.network.lm_head.weight = self.network.model.embed_tokens.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.out = out

    def reset_buffers(self) -> None:
        self.seen.zero_()

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.seen += 1
        return super().training_step(batch, batch_idx)

    def test_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("tested", self.network(**batch).loss)

    def on_train_end(self) -> None:
        """What the ranks have, brought together one parameter after the other by PyTorch."""
        whole = {
            name: x.full_tensor() if isinstance(x, DTensor) else x.detach()
            for name, x in self.named_parameters(remove_duplicate=False)
        }
        if self.out and self.global_rank == 0:
            torch.save({"weights": whole, "losses": self.losses}, self.out)


def loss_of_a_test(module: Counting, **options: Any) -> float:
    """The loss of a new Trainer's ``test``."""
    (said,) = pl.Trainer(**options, **QUIET).test(module, text(), verbose=False)
    return said["tested"]


if __name__ == "__main__":  # spawned workers import this file
    out, how, *cases = sys.argv[1:]
    for case in cases:
        devices, settings = CASES[case]
        with torch.device("meta" if case == "meta" else "cpu"):
            module = Counting(str(Path(out) / f"{case}-ranks.pt"))
        options: Any = {"devices": devices}
        options["strategy"] = UlyssesRingStrategy(start_method=how, **settings)  # type: ignore[arg-type]
        pl.Trainer(**options, **QUIET).fit(module, text())
        result: dict[str, Any] = {"state": module.state_dict()}
        options["strategy"] = UlyssesRingStrategy(start_method=how, **settings)  # type: ignore[arg-type]
        result["tested"] = loss_of_a_test(module, **options)
        result["tied"] = module.network.lm_head.weight is module.network.model.embed_tokens.weight
        torch.save(result, Path(out) / f"{case}.pt")

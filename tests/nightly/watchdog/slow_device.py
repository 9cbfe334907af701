"""Two ranks with stand-ins for GPUs, whose hosts wait 14 s in the third step; the limit is 8 s.

python -m tests.nightly.watchdog.slow_device works       # one event a second becomes complete: FIT DONE
python -m tests.nightly.watchdog.slow_device stands      # rank 1's device stops within the backward
"""

from __future__ import annotations

import sys
import time
from itertools import count
from typing import Any

import lightning as L
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_cp import UlyssesRingStrategy
from tests.nightly.watchdog.stand_in import Device

LIMIT, WAITS = 8.0, 14.0


class Model(L.LightningModule):
    """A Llama of one layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32}
        heads: dict[str, Any] = {
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
        self.model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False))

    def training_step(self, batch: Any, index: int) -> Any:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def main(case: str) -> None:
    device, steps = Device(), count(1)

    def waits() -> None:
        if next(steps) == 3:
            synchronise()

    def synchronise() -> None:
        if case == "stands" and trainer.global_rank == 0:
            return  # it has done everything, and votes
        device.stop(left=int(WAITS))
        until = time.monotonic() + WAITS
        while time.monotonic() < until or case == "stands":
            time.sleep(1)
            device.done += case == "works"
        device.stopped.clear()

    device.install(waits)
    ids = torch.randint(0, 64, (1, 64), generator=torch.Generator().manual_seed(0))
    loader: Any = torch.utils.data.DataLoader(
        [{"input_ids": ids, "labels": ids}] * 5,  # type: ignore[arg-type]
        batch_size=None,
    )
    strategy = UlyssesRingStrategy(
        mode="ring", step_timeout=LIMIT, first_step_timeout=60, parity_check="off"
    )
    silent: dict[str, Any] = {"logger": False, "enable_progress_bar": False}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=5,
        enable_checkpointing=False,
        enable_model_summary=False,
        **silent,
    )
    trainer.fit(Model(), loader)
    print(f"FIT DONE {trainer.global_step}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

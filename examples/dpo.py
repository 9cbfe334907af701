"""Direct preference optimisation of LoRA adapters, on rows that several processes share.

Run ``python examples/dpo.py``; ``--devices 1`` is one process, and prints the same losses. A pair of rows is
a chosen answer and a rejected one. The reference is the model without its adapters.
"""

import argparse
import warnings
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_cp import ContextParallelMixin, UlyssesRingStrategy

SEQ_LEN, STEPS, BETA = 512, 8, 0.1


def pairs() -> list[dict[str, torch.Tensor]]:
    """Rows [2, S]: one prompt, and two answers of different lengths; the mask is true for answers."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(STEPS):
        ids = torch.randint(1, 128, (2, SEQ_LEN), generator=generator)
        ids[1, :100] = ids[0, :100]
        answer = F.pad(torch.arange(370) < torch.tensor([[300], [370]]), (100, SEQ_LEN - 470))
        found.append({"input_ids": ids, "targets": ids.roll(-1, 1), "answer": answer.roll(-1, 1)})
    return found


class LoRA(torch.nn.Module):
    """A frozen linear layer, and a trained product of two thin matrices."""

    is_on = True  # for all layers

    def __init__(self, base: torch.nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base, self.down = base, torch.nn.Linear(base.in_features, rank, bias=False)
        self.up = torch.nn.Parameter(torch.zeros(rank, base.out_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 2 * self.down(x) @ self.up if self.is_on else self.base(x)


class DPO(ContextParallelMixin, L.LightningModule):
    """A policy that learns to prefer: a frozen model and its adapters."""

    context_parallel_sequence_dims = {"targets": 1, "answer": 1}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        sizes: Any = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128}
        config = LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4)
        self.policy: Any = LlamaForCausalLM(config).requires_grad_(False)
        for layer in self.policy.model.layers:
            layer.self_attn.v_proj = LoRA(layer.self_attn.v_proj)

    def logps(self, batch: dict[str, torch.Tensor], *, adapted: bool) -> torch.Tensor:
        """Return the log-probability of each row's answer, [2]."""
        LoRA.is_on = adapted
        logits = self.policy(batch["input_ids"]).logits.log_softmax(-1)
        of_tokens = logits.gather(-1, batch["targets"][..., None]).squeeze(-1)
        return self.sequence_sum(of_tokens, batch["answer"])

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        with torch.no_grad():  # of peft's models: torch.no_grad(), policy.disable_adapter()
            before = self.logps(batch, adapted=False)
        chosen, rejected = self.logps(batch, adapted=True) - before
        loss = -F.logsigmoid(BETA * (chosen - rejected))
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: object, batch: object, batch_idx: int) -> None:
        if self.trainer.is_global_zero:
            print(f"step {self.global_step}  loss {self.trainer.callback_metrics['loss']:.6f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    warnings.filterwarnings("ignore", r".*does not have many workers.*|.*LeafSpec.*")
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        strategy=UlyssesRingStrategy(labels="none"),
        accelerator="cpu",
        devices=parser.parse_args().devices,
        precision="64-true",  # so that all printed digits are the same
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(DPO(), DataLoader(pairs(), batch_size=None))  # type: ignore[arg-type]

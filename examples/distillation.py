"""Distillation: a student learns the probabilities of a larger teacher, at the tokens that a mask chooses.

Run ``python examples/distillation.py``; ``--devices 1`` is one process, and prints the same losses. Student
and teacher see the same part of the row. New here: ``self.count_targets`` declares the
tokens of the mean, as there are no labels.
"""

import argparse
import warnings

import lightning as L
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_cp import ContextParallelMixin, UlyssesRingStrategy

SEQ_LEN, STEPS = 512, 8


def rows() -> list[dict[str, torch.Tensor]]:
    """Rows [2, S]; the mask is true for the tokens to learn from."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(STEPS):
        ids = torch.randint(1, 128, (2, SEQ_LEN), generator=generator)
        chosen = torch.rand(2, SEQ_LEN, generator=generator) < 0.3
        found.append({"input_ids": ids, "chosen": chosen})
    return found


def llama(width: int) -> LlamaForCausalLM:
    """Make a small Llama."""
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    return LlamaForCausalLM(config)


class Distillation(ContextParallelMixin, L.LightningModule):
    """A student and its teacher."""

    context_parallel_sequence_dims = {"chosen": 1}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = llama(64), llama(128).eval().requires_grad_(False)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        with torch.no_grad():
            wanted = self.teacher(batch["input_ids"]).logits.log_softmax(-1)
        got = self.student(batch["input_ids"]).logits.log_softmax(-1)
        of_tokens = F.kl_div(got, wanted, reduction="none", log_target=True).sum(-1)
        chosen = batch["chosen"]
        loss = (of_tokens * chosen).sum() / self.count_targets(chosen)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: object, batch: object, batch_idx: int) -> None:
        if self.trainer.is_global_zero:
            print(f"step {self.global_step}  loss {self.trainer.callback_metrics['loss']:.6f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.student.parameters(), lr=1e-3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    devices = parser.parse_args().devices
    warnings.filterwarnings("ignore", r".*does not have many workers.*|.*LeafSpec.*")
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        strategy=UlyssesRingStrategy(labels="none"),
        accelerator="cpu",
        devices=devices,
        precision="64-true",  # so that all printed digits are the same
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Distillation(), DataLoader(rows(), batch_size=None))  # type: ignore[arg-type]

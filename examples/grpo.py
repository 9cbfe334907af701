"""GRPO on answers that were sampled before: clipped ratios, advantages in a group, KL to a reference.

Run ``python examples/grpo.py``; ``--devices 1`` is one process, and prints the same losses. New here:
``self.sequence_mean`` is the mean over the tokens of an answer, and ``self.gather_data`` has the rewards of
the group's rows on all data ranks.
"""

import argparse
import copy
import warnings
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_cp import ContextParallelMixin, UlyssesRingStrategy

SEQ_LEN, STEPS, GROUP, CLIP, BETA = 512, 4, 4, 0.2, 0.04


def groups() -> list[dict[str, torch.Tensor]]:
    """Rows [G, S] of one prompt with answers of different lengths; a reward for each row."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(STEPS):
        ids = torch.randint(1, 128, (GROUP, SEQ_LEN), generator=generator)
        ids[:, :100] = ids[0, :100]
        answer = torch.zeros(GROUP, SEQ_LEN, dtype=torch.bool)
        for row, end in enumerate((300, 400, 450, 511)):
            answer[row, 99 : end - 1] = True  # token i predicts token i + 1
        rewards = torch.rand(GROUP, generator=generator)
        found.append(
            {"input_ids": ids, "targets": ids.roll(-1, 1), "answer": answer, "rewards": rewards}
        )
    return found


class GRPO(ContextParallelMixin, L.LightningModule):
    """A policy that takes two steps on each group, and its frozen copy."""

    context_parallel_sequence_dims = {"targets": 1, "answer": 1}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        sizes: dict[str, Any] = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128}
        config = LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4)
        self.policy = LlamaForCausalLM(config)
        self.reference = copy.deepcopy(self.policy).eval().requires_grad_(False)

    def logps(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the log-probability of each token's target, [G, L]."""
        logits = model(batch["input_ids"]).logits.log_softmax(-1)
        return logits.gather(-1, batch["targets"][..., None]).squeeze(-1)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        with torch.no_grad():
            old, reference = self.logps(self.policy, batch), self.logps(self.reference, batch)
        group = self.gather_data(batch["rewards"])
        advantages = ((batch["rewards"] - group.mean()) / (group.std() + 1e-4))[:, None]
        optimizer: Any = self.optimizers()
        for _ in range(2):
            logps = self.logps(self.policy, batch)
            ratio = (logps - old).exp()
            gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
            kl = (reference - logps).exp() - (reference - logps) - 1
            loss = self.sequence_mean(BETA * kl - gain, batch["answer"]).mean()
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.log("loss", loss)

    def on_train_batch_end(self, outputs: object, batch: object, batch_idx: int) -> None:
        if self.trainer.is_global_zero:
            print(f"step {self.global_step}  loss {self.trainer.callback_metrics['loss']:.6f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.policy.parameters(), lr=1e-3)


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
    trainer.fit(GRPO(), DataLoader(groups(), batch_size=None))  # type: ignore[arg-type]

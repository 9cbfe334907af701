"""Direct preference optimisation with a reference model, on rows that several processes share.

Run ``python examples/dpo.py``; ``--devices 1`` is one process, and prints the same losses. Rows come in
pairs: a chosen answer, and a rejected one. What is new is ``self.sequence_sum``: the sum of a row's values.
"""

import argparse
import copy
import warnings

import lightning as L
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_cp import ContextParallelMixin, UlyssesRingStrategy

SEQ_LEN, STEPS, BETA = 512, 8, 0.1


def pairs() -> list[dict[str, torch.Tensor]]:
    """Rows [2, S]: one prompt, and two answers of other lengths; the mask is true for answers."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(STEPS):
        ids = torch.randint(1, 128, (2, SEQ_LEN), generator=generator)
        ids[1, :100] = ids[0, :100]
        answer = torch.zeros(2, SEQ_LEN, dtype=torch.bool)
        answer[0, 100:400], answer[1, 100:470] = True, True
        found.append({"input_ids": ids, "targets": ids.roll(-1, 1), "answer": answer.roll(-1, 1)})
    return found


class DPO(ContextParallelMixin, L.LightningModule):
    """A policy that learns to prefer, and its frozen copy."""

    context_parallel_sequence_dims = {"targets": 1, "answer": 1}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
        )
        self.policy = LlamaForCausalLM(config)
        self.reference = copy.deepcopy(self.policy).eval().requires_grad_(False)

    def logps(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the log-probability of each row's answer, [2]."""
        logits = model(batch["input_ids"]).logits.log_softmax(-1)
        of_tokens = logits.gather(-1, batch["targets"][..., None]).squeeze(-1)
        return self.sequence_sum(of_tokens, batch["answer"])

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        with torch.no_grad():
            before = self.logps(self.reference, batch)
        chosen, rejected = self.logps(self.policy, batch) - before
        loss = -F.logsigmoid(BETA * (chosen - rejected))
        self.log("loss", loss)
        return loss

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
    trainer.fit(DPO(), DataLoader(pairs(), batch_size=None))  # type: ignore[arg-type]

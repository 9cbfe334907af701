"""Context parallelism in your own loop: Fabric, one strategy and one line per batch.

The model, the text and the losses are those of ``examples/trainer_minimal.py``. Run it with
``python examples/fabric_minimal.py``.
"""

import argparse
import warnings
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_cp.fabric import UlyssesRingStrategy

SEQ_LEN, STEPS = 2048, 20


class Source(Dataset[dict[str, torch.Tensor]]):
    """The file, cut into sequences. Labels are the same bytes: Hugging Face models shift them."""

    def __init__(self) -> None:
        self.bytes = torch.tensor(list(Path(argparse.__file__).read_bytes()))

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sequence = self.bytes[index * SEQ_LEN : (index + 1) * SEQ_LEN]
        return {"input_ids": sequence, "labels": sequence.clone()}


def main() -> None:
    strategy = UlyssesRingStrategy()
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=4)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    network = LlamaForCausalLM(config)
    model, optimizer = fabric.setup(network, torch.optim.AdamW(network.parameters(), lr=3e-3))
    model.train()
    # In the file's own order, however many processes there are. shard_batch moves this rank's part.
    loader = fabric.setup_dataloaders(
        DataLoader(Source()), use_distributed_sampler=False, move_to_device=False
    )
    for step, batch in enumerate(loader, start=1):
        local = strategy.shard_batch(batch)  # every rank: its part of the sequence
        loss = model(**local).loss
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        shown = strategy.average(loss)  # what one process would show
        fabric.print(f"step {step:2d}  loss {shown:.8f}")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", r".*does not have many workers.*|.*LeafSpec.*")
    main()

"""LoRA on packed documents, in rows that two processes share.

Run ``python examples/lora.py``; ``--devices 1`` is one process of plain Lightning, and prints the same
losses. The paragraphs of ``argparse``'s source are the documents; no document sees another.
``--export FOLDER`` merges the adapters into the base model, for ``from_pretrained(FOLDER)``.
"""

import argparse
import warnings
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import lightning_cp  # noqa: F401 - registers strategy="ulysses_ring"
from lightning_cp.checkpoint import export_pretrained

SEQ_LEN, STEPS = 512, 8


def rows() -> list[dict[str, torch.Tensor]]:
    """Documents one after another, cut into rows. Positions restart where a document begins."""
    paragraphs = Path(argparse.__file__).read_text().split("\n\n")
    documents = [torch.tensor(list(text.encode())) for text in paragraphs if text]
    ids = torch.cat(documents)
    positions = torch.cat([torch.arange(len(document)) for document in documents])
    labels = ids.masked_fill(positions == 0, -100)  # no document predicts the next one's first byte
    cut = (x[: STEPS * SEQ_LEN].split(SEQ_LEN) for x in (ids, positions, labels))
    names = ("input_ids", "position_ids", "labels")
    return [dict(zip(names, row, strict=True)) for row in zip(*cut, strict=True)]


class LoRA(nn.Module):
    """A frozen linear layer, and a trained product of two thin matrices."""

    def __init__(self, base: nn.Linear, rank: int = 8, alpha: float = 16.0) -> None:
        super().__init__()
        self.base, self.scale = base, alpha / rank
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)  # the first step starts from the base model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.scale * self.up(self.down(x))


class Model(L.LightningModule):
    """A small Llama that stays frozen, and its adapters. Yours comes from ``from_pretrained``."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            use_cache=False,  # with a cache, transformers would not see that positions restart
        )
        self.network = LlamaForCausalLM(config).requires_grad_(False)
        for layer in self.network.model.layers:
            for name in ("q_proj", "v_proj"):
                setattr(layer.self_attn, name, LoRA(getattr(layer.self_attn, name)))

    @torch.no_grad()
    def merge(self) -> LlamaForCausalLM:
        """The base model under its own names, with the adapters in its weights."""
        for layer in self.network.model.layers:
            for name in ("q_proj", "v_proj"):
                lora = getattr(layer.self_attn, name)
                lora.base.weight += lora.scale * lora.up.weight @ lora.down.weight
                setattr(layer.self_attn, name, lora.base)
        return self.network

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.network(**batch).loss
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: object, batch: object, batch_idx: int) -> None:
        if self.trainer.is_global_zero:
            print(f"step {self.global_step}  loss {self.trainer.callback_metrics['loss']:.5f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        adapters = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(adapters, lr=1e-2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--export", metavar="FOLDER", help="a new folder for the merged model")
    arguments = parser.parse_args()
    if arguments.export and Path(arguments.export).exists():
        parser.error(f"{arguments.export} is there already. Name a new folder.")
    warnings.filterwarnings("ignore", r".*does not have many workers.*|.*LeafSpec.*")
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        strategy="ulysses_ring" if arguments.devices > 1 else "auto",
        accelerator="cpu",
        devices=arguments.devices,
        precision="64-true",  # except for the loss, which transformers computes in float32
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model()
    trainer.fit(model, DataLoader(rows()))  # type: ignore[arg-type]
    if trainer.is_global_zero:
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        print(f"trained {trained:,} of {sum(p.numel() for p in model.parameters()):,} parameters")
    if arguments.export:
        export_pretrained(model.merge(), arguments.export)  # every rank calls it

"""A diffusion model over tokens: noise for each of them, and a level of noise for each row.

Run ``python examples/diffusion.py``; ``--devices 1`` is one process, and prints the same losses. New here:
``self.draw_whole`` draws the noise of the whole row, as one process does, and ``self.sequence_mean`` is the
mean over it. The length (509) need not divide.
"""

import argparse
import warnings

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_cp import ContextParallelMixin, UlyssesRingStrategy

SEQ_LEN, STEPS, WIDTH, HEADS = 509, 8, 64, 4


def latents() -> list[dict[str, torch.Tensor]]:
    """Rows [2, S, D]."""
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(2, SEQ_LEN, WIDTH, generator=generator)} for _ in range(STEPS)]


class Denoiser(ContextParallelMixin, L.LightningModule):
    """One block that attends in both directions, with the level of noise added to its input."""

    context_parallel_sequence_dims = {"x": 1}  # noqa: RUF012
    context_parallel_num_heads = HEADS

    def __init__(self) -> None:
        super().__init__()
        self.level = nn.Linear(1, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
        x = x + self.level(level)[:, None]
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(x)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        x = batch["x"]
        level = torch.rand(len(x), 1, dtype=x.dtype)
        noise = self.draw_whole(torch.randn_like, x)
        guess = self((1 - level[:, None]) * x + level[:, None] * noise, level)
        loss = self.sequence_mean((guess - noise).square().mean(-1)).mean()
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: object, batch: object, batch_idx: int) -> None:
        if self.trainer.is_global_zero:
            print(f"step {self.global_step}  loss {self.trainer.callback_metrics['loss']:.6f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


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
    trainer.fit(Denoiser(), DataLoader(latents(), batch_size=None))  # type: ignore[arg-type]

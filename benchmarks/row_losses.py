"""Weights after five batches of the examples of losses: several ranks against one process, with and without.

    python -m benchmarks.row_losses

Errors are norms of the difference of trained weights to those of one process, over the norm of what that one
has changed; all in float64. "With" is the example as it is. "Without" has the same parts of rows and the same
exact attention, but each rank computes the loss of its own tokens and gradients are averaged: what sequence
parallelism gives where no library knows of such losses.
"""

from __future__ import annotations

import argparse
import runpy
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from lightning_cp import ContextParallelMixin, UlyssesRingStrategy
from lightning_cp.loss.counts import TargetCounts
from lightning_cp.loss.review import RunLosses
from lightning_cp.loss.terms import declared_count, divisor
from lightning_cp.models.hf.pooling import RowHead
from lightning_cp.utils import console as table

EXAMPLES = Path(__file__).parents[1] / "examples"
MODELS = {
    "dpo": ("DPO", "pairs"),
    "grpo": ("GRPO", "groups"),
    "reward": ("Reward", "pairs"),
    "classification": ("Classifier", "texts"),
    "diffusion": ("Denoiser", "latents"),
    "distillation": ("Distillation", "rows"),
}
"""Names of the module and of the function that makes its batches."""
BATCHES, RANKS = 5, (2, 4)
HEAD = ("loss", *(f"{how}, {ranks} ranks" for how in ("with", "without") for ranks in RANKS))


def own_sum(_: Any, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return the sums of what a rank has of each row."""
    return (x if mask is None else x * mask).sum(1)


def own_mean(_: Any, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return the means over what a rank has of each row."""
    return x.mean(1) if mask is None else (x * mask).sum(1) / divisor(mask.sum(1))


OF_A_RANK: dict[str, Callable[..., Any]] = {
    "sequence_sum": own_sum,
    "sequence_mean": own_mean,
    "sequence_pick": lambda _, x, index: x[:, index],
    "draw_whole": lambda _, draw, x, dim=1: draw(x),
    "gather_data": lambda _, x: x,
    "count_targets": lambda _, counted: divisor(declared_count(counted)),
}


def remove_api() -> None:
    """Let each rank compute losses of its own tokens, and let nothing refuse them."""
    for name, method in OF_A_RANK.items():
        setattr(ContextParallelMixin, name, method)
    RunLosses.check = lambda *_, **__: None  # type: ignore[method-assign]
    TargetCounts.note_padding = lambda *_: None  # type: ignore[method-assign]
    RowHead._attach = lambda _: True  # type: ignore[method-assign]  # pyright: ignore[reportPrivateUsage]


def train(name: str, devices: int, folder: Path, *, without: bool) -> None:
    """Train one example, and save its weights before and after."""
    if without:
        remove_api()
    # transformers' norm computes in float32, whatever the dtype.
    LlamaRMSNorm.forward = lambda self, x: torch.nn.functional.rms_norm(  # type: ignore[method-assign]
        x, self.weight.shape, self.weight, self.variance_epsilon
    )
    warnings.filterwarnings("ignore")
    module_name, rows_name = MODELS[name]
    example = runpy.run_path(str(EXAMPLES / f"{name}.py"))
    L.seed_everything(0, verbose=False)
    labels = "auto" if name == "classification" else "none"
    module: L.LightningModule = example[module_name]()
    loader: Any = DataLoader(example[rows_name](), batch_size=None)
    trainer = L.Trainer(
        strategy=UlyssesRingStrategy(labels=labels, parity_check="off"),
        accelerator="cpu",
        devices=devices,
        precision="64-true",
        max_epochs=1,
        limit_train_batches=BATCHES,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    before = _weights(module)
    trainer.fit(module, loader)
    if trainer.is_global_zero:
        torch.save((before, _weights(module)), folder / "weights.pt")


def _weights(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().double().flatten() for p in module.parameters()])


def changes(name: str, devices: int, *, without: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights before and after, of an example in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--devices", str(devices), "--folder", folder, *["--without"] * without]
        command = [sys.executable, "-m", "benchmarks.row_losses", "--run", name, *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # noqa: S603
        before, after = torch.load(Path(folder) / "weights.pt")
        return before, after


def errors(name: str) -> list[float]:
    """Return the errors of an example: with the API on each number of ranks, then without."""
    before, want = changes(name, 1)
    found = [changes(name, ranks, without=how)[1] for how in (False, True) for ranks in RANKS]
    return [float((x - want).norm() / (want - before).norm()) for x in found]


def main() -> None:
    """Print the table, or run one example."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.row_losses", description=__doc__)
    parser.add_argument("--run", choices=MODELS, help="train this one, in this process")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--without", action="store_true")
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args()
    if asked.run:
        train(asked.run, asked.devices, asked.folder, without=asked.without)
        return
    rows = [(name, *(f"{error:.1e}" for error in errors(name))) for name in MODELS]
    print(table.markdown_table(HEAD, rows))


if __name__ == "__main__":
    main()

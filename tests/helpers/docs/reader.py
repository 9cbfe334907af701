"""What a reader of the docs has: a small model, data, a Trainer and Fabric on few ranks of a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import lightning as L
import lightning.fabric
import lightning.pytorch
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from lightning_cp import ContextParallelMixin
from tests.helpers.pool.environment import PoolEnvironment

VOCAB, LENGTH, WIDTH = 64, 32, 32
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
Batch = Any


def llama() -> Any:
    """A causal model."""
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def routed() -> Any:
    """A mixture of experts that shows its routers."""
    experts: dict[str, Any] = {"num_local_experts": 4, "output_router_logits": True}
    return MixtralForCausalLM(MixtralConfig(**SIZES, **experts))


class Denoising(nn.Module):
    """One layer of attention over latents; the level is a feature of them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH + 1, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
        """Guess the noise of latents [B, L, D] at levels [B, 1]."""
        seen = torch.cat([x, level[:, None].expand(-1, x.shape[1], -1)], -1)
        q, k, v = self.qkv(seen).unflatten(-1, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Logits(nn.Module):
    """A model that returns logits, and takes positions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = llama()

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[B, L, vocabulary]."""
        return self.inner(input_ids=ids, position_ids=positions).logits


class Seen(torchmetrics.Metric):
    """A count of the tokens whose label is guessed."""

    hits: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("hits", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Count those of whole rows."""
        assert labels.shape[1] == LENGTH
        self.hits += (logits.argmax(-1) == labels).sum()

    def compute(self) -> torch.Tensor:
        """Return the count."""
        return self.hits


PARTS: dict[str, Any] = {
    "network": llama,
    "model": routed,
    "decoder": llama,
    "denoising": Denoising,
    "sentences": Seen,
    "layer": lambda: nn.TransformerEncoderLayer(WIDTH, 4, WIDTH, dropout=0.0, batch_first=True),
}
"""What blocks take from ``self``."""


MODELS = ("network", "decoder", "model")
"""Those of them that return a loss."""


def rows(code: str = "", count: int = 4) -> list[dict[str, torch.Tensor]]:
    """Rows of a dataset with the columns that a block reads."""
    generator = torch.Generator().manual_seed(0)
    found: list[dict[str, torch.Tensor]] = []
    for _ in range(count):
        ids = torch.randint(1, VOCAB, (LENGTH,), generator=generator)
        row = {"input_ids": ids}
        if 'batch["x"]' in code:
            row = {"x": torch.randn(LENGTH, WIDTH, generator=generator)}
        elif 'batch["answer"]' in code or "targets" in code:
            row |= {"targets": ids.roll(-1), "answer": torch.arange(LENGTH) > LENGTH // 3}
        else:
            row |= {"labels": ids.clone()}
        found.append(row)
    return found


def loader(code: str = "", count: int = 4, rows_of_batch: int = 1) -> DataLoader[Any]:
    """Those rows in batches."""
    return DataLoader(rows(code, count), batch_size=rows_of_batch)  # type: ignore[arg-type]


class Data(L.LightningDataModule):
    """The same as a data module."""

    def train_dataloader(self) -> DataLoader[Any]:
        """Return its loader."""
        return loader()


class Module(ContextParallelMixin, L.LightningModule):
    """A causal model; counts the batches that it was trained on."""

    parts: tuple[str, ...] = ("network",)
    rate = 0.1
    network: Any

    def __init__(self, parts: tuple[str, ...] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trained = self.validated = self.found = self.relevant = 0
        for name in self.parts if parts is None else parts:
            setattr(self, "network" if name == "denoising" else name, PARTS[name]())

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return logits."""
        return self.network(batch["input_ids"]).logits

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """Return the model's own loss."""
        (network,) = (getattr(self, name) for name in MODELS if getattr(self, name, None))
        if "targets" not in batch and self.trainer.val_dataloaders is not None:
            return F.cross_entropy(self(batch).flatten(0, 1), batch["labels"].flatten())
        return network(**batch).loss

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        """Count, and require a number."""
        self.trained += 1
        assert outputs["loss"].isfinite()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Find three of four."""
        self.found, self.relevant = self.found + 3, self.relevant + 4

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=self.rate)


class SmallTrainer(L.Trainer):
    """A Trainer of two steps on the ranks that stand, whatever devices it is asked for."""

    made: list[SmallTrainer] = []  # noqa: RUF012
    saves = False
    """Whether each one keeps its last checkpoint in the working directory."""

    def __init__(self, **given: Any) -> None:
        if isinstance(given.get("strategy"), str):  # ranks stand: none is forked
            given["strategy"] = given["strategy"].removesuffix("_fork")
        if self.saves:
            kept = ModelCheckpoint(dirpath=".", save_last=True)
            given["callbacks"] = [*given.get("callbacks", []), kept]
        own: dict[str, Any] = {
            "accelerator": "cpu",
            "devices": dist.get_world_size(),
            "num_nodes": 1,
            "plugins": [PoolEnvironment()],
            "max_steps": min(given.get("max_steps", 2), 2),
            "use_distributed_sampler": False,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        super().__init__(**{**given, **own})
        self.fitted = False
        self.made.append(self)

    def fit(self, *arguments: Any, **named: Any) -> None:
        """Train, and note it."""
        super().fit(*arguments, **named)
        self.fitted = True


class SmallFabric(L.Fabric):
    """A Fabric on the ranks that stand."""

    def __init__(self, **given: Any) -> None:
        own: dict[str, Any] = {"accelerator": "cpu", "devices": dist.get_world_size()}
        super().__init__(**{**given, **own, "plugins": [PoolEnvironment()]})


@contextmanager
def small() -> Iterator[None]:
    """Within: Trainers and Fabrics are small ones."""
    SmallTrainer.made.clear()
    with ExitStack() as stack:
        for place in (lightning, lightning.pytorch):
            stack.enter_context(mock.patch.object(place, "Trainer", SmallTrainer))
        for place in (lightning, lightning.fabric):
            stack.enter_context(mock.patch.object(place, "Fabric", SmallFabric))
        yield
    SmallTrainer.made.clear()

"""What nothing says of a model and its batches is asked once, with arguments that can be pasted."""

from __future__ import annotations

import pickle
from typing import Any

import lightning as L
import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_cp.errors import ConfigError, UndeclaredError
from lightning_cp.fabric import UlyssesRingStrategy as Fabrics
from tests.pool import run_ranks
from tests.pool.environment import PoolEnvironment
from tests.strategies.small import LENGTH, VOCAB, Settings, close, samples, trainer_of, weights


class Silent(pl.LightningModule):
    """A model that tells neither its heads nor how it reads labels; a loss weighted by token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        torch.set_default_dtype(torch.float64)
        self.embed, self.qkv = nn.Embedding(VOCAB, 32), nn.Linear(32, 96)
        self.head = nn.Linear(32, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[B, L, vocab]."""
        x = self.embed(ids)
        q, k, v = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + out.transpose(1, 2).flatten(2))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        ids, labels = (batch[name] for name in self.names(batch))
        loss = F.cross_entropy(self(ids).flatten(0, 1), labels.flatten())
        self.log("loss", loss)
        return loss

    def names(self, batch: Any) -> Any:
        return (0, 1) if isinstance(batch, list) else ("input_ids", "labels")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def data_of(kind: str) -> DataLoader[Any]:
    """Rows of tokens and aligned labels; of ``dict`` also what a dataset has besides."""
    rows: list[Any] = samples(8)
    for row in rows:
        row["advantages"] = torch.ones(LENGTH)
        row["old_logprobs"] = torch.ones(LENGTH - 1)
        row["score"] = torch.ones(())
    if kind == "list":
        rows = [[row["input_ids"], row["labels"]] for row in rows]
    return DataLoader(rows, batch_size=2)  # type: ignore[arg-type]


def pasted(message: str) -> dict[str, Any]:
    """The arguments of the constructor in a message."""
    (line,) = (line.strip() for line in message.splitlines() if "UlyssesRingStrategy(" in line)
    return eval(line.replace("UlyssesRingStrategy", "dict"))


def start_twice(rank: int, world_size: int, kind: str, settings: Settings) -> Any:
    """Train with what the first start's message says."""
    module, bare = Silent(), {"labels": "auto", "parity_check": "off", **settings}
    with pytest.raises(UndeclaredError) as caught:
        trainer_of(world_size, bare).fit(module, data_of(kind))
    message = str(pickle.loads(pickle.dumps(caught.value)))
    module = Silent()
    arguments = pasted(message)
    trainer_of(world_size, {"labels": "auto", **arguments}).fit(module, data_of(kind))
    return message, arguments, weights(module)


def fit_alone(rank: int, world_size: int, kind: str) -> torch.Tensor:
    module = Silent()
    trainer_of(world_size, None).fit(module, data_of(kind))
    return weights(module)


@pytest.mark.quick("dict-settings0*", "list-*")
@pytest.mark.parametrize(
    ("kind", "settings", "want"),
    [
        ("dict", {}, {"num_heads": 4, "sequence_dims": {"advantages": 1, "old_logprobs": None}}),
        ("list", {}, {"num_heads": 4, "sequence_dims": {"0": 1, "1": 1}, "label_key": "1"}),
        (
            "dict",
            {"mode": "ring", "sequence_dims": {"advantages": 1}},
            {"mode": "ring", "sequence_dims": {"advantages": 1, "old_logprobs": None}},
        ),
    ],
)
def test_the_second_start_trains(kind: str, settings: Settings, want: Settings) -> None:
    (alone,) = run_ranks(1, fit_alone, kind)
    for message, arguments, got in run_ranks(2, start_twice, kind, settings):
        assert arguments == {"labels": "aligned", "parity_check": "off", **want}
        assert '"labels": "aligned"' in message.splitlines()[-1]  # and for YAML
        close(got, alone)


def start_fabric(rank: int, world_size: int) -> str:
    fabric: Any = L.Fabric(
        accelerator="cpu",
        devices=world_size,
        strategy=Fabrics(num_heads=4),
        plugins=PoolEnvironment(),
    )
    fabric.launch()
    module = Silent()
    fabric.setup(module, module.configure_optimizers())
    with pytest.raises(UndeclaredError) as caught:
        fabric.strategy.shard_batch(next(iter(data_of("dict"))))
    return str(caught.value)


def test_fabric_asks_at_once() -> None:
    for message in run_ranks(2, start_fabric):
        assert message.startswith("3 things are not declared:\n- it is not known how Silent reads")
        dims = {"advantages": 1, "old_logprobs": None}
        assert pasted(message) == {"num_heads": 4, "labels": "aligned", "sequence_dims": dims}


def test_it_is_a_config_error() -> None:
    assert issubclass(UndeclaredError, ConfigError)

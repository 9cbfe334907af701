"""What nothing says of a model and its batches is asked once, with arguments that can be pasted."""

from __future__ import annotations

import pickle
import re
from typing import Any

import lightning as L
import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_cp import ContextParallelMixin
from lightning_cp.errors import ConfigError, UndeclaredError
from lightning_cp.fabric import UlyssesRingStrategy as Fabrics
from tests.helpers.pool import run_ranks
from tests.helpers.pool.environment import PoolEnvironment
from tests.helpers.strategies.small import (
    LENGTH,
    VOCAB,
    Settings,
    close,
    samples,
    trainer_of,
    weights,
)


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


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_fabric_asks_at_once() -> None:
    for message in run_ranks(2, start_fabric):
        assert message.startswith("3 things are not declared:\n- it is not known how Silent reads")
        dims = {"advantages": 1, "old_logprobs": None}
        assert pasted(message) == {"num_heads": 4, "labels": "aligned", "sequence_dims": dims}


def shard_without_labels(rank: int, world_size: int) -> str:
    plugins: list[Any] = [PoolEnvironment()]
    strategy = Fabrics(num_heads=4, labels="none")
    fabric: Any = L.Fabric(
        accelerator="cpu", devices=world_size, strategy=strategy, plugins=plugins
    )
    fabric.launch()
    module = Silent()
    fabric.setup(module, module.configure_optimizers())
    with pytest.raises(UndeclaredError) as raised:
        strategy.shard_batch(
            {"input_ids": samples(1)[0]["input_ids"][None], "targets": torch.zeros(1, LENGTH)}
        )
    return str(raised.value)


def test_fabric_asks_for_no_labels_where_there_are_none() -> None:
    for said in run_ranks(2, shard_without_labels):
        assert pasted(said) == {"num_heads": 4, "labels": "none", "sequence_dims": {"targets": 1}}
        assert "needs the labels" not in said


def test_it_is_a_config_error() -> None:
    assert issubclass(UndeclaredError, ConfigError)


# -- a batch without labels --------------------------------------------------------------------------------


class Scores(ContextParallelMixin, Silent):
    """A number for each row, from the last token of a batch that has tokens alone."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.sequence_pick(self(batch["input_ids"])[..., 0], -1).square().mean()


def tokens() -> DataLoader[Any]:
    rows: list[Any] = [{"input_ids": row["input_ids"]} for row in samples(8)]
    return DataLoader(rows, batch_size=2)  # type: ignore[arg-type]


def start_without_labels(rank: int, world_size: int) -> tuple[str, torch.Tensor]:
    with pytest.raises(UndeclaredError) as caught:
        trainer_of(world_size, {"labels": "auto"}).fit(Scores(), tokens())
    module, message = Scores(), str(caught.value)
    trainer_of(world_size, {"labels": "auto", **pasted(message)}).fit(module, tokens())
    return message, weights(module)


def score_alone(rank: int, world_size: int) -> torch.Tensor:
    module = Scores()
    trainer_of(world_size, None).fit(module, tokens())
    return weights(module)


@pytest.mark.quick("2")
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_batch_without_labels_is_shown_losses_of_rows(ranks: int) -> None:
    (alone,) = run_ranks(1, score_alone)
    for message, got in run_ranks(ranks, start_without_labels):
        assert pasted(message) == {"num_heads": 4, "labels": "none"}
        assert "reads its labels" not in message
        close(got, alone)


# -- what no declaration helps ------------------------------------------------------------------------


class OfRows(Silent):
    """A class for each row, by a head of the user's."""

    def __init__(self) -> None:
        from transformers import BertConfig, BertModel

        pl.LightningModule.__init__(self)
        sizes: Any = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16}
        config = BertConfig(**sizes, num_hidden_layers=1, num_attention_heads=4)
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
        self.net = BertModel(config, add_pooling_layer=False)
        self.classes = nn.Linear(16, 3)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        hidden = self.net(batch["input_ids"]).last_hidden_state
        return F.cross_entropy(self.classes(hidden[:, 0]), batch["labels"])


class Recurrent(Silent):
    """No attention: a state that goes along the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer = nn.LSTM(32, 32, batch_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.mixer(self.embed(ids))[0])


class Rows(pl.LightningModule):
    """No attention, and no sequence."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)).double()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.net(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def numbers() -> Any:
    return DataLoader(torch.randn(8, 8, dtype=torch.float64), batch_size=2)  # type: ignore[arg-type]


def start_in_vain(rank: int, world_size: int, kind: str, fabric: bool = False) -> str:
    rows = [{"input_ids": torch.arange(12), "labels": torch.tensor(1)} for _ in range(4)]
    module = {"rows": OfRows, "recurrent": Recurrent, "no sequence": Rows}[kind]()
    data: Any = {"rows": DataLoader(rows, batch_size=2), "no sequence": numbers()}  # type: ignore[arg-type]
    bare = {"labels": "auto"}

    def start() -> None:
        if not fabric:
            trainer_of(world_size, bare).fit(module, data.get(kind, data_of("dict")))
            return
        plugins: list[Any] = [PoolEnvironment()]
        strategy = Fabrics(parity_check="off")
        runner = L.Fabric(accelerator="cpu", devices=world_size, strategy=strategy, plugins=plugins)
        runner.launch()
        runner.setup(module.net if kind == "rows" else module)
        (batch, *_) = data["rows"]
        strategy.shard_batch(batch)

    with pytest.raises(ConfigError) as caught:
        start()
    return str(caught.value)


@pytest.mark.quick("2-rows-fabric", "2-rows-trainer", "2-recurrent-trainer")
@pytest.mark.parametrize("fabric", [False, True], ids=["trainer", "fabric"])
@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("rows", r"'labels' of shape \(2,\) has a label for each row.*Say labels='none'.*_size=1"),
        ("recurrent", r"these modules mix tokens .*mixer \(LSTM\).*context_parallel_size=1"),
    ],
    ids=["rows", "recurrent"],
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_what_no_declaration_helps_is_refused_at_once(
    ranks: int, kind: str, match: str, fabric: bool
) -> None:
    for message in run_ranks(ranks, start_in_vain, kind, fabric):
        assert re.search(match, message), message
        assert "UlyssesRingStrategy(" not in message


def start_rows(rank: int, world_size: int) -> tuple[str, torch.Tensor]:
    message = start_in_vain(rank, world_size, "no sequence")
    torch.manual_seed(1)
    module, data = Rows(), numbers()
    trainer_of(world_size, {"labels": "auto", **pasted(message)}).fit(module, data)
    return message, weights(module)


@pytest.mark.quick("2")
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_model_without_attention_and_sequence_is_shown_data_parallelism(ranks: int) -> None:
    (message, first), *others = run_ranks(ranks, start_rows)
    assert pasted(message) == {"context_parallel_size": 1, "data_parallel_size": ranks}
    assert "A model without attention cannot share a sequence" in message
    assert not torch.equal(first, weights(Rows()))
    for _, other in others:
        close(other, first)

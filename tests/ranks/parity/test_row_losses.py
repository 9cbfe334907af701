"""Planted faults in losses of whole rows and in counts: each is named, with the call that it lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, default_collate

from lightning_cp import ContextParallelMixin
from lightning_cp.errors import LightningCPError
from lightning_cp.fabric import UlyssesRingStrategy
from tests.helpers.parity import modules
from tests.helpers.pool import expect_on_every_rank
from tests.helpers.pool.environment import PoolEnvironment
from tests.helpers.strategies.small import HYBRID, RING, RING3, Settings, trainer_of

Values = torch.Tensor


class Losing(ContextParallelMixin, modules.Healthy):
    """Its loss is one of ``FAULTS``."""

    def __init__(self, name: str, labels: str) -> None:
        super().__init__()
        self.name = name
        self.context_parallel_labels = labels  # type: ignore[misc]

    def loss(self, logits: Values, batch: Any) -> Values:
        ids = batch["input_ids"]
        logps = logits.log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)
        return FAULTS[self.name](self, logps, ids % 3 > 0)


def rank() -> int:
    return dist.get_rank()


def preferred(values: Values) -> Values:
    """As DPO, of one number for each of two rows."""
    return -F.logsigmoid(0.1 * (values[0] - values[1]) + 0.3)


def counted(module: Losing, count: Any, loss: Values) -> Values:
    module.count_targets(count)
    return loss


def mean(x: Values, mask: Values) -> Values:
    return (x * mask).sum() / mask.sum()


FAULTS: dict[str, Callable[[Losing, Values, Values], Values]] = {
    "sum forgotten": lambda m, x, k: preferred((x * k).sum(1)),
    "one sum forgotten": lambda m, x, k: preferred(m.sequence_sum(x)) + preferred(x.sum(1)),
    "mean forgotten": lambda m, x, k: ((x * k).sum(1) / k.sum(1)).mean(),
    "pick forgotten": lambda m, x, k: preferred(x[:, -1]),
    "own mean": lambda m, x, k: mean(x, k),
    "own mean beside": lambda m, x, k: preferred(m.sequence_sum(x)) + 0.1 * x.square().mean(),
    "other mask": lambda m, x, k: counted(m, torch.ones_like(k), mean(x, k)),
    "rows counted": lambda m, x, k: counted(m, len(x), mean(x, k)),
    "own count": lambda m, x, k: m.sequence_sum(x).sum() / k.sum(),
    "own length": lambda m, x, k: m.sequence_sum(x).mean() / x.shape[1],
    "own value": lambda m, x, k: preferred(m.sequence_sum(x)) + x.detach().mean(),
    "own index": lambda m, x, k: preferred(m.sequence_pick(x, k.sum(1) - 1)),
    "rank's function": lambda m, x, k: preferred(m.sequence_sum(x)) ** (1 + (rank() == 1)),
    "rank's branch": lambda m, x, k: (x if rank() else m.sequence_sum(x)).sum(),
}

NONE, ALIGNED = "none", "aligned"
OWN = r"computed from a rank's own tokens\. Compute it from self\.sequence_sum\(values\)"
DIFFERS = (
    r"parity check on 96 tokens: the loss is .* on rank 0 and .* on rank 1, which share a sample"
)
OF_ROWS = r"cause: a function of sums over sequences\..*self\.sequence_sum\(values, mask\)"
TOKENS = r"cause: a mean over other tokens than those with labels\..*count_targets\(mask\)"
COUNT = r"cause: a count of other tokens than those of the loss\..*/ self\.count_targets\(mask\)"
NUMBER = r"cause: a loss of whole sequences, times a number of a rank's own tokens\..*sequence_sum\(mask\)"
SAME = "cause: different data inside the cp group"
INDEX = (
    r"sequence_pick: ranks .* disagree on the index of row \d .*-1 is the last token that is not"
)
BRANCH = r"ranks are not at the same call \(rank 0: sequence_sum; rank 1: .*\)"
NO_MEAN = r"cause: a loss that is not a mean over targets\..*self\.sequence_sum\(values, mask\)"

NAMED: dict[tuple[str, str], str] = {
    ("sum forgotten", NONE): OWN,
    ("sum forgotten", ALIGNED): OF_ROWS,
    ("one sum forgotten", NONE): OWN,
    ("one sum forgotten", ALIGNED): OF_ROWS,
    ("mean forgotten", NONE): OWN,
    ("mean forgotten", ALIGNED): OF_ROWS,
    ("pick forgotten", NONE): OWN,
    ("pick forgotten", ALIGNED): r"takes from its own part\..*self\.sequence_pick\(values, index\)",
    ("own mean", NONE): OWN,
    ("own mean", ALIGNED): TOKENS,
    ("own mean beside", NONE): OWN,
    ("own mean beside", ALIGNED): NO_MEAN,
    ("other mask", NONE): COUNT,
    ("other mask", ALIGNED): COUNT,
    ("rows counted", NONE): COUNT,
    ("rows counted", ALIGNED): COUNT,
    ("own count", NONE): DIFFERS,
    ("own count", ALIGNED): NUMBER,
    ("own length", NONE): NUMBER,
    ("own length", ALIGNED): NUMBER,
    ("own value", NONE): DIFFERS,
    ("own value", ALIGNED): NO_MEAN,
    ("own index", NONE): INDEX,
    ("own index", ALIGNED): INDEX,
    ("rank's function", NONE): SAME,
    ("rank's function", ALIGNED): SAME,
    ("rank's branch", NONE): BRANCH,
    ("rank's branch", ALIGNED): BRANCH,
}


def rows(labels: str) -> list[dict[str, Values]]:
    """Two rows, which have other numbers of labels, and each rank of them, if any."""
    found = modules.rows(2)
    for at, row in enumerate(found):
        row["labels"][: 5 + 9 * at] = -100
        row["labels"][::7] = -100
        if labels == NONE:
            del row["labels"]
    return found


def fit(_: int, world_size: int, name: str, labels: str, settings: Settings) -> None:
    loader: Any = DataLoader(rows(labels), batch_size=2)  # type: ignore[arg-type]
    trainer = trainer_of(world_size, {"parity_check": "first_batch", **settings})
    trainer.fit(Losing(name, labels), loader)


@pytest.mark.quick(
    *("sum forgotten-none", "pick forgotten-aligned", "own length-none", "own mean beside-aligned"),
    *("own index-none", "other mask-none", "rows counted-aligned"),
)
@pytest.mark.parametrize(
    ("name", "labels"), NAMED, ids=[f"{name}-{labels}" for name, labels in NAMED]
)
def test_the_first_check_names_them(name: str, labels: str) -> None:
    match = rf"(?s){NAMED[name, labels]}"
    expect_on_every_rank(
        2, fit, name, labels, RING, error=LightningCPError, match=match, timeout=120
    )


@pytest.mark.nightly
@pytest.mark.parametrize(("ranks", "settings"), [(3, RING3), (4, HYBRID)], ids=["ring3", "hybrid"])
@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("sum forgotten", ALIGNED),
        ("pick forgotten", ALIGNED),
        ("other mask", NONE),
        ("own length", NONE),
        ("own value", NONE),
        ("own index", NONE),
    ],
)
def test_of_more_ranks(name: str, labels: str, ranks: int, settings: Settings) -> None:
    match = rf"(?s){NAMED[name, labels]}"
    options: dict[str, Any] = {"error": LightningCPError, "match": match, "timeout": 200}
    expect_on_every_rank(ranks, fit, name, labels, settings, **options)


class Stepping(torch.nn.Module):
    """A module of Fabric whose forward is the loss."""

    def __init__(self, plain: Losing, strategy: Any) -> None:
        super().__init__()
        self.plain = plain
        for name in ("sequence_sum", "sequence_pick", "count_targets"):
            setattr(plain, name, getattr(strategy, name))

    def forward(self, batch: Any) -> Values:
        return self.plain.loss(self.plain.logits(batch), batch)


def checked(_: int, world_size: int, name: str, labels: str) -> None:
    strategy: Any = UlyssesRingStrategy(**RING, labels=labels)
    plugins: Any = [PoolEnvironment()]
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy, plugins=plugins)
    fabric.launch()
    plain: Any = Losing(name, labels)
    plain.training_step = None
    model: Any = fabric.setup(Stepping(plain, strategy))
    strategy.check_parity(default_collate(rows(labels)), model)


@pytest.mark.quick("own value-none", "own index-none")
@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("sum forgotten", NONE),
        ("sum forgotten", ALIGNED),
        ("other mask", NONE),
        ("own length", NONE),
        ("own value", NONE),
        ("own index", NONE),
        ("rank's branch", NONE),
    ],
    ids=lambda x: x,
)
def test_a_check_of_fabric_names_them(name: str, labels: str) -> None:
    match = rf"(?s){NAMED[name, labels]}"
    options: dict[str, Any] = {"error": LightningCPError, "match": match, "timeout": 120}
    expect_on_every_rank(2, checked, name, labels, **options)


@pytest.mark.parametrize("name", ["own value", "own count"])
def test_unequal_losses_are_refused_without_a_check(name: str) -> None:
    """The Trainer's callbacks read the mean of ranks; what is compared is what each has computed."""
    settings = {**RING, "parity_check": "off"}
    match = r"step 1: the loss is .* on rank 0 and .* on rank 1, which share a sample.*has stepped"
    expect_on_every_rank(2, fit, name, NONE, settings, error=LightningCPError, match=match)

"""A batch with a target everywhere tells as much of a loss as one of other numbers of targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, default_collate

from lightning_cp import ContextParallelMixin
from lightning_cp.batch import BatchRules, read_batch
from lightning_cp.errors import ConfigError, ParityError
from lightning_cp.layout import SequenceLayout
from lightning_cp.parity.batches import with_uneven_labels
from lightning_cp.utils.labels import IGNORED_LABEL
from tests.helpers.parity import modules
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.helpers.strategies.small import (
    HYBRID,
    RING,
    RING3,
    ULYSSES,
    Settings,
    close,
    trainer_of,
    weights,
)
from tests.ranks.parity.test_fabric import Network
from tests.ranks.parity.test_healthy import CHECKED, Heard
from tests.ranks.strategies.test_fabric import fabric_of

Loss = Callable[[torch.Tensor, Any], torch.Tensor]


def targets_of(batch: Any) -> torch.Tensor:
    return batch.get("shift_labels", batch["labels"])


def of_tokens(logits: torch.Tensor, batch: Any) -> torch.Tensor:
    """[B, L], 0 without a target."""
    labels = targets_of(batch)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)


def mean(logits: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets_of(batch).flatten())


def over_tokens(logits: torch.Tensor, batch: Any) -> torch.Tensor:
    return of_tokens(logits, batch).mean()


def over_rows(logits: torch.Tensor, batch: Any) -> torch.Tensor:
    counts = (targets_of(batch) != IGNORED_LABEL).sum(1)
    return (of_tokens(logits, batch).sum(1) / counts).mean()


def with_a_penalty(logits: torch.Tensor, batch: Any) -> torch.Tensor:
    return mean(logits, batch) + 1e-3 * logits.logsumexp(-1).square().mean()


def with_an_error(logits: torch.Tensor, batch: Any) -> torch.Tensor:
    return mean(logits, batch) + F.mse_loss(logits[..., 0], batch["input_ids"] % 7 / 7)


def with_other_targets(logits: torch.Tensor, batch: Any) -> torch.Tensor:
    other = F.cross_entropy(logits.flatten(0, 1), batch["input_ids"].flatten(), reduction="none")
    return mean(logits, batch) + other.mean()


def times_a_share(logits: torch.Tensor, batch: Any) -> torch.Tensor:
    return mean(logits, batch) * (targets_of(batch) != IGNORED_LABEL).double().mean()


def by_hand(logits: torch.Tensor, batch: Any) -> torch.Tensor:
    return of_tokens(logits, batch).sum() / (targets_of(batch) != IGNORED_LABEL).sum().clamp(min=1)


def with_a_penalty_of_targets(logits: torch.Tensor, batch: Any) -> torch.Tensor:
    counted = targets_of(batch) != IGNORED_LABEL
    return mean(logits, batch) + 1e-3 * logits.logsumexp(-1).square()[counted].mean()


def of_their_logits(logits: torch.Tensor, batch: Any) -> torch.Tensor:
    """It cannot look a label of -100 up."""
    return -logits.log_softmax(-1).gather(-1, targets_of(batch)[..., None]).mean()


def of_numbers(logits: torch.Tensor, batch: Any) -> torch.Tensor:
    """Labels that are no classes."""
    return F.mse_loss(logits[..., 0], targets_of(batch))


class Of(ContextParallelMixin, modules.Healthy):
    """Trained on one of the losses above; ``declares`` how many tokens a rank has."""

    def __init__(self, way: Loss, *, declares: bool = False) -> None:
        super().__init__()
        self.way, self.declares = way, declares
        for block in self.blocks:
            block.mlp[2].p = 0.0  # type: ignore[index,union-attr]

    def positions(self, batch: Any) -> torch.Tensor:
        return batch.get("position_ids", torch.arange(modules.LENGTH))

    def loss(self, logits: torch.Tensor, batch: Any) -> torch.Tensor:
        if self.declares:
            self.count_targets(targets_of(batch).numel())
        return self.way(logits, batch)


def rows(way: Loss) -> list[dict[str, torch.Tensor]]:
    """All with a target everywhere, the first two; then half a prompt."""
    found = modules.rows(4)
    if way is of_numbers:
        return [{**row, "labels": row["labels"].double()} for row in found]
    if way is not of_their_logits:
        for row in found[2:]:
            row["labels"][: modules.LENGTH // 2] = IGNORED_LABEL
    return found


def fit(
    rank: int, world_size: int, settings: Settings | None, way: Loss, declares: bool = False
) -> tuple[torch.Tensor, list[str]]:
    module = Of(way, declares=declares)
    loader: Any = DataLoader(rows(way), batch_size=2)  # type: ignore[arg-type]
    given = None if settings is None else {**CHECKED, **settings}
    with Heard() as heard:
        trainer_of(world_size, given).fit(module, loader)
    return weights(module), heard.parity


MODES: dict[str, tuple[int, Settings]] = {
    "ring 2": (2, RING),
    "ring 3": (3, RING3),
    "ulysses 2": (2, ULYSSES),
    "hybrid": (4, HYBRID),
    "ring 2, fsdp": (2, {**RING, "data_parallel": "fsdp"}),
}
WRONG: list[Loss] = [
    over_tokens,
    over_rows,
    with_a_penalty,
    with_an_error,
    with_other_targets,
    times_a_share,
]


@pytest.mark.nightly
@pytest.mark.parametrize("way", WRONG, ids=lambda way: way.__name__)
@pytest.mark.parametrize("mode", MODES)
def test_a_loss_that_is_right_by_chance_is_refused(mode: str, way: Loss) -> None:
    ranks, settings = MODES[mode]
    match = (
        r"(?s)parity check on 96 tokens of the batch with some labels left out.*Likely cause: (unscaled "
        r"loss|a loss that is not a mean|a mean over other tokens|a function of sums).*With all of its "
        r"labels the batch agrees.*labels != -100"
    )
    expect_on_every_rank(ranks, fit, settings, way, error=ParityError, match=match)


def said(mode: str, way: Loss, declares: bool = False) -> str:
    """What the check said of a loss that is trained on as in one process."""
    ranks, settings = MODES[mode]
    want = run_ranks(1, fit, None, way)[0][0]
    every = run_ranks(ranks, fit, settings, way, declares)
    for got, _ in every:
        close(got, want)
    return every[0][1][0]


@pytest.mark.nightly
@pytest.mark.parametrize("way", [by_hand, with_a_penalty_of_targets], ids=lambda way: way.__name__)
@pytest.mark.parametrize("mode", MODES)
def test_a_mean_over_targets_is_cleared(mode: str, way: Loss) -> None:
    assert "agree on 96 tokens, and with some of their labels left out (float64" in said(mode, way)


@pytest.mark.nightly
@pytest.mark.parametrize("way", [mean, of_numbers], ids=lambda way: way.__name__)
def test_what_needs_no_look_gets_none(way: Loss) -> None:
    """A loss that is known, and labels of which none can be left out."""
    assert "agree on 96 tokens (float64" in said("ring 2", way)


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["ring 2", "ring 2, fsdp"])
def test_a_loss_that_knows_no_such_labels_has_to_declare(mode: str) -> None:
    ranks, settings = MODES[mode]
    match = r"it is not known what this loss is a mean over.*it was left out: its loss is of no known kind"
    expect_on_every_rank(ranks, fit, settings, of_their_logits, error=ConfigError, match=match)
    assert "agree on 96 tokens (float64" in said(mode, of_their_logits, declares=True)


def checked(rank: int, world_size: int, settings: Settings, way: Loss) -> str:
    fabric = fabric_of(world_size, settings)
    fabric.launch()
    strategy: Any = fabric.strategy
    plain: Any = modules.Healthy()
    plain.training_step, plain.loss = None, way
    model: Any = fabric.setup(Network(plain))
    return strategy.check_parity(default_collate(modules.rows(2)), model)


@pytest.mark.nightly
def test_in_fabric_too() -> None:
    match = r"with some labels left out"
    expect_on_every_rank(2, checked, ULYSSES, over_tokens, error=ParityError, match=match)
    for settings in (RING, {**RING, "labels": "shift"}):
        for line in run_ranks(2, checked, settings, by_hand):
            assert "and with some of their labels left out" in line


@pytest.mark.parametrize("kind", ["aligned", "shift"])
def test_numbers_of_targets_are_other_ones(kind: Any) -> None:
    """Between ranks, rows, and the same rank's rows; a part that has some keeps some."""
    batch = default_collate(modules.rows(2, padded=True))
    batch["table"] = torch.zeros(5)
    rules = BatchRules(labels=kind)
    layout = SequenceLayout(modules.LENGTH, 2, 2, "zigzag")
    whole = read_batch(batch, rules, needs_labels=True)
    changed = with_uneven_labels(batch, whole, rules, layout)
    assert changed is not None
    assert all(changed[name] is x for name, x in batch.items() if name != "labels")
    labels = read_batch(changed, rules, needs_labels=True).aligned_labels
    assert labels is not None
    assert whole.aligned_labels is not None
    left = labels != whole.aligned_labels
    assert (labels[left] == IGNORED_LABEL).all()
    counts = torch.stack([(layout.shard(labels, rank, dim=1) != -100).sum(1) for rank in range(4)])
    assert counts.min() > 0
    assert len(set(counts.sum(0).tolist())) == 2
    assert len(set(counts.sum(1).tolist())) == 4
    assert torch.linalg.matrix_rank(counts.double()) > 1


@pytest.mark.parametrize(
    ("labels", "rules"),
    [
        (torch.ones(1, 48), BatchRules(labels="aligned")),
        (torch.ones(1, 48, dtype=torch.bool), BatchRules(labels="aligned")),
        (torch.full((1, 48), -100), BatchRules(labels="aligned")),
        (torch.ones(1, 48, dtype=torch.long), BatchRules(labels="ignore")),
        (torch.ones(1, 48, dtype=torch.long), BatchRules(labels="shift", label_key="input_ids")),
    ],
    ids=["numbers", "flags", "no targets", "no labels", "labels are inputs"],
)
def test_labels_that_cannot_be_left_out(labels: torch.Tensor, rules: BatchRules) -> None:
    batch = {rules.label_key: labels}
    whole = read_batch(batch, rules, needs_labels=False)
    assert with_uneven_labels(batch, whole, rules, SequenceLayout(48, 2, 1, "contiguous")) is None

"""Losses by hand that would be wrong: the cause that is named is theirs, with and without a teacher."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from lightning_cp import ContextParallelMixin
from lightning_cp.errors import ParityError
from tests.helpers.parity import modules
from tests.helpers.pool import run_ranks
from tests.helpers.strategies.small import RING, RING3, trainer_of

Values = torch.Tensor
GRIDS = {2: RING, 3: RING3}


class Losing(ContextParallelMixin, modules.Healthy):
    """Its loss is one of ``LOSSES``; a frozen teacher among its modules may be called after it."""

    context_parallel_labels = "aligned"

    def __init__(self, name: str, *, taught: bool = False) -> None:
        super().__init__()
        self.name = name
        self.teacher = modules.Healthy(layers=1).requires_grad_(False) if taught else None

    def loss(self, logits: Values, batch: Any) -> Values:
        if self.teacher is None:
            guide = torch.nn.functional.one_hot((batch["input_ids"] + 1) % modules.VOCAB) * 3.0
            guide = F.pad(guide, (0, modules.VOCAB - guide.shape[-1]))
        else:
            with torch.no_grad():
                guide = self.teacher.logits(batch)
        return LOSSES[self.name](logits, guide.to(logits), batch["labels"])


def divergence(logits: Values, guide: Values) -> Values:
    """[B, L]."""
    each = F.kl_div(
        logits.log_softmax(-1), guide.log_softmax(-1), log_target=True, reduction="none"
    )
    return each.sum(-1)


def of_tokens(logits: Values, labels: Values) -> tuple[Values, Values]:
    losses = F.cross_entropy(logits.transpose(1, 2), labels.clamp(min=0), reduction="none")
    return losses, (labels != -100).to(losses)


def row_means(logits: Values, guide: Values, labels: Values) -> Values:
    n, m = of_tokens(logits, labels)
    return ((n * m).sum(1) / m.sum(1)).mean()


def row_sums(logits: Values, guide: Values, labels: Values) -> Values:
    n, m = of_tokens(logits, labels)
    return (n * m).sum(1).mean()


def masked_twice(logits: Values, guide: Values, labels: Values) -> Values:
    m = (labels != -100) & (labels % 3 != 0)
    return (divergence(logits, guide) * m).sum() / m.sum()


def preferred(logits: Values, guide: Values, labels: Values) -> Values:
    n, m = of_tokens(logits, labels)
    return -F.logsigmoid(0.1 * ((n * m).sum(1)[0] - (n * m).sum(1)[1]))


def contrastive(logits: Values, guide: Values, labels: Values) -> Values:
    a, b = F.normalize(logits.mean(1), dim=-1), F.normalize(guide.mean(1), dim=-1)
    return F.cross_entropy(a @ b.T / 0.1, torch.arange(len(a)))


LOSSES: dict[str, Callable[[Values, Values, Values], Values]] = {
    "sum": lambda x, t, y: 0.01 * F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="sum"),
    "mean of rows": row_means,
    "sums of rows": row_sums,
    "kl of other targets": masked_twice,
    "function of sums": preferred,
    "kl over all": lambda x, t, y: divergence(x, t).mean(),
    "kl of batchmean": lambda x, t, y: F.kl_div(
        x.log_softmax(-1), t.log_softmax(-1), log_target=True, reduction="batchmean"
    ),
    "beside cross-entropy": lambda x, t, y: (
        F.cross_entropy(x.flatten(0, 1), y.flatten()) + divergence(x, t).mean()
    ),
    "contrastive": contrastive,
    "mse over all": lambda x, t, y: F.mse_loss(x, t),
}


def said(rank: int, world_size: int, names: list[str], taught: bool) -> dict[str, str]:
    found: dict[str, str] = {}
    rows = modules.rows(2)
    for at, row in enumerate(rows):
        row["labels"][: 5 + 9 * at] = -100
        row["labels"][::7] = -100
    for name in names:
        loader: Any = DataLoader(rows, batch_size=2)  # type: ignore[arg-type]
        trainer = trainer_of(world_size, {"parity_check": "first_batch", **GRIDS[world_size]})
        try:
            trainer.fit(Losing(name, taught=taught), loader)
            found[name] = "nothing"
        except ParityError as error:
            found[name] = str(error)
    return found


MEAN = r"a mean over other tokens than those with labels\..*count_targets\(mask\)"
SUM = (
    r"unscaled loss\..*how many targets its rank has.*For a sum write self\.sequence_sum\(losses of tokens, "
    r"mask\)\.sum\(\).*self\.unshard\(losses"
)
OF_ROWS = r"a function of sums over sequences\..*its mean and its count.*self\.unshard\(x\)"
CAUSES = {
    "sum": SUM,
    "sums of rows": SUM,
    "kl of batchmean": SUM,
    "mean of rows": OF_ROWS,
    "function of sums": OF_ROWS,
    "contrastive": r"a function of sums over sequences\.\n.*a target for each row.*: 2 on rank 0",
    "kl of other targets": MEAN,
    "kl over all": MEAN,
    "mse over all": MEAN,
    "beside cross-entropy": r"a loss that is not a mean over targets\..*mean over other tokens",
}


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 3], ids=["ring2", "ring3"])
@pytest.mark.parametrize("taught", [False, True], ids=["alone", "taught"])
def test_causes_are_those_of_the_loss(taught: bool, ranks: int) -> None:
    """Beside a frozen teacher that is called last, as the student's output is the last that trains."""
    for found in run_ranks(ranks, said, list(LOSSES), taught, timeout=300):
        for name in LOSSES:
            cause = CAUSES[name]
            assert re.search(rf"(?s)Likely cause: {cause}", found[name]), (name, found[name])
            assert "cross-entropy" not in found[name]
            assert "plain loss                     agrees" in found[name]
            if name == "contrastive":
                assert "count_targets" not in found[name]  # it would be taken, and be wrong still

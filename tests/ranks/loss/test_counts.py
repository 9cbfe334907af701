"""What a loss counted is compared with what its rank is weighted by, and can be declared."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lightning_cp import ContextParallelMixin
from lightning_cp.errors import ConfigError, LightningCPError, ParityError
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.helpers.strategies.small import (
    HYBRID,
    LET_EMPTY,
    RING,
    RING3,
    ULYSSES,
    VOCAB,
    Batch,
    Settings,
    Small,
    close,
    loader,
    trainer_of,
    weights,
)

pytestmark = LET_EMPTY
OFF: Settings = {"parity_check": "off"}
CLASSES = torch.linspace(0.5, 2.0, VOCAB, dtype=torch.float64)


def masked_labels(batch: Batch) -> torch.Tensor:
    """Targets that the step leaves out by what a token is, so that every process leaves out the same."""
    drawn = batch["input_ids"] * 7919 % 97 < 45
    return batch["labels"].where(drawn, -100)


class Masked(ContextParallelMixin, Small):
    """Leaves out labels within the step, by one of ``WAYS``."""

    def __init__(self, way: Any = None, *, manual: bool = False) -> None:
        super().__init__()
        self.way = way
        self.automatic_optimization = not manual

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = self.way(self, batch, self.logits(batch).flatten(0, 1))
        self.log("loss", loss, on_step=True)
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        loss = self.way(self, batch, self.logits(batch).flatten(0, 1))
        self.log("val_loss", loss, batch_size=1)


def cross_entropy(module: Masked, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    targets = masked_labels(batch).flatten()
    module.count_targets(targets != -100)
    return F.cross_entropy(logits, targets)


def by_hand(module: Masked, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    targets = masked_labels(batch).flatten()
    losses = F.cross_entropy(logits, targets, reduction="none")
    return losses.sum() / module.count_targets(targets != -100)


def by_class(module: Masked, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    targets = batch["labels"].flatten()
    module.count_targets(CLASSES[targets.clamp(min=0)] * (targets != -100))
    return F.cross_entropy(logits, targets, CLASSES)


def smoothed(module: Masked, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    targets = masked_labels(batch).flatten()
    module.count_targets(int((targets != -100).sum()))
    return 0.5 * F.cross_entropy(logits, targets, label_smoothing=0.1)


def without_a_target(module: Masked, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    """Beside a value of whole rows, which counts nevertheless."""
    ids = batch["input_ids"]
    nothing = torch.zeros_like(ids, dtype=torch.bool)
    values = logits.view(*ids.shape, -1).log_softmax(-1)[..., 3]
    mean = (values * nothing).sum() / module.count_targets(nothing)
    return mean + module.sequence_mean(values.exp()).square().sum()


WAYS = (cross_entropy, by_hand, by_class, smoothed)


def trained(
    rank: int, world_size: int, settings: Settings | None, way: Any, options: dict[str, Any]
) -> Any:
    module = Masked(way, manual=options.pop("manual", False))
    trainer = trainer_of(world_size, settings, **options)
    trainer.fit(module, loader(6), loader(4))
    shown = {name: float(x) for name, x in trainer.callback_metrics.items()}
    return weights(module), shown


@lru_cache(maxsize=16)
def alone(way: Any, *options: Any) -> Any:
    return run_ranks(1, trained, None, way, dict(options))[0]


CASES: list[Any] = [
    pytest.param(2, RING, cross_entropy, id="ring 2"),
    pytest.param(2, RING, without_a_target, id="ring 2, a row without targets"),
    pytest.param(3, RING3, by_hand, id="ring 3, by hand"),
    pytest.param(2, ULYSSES, by_class, id="ulysses 2, weights of classes"),
    pytest.param(4, HYBRID, smoothed, id="hybrid, smoothed"),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("ranks", "settings", "way"), CASES)
def test_what_is_declared_is_what_a_loss_is_weighted_by(
    ranks: int, settings: Settings, way: Any
) -> None:
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}
    for got in run_ranks(ranks, trained, {**settings, **OFF}, way, options):
        close(got, alone(way, *options.items()))


@pytest.mark.nightly
def test_with_manual_optimization_and_a_check_that_is_left_out() -> None:
    for got in run_ranks(2, trained, RING, by_hand, {"manual": True}):
        close(got, alone(by_hand, ("manual", True)))


# -- not declared ---------------------------------------------------------------------------------


def undeclared(module: Masked, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, masked_labels(batch).flatten())


def classes_undeclared(module: Masked, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, batch["labels"].flatten(), CLASSES)


def soft(module: Masked, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    """A mean over all tokens; those of padding add what nobody learns from."""
    real = module.token_mask(batch["input_ids"]).expand_as(batch["input_ids"]).reshape(-1, 1)
    return F.cross_entropy(logits * real, logits.detach().flip(-1).softmax(-1))


def also_undeclared(module: Masked, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    main = F.cross_entropy(logits, batch["labels"].flatten())
    return main + 0.1 * F.nll_loss(logits.log_softmax(-1), masked_labels(batch).flatten())


def refused(
    rank: int, world_size: int, settings: Settings, way: Any, options: dict[str, Any]
) -> None:
    module = Masked(way, manual=options.pop("manual", False))
    before = weights(module)
    try:
        trainer_of(world_size, settings, **options).fit(module, loader(2), loader(2))
    finally:
        assert torch.equal(weights(module), before)


@pytest.mark.quick("weights of classes", "probabilities", "a further loss")
@pytest.mark.parametrize(
    ("way", "more", "options"),
    [
        pytest.param(undeclared, OFF, {}, id="labels left out"),
        pytest.param(undeclared, {}, {"manual": True}, id="check left out"),
        pytest.param(undeclared, {**OFF, "check_finite": False}, {}, id="check_finite=False"),
        pytest.param(classes_undeclared, OFF, {}, id="weights of classes"),
        pytest.param(soft, OFF, {}, id="probabilities"),
        pytest.param(also_undeclared, OFF, {}, id="a further loss"),
    ],
)
def test_other_counts_are_refused_before_a_weight_changes(
    way: Any, more: Settings, options: dict[str, Any]
) -> None:
    numbers = (
        r"counted other targets than its rank is weighted by: \d+(\.\d+)? on rank 0, which is "
    )
    match = rf"step 1: a loss {numbers}weighted by \d+.*count_targets.*No rank has stepped"
    expect_on_every_rank(2, refused, {**RING, **more}, way, options, error=ConfigError, match=match)


def by_its_number(module: Masked, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    labels = batch["labels"].flatten()
    return F.cross_entropy(logits, labels) * ((labels != -100).sum().item() / labels.numel())


@pytest.mark.parametrize(
    "options", [{}, {"accumulate_grad_batches": 2}], ids=["each step", "a window"]
)
def test_a_number_that_differs_between_ranks_is_refused(options: dict[str, Any]) -> None:
    match = r"a loss is multiplied or divided by 0\.\d+ on rank 0 and by 0\.\d+ on rank 1.*No rank"
    expect_on_every_rank(
        2, refused, {**RING, **OFF}, by_its_number, options, error=ConfigError, match=match
    )


@pytest.mark.nightly
@pytest.mark.parametrize("way", [undeclared, classes_undeclared, also_undeclared])
def test_the_parity_check_names_other_counts_as_the_cause(way: Any) -> None:
    """And no way to train all the same: the first step would be refused."""
    match = (
        r"(?s)parity check on 58 tokens.*Likely cause: a loss that counts other targets than the labels\."
        r"\n  Logits agree, and a loss counted other targets than its rank is weighted by: "
        r"[\d.]+ on rank 0, which is weighted by \d+[^\n]*\.\n  [^\n]*count_targets[^\n]*\.$"
    )
    expect_on_every_rank(2, refused, RING, way, {}, error=ParityError, match=match)


def declared_otherwise(module: Masked, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    module.count_targets(7)
    return F.cross_entropy(logits, batch["labels"].flatten())


def declared_twice(module: Masked, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    module.count_targets(7)
    return cross_entropy(module, batch, logits)


def mean_by_hand(module: Masked, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    targets = masked_labels(batch).flatten()
    return F.cross_entropy(logits, targets, reduction="sum") / (targets != -100).sum()


def fits_two(rank: int, world_size: int, settings: Settings) -> None:
    trainer = trainer_of(world_size, settings)
    trainer.fit(Masked(by_hand), loader(2), loader(2))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Masked(mean_by_hand), loader(2), loader(2))


@pytest.mark.nightly
def test_what_one_module_declares_says_nothing_of_the_next() -> None:
    match = "not known what this loss is a mean over"
    expect_on_every_rank(2, fits_two, {**RING, **OFF}, error=ConfigError, match=match)


class Ending(Masked):
    """Ends with an error in the second batch of a window."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        if batch_idx == 1:
            raise ArithmeticError("a batch that cannot be used")
        return super().training_step(batch, batch_idx)


def without_a_number(module: Masked, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, batch["labels"].flatten()) * float("nan")


def fits_after_an_error(
    rank: int, world_size: int, settings: Settings | None, way: Any
) -> torch.Tensor:
    trainer = trainer_of(world_size, settings, accumulate_grad_batches=2)
    with pytest.raises(ArithmeticError, match="cannot be used"):
        trainer.fit(Ending(way), loader(4), loader(2))
    trainer.fit_loop.max_epochs = 2
    module = Masked(cross_entropy)
    trainer.fit(module, loader(4), loader(2))
    assert trainer.global_step
    return weights(module)


@pytest.mark.nightly
@pytest.mark.parametrize("way", [undeclared, without_a_number])
def test_a_window_that_an_error_has_ended_says_nothing_of_the_next(way: Any) -> None:
    settings = {**RING, **OFF, "step_timeout": None}
    want = run_ranks(1, fits_after_an_error, None, way)[0]
    for got in run_ranks(2, fits_after_an_error, settings, way):
        close(got, want)


def negative(module: Masked, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    module.count_targets(-1)
    return cross_entropy(module, batch, logits)


def not_a_number(module: Masked, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    """On one rank only."""
    weights = torch.full((2,), torch.nan if module.global_rank else 1.0)
    module.count_targets(weights)
    return cross_entropy(module, batch, logits)


def less_than_nothing(module: Masked, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    module.count_targets(-torch.ones(batch["labels"].shape))
    return cross_entropy(module, batch, logits)


def summed(batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    """By hand, so that what it counts cannot be seen."""
    return F.cross_entropy(logits, batch["labels"].flatten(), reduction="none").sum()


def whole_mask(module: Masked, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    """Of all tokens of the rows: equal on all ranks, so that their own targets would not weigh."""
    mask = module.unshard(batch["labels"]) != -100
    return summed(batch, logits) / module.count_targets(mask)


def flat_whole_mask(module: Masked, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    mask = module.unshard(batch["labels"]) != -100
    return summed(batch, logits) / module.count_targets(mask.flatten().double())


def shifted_mask(module: Masked, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    """On one rank only."""
    mask = batch["labels"] != -100
    mask = mask[:, 1:] if module.global_rank else mask
    return summed(batch, logits) / module.count_targets(mask)


@pytest.mark.parametrize(("ranks", "settings"), [(2, RING), (3, RING3), (4, HYBRID)])
@pytest.mark.parametrize("way", [whole_mask, flat_whole_mask, shifted_mask])
@pytest.mark.quick("whole_mask-3-*", "shifted_mask-2-*")
def test_masks_of_other_tokens_are_refused(ranks: int, settings: Settings, way: Any) -> None:
    match = r"count_targets was given values \(.*\) of other tokens than this rank's, \[2, \d+\]"
    options: dict[str, Any] = {"error": LightningCPError, "match": match}
    expect_on_every_rank(ranks, refused, {**settings, **OFF}, way, {}, **options)


def on_one_rank(module: Masked, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    if module.global_rank:
        module.count_targets(7)
    return F.cross_entropy(logits, batch["labels"].flatten())


def test_a_rank_that_declares_alone_is_refused() -> None:
    match = "ranks are not at the same call"
    expect_on_every_rank(
        2, refused, {**RING, **OFF}, on_one_rank, {}, error=LightningCPError, match=match
    )


@pytest.mark.parametrize(
    ("way", "match"),
    [
        (declared_otherwise, r"on rank 0, which is weighted by 7"),
        (declared_twice, "count_targets was called twice for one loss"),
        (negative, r"count_targets\(-1\) declares no number of targets"),
        (less_than_nothing, r"count_targets\(a tensor\) declares no number of targets"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_declarations_that_cannot_be(way: Any, match: str) -> None:
    expect_on_every_rank(2, refused, {**RING, **OFF}, way, {}, error=ConfigError, match=match)


def test_a_count_that_is_none_on_one_rank() -> None:
    match = r"count_targets\(a tensor\) declares no number of targets"
    settings = {**RING, **OFF}
    expect_on_every_rank(
        2, refused, settings, not_a_number, {}, error=LightningCPError, match=match
    )


# -- what is no mistake ---------------------------------------------------------------------------


def with_a_metric(module: Masked, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        module.log("other", F.cross_entropy(logits, masked_labels(batch).flatten()))
    return F.cross_entropy(logits, batch["labels"].flatten())


def with_a_detached_loss(module: Masked, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    other = F.cross_entropy(logits, masked_labels(batch).flatten())
    return F.cross_entropy(logits, batch["labels"].flatten()) + 0 * other.nan_to_num().detach()


def of_two_heads(module: Masked, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    labels = batch["labels"].flatten()
    losses = [F.cross_entropy(x, labels, label_smoothing=0.1) for x in (logits, logits.flip(-1))]
    return torch.stack(losses).mean()


def of_a_whole_row(module: Masked, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    """A class for each row, by all of its tokens, beside the loss of tokens."""
    row = module.unshard(logits.view(len(batch["input_ids"]), -1, VOCAB)).mean(1)
    labels = batch["labels"].flatten()
    further = F.cross_entropy(row, torch.tensor([3, 5])) + row.square().sum(-1).sqrt().mean()
    return F.cross_entropy(logits, labels) + 0.3 * further


@pytest.mark.nightly
@pytest.mark.filterwarnings(
    "ignore:self.log.'other', .* in validation_step was given a mean over other"
)
@pytest.mark.parametrize("way", [with_a_metric, with_a_detached_loss, of_two_heads, of_a_whole_row])
def test_these_are_as_in_one_process(way: Callable[..., torch.Tensor]) -> None:
    for got in run_ranks(2, trained, {**RING, **OFF}, way, {}):
        close(got[0], alone(way)[0])

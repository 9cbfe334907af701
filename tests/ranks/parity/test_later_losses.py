"""A loss of no known kind that begins in the middle of a run: checked before its first step, or refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_cp.consistency import step_vote
from lightning_cp.errors import ConfigError, LightningCPError, ParityError
from tests.helpers.parity import modules
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.helpers.strategies.small import (
    RING,
    RING3,
    ULYSSES,
    Settings,
    close,
    trainer_of,
    weights,
)
from tests.ranks.parity.test_healthy import CHECKED, Heard


class Changing(modules.Healthy):
    """Cross-entropy in its first step, and another loss from the second one on."""

    def positions(self, batch: Any) -> torch.Tensor:
        return batch.get("position_ids", torch.arange(batch["input_ids"].shape[1])[None])

    def loss(self, logits: torch.Tensor, batch: Any) -> torch.Tensor:
        return (
            self.later(logits, batch) if self.trainer.global_step else super().loss(logits, batch)
        )

    def later(self, logits: torch.Tensor, batch: Any) -> torch.Tensor:
        raise NotImplementedError


class Beginning(Changing):
    """A penalty that the first step does not have."""

    def later(self, logits: torch.Tensor, batch: Any) -> torch.Tensor:
        penalty = logits.logsumexp(-1).square().mean()
        return modules.Healthy.loss(self, logits, batch) + 0.1 * penalty


class Warming(Beginning):
    """Its weight is 0 in the first step; the gradients of another one always are."""

    def loss(self, logits: torch.Tensor, batch: Any) -> torch.Tensor:
        penalty = self.weight() * logits.logsumexp(-1).square().mean()
        return modules.Healthy.loss(self, logits, batch) + penalty + 0.0 * logits.sum()

    def weight(self) -> Any:
        return 0.1 * bool(self.trainer.global_step)


class WarmingTensor(Warming):
    """Its weight is a tensor."""

    def weight(self) -> Any:
        return torch.tensor(super().weight())


class Switching(Changing):
    """As many factors are 0 in the first step as later, and others."""

    def loss(self, logits: torch.Tensor, batch: Any) -> torch.Tensor:
        on = bool(self.trainer.global_step)
        penalty = logits.logsumexp(-1).square().mean()
        return (1 - on) * modules.Healthy.loss(self, logits, batch) + on * penalty


class Pulling(Changing):
    """A parameter is pulled to a mean of a rank's own tokens, with a weight of 0 in the first step."""

    def loss(self, logits: torch.Tensor, batch: Any) -> torch.Tensor:
        pull = (self.head.bias - logits.detach().mean((0, 1))).square().sum()
        known = modules.Healthy.loss(self, logits, batch)
        return known + 0.5 * bool(self.trainer.global_step) * pull


class Declaring(Beginning):
    """Declares a mean by hand in its first step, and has a penalty that is not declared in others."""

    def loss(self, logits: torch.Tensor, batch: Any) -> torch.Tensor:
        if self.trainer.global_step:
            return self.later(logits, batch)
        losses = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
        strategy: Any = self.trainer.strategy
        return losses.sum() / strategy.count_targets(batch["labels"] != -100)


class ByHand(Changing):
    """The same mean, in other words."""

    def later(self, logits: torch.Tensor, batch: Any) -> torch.Tensor:
        labels = batch["labels"].flatten()
        losses = F.cross_entropy(logits.flatten(0, 1), labels, reduction="none")
        return losses.sum() / (labels != -100).sum()


class AtFullLength(Changing):
    """A penalty that the tokens of a check do not have."""

    def later(self, logits: torch.Tensor, batch: Any) -> torch.Tensor:
        short = logits.shape[1] < modules.LENGTH // 2
        known = modules.Healthy.loss(self, logits, batch)
        return known if short else known + 0.1 * logits.logsumexp(-1).square().mean()


class OfWindows(Changing):
    """Windows of three micro-batches: cross-entropies, then means by hand, declared or not, beside one."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.kind = "kkkudk"[batch_idx]
        return super().training_step(batch, batch_idx)

    def loss(self, logits: torch.Tensor, batch: Any) -> torch.Tensor:
        if self.kind == "k":
            return modules.Healthy.loss(self, logits, batch)
        labels = batch["labels"].flatten()
        losses = F.cross_entropy(logits.flatten(0, 1), labels, reduction="none").sum()
        counted: Any = (labels != -100).sum()
        strategy: Any = self.trainer.strategy
        if self.kind == "d" and hasattr(strategy, "count_targets"):
            counted = strategy.count_targets(labels != -100)
        return losses * self.factor / counted

    factor = 1.0


class WrongOfWindows(OfWindows):
    """What is looked at is wrong: a rank counts its own tokens."""

    def loss(self, logits: torch.Tensor, batch: Any) -> torch.Tensor:
        self.factor = float(logits.shape[1])
        return super().loss(logits, batch)


class ScaledBlock(modules.Block):
    """A frozen factor, which autograd keeps for backward."""

    calls = 0

    def __init__(self) -> None:
        super().__init__(modules.Attention(), torch.nn.Identity())
        self.scale = torch.nn.Parameter(torch.ones(modules.FEATURES), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ScaledBlock.calls += 1
        x = x + self.attention(self.norm_1(x))
        return x + self.scale * self.mlp(self.norm_2(x))


class Recomputing(ByHand):
    """Blocks are computed again in backward; the loss is by hand, and one rank has no targets."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(ScaledBlock() for _ in range(2))

    def logits(self, batch: Any) -> torch.Tensor:
        x = self.tokens(batch["input_ids"]) + self.places(self.positions(batch))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))

    def loss(self, logits: torch.Tensor, batch: Any) -> torch.Tensor:
        if (batch["labels"] == -100).all():
            return 0 * logits.sum()
        return self.later(logits, batch)


class OfAMask(ByHand):
    """A mean by hand, of all targets in the first step, and of a mask's in others."""

    def loss(self, logits: torch.Tensor, batch: Any) -> torch.Tensor:
        counted = self.mask(batch).to(logits)
        losses = F.cross_entropy(
            logits.flatten(0, 1), batch["labels"].flatten(), reduction="none"
        ).view_as(counted)
        return (losses * counted).sum() / counted.sum().clamp(min=1)

    def mask(self, batch: Any) -> torch.Tensor:
        ids = batch["input_ids"]
        chosen = (ids % 5 < 2) if self.trainer.global_step else ids >= 0
        return (batch["labels"] != -100) & chosen


class OfAMasksMean(OfAMask):
    """PyTorch takes the mean."""

    def loss(self, logits: torch.Tensor, batch: Any) -> torch.Tensor:
        counted = self.mask(batch)
        return F.mse_loss(logits[counted][:, 0], batch["labels"][counted] % 7 / 7)


class Following(ByHand):
    """A number of Python follows what a rank has measured, beside a mean by hand."""

    number: Any = 1.0

    def loss(self, logits: torch.Tensor, batch: Any) -> torch.Tensor:
        loss, number = self.later(logits, batch), self.number
        self.number = self.follow(loss.detach())
        return number * loss

    def follow(self, loss: torch.Tensor) -> Any:
        return loss.item()


class FollowingTensor(Following):
    """A tensor of one element does."""

    number = torch.ones(())

    def follow(self, loss: torch.Tensor) -> Any:
        return loss


class Weighted(ByHand):
    """Right: a mean by hand over two features, times a number that changes alike on all ranks."""

    def loss(self, logits: torch.Tensor, batch: Any) -> torch.Tensor:
        counted = batch["labels"] != -100
        error = F.mse_loss(logits[counted][:, :2], logits[counted][:, :2].detach() - 1)
        return self.later(logits, batch) * (1 + self.trainer.global_step) + error


class Centred(Changing):
    """A mean of a rank's own tokens, of all steps before, moves the logits."""

    kept: Any = 0.0

    def loss(self, logits: torch.Tensor, batch: Any) -> torch.Tensor:
        kept = self.kept
        self.kept = 0.5 * (kept + logits.detach().mean((0, 1)))
        return modules.Healthy.loss(self, logits - kept, batch)


class SecondPhase(ByHand):
    """Another mean by hand from the third step on: of rows."""

    def loss(self, logits: torch.Tensor, batch: Any) -> torch.Tensor:
        if self.trainer.global_step < 2:
            return self.later(logits, batch)
        labels = batch["labels"]
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return (losses.view_as(labels).sum(1) / (labels != -100).sum(1).clamp(min=1)).mean()


KINDS = {
    cls.__name__: cls
    for cls in (
        *(Beginning, Warming, WarmingTensor, Switching, Pulling, Declaring, ByHand, AtFullLength),
        *(OfAMask, OfAMasksMean, Following, FollowingTensor, Weighted, Centred, SecondPhase),
    )
}
THIRD = ("Centred", "SecondPhase")
"""Refused in the third step."""
WINDOWS = {cls.__name__: cls for cls in (OfWindows, WrongOfWindows)}


def fit(rank: int, world_size: int, name: str, settings: Settings | None, window: int = 1) -> Any:
    module, rows = {**KINDS, **WINDOWS}[name](), modules.rows(12 if name in WINDOWS else 8)
    for block in module.blocks:
        block.mlp[2].p = 0.0  # type: ignore[index, union-attr]
    for at, row in enumerate(rows):
        row["labels"][: 3 * at + 1] = -100  # ranks have other numbers of targets
    before = weights(module)
    with Heard() as heard:
        trainer = trainer_of(world_size, settings, accumulate_grad_batches=window)
        try:
            trainer.fit(module, DataLoader(rows, batch_size=2))  # type: ignore[arg-type]
        except LightningCPError:
            assert trainer.global_step == 1 + (name in THIRD), "what is refused is not taken"
            assert not torch.equal(weights(module), before)
            raise
    return weights(module), heard.parity


@pytest.mark.quick("Switching", "Declaring")
@pytest.mark.parametrize(
    "name", ["Beginning", "Warming", "WarmingTensor", "Switching", "Pulling", "Declaring"]
)
def test_a_penalty_that_begins_later_is_compared_with_one_process(name: str) -> None:
    match = "does not compute what it computes in one process"
    settings = {**RING, **CHECKED}
    expect_on_every_rank(2, fit, name, settings, error=ParityError, match=match)


@pytest.mark.quick("2-OfAMask", "3-OfAMasksMean")
@pytest.mark.parametrize("name", ["OfAMask", "OfAMasksMean", "Following", "FollowingTensor"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_factor_that_ranks_do_not_share_is_compared_with_one_process(
    ranks: int, name: str
) -> None:
    match = "does not compute what it computes in one process"
    settings = {**(RING if ranks == 2 else RING3), **CHECKED}
    expect_on_every_rank(ranks, fit, name, settings, error=ParityError, match=match)


@pytest.mark.quick("Centred")
@pytest.mark.parametrize("name", THIRD)
def test_what_has_begun_by_the_third_step_is_compared_with_one_process(name: str) -> None:
    match = "does not compute what it computes in one process"
    expect_on_every_rank(2, fit, name, {**RING, **CHECKED}, error=ParityError, match=match)


def agreed(rank: int, world_size: int, name: str) -> tuple[torch.Tensor, list[int]]:
    """Weights, and in which steps ranks had more to say than their vote."""
    steps: list[int] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            step_vote, "gather_facts", lambda fact, *_, **__: steps.append(fact["step"])
        )
        got, _ = fit(rank, world_size, name, {**RING, **CHECKED})
    return got, steps


def test_right_factors_cost_no_agreement() -> None:
    """Numbers of targets, which differ; the first step tells those that go with them."""
    want, _ = run_ranks(1, fit, "Weighted", None)[0]
    for got, steps in run_ranks(2, agreed, "Weighted"):
        close(got, want)
        assert steps == [1]


def test_a_declared_loss_clears_none_that_is_not_declared() -> None:
    settings = {**RING3, "parity_check": "off"}
    match = "not known what this loss is a mean over"
    expect_on_every_rank(3, fit, "Declaring", settings, error=ConfigError, match=match)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("ranks", "settings", "window"),
    [
        (2, RING, 1),
        (3, {**RING3, "data_parallel": "fsdp"}, 2),
        pytest.param(2, {**ULYSSES, "data_parallel": "zero1"}, 1, marks=pytest.mark.nightly),
        pytest.param(3, RING3, 2, marks=pytest.mark.nightly),
        pytest.param(2, {**ULYSSES, "data_parallel": "fsdp"}, 1, marks=pytest.mark.nightly),
    ],
)
def test_a_mean_by_hand_that_begins_later_is_compared_once(
    ranks: int, settings: Settings, window: int
) -> None:
    want, _ = run_ranks(1, fit, "ByHand", None, window)[0]
    every = run_ranks(ranks, fit, "ByHand", {**settings, **CHECKED}, window, timeout=60)
    assert ["agree on" in line for line in every[0][1]] == [True, True]
    for got, _ in every:
        close(got, want)


@pytest.mark.nightly
def test_a_loss_that_the_check_does_not_see_is_refused() -> None:
    match = "not known what this loss is a mean over.*left out: .*known kind"
    settings = {**RING, **CHECKED, "parity_tokens": 16}
    expect_on_every_rank(2, fit, "AtFullLength", settings, error=ConfigError, match=match)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("ranks", "settings"), [(2, ULYSSES), (3, {**RING3, "data_parallel": "fsdp"})]
)
def test_the_micro_batch_that_asks_is_looked_at(ranks: int, settings: Settings) -> None:
    """It is not the last one of its window."""
    want, _ = run_ranks(1, fit, "OfWindows", None, 3)[0]
    every = run_ranks(ranks, fit, "OfWindows", {**settings, **CHECKED}, 3, timeout=60)
    assert ["agree on" in line for line in every[0][1]] == [True, True]
    for got, _ in every:
        close(got, want)


@pytest.mark.nightly
def test_a_wrong_micro_batch_within_a_window_is_refused() -> None:
    match = "does not compute what it computes in one process"
    expect_on_every_rank(
        2, fit, "WrongOfWindows", {**RING, **CHECKED}, 3, error=ParityError, match=match
    )


class Moving(modules.Healthy):
    """Steps count themselves, and keep a mean of a rank's own tokens."""

    steps: torch.Tensor
    center: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("center", torch.zeros(modules.VOCAB))
        self.shift = torch.nn.Parameter(torch.zeros(modules.VOCAB), requires_grad=False)

    def loss(self, logits: torch.Tensor, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            self.steps += 1
            self.center.lerp_(logits.mean((0, 1)), 0.5)
            self.shift.copy_(self.center)
        return super().loss(logits, batch)


def warned(rank: int, world_size: int, settings: Settings) -> list[str]:
    loader: Any = DataLoader(modules.rows(4), batch_size=2)  # type: ignore[arg-type]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trainer_of(world_size, {**settings, "parity_check": "off"}).fit(Moving(), loader)
    said = (str(each.message) for each in found)
    return [line.split()[3] for line in said if line.startswith("steps write to")]


@pytest.mark.parametrize(("ranks", "settings"), [(2, RING), (3, RING3)])
def test_state_of_a_rank_s_own_tokens_is_warned_of_by_name(ranks: int, settings: Settings) -> None:
    """Not what all ranks write alike."""
    first, *others = run_ranks(ranks, warned, settings)
    assert first == ["center", "shift"]
    assert not any(others)


def recomputed(rank: int, world_size: int) -> tuple[int, int]:
    module, rows = Recomputing(), modules.rows(4)
    for row in rows:
        row["labels"][len(row["labels"]) // 4 : 3 * len(row["labels"]) // 4] = -100  # of rank 1
    ScaledBlock.calls = 0
    trainer = trainer_of(world_size, {**RING, **CHECKED})
    trainer.fit(module, DataLoader(rows, batch_size=2))  # type: ignore[arg-type]
    return trainer.global_step, ScaledBlock.calls


@pytest.mark.nightly
def test_a_look_at_a_loss_computes_no_layer_again() -> None:
    """A rank without targets does not look: the others would wait for it."""
    first, second = run_ranks(2, recomputed)
    assert first == second
    assert first[0] == 2

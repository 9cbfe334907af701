"""Losses of loops of one's own: known, declared, checked, or refused at the first backward."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from lightning_cp import ContextParallelMixin
from lightning_cp.errors import ConfigError, LightningCPError
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
from tests.ranks.strategies.test_fabric import Loop

pytestmark = LET_EMPTY


def token_losses(loop: Loop, batch: Batch) -> torch.Tensor:
    """[B, L], 0 where nothing counts."""
    logits, labels = loop.logits(batch), batch["labels"]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)


def mean_by_hand(loop: Loop, batch: Batch) -> torch.Tensor:
    return token_losses(loop, batch).sum() / (batch["labels"] != -100).sum().clamp(min=1)


def declared_by_hand(loop: Loop, batch: Batch) -> torch.Tensor:
    strategy: Any = loop.fabric.strategy
    return token_losses(loop, batch).sum() / strategy.count_targets(batch["labels"] != -100)


def preferences(loop: Loop, batch: Batch) -> torch.Tensor:
    """As DPO: of each row's sum, which no rank has by itself."""
    chosen, rejected = token_losses(loop, batch).sum(1)
    return -F.logsigmoid(0.1 * (chosen - rejected) + 0.3)


def preferences_of_whole_rows(loop: Loop, batch: Batch) -> torch.Tensor:
    losses = token_losses(loop, batch)
    strategy: Any = loop.fabric.strategy
    whole = strategy.unshard(losses) if loop.parallel else losses
    chosen, rejected = whole.sum(1)
    return -F.logsigmoid(0.1 * (chosen - rejected) + 0.3)


def perplexity(loop: Loop, batch: Batch) -> torch.Tensor:
    return loop.loss(batch).exp()


def of_two_means(loop: Loop, batch: Batch) -> torch.Tensor:
    return loop.loss(batch) * loop.loss(batch)


def of_its_tokens(loop: Loop, batch: Batch) -> torch.Tensor:
    """A sum, divided by what all processes are to divide by."""
    return loop.loss(batch) * (batch["labels"] != -100).sum() / 40


def where_there_are_targets(loop: Loop, batch: Batch) -> torch.Tensor:
    """Nothing, by hand, on a rank without any."""
    if (batch["labels"] != -100).any():
        return loop.loss(batch)
    return 0 * loop.logits(batch).sum()


def by_hand_where_there_are_targets(loop: Loop, batch: Batch) -> torch.Tensor:
    """As ``where_there_are_targets``, of a loss that is not known."""
    if (batch["labels"] != -100).any():
        return mean_by_hand(loop, batch)
    return 0 * loop.loss(batch).nan_to_num()


def with_a_penalty(loop: Loop, batch: Batch) -> torch.Tensor:
    return loop.loss(batch) + 1e-3 * loop.logits(batch).logsumexp(-1).square().mean()


def trained(
    rank: int,
    world_size: int,
    settings: Settings | None,
    way: Any,
    let: str = "",
    count: int = 4,
) -> Any:
    """Two samples a step; ``let`` says what lets a loss of no known kind pass."""
    loop = Loop(world_size, settings)
    strategy: Any = loop.fabric.strategy
    losses: list[torch.Tensor] = []
    try:
        for step, whole in enumerate(loop.batches(count, use_distributed_sampler=False)):
            if let == "checked" and loop.parallel and not step:
                strategy.check_parity(whole, lambda batch: way(loop, batch))
            if let == "checked and declared" and not step:
                strategy.check_parity(whole, partial(declared_by_hand, loop))
            batch = loop.shard(whole)
            if loop.parallel and (let == "declared" or (let == "declared once" and not step)):
                strategy.count_targets(batch["labels"] != -100)
            loss = way(loop, batch)
            loop.fabric.backward(loss)
            losses.append(loop.shown(loss))
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    finally:
        loop.end()
    return losses, weights(loop.model)


@lru_cache(maxsize=8)
def alone(way: Any, count: int = 4) -> Any:
    return run_ranks(1, trained, None, way, "", count)[0]


@pytest.mark.parametrize(
    "way",
    [mean_by_hand, preferences, perplexity, of_two_means, of_its_tokens, with_a_penalty],
)
def test_a_loss_of_no_known_kind_is_refused_at_the_first_backward(way: Any) -> None:
    match = (
        r"not known what this loss is a mean over.*fabric.strategy.count_targets\(mask or number\).*"
        r"fabric.strategy.sequence_sum\(values\), sequence_mean, .*labels='none'.*"
        r"fabric.strategy.check_parity\(batch, step\)"
    )
    expect_on_every_rank(2, trained, RING, way, error=ConfigError, match=match)


@pytest.mark.parametrize("let", ["declared", "checked"])
def test_a_mean_by_hand_is_exact_once_it_was_declared_or_checked(let: str) -> None:
    for got in run_ranks(2, trained, RING, mean_by_hand, let):
        close(got, alone(mean_by_hand))


KEPT = partial(F.cross_entropy, label_smoothing=0.1)
"""Refers to PyTorch's function, which no strategy replaces within it."""


def of_a_kept_function(loop: Loop, batch: Batch) -> torch.Tensor:
    return KEPT(loop.logits(batch).flatten(0, 1), batch["labels"].flatten())


def test_a_function_that_is_kept_from_before_setup_is_exact_once_it_was_checked() -> None:
    """The check must see it as the steps do, not as a known loss."""
    for got in run_ranks(2, trained, RING, of_a_kept_function, "checked"):
        close(got, alone(of_a_kept_function))


def by_hand_from_the_second_step_on(loop: Loop, batch: Batch) -> torch.Tensor:
    return (mean_by_hand if loop.optimizer.state else Loop.loss)(loop, batch)


def test_a_check_of_a_known_loss_clears_no_other_one() -> None:
    match = (
        r"not known what this loss is a mean over.*check_parity\(batch, step\) \(the loss that it"
    )
    settings, way = RING, by_hand_from_the_second_step_on
    expect_on_every_rank(2, trained, settings, way, "checked", error=ConfigError, match=match)


@pytest.mark.quick("3-declared once", "2-checked and declared")
@pytest.mark.parametrize("let", ["declared once", "checked and declared"])
@pytest.mark.parametrize(("ranks", "settings"), [(2, RING), (3, RING3)], ids=["2", "3"])
def test_a_declared_loss_clears_none_that_is_not_declared(
    ranks: int, settings: Settings, let: str
) -> None:
    match = "not known what this loss is a mean over"
    expect_on_every_rank(
        *(ranks, trained, settings, mean_by_hand, let), error=ConfigError, match=match
    )


def of_fewer_targets(loop: Loop, batch: Batch) -> torch.Tensor:
    """Of labels that are cut in the step, which nothing declares."""
    labels = batch["labels"].where(batch["input_ids"] % 2 > 0, -100)
    return F.cross_entropy(loop.logits(batch).flatten(0, 1), labels.flatten())


def by_its_number(loop: Loop, batch: Batch) -> torch.Tensor:
    """Times the targets of a batch, of those of a window."""
    return loop.loss(batch) * (batch["labels"] != -100).sum().item() / 80


def by_the_whole_number(loop: Loop, batch: Batch) -> torch.Tensor:
    strategy: Any = loop.fabric.strategy
    labels = strategy.unshard(batch["labels"]) if loop.parallel else batch["labels"]
    return loop.loss(batch) * (labels != -100).sum().item() / 80


def stepped(
    rank: int, world_size: int, settings: Settings, way: Any, checked: bool = False
) -> None:
    """One step, which must not change a weight."""
    loop = Loop(world_size, settings)
    strategy: Any = loop.fabric.strategy
    before = weights(loop.model)
    try:
        for whole in loop.batches(2, use_distributed_sampler=False):
            if checked:
                strategy.check_parity(whole, lambda batch: way(loop, batch))
            loop.fabric.backward(way(loop, loop.shard(whole)))
            loop.optimizer.step()
    finally:
        loop.end()
        assert torch.equal(weights(loop.model), before)


GRIDS = pytest.mark.parametrize(
    ("ranks", "settings"),
    [(2, RING), (3, RING3), (2, ULYSSES), (4, HYBRID)],
    ids=["ring 2", "ring 3", "ulysses 2", "hybrid"],
)


@pytest.mark.quick("ring 3", "ulysses 2")
@GRIDS
def test_a_number_that_differs_between_ranks_is_refused(ranks: int, settings: Settings) -> None:
    match = (
        r"step 1: a loss is multiplied or divided by \d+ on rank \d and by \d+ on rank \d, which share a "
        r"sample.*unshard\(labels\).*No rank has stepped"
    )
    expect_on_every_rank(ranks, stepped, settings, by_its_number, error=ConfigError, match=match)


def by_its_number_within(loop: Loop, batch: Batch) -> torch.Tensor:
    """A regulariser of a rank's own number, which no other one shows."""
    own = (batch["labels"] != -100).sum().item()
    weight = next(iter(loop.model.parameters()))
    return loop.loss(batch) + (weight * own).square().mean()


@pytest.mark.quick("ring 3")
@GRIDS
def test_a_number_within_a_regulariser_is_refused_where_it_differs(
    ranks: int, settings: Settings
) -> None:
    match = "step 1: a loss is multiplied or divided by .*No rank has stepped"
    expect_on_every_rank(
        *(ranks, stepped, settings, by_its_number_within), error=ConfigError, match=match
    )


@pytest.mark.nightly
@GRIDS
def test_a_number_of_the_whole_sample_is_exact(ranks: int, settings: Settings) -> None:
    want = alone(by_the_whole_number)
    for got in run_ranks(ranks, trained, settings, by_the_whole_number):
        close(got, want)


def declared_times_its_own(loop: Loop, batch: Batch) -> torch.Tensor:
    """A coefficient that follows what a rank has measured."""
    loss = declared_by_hand(loop, batch)
    return loss * loss.item()


def test_a_declared_loss_times_a_number_of_a_rank_is_refused() -> None:
    match = r"tokens of its loss do not weigh the same.* is \d.* on rank 0 and \d.* on rank 1"
    expect_on_every_rank(
        2, stepped, ULYSSES, declared_times_its_own, error=ConfigError, match=match
    )


def towards(make: Any) -> Any:
    """Pulls a parameter to a tensor, besides."""

    def way(loop: Loop, batch: Batch) -> torch.Tensor:
        first = next(iter(loop.model.parameters()))
        logits = loop.logits(batch)
        pull = (first - make(logits.detach()).expand(first.shape)).square().mean()
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()) + 0.5 * pull

    return way


def towards_its_tokens(loop: Loop, batch: Batch) -> torch.Tensor:
    """Their mean logit, which each rank has of its own."""
    return towards(lambda logits: logits.mean())(loop, batch)


def towards_a_number(loop: Loop, batch: Batch) -> torch.Tensor:
    return towards(lambda logits: torch.tensor(0.1))(loop, batch)


@pytest.mark.quick("ring 3", "hybrid")
@GRIDS
def test_a_parameter_beside_a_rank_s_own_tensor_is_refused(ranks: int, settings: Settings) -> None:
    match = r"made of parameters and of another tensor.*rank 0 and.*not known what this loss is"
    expect_on_every_rank(
        ranks, stepped, settings, towards_its_tokens, error=ConfigError, match=match
    )


def test_a_parameter_beside_the_same_tensor_everywhere_is_exact() -> None:
    for got in run_ranks(2, trained, RING, towards_a_number):
        close(got, alone(towards_a_number))


def whole_losses(loop: Loop, batch: Batch) -> torch.Tensor:
    losses = token_losses(loop, batch)
    strategy: Any = loop.fabric.strategy
    return strategy.unshard(losses) if loop.parallel else losses


def whole_by_its_count(loop: Loop, batch: Batch) -> torch.Tensor:
    """A whole sum over the number of a rank's targets."""
    return whole_losses(loop, batch).sum() / (batch["labels"] != -100).sum()


def whole_with_its_baseline(loop: Loop, batch: Batch) -> torch.Tensor:
    """Rows weighted by how far their reward is from a mean over the rank's own tokens."""
    rewards = torch.tensor([1.0, 2.0]) - loop.logits(batch).detach().mean()
    return (whole_losses(loop, batch).sum(1) * rewards).mean()


def whole_with_a_baseline(loop: Loop, batch: Batch) -> torch.Tensor:
    """The same by a mean over all tokens, beside a mean over targets."""
    logits = loop.logits(batch).detach().mean(-1)
    strategy: Any = loop.fabric.strategy
    rewards = torch.tensor([1.0, 2.0])
    rewards = rewards - (strategy.unshard(logits) if loop.parallel else logits).mean()
    return loop.loss(batch) + (whole_losses(loop, batch).sum(1) * rewards).mean()


@pytest.mark.quick("ring 3-whole_by_its_count", "hybrid-whole_with_its_baseline")
@pytest.mark.parametrize("way", [whole_by_its_count, whole_with_its_baseline])
@GRIDS
def test_whole_rows_with_a_rank_s_own_tensor_are_refused(
    ranks: int, settings: Settings, way: Any
) -> None:
    match = r"sequences or parameters with something.*on rank 0 and.*sequence_sum.*not known what"
    expect_on_every_rank(ranks, stepped, settings, way, error=ConfigError, match=match)


@pytest.mark.quick("hybrid")
@GRIDS
def test_whole_rows_with_a_tensor_of_whole_rows_are_exact(ranks: int, settings: Settings) -> None:
    want = alone(whole_with_a_baseline)
    for got in run_ranks(ranks, trained, settings, whole_with_a_baseline):
        close(got, want)


def whole_by_its_number(loop: Loop, batch: Batch) -> torch.Tensor:
    """Less apart than the rounding that is let pass in gradients."""
    return whole_losses(loop, batch).sum() * (1 + 1e-6 * torch.distributed.get_rank())


@pytest.mark.quick("ring 3")
@GRIDS
def test_whole_rows_times_a_rank_s_own_number_are_refused(ranks: int, settings: Settings) -> None:
    match = r"a loss is multiplied or divided by 1 on rank 0 and by .* on rank 1.*No rank has"
    way = whole_by_its_number
    expect_on_every_rank(ranks, stepped, settings, way, error=ConfigError, match=match)


def by_its_sample(loop: Loop, batch: Batch) -> torch.Tensor:
    """Times another number in each data rank."""
    return loop.loss(batch) * (1 + torch.distributed.get_rank() // 2)


@pytest.mark.nightly
def test_ranks_with_other_samples_may_have_other_numbers() -> None:
    settings = {**RING, "data_parallel_size": 2}
    every = run_ranks(4, trained, settings, by_its_sample)
    assert all(torch.equal(got[1], every[0][1]) for got in every)


def without_a_number(loop: Loop, batch: Batch) -> torch.Tensor:
    return loop.loss(batch) * float("nan")


def left_out(rank: int, world_size: int, settings: Settings | None, way: Any) -> torch.Tensor:
    """Four steps; an error ends the second one after its backward, and the loop leaves its batch out."""
    loop = Loop(world_size, settings)
    try:
        for step, whole in enumerate(loop.batches(8, use_distributed_sampler=False)):
            try:
                loop.fabric.backward((way if step == 1 else Loop.loss)(loop, loop.shard(whole)))
                if step == 1:
                    raise ArithmeticError("a batch that cannot be used")
                loop.optimizer.step()
            except ArithmeticError:
                pass
            loop.optimizer.zero_grad()
    finally:
        loop.end()
    return weights(loop.model)


@pytest.mark.quick("of_fewer_targets-ring", "without_a_number-fsdp")
@pytest.mark.parametrize("more", [{}, {"data_parallel": "fsdp"}], ids=["ring", "fsdp"])
@pytest.mark.parametrize("way", [of_fewer_targets, without_a_number])
def test_a_batch_that_an_error_has_ended_can_be_left_out(way: Any, more: Settings) -> None:
    want = run_ranks(1, left_out, None, way)[0]
    for got in run_ranks(2, left_out, {**RING, **more}, way):
        close(got, want)


@pytest.mark.parametrize("let", ["", "checked"])
def test_a_rank_without_targets_may_have_a_loss_of_its_own(let: str) -> None:
    settings = {**RING, "check_finite": False}
    for got in run_ranks(2, trained, settings, where_there_are_targets, let, 6):
        close(got, alone(where_there_are_targets, 6))


def begun_without_targets(rank: int, world_size: int, way: Any) -> None:
    """One step, on the batch in which one rank has no targets."""
    loop = Loop(world_size, RING)
    try:
        *_, whole = loop.batches(6, use_distributed_sampler=False)
        loop.fabric.backward(way(loop, loop.shard(whole)))
    finally:
        loop.end()


def test_what_is_refused_on_a_rank_with_targets_ends_the_others_too() -> None:
    expect_on_every_rank(
        2,
        begun_without_targets,
        by_hand_where_there_are_targets,
        error=LightningCPError,
        match="not known what this loss is a mean over",
    )


@pytest.mark.quick("ring 3")
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [(2, ULYSSES), (3, RING3), (4, HYBRID), (2, {**RING, "data_parallel": "fsdp"})],
    ids=["ulysses 2", "ring 3", "hybrid", "ring 2, fsdp"],
)
def test_a_loss_of_whole_rows_is_that_of_one_process(ranks: int, settings: Settings) -> None:
    want = alone(preferences_of_whole_rows)
    for got in run_ranks(ranks, trained, settings, preferences_of_whole_rows):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


class Preferring(ContextParallelMixin, Small):
    """The same in a Trainer."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.whole = whole

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        logits, labels = self.logits(batch), batch["labels"]
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        rows = losses.view_as(labels)
        chosen, rejected = (self.unshard(rows) if self.whole else rows).sum(1)
        return -F.logsigmoid(0.1 * (chosen - rejected) + 0.3)


def fitted(rank: int, world_size: int, settings: Settings | None, whole: bool) -> torch.Tensor:
    module = Preferring(whole)
    trainer_of(world_size, settings).fit(module, loader(4))
    return weights(module)


@pytest.mark.nightly
def test_in_a_trainer_too() -> None:
    want = run_ranks(1, fitted, None, True)[0]
    for got in run_ranks(2, fitted, {**RING, "parity_check": "off"}, True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    match = r"not known what this loss is a mean over.*self.count_targets.*parity_check='off' away"
    settings = {**RING, "parity_check": "off"}
    expect_on_every_rank(2, fitted, settings, False, error=ConfigError, match=match)


# -- targets that are drawn -----------------------------------------------------------------------


class Drawing(ContextParallelMixin, Small):
    """Masks tokens at random, each rank its own; remembers what it drew."""

    def __init__(self, drawn: list[torch.Tensor] | None) -> None:
        super().__init__()
        self.given, self.drawn = list(drawn or []), []

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        labels = batch["labels"]
        if self.given:
            mask = self.given.pop(0)
        else:
            mask = torch.rand(labels.shape) < 0.4
            self.drawn.append(self.unshard(mask.long()).bool())
        masked = mask & (labels != -100)
        logits = self.logits({**batch, "input_ids": batch["input_ids"].where(~masked, 1)})
        self.count_targets(masked)
        return F.cross_entropy(logits.flatten(0, 1), labels.where(masked, -100).flatten())


def drew(
    rank: int, world_size: int, settings: Settings | None, window: int, drawn: Any = None
) -> Any:
    torch.manual_seed(rank)
    module = Drawing(drawn)
    trainer_of(world_size, settings, accumulate_grad_batches=window).fit(module, loader(8))
    return weights(module), module.drawn


@pytest.mark.nightly
def test_random_masks_are_weighted_as_the_same_draws_in_one_process() -> None:
    every = run_ranks(3, drew, {**RING3, "parity_check": "off"}, 2)
    drawn = every[0][1]
    assert len(drawn) == 4
    assert not torch.equal(drawn[0][:, :10], drawn[0][:, 10:20])
    want = run_ranks(1, drew, None, 2, drawn)[0][0]
    for got, _ in every:
        close(got, want)


def of_all_targets(rank: int, world_size: int, drawn: Any) -> torch.Tensor:
    """One process: each target of two batches on two data ranks weighs the same."""
    module = Small()
    optimizer = module.configure_optimizers()
    batches = list(loader(8))
    for first in (0, 2):
        of_window = [(at, batches[at]) for at in range(first, first + 2)]
        total = 0
        for at, batch in of_window:
            masked = drawn[at] & (batch["labels"] != -100)
            ids = batch["input_ids"].where(~masked, 1)
            logits = module.logits({**batch, "input_ids": ids}).flatten(0, 1)
            targets = batch["labels"].where(masked, -100).flatten()
            F.cross_entropy(logits, targets, reduction="sum").backward()
            total += int(masked.sum())
        for p in module.parameters():
            assert p.grad is not None
            p.grad /= total
        optimizer.step()
        optimizer.zero_grad()
    return weights(module)


@pytest.mark.nightly
def test_in_a_window_all_targets_that_were_drawn_weigh_the_same() -> None:
    settings = {**RING, "parity_check": "off", "token_weighting": "global"}
    every = run_ranks(2, drew, settings, 2)
    want = run_ranks(1, of_all_targets, every[0][1])[0]
    for got, _ in every:
        close(got, want)


class Bert(ContextParallelMixin, Small):
    """A Hugging Face model that is given labels which the step has drawn."""

    def __init__(self) -> None:
        super().__init__()
        sizes: Any = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
        drop: Any = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config = BertConfig(vocab_size=VOCAB, num_attention_heads=4, **sizes, **drop)
        self.model = BertForMaskedLM(config).double()

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        ids = batch["input_ids"]
        masked = (ids * 7919 % 97 < 45) & (batch["labels"] != -100)
        self.count_targets(masked)
        labels = ids.where(masked, -100)
        return self.model(input_ids=ids.where(~masked, 1), labels=labels).loss


def bert(rank: int, world_size: int, settings: Settings | None) -> torch.Tensor:
    module = Bert()
    trainer_of(world_size, settings).fit(module, loader(4))
    return weights(module)


@pytest.mark.nightly
def test_a_hugging_face_model_takes_labels_that_the_step_drew() -> None:
    want = run_ranks(1, bert, None)[0]
    for got in run_ranks(2, bert, {**RING, "labels": "auto"}):
        close(got, want)


class Causal(ContextParallelMixin, Small):
    """A Hugging Face model that shifts the batch's labels; what is declared is ``more`` than it counts."""

    def __init__(self, more: int) -> None:
        super().__init__()
        sizes: Any = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
        config = LlamaConfig(vocab_size=VOCAB, num_attention_heads=4, **sizes)
        self.model, self.more = LlamaForCausalLM(config).double(), more

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        if "shift_labels" in batch:
            self.count_targets((batch["shift_labels"] != -100).sum() + self.more)
        return self.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss


def causal(rank: int, world_size: int, settings: Settings | None, more: int) -> torch.Tensor:
    module = Causal(more)
    trainer_of(world_size, settings).fit(module, loader(4))
    return weights(module)


@pytest.mark.nightly
def test_what_is_declared_for_a_hugging_face_model_is_what_it_counts() -> None:
    settings = {**RING, "labels": "auto", "parity_check": "off"}
    want = run_ranks(1, causal, None, 0)[0]
    for got in run_ranks(2, causal, settings, 0):  # whose rotary embeddings are in float32
        torch.testing.assert_close(got, want, rtol=0, atol=1e-8)
    match = r"a loss counted other targets than its rank is weighted by: \d+ on rank 0"
    expect_on_every_rank(2, causal, settings, 1, error=ConfigError, match=match)

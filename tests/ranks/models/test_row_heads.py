"""Classes, numbers and rewards of rows, by transformers' own heads: one process's loss and gradients."""

from __future__ import annotations

from functools import lru_cache
from typing import Any
from unittest.mock import PropertyMock, patch

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_cp.errors import ConfigError
from lightning_cp.fabric import UlyssesRingStrategy
from lightning_cp.models.hf.pooling import has_row_head
from tests.helpers.models.later import is_refused
from tests.helpers.models.steps import Case
from tests.helpers.models.zoo import make
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.helpers.pool.environment import PoolEnvironment
from tests.helpers.strategies.small import (
    HYBRID,
    RING,
    RING3,
    ULYSSES,
    Settings,
    alone,
    close,
    whole,
)

LENGTH = 29
ENCODER: dict[str, Any] = {
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "max_position_embeddings": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "LlamaForSequenceClassification": {},
    "Qwen2ForSequenceClassification": {},
    "MistralForSequenceClassification": {},
    "GPT2ForSequenceClassification": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "GPTNeoXForSequenceClassification": {},
    "BertForSequenceClassification": ENCODER,
    "ElectraForSequenceClassification": {**ENCODER, "embedding_size": 32},
    "DistilBertForSequenceClassification": {
        "dim": 32,
        "n_heads": 4,
        "n_layers": 2,
        "hidden_dim": 48,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "seq_classif_dropout": 0.0,
    },
    "ModernBertForSequenceClassification": {
        "global_attn_every_n_layers": 1,
        "cls_token_id": 1,
        "sep_token_id": 2,
    },
}
ANSWERS: dict[str, dict[str, Any]] = {
    "BertForQuestionAnswering": ENCODER,
    "LlamaForQuestionAnswering": {},
}


def batches(kind: str, sides: str) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(4)
    found: list[dict[str, torch.Tensor]] = []
    for _ in range(2):
        ids = torch.randint(3, 43, (3, LENGTH), generator=generator)
        mask = torch.ones_like(ids)
        if sides == "right":
            mask[0, -9:], mask[2, -1:] = 0, 0
        if sides == "left":
            mask[1, :12] = 0
        labels: Any = {
            "classes": torch.randint(0, 3, (3,), generator=generator),
            "numbers": torch.randn(3, generator=generator).double(),
            "several": (torch.rand(3, 3, generator=generator) < 0.5).double(),
        }[kind]
        found.append({"input_ids": ids * mask, "attention_mask": mask, "labels": labels})
    return found


def trained(
    rank: int,
    world_size: int,
    settings: Settings | None,
    name: str,
    kind: str,
    sides: str,
    *,
    embeds: bool = False,
    frozen: bool = False,
    **more: Any,
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    torch.manual_seed(3)
    if settings is None:
        alone()
    strategy: Any = "auto" if settings is None else UlyssesRingStrategy(**settings)
    plugins: Any = [] if settings is None else [PoolEnvironment()]
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy, plugins=plugins)
    fabric.launch()
    made = make(
        name, Case(), num_labels=1 if kind == "numbers" else 3, **{**MODELS[name], **more}
    ).double()
    made.base_model.requires_grad_(not frozen)
    trained = [p for p in made.parameters() if p.requires_grad]
    model: Any
    model, optimizer = fabric.setup(made, torch.optim.SGD(trained, lr=0.1))
    loader: Any = fabric.setup_dataloaders(
        torch.utils.data.DataLoader(batches(kind, sides), batch_size=None),  # type: ignore[arg-type]
        use_distributed_sampler=False,
    )
    losses: list[torch.Tensor] = []
    for batch in loader:
        part = batch if settings is None else strategy.shard_batch(batch)
        if embeds:
            part["inputs_embeds"] = made.get_input_embeddings()(part.pop("input_ids"))
        output = model(**part)
        fabric.backward(output.loss)
        losses += [output.loss.detach(), output.logits.detach()]
        optimizer.step()
        optimizer.zero_grad()
    if settings is not None:
        strategy.end_step()
    return losses, {n: whole(p.detach()).clone() for n, p in made.named_parameters()}


@lru_cache(maxsize=16)
def one(name: str, kind: str, sides: str) -> Any:
    return run_ranks(1, trained, None, name, kind, sides)[0]


def check(ranks: int, settings: Settings, name: str, kind: str, sides: str) -> None:
    losses, weights = one(name, kind, sides)
    for got, of_rank in run_ranks(ranks, trained, settings, name, kind, sides):
        torch.testing.assert_close(got, losses, rtol=1e-10, atol=1e-11)
        torch.testing.assert_close(of_rank, weights, rtol=1e-10, atol=1e-11)


@pytest.mark.quick("LlamaForSequenceClassification", "BertForSequenceClassification")
@pytest.mark.parametrize("name", MODELS)
def test_a_head_takes_its_token_from_any_rank(name: str) -> None:
    check(2, RING, name, "classes", "right")


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", ["LlamaForSequenceClassification", "ElectraForSequenceClassification"]
)
@pytest.mark.parametrize("kind", ["classes", "numbers", "several"])
@pytest.mark.parametrize("sides", ["", "left", "right"])
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [(2, RING), (3, RING3), (2, ULYSSES), (4, HYBRID), (2, {**RING, "data_parallel": "fsdp"})],
    ids=["ring 2", "ring 3", "ulysses 2", "hybrid", "fsdp"],
)
def test_kinds_of_labels_and_padding(
    ranks: int, settings: Settings, name: str, kind: str, sides: str
) -> None:
    if name.startswith("Electra") and sides == "left":
        expect_on_every_rank(
            *(ranks, trained, settings, name, kind, sides),
            error=ConfigError,
            match="the first position of each row, which is padding in row 1 .*padding_side='right'",
        )
    else:
        check(ranks, settings, name, kind, sides)


@pytest.mark.parametrize(
    "name", ["BertForSequenceClassification", "LlamaForSequenceClassification"]
)
def test_a_head_behind_a_frozen_model(name: str) -> None:
    """No gradient reaches the token that it takes."""
    (want,) = run_ranks(1, trained, None, name, "classes", "right", frozen=True)
    for got in run_ranks(3, trained, RING3, name, "classes", "right", frozen=True):
        close(got, want)


def test_a_value_at_padding_is_refused_by_name() -> None:
    """Without token ids, transformers takes the last position of each row, whatever is there."""
    expect_on_every_rank(
        *(2, trained, RING, "LlamaForSequenceClassification", "classes", "right"),
        embeds=True,
        error=ConfigError,
        match="the last position of each row, which is padding in row 0 .*Pad on the left",
    )


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_token_that_the_mask_excludes_is_refused_by_name(ranks: int) -> None:
    """Rows are padded with another id than the config's: one process reads what padding attends to."""
    settings = RING if ranks == 2 else {"mode": "ring"}
    expect_on_every_rank(
        *(ranks, trained, settings, "LlamaForSequenceClassification", "classes", "right"),
        pad_token_id=2,
        error=ConfigError,
        match="position 28 of row 0, .* not pad_token_id=2, but attention_mask excludes it.*Set config",
    )


def set_up(
    world_size: int, settings: Settings | None, name: str, **more: Any
) -> tuple[Fabric, Any, Any, Any]:
    """Fabric without labels of tokens, a model, and both as Fabric's."""
    torch.manual_seed(3)
    if settings is None:
        alone()
    strategy: Any = "auto" if settings is None else UlyssesRingStrategy(labels="none", **settings)
    plugins: Any = [] if settings is None else [PoolEnvironment()]
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy, plugins=plugins)
    fabric.launch()
    made = make(name, Case(), **more).double()
    return fabric, made, *fabric.setup(made, torch.optim.SGD(made.parameters(), lr=0.1))


def preferred(
    rank: int, world_size: int, settings: Settings | None, sides: str
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Two steps of a reward model that is a head of one number, called without labels: rows are pairs."""
    fabric, made, model, optimizer = set_up(
        world_size, settings, "LlamaForSequenceClassification", num_labels=1
    )
    strategy: Any = fabric.strategy
    losses: list[torch.Tensor] = []
    for batch in batches("numbers", sides):
        del batch["labels"]
        rewards = model(**(batch if settings is None else strategy.shard_batch(batch))).logits
        loss = -F.logsigmoid(rewards[:1] - rewards[1:]).mean()
        fabric.backward(loss)
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    if settings is not None:
        strategy.end_step()
    return losses, {n: whole(p.detach()).clone() for n, p in made.named_parameters()}


@pytest.mark.quick("ring 3-right")
@pytest.mark.parametrize("sides", ["left", "right"])
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [(3, RING3), (2, ULYSSES), (2, {**RING, "data_parallel": "fsdp"})],
    ids=["ring 3", "ulysses 2", "fsdp"],
)
def test_rewards_of_a_head_without_labels(ranks: int, settings: Settings, sides: str) -> None:
    losses, weights = run_ranks(1, preferred, None, sides)[0]
    for got, of_rank in run_ranks(ranks, preferred, settings, sides):
        torch.testing.assert_close(got, losses, rtol=1e-10, atol=1e-11)
        torch.testing.assert_close(of_rank, weights, rtol=1e-10, atol=1e-11)


def answered(
    rank: int, world_size: int, settings: Settings | None, name: str, sides: str
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Two steps on the tokens where an answer begins and ends, as the refusal of these arguments advises.

    One process takes the model's own loss of rows without padding, which it does not exclude.
    """
    fabric, made, model, optimizer = set_up(world_size, settings, name, **ANSWERS[name])
    strategy: Any = fabric.strategy
    losses: list[torch.Tensor] = []

    def softmax(logits: torch.Tensor, mask: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        real = logits.masked_fill(mask == 0, -torch.inf)
        return F.cross_entropy(real if settings is None else strategy.unshard(real), at)

    for batch in batches("classes", sides):
        ends = batch.pop("labels") + 7
        part = batch if settings is None else strategy.shard_batch(batch)
        if settings is None and not sides:
            loss = model(**part, start_positions=ends - 5, end_positions=ends).loss
        else:
            output, mask = model(**part), part["attention_mask"]
            starts = softmax(output.start_logits, mask, ends - 5)
            loss = (starts + softmax(output.end_logits, mask, ends)) / 2
        fabric.backward(loss)
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    if settings is not None:
        strategy.end_step()
    return losses, {n: whole(p.detach()).clone() for n, p in made.named_parameters()}


@pytest.mark.quick("ring 3-right-Bert*", "ulysses 2--Llama*")
@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("sides", ["", "right"])
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [(3, RING3), (2, ULYSSES), (2, {**RING, "data_parallel": "fsdp"})],
    ids=["ring 3", "ulysses 2", "fsdp"],
)
def test_answers_are_a_softmax_over_whole_rows(
    ranks: int, settings: Settings, name: str, sides: str
) -> None:
    losses, weights = run_ranks(1, answered, None, name, sides)[0]
    for got, of_rank in run_ranks(ranks, answered, settings, name, sides):
        torch.testing.assert_close(got, losses, rtol=1e-10, atol=1e-11)
        torch.testing.assert_close(of_rank, weights, rtol=1e-10, atol=1e-11)


def test_the_loss_of_a_model_without_a_head_is_not_read() -> None:
    """transformers warns of its unknown ``loss_type``, as if the user had set one."""
    sizes: dict[str, Any] = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_hidden_layers": 1}
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    loss = PropertyMock(side_effect=AssertionError)
    with patch.object(type(model.model), "loss_function", new=loss):
        assert not has_row_head(model.model)


def test_a_head_of_another_kind_is_refused_by_name() -> None:
    name = "ModernBertForSequenceClassification"
    match = f"{name} makes one value of a sequence.*sequence_mean in the step, with labels='none'"
    if is_refused("modernbert"):
        match = f"{name} does not use transformers' attention interface"
    expect_on_every_rank(
        *(2, trained, RING, name, "classes", ""),
        classifier_pooling="mean",
        error=ConfigError,
        match=match,
    )

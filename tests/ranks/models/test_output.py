"""What a model makes of a whole sequence is refused, by its name or once its use is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_cp.errors import ConfigError
from tests.helpers.models.steps import LENGTH, ROWS, Case, make_batch, make_model, start
from tests.helpers.models.zoo import make
from tests.helpers.pool import expect_on_every_rank, run_ranks

Batch = dict[str, torch.Tensor]

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert(kind: str) -> Callable[[], Any]:
    return lambda: make(kind, Case(), **NO_DROPOUT)


def without_pooler() -> Any:
    model = bert("BertModel")()
    model.pooler = None
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: make_model(Case()),
    "answers": lambda: make("LlamaForQuestionAnswering", Case()),
    "bert choice": bert("BertForMultipleChoice"),
    "bert next sentence": bert("BertForNextSentencePrediction"),
    "bert": bert("BertModel"),
    "bert without pooler": without_pooler,
    "bert two heads": bert("BertForPreTraining"),
}


def plainly(model: Any, batch: Batch) -> Any:
    return model(input_ids=batch["input_ids"])


def in_a_tuple(model: Any, batch: Batch) -> Any:
    return model(input_ids=batch["input_ids"], return_dict=False)


def choosing(model: Any, batch: Batch) -> Any:
    return model(input_ids=batch["input_ids"][:, None])


def answering(model: Any, batch: Batch) -> Any:
    given = {"start_positions": torch.zeros(ROWS).long(), "end_positions": torch.ones(ROWS).long()}
    return model(input_ids=batch["input_ids"], **given)


def last_tokens(model: Any, batch: Batch) -> Any:
    model(input_ids=batch["input_ids"], logits_to_keep=5).logits.sum().backward()


def second_head(model: Any, batch: Batch) -> Any:
    model(input_ids=batch["input_ids"]).seq_relationship_logits.sum().backward()


def first_head(model: Any, batch: Batch) -> Any:
    model(input_ids=batch["input_ids"]).prediction_logits.sum().backward()


def within_a_step(
    rank: int, world_size: int, name: str, call: Callable[[Any, Batch], Any], predicts: bool
) -> torch.Tensor | None:
    torch.manual_seed(3)
    model = MODELS[name]().double()
    runtime = start(1, 2, model, labels="aligned")
    try:
        local = runtime.shard(make_batch(Case()), needs_labels=not predicts)
        runtime.begin_step()
        runtime.step.mark_loss_weighted()
        with torch.set_grad_enabled(not predicts):
            output = call(model, local)
        return None if output is None else runtime.step.unshard_output(output[0].detach(), {})
    finally:
        runtime.detach()


def after_a_failed_call(model: Any, batch: Batch) -> Any:
    """The step takes an error of the model's, and calls it again."""

    def fail(*_: Any) -> None:
        raise RuntimeError("within the model")

    hook = model.embeddings.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="within the model"):
        plainly(model, batch)
    hook.remove()
    return plainly(model, batch)


ONE_VALUE = "makes one value of a sequence"
POOLED = r"BertModel returns pooler_output.*model.pooler = None.*sequence_pick\(hidden, 0\)"


@pytest.mark.quick(
    "bert next sentence-*-False",
    "answers-*-False",
    "bert-in_a_tuple-*-True",
    "bert-after_*-True",
    "bert-plainly-*-False",
)
@pytest.mark.parametrize("predicts", [False, True])
@pytest.mark.parametrize(
    ("name", "call", "match"),
    [
        ("bert choice", choosing, f"BertForMultipleChoice {ONE_VALUE}"),
        ("bert next sentence", plainly, f"BertForNextSentencePrediction {ONE_VALUE}"),
        ("answers", answering, "LlamaForQuestionAnswering is called with start_positions"),
        ("bert", plainly, POOLED),
        ("bert", in_a_tuple, POOLED),
        ("bert", after_a_failed_call, POOLED),
    ],
)  # fmt: skip
def test_one_value_for_a_sequence_is_refused(
    name: str, call: Callable[[Any, Batch], Any], match: str, predicts: bool
) -> None:
    args = (name, call, predicts)
    expect_on_every_rank(2, within_a_step, *args, error=ConfigError, match=match, timeout=20)


UNUSED = "has no dimension along the sequence"


@pytest.mark.parametrize(
    ("name", "call", "match"),
    [
        ("llama", last_tokens, rf"uses logits \(3, 5, 43\) of LlamaForCausalLM, which {UNUSED}"),
        ("bert two heads", second_head, rf"uses seq_relationship_logits \(3, 2\) of .* {UNUSED}"),
    ],
)  # fmt: skip
def test_what_is_not_along_the_sequence_may_not_be_used(
    name: str, call: Callable[[Any, Batch], Any], match: str
) -> None:
    args = (name, call, False)
    expect_on_every_rank(2, within_a_step, *args, error=ConfigError, match=match, timeout=20)


def test_it_may_be_left_unused() -> None:
    run_ranks(2, within_a_step, "bert two heads", first_head, False, timeout=20)


@pytest.mark.parametrize("name", ["bert without pooler", "answers"])
def test_values_of_each_token_work(name: str) -> None:
    torch.manual_seed(3)
    want = plainly(MODELS[name]().double(), make_batch(Case()))[0].detach()
    assert want.shape[:2] == (ROWS, LENGTH)
    for got in run_ranks(2, within_a_step, name, plainly, True, timeout=20):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)

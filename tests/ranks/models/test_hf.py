"""Hugging Face models under context parallelism: one step equals the one-process model, or is refused.

What one process does with padding: its tokens' own outputs are computed (behind a row they see the row,
before it nothing), but nobody attends to them and they have no targets. Here they are not computed at
all, so their logits differ and nothing else does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_cp.errors import ConfigError
from lightning_cp.models.hf.labels import label_alignment
from tests.helpers.models.later import transformers_version
from tests.helpers.models.steps import (
    Case,
    Outcome,
    make_batch,
    make_bert,
    make_gpt2,
    make_llama,
    make_model,
    one_process,
    parallel,
    start,
)
from tests.helpers.pool import expect_on_every_rank, run_ranks

SIZES = {"ring 2": (1, 2), "ulysses 2": (2, 1), "hybrid 2x2": (2, 2)}

OWN_LOSS = {"labels", "batch", "positional", "forward"}
"""Calls whose loss is computed by the model, in float32."""


@lru_cache(maxsize=32)
def plain(case: Case) -> Outcome:
    """The one-process result; checkpointing is not asked for there."""
    return one_process(replace(case, checkpoint=""))


def compare(case: Case, ulysses: int, ring: int) -> list[Outcome]:
    """Loss, every gradient, and the logits of every token that is not padding, on every rank."""
    want = plain(case)
    results = run_ranks(ulysses * ring, parallel, case, ulysses, ring, timeout=30)
    batch = make_batch(case)
    valid = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    tolerance = 1e-6 if case.call in OWN_LOSS else 1e-12
    for got in results:
        assert got.loss == pytest.approx(want.loss, rel=tolerance)
        torch.testing.assert_close(got.logits[valid], want.logits[valid], rtol=1e-12, atol=1e-14)
        assert got.gradients.keys() == want.gradients.keys()
        for name, gradient in want.gradients.items():
            scale = max(float(gradient.abs().max()), 1e-3)
            worst = float((got.gradients[name] - gradient).abs().max()) / scale
            assert worst <= tolerance, (name, worst)
    return results


# -- rows of different lengths, and packed documents ------------------------------------------------


@pytest.mark.quick("right-ring 2")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("batch", ["plain", "right", "left", "both", "packed"])
def test_llama_equals_one_process(batch: str, size: str) -> None:
    case = Case(batch=batch, use_cache=batch != "packed")
    results = compare(case, *SIZES[size])
    assert [result.calls for result in results] == [2] * len(results), "one call a layer"
    if batch in (
        "right",
        "packed",
    ):  # the comparison can tell: without the mask one process differs
        other = one_process(replace(case, batch="plain"))
        assert abs(other.loss - plain(case).loss) > 1e-3


@pytest.mark.quick("packed")
@pytest.mark.parametrize("batch", ["right", "packed"])
def test_gpt2_equals_one_process(batch: str) -> None:
    compare(Case(model="gpt2", batch=batch, use_cache=batch != "packed"), 1, 2)


@pytest.mark.quick("labels-both", "logits-plain")
@pytest.mark.parametrize("batch", ["plain", "both"])
@pytest.mark.parametrize("call", ["logits", "labels"])
def test_bert_attends_in_both_directions(batch: str, call: str) -> None:
    compare(Case(model="bert", batch=batch, call=call), 1, 2)


def test_eager_models_equal_themselves() -> None:
    """transformers' eager attention rounds its softmax to float32."""
    case = Case(batch="right", attention="eager")
    want = plain(case)
    for got in run_ranks(2, parallel, case, 1, 2, timeout=30):
        assert got.loss == pytest.approx(want.loss, rel=1e-7)


# -- how steps call models --------------------------------------------------------------------------


@pytest.mark.quick("bert-batch", "bert-hidden", "llama-labels", "llama-positional")
@pytest.mark.parametrize("call", ["labels", "batch", "positional", "hidden"])
@pytest.mark.parametrize("model", ["llama", "bert"])
def test_every_way_to_call_a_model(model: str, call: str) -> None:
    compare(Case(model=model, batch="both", call=call), 1, 2)


@pytest.mark.quick("llama-forward", "bert-hidden forward")
@pytest.mark.parametrize("call", ["forward", "hidden forward"])
@pytest.mark.parametrize("model", ["llama", "bert"])
def test_a_forward_that_is_called_past_its_hooks(model: str, call: str) -> None:
    """Of plain rows, which have targets at the seams between ranks."""
    compare(Case(model=model, call=call), 1, 2)


def copied(rank: int, world_size: int) -> bool:
    """A copy that is made within a step, as callbacks make them of averaged weights."""
    case = Case()
    model = make_model(case)
    runtime = start(1, 2, model)
    runtime.shard(make_batch(case), needs_labels=True)
    runtime.begin_step()
    twin = copy.deepcopy(model)
    runtime.detach()
    with torch.no_grad():
        want = model(**make_batch(case)).loss
        for parameter in model.parameters():
            parameter.zero_()
        return torch.equal(twin(**make_batch(case)).loss, want)


def test_a_copy_that_is_made_within_a_step_is_a_plain_model() -> None:
    assert run_ranks(2, copied, timeout=20) == [True] * 2


def call_copy(rank: int, world_size: int, within: bool) -> None:
    """By zigzag positions one rank of two would take its tokens for packed, and refuse them alone."""
    case = Case()
    model = make_model(case)
    runtime = start(1, 2, model)
    try:
        twin = copy.deepcopy(model)
        local = runtime.shard(make_batch(case), needs_labels=True)
        runtime.begin_step()
        twin = copy.deepcopy(model) if within else twin
        twin(**local)
    finally:
        runtime.detach()


@pytest.mark.parametrize("within", [True, False])
def test_a_copy_that_is_called_within_a_step_is_refused(within: bool) -> None:
    match = "a copy of a LlamaForCausalLM is called within a step.*Make it before"
    expect_on_every_rank(2, call_copy, within, error=ConfigError, match=match, timeout=20)


@pytest.mark.quick("keep-labels-hybrid 2x2", "reentrant-logits-ring 2")
@pytest.mark.parametrize("size", ["ring 2", "hybrid 2x2"])
@pytest.mark.parametrize("call", ["logits", "labels"])
@pytest.mark.parametrize("checkpoint", ["reentrant", "plain", "keep"])
def test_gradient_checkpointing_changes_nothing(checkpoint: str, call: str, size: str) -> None:
    """Also where a rank has no targets, and cross-entropy over nothing is NaN."""
    results = compare(Case(batch="both", checkpoint=checkpoint, call=call), *SIZES[size])
    assert all(result.calls == 4 for result in results), "every block was run again"


def whole_block(rank: int, world_size: int) -> float:
    """The head is checkpointed together with attention, and one rank has no target."""
    from torch.utils.checkpoint import checkpoint

    case = Case()
    model = make_model(case)
    runtime = start(1, 2, model)
    local = runtime.shard(make_batch(case), needs_labels=True)
    runtime.begin_step()
    forward: Callable[..., Any] = lambda ids: model(input_ids=ids).logits.tanh()  # noqa: E731
    logits: Any = checkpoint(forward, local["input_ids"], use_reentrant=False)
    loss = F.cross_entropy(logits.flatten(0, 1), local["shift_labels"].flatten())
    runtime.step.scale_loss(loss).backward()
    runtime.step.after_backward(model.parameters())
    average = float(runtime.step.average(loss))
    runtime.detach()
    return average


def test_a_checkpoint_around_everything() -> None:
    case = Case()
    logits, labels = plain(case).logits.tanh(), make_batch(case)["labels"]
    want = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    for got in run_ranks(2, whole_block, timeout=30):
        assert got == pytest.approx(float(want), rel=1e-12)


# -- what is refused --------------------------------------------------------------------------------


def refused(rank: int, world_size: int, what: str) -> None:
    case = Case(use_cache=False)
    model = make_model(case)
    runtime = start(1, 2, model)
    try:
        batch = make_batch(case)
        if what == "dense mask in the batch":
            length = batch["input_ids"].shape[1]
            batch["attention_mask"] = torch.ones(3, 1, length, length)
        local = runtime.shard(batch, needs_labels=True)
        runtime.begin_step()
        STEPS[what](model, local)
    finally:
        runtime.detach()


def fewer_labels(model: Any, batch: dict[str, torch.Tensor]) -> None:
    batch["labels"] = batch["labels"].masked_fill(batch["labels"] > 9, -100)
    model(input_ids=batch["input_ids"], labels=batch["labels"])


def fewer_labels_beside_ours(model: Any, batch: dict[str, torch.Tensor]) -> None:
    """The shifted labels that were added to the batch would hide the change."""
    batch["labels"] = batch["labels"].masked_fill(batch["labels"] > 9, -100)
    model(**batch)


def fewer_targets(model: Any, batch: dict[str, torch.Tensor]) -> None:
    targets = torch.full_like(batch["shift_labels"], -100)
    targets[:, :3] = 1
    model(input_ids=batch["input_ids"], labels=batch["labels"], shift_labels=targets)


def fewer_targets_in_place(model: Any, batch: dict[str, torch.Tensor]) -> None:
    batch["shift_labels"][:, 3:] = -100
    model(**batch)


def with_cache(model: Any, batch: dict[str, torch.Tensor]) -> None:
    from transformers import DynamicCache

    name = "past_key_values" if transformers_version() < (5, 24) else "cache"
    model(input_ids=batch["input_ids"], **{name: DynamicCache(config=model.config)})


def generate(model: Any, batch: dict[str, torch.Tensor]) -> None:
    model.generate(batch["input_ids"], max_new_tokens=1, do_sample=False, use_cache=False)


def dense_mask(model: Any, batch: dict[str, torch.Tensor]) -> None:
    length = batch["input_ids"].shape[1]
    model(input_ids=batch["input_ids"], attention_mask=torch.zeros(3, 1, length, length).double())


def dropping(model: Any, batch: dict[str, torch.Tensor]) -> None:
    for module in model.modules():
        module.attention_dropout = 0.1
    model(input_ids=batch["input_ids"])


STEPS: dict[str, Callable[[Any, dict[str, torch.Tensor]], None]] = {
    "changed labels": fewer_labels,
    "changed labels beside ours": fewer_labels_beside_ours,
    "other targets": fewer_targets,
    "other targets in place": fewer_targets_in_place,
    "cache": with_cache,
    "generate": generate,
    "dense mask in the batch": lambda model, batch: None,
    "dense mask in the step": dense_mask,
    "dropout": dropping,
}

REFUSALS = {
    "changed labels": "labels= are not the batch's, or were changed after it was sharded",
    "changed labels beside ours": "labels= are not the batch's, or were changed after it was sharded",
    "other targets": "weighted by the targets that were counted then",
    "other targets in place": "weighted by the targets that were counted then",
    "cache": "a key/value cache cannot be used under context parallelism. Pass none in a step",
    "generate": "LlamaForCausalLM.generate was called within a step.*Generate with context_parallel_size=1",
    "dense mask in the batch": r"an attention_mask of shape \(3, 1, 37, 37\) cannot be sharded",
    "dense mask in the step": r"dense attention mask of shape \(3, 1, 20, 20\)",
    "dropout": r"attention dropout must be 0\.0",
}


@pytest.mark.quick("changed labels", "changed labels beside ours", "other targets in place")
@pytest.mark.parametrize("what", REFUSALS)
def test_steps_that_would_be_silently_wrong(what: str) -> None:
    expect_on_every_rank(2, refused, what, error=ConfigError, match=REFUSALS[what], timeout=20)


def own_targets(rank: int, world_size: int) -> float:
    """The step shifts by itself, from the targets it was given."""
    case = Case()
    model = make_model(case)
    runtime = start(1, 2, model)
    local = runtime.shard(make_batch(case), needs_labels=True)
    runtime.begin_step()
    targets = local["shift_labels"]
    targets = torch.where(targets == 7, 8, targets)  # as many as before
    loss = model(input_ids=local["input_ids"], labels=local["labels"], shift_labels=targets).loss
    average = float(runtime.step.average(loss))
    runtime.detach()
    return average


@pytest.mark.nightly
def test_targets_of_the_step_itself() -> None:
    case = Case()
    model, batch = make_model(case), make_batch(case)
    targets = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    targets = torch.where(targets == 7, 8, targets)
    want = float(model(**batch, shift_labels=targets).loss.detach())
    assert want != pytest.approx(float(model(**batch).loss.detach()))
    assert run_ranks(2, own_targets, timeout=20) == pytest.approx([want] * 2, rel=1e-6)


# -- how labels are read ----------------------------------------------------------------------------


def test_the_kind_of_labels_is_known_by_the_models_own_loss() -> None:
    assert label_alignment(make_llama(Case())) == "shift"
    assert label_alignment(make_gpt2(Case())) == "shift"
    assert label_alignment(make_bert(Case())) == "aligned"


def test_a_model_without_a_loss_says_nothing() -> None:
    """The head, the loss and the shift are the user's own."""
    llama, bert = make_llama(Case()), make_bert(Case())
    assert label_alignment(llama.model) is None
    assert label_alignment(bert.bert) is None


class Backbone(nn.Module):
    """A Hugging Face model with a head of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = make_llama(Case()).model


def attach_backbone(rank: int, world_size: int) -> None:
    start(1, 2, Backbone())


def test_a_headless_model_needs_a_declaration() -> None:
    expect_on_every_rank(
        2,
        attach_backbone,
        error=ConfigError,
        match="not known how Backbone reads.*labels='aligned'",
    )

"""A model's own loss under context parallelism: one process's, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_cp.config import StrategyConfig
from lightning_cp.errors import ConfigError
from lightning_cp.runtime.runtime import ContextParallelRuntime
from tests.helpers.models.steps import Case, make_batch, make_model, start
from tests.helpers.models.zoo import make
from tests.helpers.pool import expect_on_every_rank, run_ranks

Batch = dict[str, torch.Tensor]

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def double_heads() -> Any:
    from transformers import GPT2Config, GPT2DoubleHeadsModel

    sizes: dict[str, Any] = {"vocab_size": 43, "n_embd": 32, "n_layer": 2, "n_head": 4}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    options: dict[str, Any] = {"num_labels": 2}
    return GPT2DoubleHeadsModel(GPT2Config(**sizes, **dropout, **options))


def mixtral(coefficient: float, routers: bool = True) -> Any:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": routers}
    return make("MixtralForCausalLM", Case(), **experts, router_aux_loss_coef=coefficient)


def other_router() -> Any:
    """It adds something that no router of transformers does."""
    from transformers import MixtralForCausalLM

    class OtherRouter(MixtralForCausalLM):
        def forward(self, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
            output = super().forward(*args, labels=labels, **kwargs)
            at = 0 if isinstance(output, tuple) else "loss"
            changed = output[at] + 0.1 * self.lm_head.weight.square().mean()
            if isinstance(output, tuple):
                return changed, *output[1:]
            output["loss"] = changed
            return output

    model = mixtral(0.1)
    model.__class__ = OtherRouter
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "other router": other_router,
    "llama": lambda: make_model(Case()),
    "bert": lambda: make_model(Case(model="bert")),
    "gpt2 double": double_heads,
    "bert pretraining": lambda: make("BertForPreTraining", Case(), **NO_DROPOUT),
    "electra pretraining": lambda: make("ElectraForPreTraining", Case(), **NO_DROPOUT),
    "router": lambda: mixtral(0.1),
    "router with coefficient 0": lambda: mixtral(0.0),
    "router without logits": lambda: mixtral(0.1, routers=False),
}


def model_of(name: str) -> Any:
    torch.manual_seed(3)
    return MODELS[name]().double().train()


def step(rank: int, world_size: int, name: str, call: str, labels: str) -> float:
    """The loss of one step; ``labels`` as it is given to the strategy."""
    model = model_of(name)
    runtime = ContextParallelRuntime(StrategyConfig(ulysses_size=1, ring_size=2, labels=labels))
    runtime.meshes.build(2, "cpu", None, model)
    try:
        runtime.attach(model, {}, needs_labels=True)
        local = runtime.shard(make_batch(Case()), needs_labels=True)
        runtime.begin_step()
        loss = CALLS[call](model, local)
        runtime.check_step()
        return float(runtime.step.average(loss))
    finally:
        runtime.detach()


def own_loss(model: Any, batch: Batch) -> torch.Tensor:
    return model(input_ids=batch["input_ids"], labels=batch["labels"]).loss


def past_hooks(model: Any, batch: Batch) -> torch.Tensor:
    return model.forward(input_ids=batch["input_ids"], labels=batch["labels"]).loss


def in_a_tuple(model: Any, batch: Batch) -> torch.Tensor:
    return model(input_ids=batch["input_ids"], labels=batch["labels"], return_dict=False)[0]


def with_next_sentence(model: Any, batch: Batch) -> torch.Tensor:
    pairs = torch.tensor([0, 1, 0])
    given = {"input_ids": batch["input_ids"], "next_sentence_label": pairs}
    return model(**given, labels=batch["labels"]).loss


def counting_targets(model: Any, batch: Batch) -> torch.Tensor:
    count = (batch["labels"] != -100).sum() + 1
    ids, labels = batch["input_ids"], batch["labels"]
    return model(input_ids=ids, labels=labels, num_items_in_batch=count).loss


def in_the_step(model: Any, batch: Batch) -> torch.Tensor:
    output = model(input_ids=batch["input_ids"])
    logits = output.logits if hasattr(output, "logits") else output.prediction_logits
    return F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())


def of_the_model_inside(model: Any, batch: Batch) -> torch.Tensor:
    """The head is called by the step, which shifts by itself."""
    logits = model.lm_head(model.model(batch["input_ids"]).last_hidden_state)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def shifted_by_the_user(model: Any, batch: Batch) -> torch.Tensor:
    ids, labels = batch["input_ids"], batch["labels"]
    return model(input_ids=ids, labels=labels, shift_labels=labels).loss


def distilled(model: Any, batch: Batch) -> torch.Tensor:
    """A teacher is called without labels, for the divergence from it."""
    with torch.no_grad():
        teacher = model(input_ids=batch["input_ids"]).logits.roll(1, -1)
    return _with_divergence(model, batch, teacher)


def distilled_from_frozen(model: Any, batch: Batch) -> torch.Tensor:
    model.requires_grad_(False)
    teacher = model(input_ids=batch["input_ids"]).logits.roll(1, -1)
    model.requires_grad_(True)
    return _with_divergence(model, batch, teacher)


def _with_divergence(model: Any, batch: Batch, teacher: torch.Tensor) -> torch.Tensor:
    output = model(input_ids=batch["input_ids"], labels=batch["labels"])
    soft, hard = (x.log_softmax(-1) for x in (output.logits, teacher))
    each = F.kl_div(soft, hard, log_target=True, reduction="none").sum(-1)
    mask = batch["shift_labels"] != -100
    return output.loss + (each * mask).sum() / mask.sum()


def labelled_teacher(model: Any, batch: Batch) -> torch.Tensor:
    """Its loss is thrown away, and nothing says how the step reads labels for its own."""
    model.requires_grad_(False)
    own_loss(model, batch)
    model.requires_grad_(True)
    logits = model.lm_head(model.model(batch["input_ids"]).last_hidden_state)
    return F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())


CALLS: dict[str, Callable[[Any, Batch], torch.Tensor]] = {
    "labels": own_loss,
    "forward": past_hooks,
    "tuple": in_a_tuple,
    "next sentence": with_next_sentence,
    "count": counting_targets,
    "outside": in_the_step,
    "inside": of_the_model_inside,
    "shifted": shifted_by_the_user,
    "distilled": distilled,
    "frozen": distilled_from_frozen,
    "teacher": labelled_teacher,
}

INSTEAD = r".*loss in the step from batch\['shift_labels'\].*declare labels='shift'"
BY_ITSELF = "{} computes its loss by itself" + INSTEAD
ADDS = "OtherRouter returns another loss than the mean over targets.*router_aux_loss_coef=0"


@pytest.mark.quick(
    "bert pretraining-next sentence-auto-match1",
    "bert-labels-shift-labels='shift' is declared, but BertForMaskedLM does not shift",
)
@pytest.mark.parametrize(
    ("name", "call", "labels", "match"),
    [
        ("gpt2 double", "labels", "auto", BY_ITSELF.format("GPT2DoubleHeadsModel")),
        ("bert pretraining", "next sentence", "auto", BY_ITSELF.format("BertForPreTraining")),
        ("electra pretraining", "labels", "auto", BY_ITSELF.format("ElectraForPreTraining")),
        ("gpt2 double", "forward", "auto", BY_ITSELF.format("GPT2DoubleHeadsModel")),
        ("other router", "labels", "auto", ADDS),
        ("other router", "forward", "auto", ADDS),
        ("other router", "tuple", "auto", ADDS),
        ("llama", "count", "auto", "called with num_items_in_batch=.*Leave num_items_in_batch away"),
        ("bert", "count", "auto", "called with num_items_in_batch="),
        ("llama", "labels", "aligned", "labels='aligned' is declared, but LlamaForCausalLM shifts"),
        ("bert", "labels", "shift", "labels='shift' is declared, but BertForMaskedLM does not shift"),
        ("llama", "outside", "auto", "the model was called without labels, so the loss is computed"),
        ("llama", "inside", "auto", "the model was called without labels, so the loss is computed"),
        ("llama", "teacher", "auto", "the model was called without labels, so the loss is computed"),
    ],
)  # fmt: skip
def test_other_losses_are_refused(name: str, call: str, labels: str, match: str) -> None:
    expect_on_every_rank(2, step, name, call, labels, error=ConfigError, match=match, timeout=20)


def one_process(name: str, call: str) -> float:
    batch = make_batch(Case())
    batch["shift_labels"] = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    return float(CALLS[call](model_of(name), batch).detach())


@pytest.mark.quick("llama-outside-shift", "bert-tuple-auto")
@pytest.mark.parametrize(
    ("name", "call", "labels"),
    [
        ("router", "labels", "auto"),
        ("router", "forward", "auto"),
        ("router", "tuple", "auto"),
        ("router with coefficient 0", "labels", "auto"),
        ("router without logits", "labels", "auto"),
        ("llama", "tuple", "auto"),
        ("llama", "outside", "shift"),
        ("llama", "shifted", "aligned"),
        ("llama", "distilled", "auto"),
        ("llama", "frozen", "auto"),
        ("bert", "tuple", "auto"),
        ("gpt2 double", "outside", "shift"),
        ("bert pretraining", "outside", "shift"),
    ],
)
def test_what_works_equals_one_process(name: str, call: str, labels: str) -> None:
    want = one_process(name, call)
    assert run_ranks(2, step, name, call, labels, timeout=20) == pytest.approx([want] * 2, rel=1e-6)


# -- evaluation -------------------------------------------------------------------------------------


def evaluate(rank: int, world_size: int, what: str) -> None:
    """A step that is not training: in evaluation mode, and attached as the Trainer does."""
    model = model_of("llama").eval()
    runtime = ContextParallelRuntime(StrategyConfig(ulysses_size=1, ring_size=2))
    runtime.meshes.build(2, "cpu", None, model)
    try:
        runtime.attach(model, {}, needs_labels=what != "predict")
        batch = make_batch(Case())
        if what == "no labels":
            del batch["labels"]
        local = runtime.shard(batch, needs_labels=False)
        runtime.begin_step()
        with torch.inference_mode():
            labels = {"labels": local["labels"]} if what == "with labels" else {}
            called = model.model if what == "inside" else model
            called(input_ids=local["input_ids"], **labels)
        runtime.check_step()
    finally:
        runtime.detach()


@pytest.mark.parametrize("what", ["without labels", "inside"])
def test_a_loss_outside_of_the_model_is_refused_in_evaluation_too(what: str) -> None:
    expect_on_every_rank(
        2, evaluate, what, error=ConfigError, match="called without labels", timeout=20
    )


@pytest.mark.parametrize("what", ["with labels", "predict", "no labels"])
def test_evaluation_that_works(what: str) -> None:
    run_ranks(2, evaluate, what, timeout=20)


# -- the plain model afterwards ---------------------------------------------------------------------


class Holder(nn.Module):
    """Holds a model."""

    def __init__(self) -> None:
        super().__init__()
        self.model = model_of("llama")


def replaced(rank: int, world_size: int) -> tuple[bool, bool]:
    holder = Holder()
    fresh = "_loss_function" in vars(holder.model)
    runtime = start(1, 2, holder, labels="shift")
    runtime.shard(make_batch(Case()), needs_labels=True)
    runtime.begin_step()
    inside = "_loss_function" in vars(holder.model)
    runtime.end_step()
    after = "_loss_function" in vars(holder.model)
    runtime.detach()
    assert not fresh
    return inside, after


def test_the_loss_function_is_the_models_own_outside_of_a_step() -> None:
    assert run_ranks(2, replaced, timeout=20) == [(True, False)] * 2

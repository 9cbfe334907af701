"""``chunked_loss=``: Hugging Face models whose head makes no logits have the losses of one process."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lightning_cp.config import StrategyConfig
from lightning_cp.errors import ConfigError
from lightning_cp.memory.chunked_logits import ChunkedLogits
from lightning_cp.runtime.model_binding import make_step_patches
from lightning_cp.runtime.runtime import ContextParallelRuntime
from tests.helpers.memory.sizes import Largest
from tests.helpers.models.later import BLOOMS_LOSS, transformers_version
from tests.helpers.models.matrix import whole_sequence
from tests.helpers.models.steps import (
    VOCAB,
    Case,
    Outcome,
    make_batch,
    make_model,
    one_process,
    start,
)
from tests.helpers.pool import expect_on_every_rank, run_ranks

SIZES = {"alone": (1, 1), "ring 2": (1, 2), "ulysses 2": (2, 1), "hybrid 2x2": (2, 2)}
MODELS = ("llama", "gemma2_capped", "cohere", "granite", "gpt2", "bert", "bloom", "phi3")
FLOAT32 = {"cohere"}
"""Its norms are."""
CHUNK = 5


def labelled(runtime: ContextParallelRuntime, case: Case, model: Any) -> tuple[Any, Any]:
    """Output of the model, called with labels in a step that has begun, and its batch."""
    local = runtime.shard(make_batch(case), needs_labels=True)
    runtime.begin_step()
    given = {key: local[key] for key in ("attention_mask", "position_ids") if key in local}
    return model(input_ids=local["input_ids"], labels=local["labels"], **given), local


def parallel(rank: int, world_size: int, case: Case, ulysses: int, ring: int) -> Outcome:
    """One step with the loss in chunks; the most numbers of any tensor are in place of the calls."""
    model = make_model(case)
    runtime = start(ulysses, ring, model, chunked_loss=CHUNK, labels="auto")
    try:
        with Largest() as found:
            output, local = labelled(runtime, case, model)
            runtime.step.scale_loss(output.loss).backward()
        runtime.step.after_backward(model.parameters())
        assert isinstance(output.logits, ChunkedLogits)
        assert output.logits.shape == (*local["input_ids"].shape, VOCAB)
        gradients: dict[str, torch.Tensor] = {}
        for name, p in model.named_parameters():
            if p.grad is not None:
                if world_size > 1:
                    dist.all_reduce(p.grad)
                gradients[name] = p.grad / world_size
        loss = float(runtime.step.average(output.loss).detach())
        runtime.end_step()
        assert "forward" not in vars(model.get_output_embeddings())
        assert not isinstance(model(input_ids=local["input_ids"].clone()).logits, ChunkedLogits)
        return Outcome(loss, gradients, torch.empty(0), found.numel)
    finally:
        runtime.detach()


@lru_cache(maxsize=32)
def plain(case: Case) -> Outcome:
    """All logits, and cross-entropy in float64, in one process."""
    return one_process(case)


def compare(case: Case, ulysses: int, ring: int) -> None:
    """Eager attention is float32 inside: what ranks share is compared with our reference kernel, alone."""
    want = plain(case) if ulysses * ring == 1 else whole_sequence(case)
    tolerance = 1e-6 if case.model in FLOAT32 else 1e-12
    for got in run_ranks(ulysses * ring, parallel, case, ulysses, ring, timeout=30):
        assert got.loss == pytest.approx(want.loss, rel=tolerance)
        assert got.gradients.keys() == want.gradients.keys()
        for name, gradient in want.gradients.items():
            scale = max(float(gradient.abs().max()), 1e-3)
            assert float((got.gradients[name] - gradient).abs().max()) <= tolerance * scale, name


@pytest.mark.quick("bert-alone")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("model", MODELS)
def test_loss_and_gradients_are_those_of_one_process(model: str, size: str) -> None:
    case = Case(model=model, attention="eager" if model in ("bloom", "gemma2_capped") else "sdpa")
    if model == "bloom" and size != "alone" and transformers_version() < BLOOMS_LOSS.since:
        ulysses, ring = SIZES[size]
        expect_on_every_rank(
            ulysses * ring,
            parallel,
            case,
            ulysses,
            ring,
            error=ConfigError,
            match=BLOOMS_LOSS.match,
        )
        return
    compare(case, *SIZES[size])


@pytest.mark.nightly
@pytest.mark.parametrize("batch", ["right", "packed"])
@pytest.mark.parametrize("checkpoint", ["", "keep"])
def test_padded_packed_and_checkpointed(batch: str, checkpoint: str) -> None:
    case = Case(batch=batch, use_cache=False)
    want = plain(case)
    for got in run_ranks(2, parallel, replace(case, checkpoint=checkpoint), 1, 2, timeout=30):
        assert got.loss == pytest.approx(want.loss, rel=1e-12)


def sizes_of(rank: int, world_size: int, chunked: bool) -> int:
    """The most numbers of a tensor, in a step of a model with a large vocabulary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"vocab_size": 3000, "hidden_size": 8, "intermediate_size": 8}
    heads: dict[str, Any] = {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
    }
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False))
    runtime = start(1, 2, model, chunked_loss=CHUNK if chunked else False, labels="auto")
    try:
        with Largest() as found:
            output, _ = labelled(runtime, Case(), model)
            runtime.step.scale_loss(output.loss).backward()
        return found.numel
    finally:
        runtime.detach()


@pytest.mark.nightly
def test_no_tensor_is_as_large_as_the_logits() -> None:
    """20 tokens of 3 rows on each rank; the weight is [3000, 8]."""
    assert run_ranks(2, sizes_of, False) == [3 * 20 * 3000] * 2
    assert run_ranks(2, sizes_of, True) == [3000 * 8] * 2


# -- what else is done with logits ------------------------------------------------------------------


def in_step(model: Any, **settings: Any) -> Any:
    """Patches of one process, entered."""
    patches = make_step_patches(
        nn.ModuleList([model]), StrategyConfig(chunked_loss=CHUNK, **settings)
    )
    patches.begin()
    return patches


IDS = torch.arange(24).view(2, 12) % VOCAB


@pytest.mark.parametrize(
    "use",
    [
        lambda z: z.argmax(-1),
        lambda z: torch.argmax(z, -1),
        lambda z: z[:, :-1],
        lambda z: z.softmax(-1),
        lambda z: F.log_softmax(z, -1),
        lambda z: z * torch.ones(VOCAB),
        lambda z: z + z,
        lambda z: z == 1,
        lambda z: 1 / z,
        lambda z: z.view(2, -1),
        lambda z: z.flatten(),
        lambda z: z.to("meta"),
        lambda z: z.sum(),
        lambda z: z.detach(),
        lambda z: list(z),
        lambda z: copy.deepcopy(z),
        lambda z: torch.nn.CrossEntropyLoss(label_smoothing=0.1)(z.view(-1, VOCAB), IDS.flatten()),
        lambda z: F.cross_entropy(z.view(-1, VOCAB), IDS.flatten(), weight=torch.ones(VOCAB)),
        lambda z: F.cross_entropy(z.transpose(1, 2), IDS),
        lambda z: F.cross_entropy(torch.zeros(24, VOCAB), z),
    ],
)
def test_what_needs_the_logits_is_refused(use: Any) -> None:
    model = make_model(Case())
    patches = in_step(model)
    logits = model(input_ids=IDS, labels=IDS).logits
    with pytest.raises(ConfigError, match=r"chunked_loss= computes the loss without .*labels"):
        use(logits)
    patches.end()


def test_a_loss_outside_of_the_model_is_refused() -> None:
    model = make_model(Case())
    patches = in_step(model)
    logits = model(input_ids=IDS, labels=IDS).logits
    with pytest.raises(ConfigError, match="cross_entropy after the model has returned"):
        F.cross_entropy(logits.view(-1, VOCAB), IDS.flatten())
    patches.end()


def test_what_logits_tell_of_themselves() -> None:
    model = make_model(Case())
    patches = in_step(model)
    logits = model(input_ids=IDS, labels=IDS).logits
    assert logits.shape == (2, 12, VOCAB)
    assert logits.size(-1) == VOCAB
    assert (logits.dtype, logits.device, len(logits)) == (torch.float64, IDS.device, 2)
    assert logits.requires_grad
    assert logits.to(IDS.device).half().dtype == torch.float16
    assert logits.type_as(torch.zeros(1)).dtype == torch.float32
    assert "never made" in repr(logits)
    patches.end()


def test_without_labels_logits_are_made_and_that_is_said_once() -> None:
    model = make_model(Case())
    want = model(input_ids=IDS).logits
    patches = in_step(model)
    model(input_ids=IDS, labels=IDS)
    assert patches.pop_reports() == []
    for _ in range(2):
        assert torch.equal(model(input_ids=IDS).logits, want)
    (line,) = patches.pop_reports()
    assert line.startswith("chunked_loss: LlamaForCausalLM was called without labels=")
    assert torch.equal(model(input_ids=IDS).logits, want)
    assert patches.pop_reports() == []
    patches.end()
    assert torch.equal(model(input_ids=IDS).logits, want)


def test_a_copy_of_the_model_computes_with_its_own_weights() -> None:
    model = make_model(Case())
    patches = in_step(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.mul_(2)
        want = 2 * model(input_ids=IDS).logits
        torch.testing.assert_close(twin(input_ids=IDS, labels=IDS).logits, want)
    patches.end()


def test_an_error_in_the_model_leaves_nothing_behind() -> None:
    model = make_model(Case())
    patches = in_step(model)
    with pytest.raises(IndexError):
        model(input_ids=IDS, labels=IDS + VOCAB)
    want = model(input_ids=IDS, labels=IDS).loss
    patches.end()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    torch.testing.assert_close(want, model(input_ids=IDS, labels=IDS).loss, check_dtype=False)


# -- what is refused by name ------------------------------------------------------------------------


class OtherLinear(nn.Linear):
    """As LoRA's and quantised layers are."""


def with_head(head: Any) -> Any:
    model = make_model(Case())
    model.set_output_embeddings(head(model.lm_head))
    return model


def without_head() -> Any:
    return make_model(Case()).model


def parametrised(head: nn.Linear) -> nn.Module:
    return torch.nn.utils.parametrizations.weight_norm(head)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (without_head, r"none that has a head .*: LlamaModel\. .*linear_cross_entropy"),
        (lambda: nn.Linear(2, 2), "no Hugging Face model"),
        (lambda: with_head(lambda _: OtherLinear(32, VOCAB)), "LlamaForCausalLM is a OtherLinear"),
        (lambda: with_head(parametrised), "is a ParametrizedLinear"),
    ],
)
def test_models_without_a_plain_head(make: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        in_step(make())


def own_head(rank: int, world_size: int) -> None:
    """An engine that gathers the head by itself."""
    from tests.ranks.strategies.test_fabric import fabric_of

    model = make_model(Case())
    engine = {"data_parallel": "fsdp", "wrap_modules": ["lm_head"], "chunked_loss": CHUNK}
    fabric = fabric_of(world_size, {"ring_size": 2, "ulysses_size": 1, "labels": "auto", **engine})
    fabric.launch()
    wrapped: Any = fabric.setup_module(model)
    strategy: Any = fabric.strategy
    part = strategy.shard_batch(make_batch(Case()))
    wrapped(input_ids=part["input_ids"], labels=part["labels"])


def test_a_head_that_is_gathered_by_itself() -> None:
    match = "the head became a FSDPLinear.*Leave the head out of wrap_modules"
    expect_on_every_rank(2, own_head, error=ConfigError, match=match)

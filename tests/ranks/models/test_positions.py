"""Models that count positions in their own way: refused, unless the batch brings the positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_cp.errors import ConfigError, ShapeError
from lightning_cp.models.hf.positions import counts_positions_locally
from tests.helpers.models.later import all_families, needs
from tests.helpers.models.steps import (
    Case,
    Outcome,
    make_batch,
    make_model,
    one_process,
    parallel,
    start,
)
from tests.helpers.pool import expect_on_every_rank, run_ranks


def parallel_opt(rank: int, world_size: int, batch: str) -> Outcome:
    return parallel(rank, world_size, Case(model="opt", batch=batch), 1, 2)


@pytest.mark.quick("case1-*", "case2-*")
@pytest.mark.parametrize(
    ("case", "match"),
    [
        (Case(model="roberta"), "RobertaEmbeddings does not count positions from 0 on"),
        (Case(model="roberta", batch="right"), "Put the position_ids that it would make into the batch"),
        (Case(model="esm"), "EsmEmbeddings does not count positions from 0 on"),
        (Case(model="opt", batch="left"), "OPTLearnedPositionalEmbedding does not count positions"),
    ],
)  # fmt: skip
def test_models_that_count_otherwise_are_refused(case: Case, match: str) -> None:
    expect_on_every_rank(2, parallel, case, 1, 2, error=ConfigError, match=match, timeout=20)


@needs("opt")
def test_opt_without_left_padding_counts_from_zero() -> None:
    want = one_process(Case(model="opt", batch="right"))
    for got in run_ranks(2, parallel_opt, "right", timeout=20):
        assert got.loss == pytest.approx(want.loss, rel=1e-12)


def with_positions(rank: int, world_size: int) -> torch.Tensor:
    """RoBERTa with the positions that it would have made."""
    case = Case(model="roberta")
    model = make_model(case)
    runtime = start(1, 2, model)
    try:
        batch = make_batch(case)
        batch["input_ids"] = batch["input_ids"].clamp(min=3)  # none is padding
        batch["position_ids"] = torch.arange(1, 38).expand(3, -1)
        local = runtime.shard(batch, needs_labels=True)
        runtime.begin_step()
        logits = model(input_ids=local["input_ids"], position_ids=local["position_ids"]).logits
        return runtime.step.unshard_output(logits.detach(), {})
    finally:
        runtime.detach()


def test_positions_of_the_batch_are_taken() -> None:
    case = Case(model="roberta")
    ids = make_batch(case)["input_ids"].clamp(min=3)
    want = make_model(case)(input_ids=ids).logits.detach()
    for got in run_ranks(2, with_positions, timeout=20):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


def call_with(rank: int, world_size: int, what: str) -> None:
    """What the step makes of a rank's own tokens."""
    case = Case(model="gpt2", batch="packed" if what == "rows" else "plain", use_cache=False)
    model = make_model(case)
    runtime = start(1, 2, model)
    try:
        local = runtime.shard(make_batch(case), needs_labels=True)
        runtime.begin_step()
        ids = local["input_ids"]
        counted = torch.arange(ids.shape[1])
        given: dict[str, torch.Tensor | None] = {
            "counted": counted,
            "counted for each row": counted.expand_as(ids),
            "rows": None,
        }
        ids = torch.cat([ids, ids]) if what == "rows" else ids
        model(input_ids=ids, position_ids=given[what])
    finally:
        runtime.detach()


@pytest.mark.parametrize("what", ["counted", "counted for each row"])
def test_positions_of_the_step_itself_are_refused(what: str) -> None:
    match = "position_ids that the model was given are not the batch's"
    expect_on_every_rank(2, call_with, what, error=ConfigError, match=match, timeout=20)


def test_rows_without_positions_are_refused() -> None:
    match = "called with 6 rows, but the batch has 3, whose positions differ"
    expect_on_every_rank(2, call_with, "rows", error=ShapeError, match=match, timeout=20)


def both_ways(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The batch and a changed one, joined within the step."""
    ids = batch["input_ids"]
    return model(input_ids=torch.cat([ids, (7 * ids) % 43])).logits


def joined(rank: int, world_size: int, model: str) -> torch.Tensor:
    case = Case(model=model)
    module = make_model(case)
    runtime = start(1, 2, module)
    try:
        local = runtime.shard(make_batch(case), needs_labels=True)
        runtime.begin_step()
        return runtime.step.unshard_output(both_ways(module, local).detach(), {})
    finally:
        runtime.detach()


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_more_rows_than_the_batch_has(model: str) -> None:
    case = Case(model=model)
    want = both_ways(make_model(case), make_batch(case)).detach()
    for got in run_ranks(2, joined, model, timeout=20):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


# -- models that cannot be told positions -----------------------------------------------------------

DECODERS = ["Bart", "MBart", "Pegasus", "Marian", "Blenderbot", "BlenderbotSmall", "PLBart"]


def decoder(name: str) -> Any:
    import transformers

    sizes = {"vocab_size": 43, "d_model": 32, "max_position_embeddings": 64}
    layers = {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    kind = getattr(transformers, f"{name}ForCausalLM")
    return kind(kind.config_class(**sizes, **layers, **tokens, is_encoder_decoder=False))


def call_decoder(rank: int, world_size: int, name: str) -> None:
    model = decoder(name)
    runtime = start(1, 2, model)
    try:
        local = runtime.shard(make_batch(Case()), needs_labels=True)
        runtime.begin_step()
        model(input_ids=local["input_ids"], use_cache=False)
    finally:
        runtime.detach()


@pytest.mark.quick("Bart", "PLBart", "Pegasus")
@pytest.mark.parametrize("name", DECODERS)
def test_models_without_position_ids_are_refused(name: str) -> None:
    expect_on_every_rank(
        2, call_decoder, name, error=ConfigError, timeout=20,
        match=f"{name}ForCausalLM takes no position_ids, and neither does any model inside",
    )  # fmt: skip


def test_models_that_can_be_told_or_are_relative() -> None:
    from transformers import T5Config, T5EncoderModel

    assert counts_positions_locally([decoder("Bart")])
    assert not counts_positions_locally([make_model(Case())])
    sizes: dict[str, Any] = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 4}
    assert not counts_positions_locally([T5EncoderModel(T5Config(vocab_size=40, **sizes))])


@pytest.mark.parametrize("name", all_families())
def test_every_model_of_the_zoo_can_be_told(name: str) -> None:
    assert not counts_positions_locally([make_model(Case(model=name))])

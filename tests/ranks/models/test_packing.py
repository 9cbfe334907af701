"""Restarting positions: the documents that one process would see, or a refusal that says how to agree."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_cp.errors import ConfigError
from tests.helpers.models.later import needs
from tests.helpers.models.steps import Case, make_batch, make_model, one_process, restarting, start
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.ranks.models.test_windows import compare

# -- what one process does --------------------------------------------------------------------------


def is_isolated(case: Case) -> bool:
    """Whether one process keeps a row's documents apart."""
    model, batch = make_model(case), make_batch(case)
    given = {name: batch[name] for name in ("input_ids", "position_ids")}
    # With gradients, as in training: since transformers 5.24 checkpointing turns a cache off only then.
    before = model(**given).logits
    given["input_ids"] = given["input_ids"].clone()
    given["input_ids"][0, 2] += 1 if given["input_ids"][0, 2] < 9 else -1  # in the first document
    after = model(**given).logits
    assert not torch.equal(after[0, 2], before[0, 2])
    return torch.equal(after[0, 8:30], before[0, 8:30])  # the third document


@pytest.mark.parametrize(
    ("case", "want"),
    [
        (Case(batch="packed", use_cache=False), True),
        (Case(batch="packed", use_cache=True), False),
        (Case(batch="packed", use_cache=True, checkpoint="plain"), True),
        (Case(model="gpt2", batch="packed", use_cache=False), True),
        (Case(model="gpt2", batch="packed", use_cache=True), False),
        (Case(model="gemma3", batch="packed", use_cache=False, window=5), True),
        (Case(model="bert", batch="packed"), False),
        pytest.param(Case(model="modernbert", batch="packed"), False, marks=needs("modernbert")),
    ],
)
def test_what_one_process_takes_for_documents(case: Case, want: bool) -> None:
    assert is_isolated(case) == want


# -- where both agree -------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_checkpointing_hides_the_cache_in_one_process_too(model: str) -> None:
    """The cache is off while blocks are checkpointed in training, so documents are isolated."""
    compare(Case(model=model, batch="packed", use_cache=True, checkpoint="plain"), 1, 2, calls=4)


# -- where they would not ---------------------------------------------------------------------------


def call_model(rank: int, world_size: int, case: Case, what: str) -> None:
    model = make_model(replace(case, attention="sdpa"))
    if case.attention != "sdpa":
        model.config._attn_implementation_internal = (
            case.attention
        )  # not installed here: never called
    runtime = start(1, 2, model)
    try:
        both = case.batch == "both marks"  # packed, and an attention_mask that says nothing
        late = case.batch == "late document"  # rank 1 holds a part of the first document alone
        batch = make_batch(replace(case, batch="packed") if both or late else case)
        if late:
            batch["position_ids"] = restarting([0, 30, 37]).repeat(3, 1)
        if both:
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        local = runtime.shard(batch, needs_labels=True)
        runtime.begin_step()
        CALLS[what](model, local)
    finally:
        runtime.detach()


def plainly(model: Any, batch: dict[str, Any]) -> None:
    model(input_ids=batch["input_ids"], position_ids=batch["position_ids"])


def without_positions(model: Any, batch: dict[str, Any]) -> None:
    model(input_ids=batch["input_ids"])


def asking_for_a_cache(model: Any, batch: dict[str, Any]) -> None:
    model(input_ids=batch["input_ids"], use_cache=True)


def inner(model: Any, batch: dict[str, Any]) -> None:
    model.base_model(batch["input_ids"])


def counting_by_itself(model: Any, batch: dict[str, Any]) -> None:
    ids = batch["input_ids"]
    model(input_ids=ids, position_ids=torch.arange(ids.shape[1])[None])


def with_a_mask(model: Any, batch: dict[str, Any]) -> None:
    positions = batch["position_ids"]
    mask = torch.ones_like(positions)
    model(input_ids=batch["input_ids"], position_ids=positions, attention_mask=mask)


def not_reading_positions(model: Any, batch: dict[str, Any]) -> None:
    from transformers.models.llama import modeling_llama

    create = modeling_llama.create_causal_mask
    without: Any = lambda position_ids, **given: create(**given)  # noqa: E731
    modeling_llama.create_causal_mask = without
    try:
        model(input_ids=batch["input_ids"])
    finally:
        modeling_llama.create_causal_mask = create


def with_boundaries(model: Any, batch: dict[str, Any]) -> None:
    model(input_ids=batch["input_ids"], cu_seq_lens_q=torch.tensor([0, 5, 20], dtype=torch.int32))


CALLS: dict[str, Callable[[Any, dict[str, Any]], None]] = {
    "plainly": plainly,
    "without positions": without_positions,
    "asking for a cache": asking_for_a_cache,
    "inner": inner,
    "counting by itself": counting_by_itself,
    "with a mask": with_a_mask,
    "not reading positions": not_reading_positions,
    "with boundaries": with_boundaries,
}

CACHED = Case(batch="packed")
PLAIN = Case(batch="packed", use_cache=False)
LATE = Case(batch="late document")
CACHE = r"position_ids restart \(packed documents\), but Llama\w+ is called with use_cache=True"

REFUSED = [
    (CACHED, "plainly", CACHE + ".*Set model.config.use_cache = False"),
    (CACHED, "without positions", CACHE),
    (CACHED, "inner", CACHE),
    (PLAIN, "asking for a cache", CACHE),
    (LATE, "plainly", CACHE),
    (
        replace(PLAIN, attention="flash_attention_2"),
        "plainly",
        "batch of 3 rows: in one process flash",
    ),
    (PLAIN, "with a mask", "but the model is given an attention_mask as well"),
    (PLAIN, "not reading positions", "but llama does not read them when it makes its mask"),
    (
        replace(PLAIN, batch="both marks"),
        "plainly",
        "batch has an attention_mask, and so its rows are single",
    ),
    (PLAIN, "counting by itself", "position_ids that the model was given are not the batch's"),
    (Case(), "counting by itself", "position_ids that the model was given are not the batch's"),
    (Case(), "with boundaries", "cu_seq_lens_q does not describe the documents of the batch"),
]


@pytest.mark.parametrize(("case", "what", "match"), REFUSED)
def test_disagreement_is_refused(case: Case, what: str, match: str) -> None:
    """Also where one rank's tokens are of the first document alone, so that it sees nothing wrong."""
    expect_on_every_rank(2, call_model, case, what, error=ConfigError, match=match, timeout=20)


def bidirectional(rank: int, world_size: int, name: str) -> list[str]:
    case = Case(model=name, batch="packed")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        call_model(rank, world_size, case, "plainly")
    return [str(warning.message) for warning in seen]


@pytest.mark.parametrize("name", ["bert", pytest.param("modernbert", marks=needs("modernbert"))])
def test_bidirectional_models_say_that_documents_are_isolated(name: str) -> None:
    for seen in run_ranks(2, bidirectional, name, timeout=20):
        assert len(seen) == 1, seen
        assert f"a row of a bidirectional model ({name})" in seen[0]


def boundaries(rank: int, world_size: int) -> None:
    case = Case(use_cache=False)
    model = make_model(case)
    runtime = start(1, 2, model)
    try:
        batch = {name: x[:1] for name, x in make_batch(case).items()}
        batch["position_ids"] = restarting([0, 5, 20, 37])[None]
        local = runtime.shard(batch, needs_labels=True)
        runtime.begin_step()
        model(**local, cu_seq_lens_q=torch.tensor([0, 5, 20, 37], dtype=torch.int32))
    finally:
        runtime.detach()


def test_boundaries_that_agree_are_accepted() -> None:
    run_ranks(2, boundaries, timeout=20)


def test_the_comparison_can_tell() -> None:
    """Isolated or not makes a difference of the loss."""
    assert abs(one_process(PLAIN).loss - one_process(CACHED).loss) > 1e-3


# -- several positions a token: models for images --------------------------------------------------


def make_vl() -> Any:
    """A model for images, called with text alone: its rotary positions are computed in float32."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    torch.manual_seed(3)
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    sizes: dict[str, Any] = {"vocab_size": 43, "hidden_size": 32, "intermediate_size": 48}
    text = {**sizes, "num_hidden_layers": 2, "rope_parameters": rope, "use_cache": False}
    tower: dict[str, Any] = {"depth": 1, "hidden_size": 16, "out_hidden_size": 32, "num_heads": 2}
    config = Qwen2_5_VLConfig(
        text_config={**text, **heads},
        vision_config={**tower, "intermediate_size": 16, "fullatt_block_indexes": [0]},
        image_token_id=40,
        video_token_id=41,
        vision_start_token_id=39,
    )
    return Qwen2_5_VLForConditionalGeneration(config).double()


def stacked_batch() -> dict[str, torch.Tensor]:
    """Two documents a row; the text's positions in front of those of time, height and width."""
    ids = make_batch(Case())["input_ids"] % 39
    return {"input_ids": ids, "position_ids": restarting([0, 20, 37]).expand(4, *ids.shape)}


def evaluate_stacked(rank: int, world_size: int, ulysses: int, layout: str) -> torch.Tensor:
    """As in validation, prediction and Fabric's loops: nothing is compared beforehand."""
    model = make_vl()
    runtime = start(ulysses, world_size // ulysses, model, layout=layout)
    try:
        local = runtime.shard(stacked_batch(), needs_labels=False)
        runtime.begin_step()
        return runtime.step.unshard_output(model(**local).logits.detach(), {})
    finally:
        runtime.detach()


@pytest.mark.quick("3-1-contiguous", "2-2-auto")
@pytest.mark.parametrize(
    ("ranks", "ulysses", "layout"),
    [(2, 2, "auto"), (3, 1, "contiguous"), (4, 2, "zigzag")],
)
def test_packed_rows_with_several_positions_a_token(ranks: int, ulysses: int, layout: str) -> None:
    model = make_vl()
    want = model(**stacked_batch()).logits.detach()
    for got in run_ranks(ranks, evaluate_stacked, ulysses, layout, timeout=20):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    one = stacked_batch()
    one["position_ids"] = one["position_ids"][
        1:
    ]  # the same rotary positions, no text's: one document
    assert (model(**one).logits - want).abs().max() > 1e-3


def call_without_text(rank: int, world_size: int) -> None:
    model = make_vl()
    runtime = start(1, 2, model)
    try:
        local = runtime.shard(stacked_batch(), needs_labels=False)
        runtime.begin_step()
        model(input_ids=local["input_ids"], position_ids=local["position_ids"][1:])
    finally:
        runtime.detach()


def test_a_step_that_drops_the_positions_of_the_text_is_refused() -> None:
    match = "does not read them when it makes its mask"
    expect_on_every_rank(2, call_without_text, error=ConfigError, match=match, timeout=20)

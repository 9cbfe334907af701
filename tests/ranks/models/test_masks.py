"""What models ask of their masks: read exactly, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import masking_utils as theirs

from lightning_cp.errors import ConfigError
from lightning_cp.layout import Documents, SequenceLayout
from lightning_cp.models import StepState, SwapHandle
from lightning_cp.models.hf.masks import MaskNote, Visibility, make_note, mask_function, read_mask
from tests.helpers.models.later import transformers_version
from tests.helpers.models.steps import Case, make_batch, make_model, start
from tests.helpers.pool import expect_on_every_rank

LENGTH = 40

PACKED = torch.tensor([[0, 0, 0, 1, 1]])
"""Which document each token is in."""


def packed(inside: Callable[..., Any]) -> Callable[..., Any]:
    """As transformers folds restarting positions into a mask."""
    if transformers_version() < (5, 23):
        return theirs.and_masks(inside, theirs.packed_sequence_mask_function(PACKED))
    local = theirs.remap_positions_for_packed_sequence(inside, torch.tensor([[0, 1, 2, 0, 1]]))
    return theirs.and_masks(theirs.packed_sequence_mask_function(PACKED), local)


def chunked(size: int) -> Callable[..., Any]:
    return theirs.chunked_causal_mask_function(size, torch.zeros(1, dtype=torch.long))


# -- reading ----------------------------------------------------------------------------------------

SLIDING = theirs.sliding_window_causal_mask_function
BOTH_WAYS: Any = getattr(theirs, "sliding_window_bidirectional_mask_function", None)  # since 5.1

TRUE, FALSE = (
    lambda *args: torch.tensor(True, dtype=torch.bool),  # as files of transformers have it
    lambda *args: torch.tensor(False, dtype=torch.bool),
)


@pytest.mark.parametrize(
    ("function", "causal", "window"),
    [
        (theirs.causal_mask_function, True, (-1, -1)),
        (theirs.bidirectional_mask_function, False, (-1, -1)),
        (SLIDING(7), True, (6, -1)),
        (packed(theirs.causal_mask_function), True, (-1, -1)),
        (packed(SLIDING(7)), True, (6, -1)),
        (packed(chunked(LENGTH)), True, (-1, -1)),
        (chunked(LENGTH), True, (-1, -1)),
        (theirs.and_masks(SLIDING(7), SLIDING(4)), True, (3, -1)),
        (theirs.and_masks(theirs.causal_mask_function, TRUE), True, (-1, -1)),
        *(
            [
                (BOTH_WAYS(7), False, (7, 7)),
                (theirs.and_masks(BOTH_WAYS(7), theirs.causal_mask_function), True, (7, -1)),
            ]
            if BOTH_WAYS
            else []
        ),
    ],
)
def test_what_can_be_said(
    function: Callable[..., Any], causal: bool, window: tuple[int, int]
) -> None:
    assert read_mask(function, LENGTH) == Visibility(causal, window)


@pytest.mark.parametrize(
    "function",
    [theirs.causal_mask_function, SLIDING(3), *([BOTH_WAYS(2)] if BOTH_WAYS else [])],
)
def test_what_is_read_is_what_is_computed(function: Callable[..., Any]) -> None:
    """Every pair of tokens, as transformers' own mask has it."""
    visible = read_mask(function, LENGTH)
    left, right = (side if side >= 0 else 99 for side in visible.window)
    for q in range(9):
        for k in range(9):
            want = bool(function(0, 0, torch.tensor(q), torch.tensor(k)))
            got = q - k <= left and k - q <= (0 if visible.causal else right)
            assert got == want, (q, k)


def own(batch_idx: int, head_idx: int, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
    """A mask function of a user."""
    return kv_idx != 3


BLOCKWISE: Any = getattr(theirs, "blockwise_overlay", None)  # not before 5.7
BLOCKS = BLOCKWISE(torch.zeros(1, 5, dtype=torch.long)) if BLOCKWISE else None


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (own, r"not sharded: .*test_masks\.own \(and_mask_function or its own mask function\)"),
        (theirs.and_masks(theirs.causal_mask_function, FALSE), r"not sharded: .*test_masks\.<lambda>"),
        (theirs.and_masks(theirs.causal_mask_function, own), r"not sharded: .*test_masks\.own"),
        (packed(own), r"not sharded: .*test_masks\.own"),
        (theirs.or_masks(theirs.causal_mask_function, own), r"causal_mask_function \| .*\.own \(or_mask"),
        *([
            (theirs.or_masks(theirs.causal_mask_function, BLOCKS), r"\| blockwise_overlay .*or prefixes"),
            (BLOCKS, r"blockwise_overlay \(block_sequence_ids, blocks of tokens"),
        ] if BLOCKS else []),
        (theirs.padding_mask_function(PACKED), r"a padding mask made by the model itself"),
        (chunked(LENGTH - 1), r"attention_chunk_size=39.*has 40 tokens.*at most one chunk"),
        (packed(chunked(3)), r"attention_chunk_size=3"),
        (theirs.add_offsets_to_mask_function(theirs.causal_mask_function, 1, 0), "add_offsets"),
        (torch.ones, "not sharded"),
    ],
)  # fmt: skip
def test_what_cannot_be_said(function: Callable[..., Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match) as refused:
        read_mask(function, LENGTH)
    assert "What can be expressed" in str(refused.value)


# -- the note that stands for a mask ----------------------------------------------------------------


def note() -> MaskNote:
    return make_note(Visibility(True, (6, -1)), (2, 1, 8, 8), "cpu")


@pytest.mark.parametrize(
    "move",
    [
        lambda x: x.detach(),
        lambda x: x.to(torch.float64),
        lambda x: x.contiguous(),
        lambda x: x[:, :, :, :8],
        lambda x: x[..., : x.shape[-1]],
    ],
)
def test_a_note_may_be_moved(move: Callable[[Any], Any]) -> None:
    moved = move(note())
    assert moved.visible == Visibility(True, (6, -1))
    assert moved.shape == (2, 1, 8, 8)
    assert moved.dim() == moved.ndim == 4


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda x: x[:, :, :, :5], "__getitem__"),
        (lambda x: x + torch.ones(8), "changes its attention mask after making it .*add"),
        (lambda x: x & x, "and"),
        (lambda x: ~x, "invert|bitwise_not"),
        (lambda x: torch.where(x, 1.0, 0.0), "where"),
        (lambda x: torch.cat([x, x]), "cat"),
        (lambda x: x.masked_fill(torch.ones(8, dtype=torch.bool), True), "masked_fill"),
        (lambda x: x.expand(2, 4, 8, 8), "expand"),
        (lambda x: bool(x.all()), "all"),
    ],
)
def test_a_note_may_not_be_read_or_changed(change: Callable[[Any], Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        change(note())


def handle_of(layout: SequenceLayout) -> SwapHandle:
    mesh: Any = SimpleNamespace(cp_rank=0, cp_size=1, sample_size=1)
    handle = SwapHandle(mesh)
    handle.activate(StepState(layout, layout.positions(0)[None]))
    return handle


@pytest.mark.parametrize(("queries", "keys"), [(8, 9), (9, 8), (12, 12)])
def test_masks_of_another_sequence_are_refused(queries: int, keys: int) -> None:
    make = mask_function(handle_of(SequenceLayout(8)), "sdpa")
    with pytest.raises(ConfigError, match=f"{queries} queries and {keys} keys, but.*has 8 tokens"):
        make(
            batch_size=1,
            q_length=queries,
            kv_length=keys,
            mask_function=theirs.causal_mask_function,
        )


# -- padding: the layout has what the batch said ----------------------------------------------------

LEFT = Documents.from_padding_mask(torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]]))
RIGHT = Documents.from_padding_mask(torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0]]))


def make_mask(documents: Documents | None, given: Any, *, causal: bool = True) -> MaskNote:
    make = mask_function(handle_of(SequenceLayout(8, documents=documents)), "sdpa")
    function = theirs.causal_mask_function if causal else theirs.bidirectional_mask_function
    given = None if given is None else torch.tensor(given, dtype=torch.bool)
    return make(batch_size=1, q_length=8, kv_length=8, mask_function=function, attention_mask=given)


def test_padding_of_the_batch_is_accepted() -> None:
    make_mask(RIGHT, [[1, 1, 1, 1, 1, 1, 0, 0]])
    make_mask(LEFT, [[0, 0, 1, 1, 1, 1, 1, 1]])
    make_mask(None, [[1] * 8])
    make_mask(RIGHT, None)  # no token of a causal row sees what is behind it
    make_mask(None, None, causal=False)


@pytest.mark.parametrize("documents", [None, LEFT])
def test_padding_that_is_not_the_batchs_is_refused(documents: Documents | None) -> None:
    with pytest.raises(
        ConfigError, match="attention_mask that the model was given is not the batch's"
    ):
        make_mask(documents, [[1, 1, 1, 1, 1, 1, 0, 0]])


def test_a_mask_of_some_rows_is_refused() -> None:
    rows = Documents.from_padding_mask(torch.tensor([[1] * 8, [1] * 7 + [0], [1] * 8]))
    with pytest.raises(
        ConfigError, match="an attention_mask of 2 rows in a step whose batch has 3"
    ):
        make_mask(rows, [[1] * 8, [1] * 7 + [0]])


@pytest.mark.parametrize(("documents", "causal"), [(LEFT, True), (LEFT, False), (RIGHT, False)])
def test_padding_that_the_model_was_not_told_is_refused(documents: Documents, causal: bool) -> None:
    with pytest.raises(ConfigError, match="with padding, but the model was called without it"):
        make_mask(documents, None, causal=causal)


# -- in a step --------------------------------------------------------------------------------------


def attends_to_a_prefix(model: Any) -> None:
    """As image tokens and prefixes are made visible to each other."""
    from transformers.models.llama import modeling_llama

    create = modeling_llama.create_causal_mask

    def with_prefix(*args: Any, **kwargs: Any) -> Any:
        return create(*args, **kwargs, or_mask_function=own)

    modeling_llama.create_causal_mask = with_prefix


def adds_to_its_mask(model: Any) -> None:
    def add(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "attention_mask": kwargs["attention_mask"] * 1.0}

    model.model.layers[0].self_attn.register_forward_pre_hook(add, with_kwargs=True)


def drops_its_mask(model: Any) -> None:
    def drop(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "attention_mask": None}

    model.model.layers[0].self_attn.register_forward_pre_hook(drop, with_kwargs=True)


CHANGES = {
    "a prefix": (attends_to_a_prefix, r"own \(or_mask_function or block_sequence_ids"),
    "an addition": (adds_to_its_mask, "changes its attention mask after making it"),
    "no mask": (drops_its_mask, "LlamaAttention was given no mask"),
}


def changed(rank: int, world_size: int, what: str, is_compiled: bool) -> None:
    from transformers.models.llama import modeling_llama

    create = modeling_llama.create_causal_mask
    case = Case()
    model = make_model(case)
    CHANGES[what][0](model)
    runtime = start(1, 2, model)
    try:
        local = runtime.shard(make_batch(case), needs_labels=True)
        runtime.begin_step()
        called = torch.compile(model, backend="eager") if is_compiled else model
        called(input_ids=local["input_ids"])
    finally:
        torch._dynamo.reset()
        modeling_llama.create_causal_mask = create
        runtime.detach()


@pytest.mark.quick("a prefix-", "an addition-")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("is_compiled", [False, True], ids=["", "compiled"])
@pytest.mark.parametrize("what", CHANGES)
def test_models_that_ask_for_more(what: str, is_compiled: bool) -> None:
    expect_on_every_rank(
        *(2, changed, what, is_compiled), error=ConfigError, match=CHANGES[what][1], timeout=120
    )

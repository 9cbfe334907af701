"""What is refused of LitGPT's models: settings before the first step, calls before any data move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_cp.errors import ConfigError, ShapeError
from lightning_cp.models.swap import swap_attention
from tests.helpers.models.litgpt_zoo import LLAMA, litgpt_file, litgpt_model, needs_litgpt
from tests.helpers.models.matrix import case_of
from tests.helpers.models.mesh import MESH
from tests.helpers.models.steps import Case, make_batch, make_model, start
from tests.helpers.pool import expect_on_every_rank

pytestmark = needs_litgpt


def too_long(model: Any) -> None:
    """Each rank's part is shorter than that."""
    model.gpt.max_seq_length = 30


def with_positions(model: Any, batch: dict[str, torch.Tensor]) -> None:
    model.gpt(batch["input_ids"], input_pos=torch.arange(batch["input_ids"].shape[1]))


def shifted(model: Any, batch: dict[str, torch.Tensor]) -> None:
    model.gpt(batch["input_ids"][:, :-1])


def masked(model: Any, batch: dict[str, torch.Tensor]) -> None:
    tokens = batch["input_ids"].shape[1]
    gpt = model.gpt
    x = gpt.transformer.wte(batch["input_ids"])
    gpt.transformer.h[0].attn(x, gpt.cos[:1, None], gpt.sin[:1, None], torch.ones(tokens, tokens))


def in_a_step(
    rank: int,
    world_size: int,
    prepare: Callable[[Any], None] | None,
    call: Callable[..., None] | None,
    batch: str,
) -> None:
    case = case_of("litgpt_llama", "plain")
    model = make_model(case)
    if prepare is not None:
        prepare(model)
    runtime = start(1, world_size, model, labels="shift")
    try:
        local = runtime.shard(make_batch(Case(model=case.model, batch=batch)), needs_labels=True)
        runtime.begin_step()
        (call or _whole)(model, local)
    finally:
        runtime.detach()


def _whole(model: Any, batch: dict[str, torch.Tensor]) -> None:
    model.gpt(batch["input_ids"])


@pytest.mark.parametrize(
    ("prepare", "call", "batch", "error", "match"),
    [
        (too_long, None, "plain", ConfigError, r"GPT\) is 30, but sequences have 37 tokens over"),
        (None, with_positions, "plain", ConfigError, r"called with input_pos=, .* cache"),
        (None, shifted, "plain", ShapeError, r"this rank holds \d+ tokens of each of"),
        (None, masked, "plain", ConfigError, r"given a dense mask of shape"),
        (None, None, "packed", ConfigError, r"declares no documents, and a LitGPT model takes no"),
    ],
    ids=["too long", "cache", "shifted in the step", "mask", "positions alone"],
)
def test_calls_that_are_refused(
    prepare: Any, call: Any, batch: str, error: type[Exception], match: str
) -> None:
    expect_on_every_rank(2, in_a_step, prepare, call, batch, error=error, match=match)


class Other(nn.Module):
    """Attention as another version may have it."""

    def forward(self, x: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
        return x


def swap(model: Any) -> None:
    swap_attention(model, MESH).undo()


def test_adapters_are_refused() -> None:
    for file in ("adapter", "adapter_v2"):
        with pytest.raises(ConfigError, match="second attention, over their adaption prompt"):
            swap(litgpt_model(file, **LLAMA))


def test_attention_of_somebody_else_is_refused() -> None:
    model = litgpt_model(**LLAMA)
    model.transformer.h[0].attn.scaled_dot_product_attention = lambda q, k, v, mask=None: q
    with pytest.raises(ConfigError, match="has its own scaled_dot_product_attention"):
        swap(model)


def test_other_arguments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(litgpt_file("model").CausalSelfAttention, "forward", Other.forward)
    with pytest.raises(ConfigError, match=r"takes \['x', 'cos'\], and \['x', 'cos', 'sin', 'mask'"):
        swap(litgpt_model(**LLAMA))


def test_a_window_without_the_token_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="sliding_window_size must be at least 1 token, got 0"):
        swap(litgpt_model(**LLAMA, sliding_window_size=0, sliding_window_indices=[1, 1]))


def test_a_part_of_a_model_cannot_be_listed() -> None:
    model = litgpt_model(**LLAMA)
    with pytest.raises(
        ConfigError, match=r"a part of GPT, a LitGPT model, is listed: .* List the model"
    ):
        swap_attention(model, MESH, "auto", [model.transformer.h[0]])


def test_attention_of_one_block_cannot_be_local() -> None:
    model = litgpt_model(**LLAMA)
    model.transformer.h[1].context_parallel_local = True
    with pytest.raises(ConfigError, match=r"attention of block 1 of GPT, .* is left alone"):
        swap(model)


def test_a_whole_model_may_be_left_alone() -> None:
    """What is not listed, or declared local, is LitGPT's own throughout."""
    model, other = litgpt_model(**LLAMA), nn.Linear(2, 2)
    both = nn.ModuleList([model, other])
    model.context_parallel_local = True
    for handle in (swap_attention(both, MESH), swap_attention(both, MESH, "auto", [other])):
        handle.activate(None)  # type: ignore[arg-type]
        assert "scaled_dot_product_attention" not in vars(model.transformer.h[0].attn)
        handle.undo()

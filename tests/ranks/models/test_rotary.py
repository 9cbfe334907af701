"""Rotary embeddings that look at the longest position: ranks agree on that of the whole batch."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn

from lightning_cp.errors import ConfigError
from lightning_cp.models.handle import SwapHandle
from lightning_cp.models.hf.positions import patch_length_dependent_rope
from lightning_cp.models.hf.swap import swap_hf
from tests.helpers.models.steps import Case, make_batch, make_model, one_process
from tests.ranks.models.test_hf import compare as compare_valid
from tests.ranks.models.test_windows import SIZES, compare, difference

OTHER = {
    "phi3_longrope": "phi3_shortrope",
    "llama_longrope": "llama",
    "llama_dynamic": "llama_not_dynamic",
}
"""The model with frequencies of sequences that are shorter: those of a rank that looks at its own tokens."""


@pytest.mark.quick("phi3_longrope-hybrid 2x2", "llama_dynamic-ulysses 2")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("model", OTHER)
def test_ranks_use_the_frequencies_of_the_whole_sequence(model: str, size: str) -> None:
    case, other = Case(model=model), Case(model=OTHER[model])
    assert difference(one_process(other), one_process(case)) > 1e-3
    compare(case, *SIZES[size])


@pytest.mark.quick("phi3_longrope-left", "llama_longrope-packed", "llama_dynamic-right")
@pytest.mark.parametrize("batch", ["packed", "right", "left"])
@pytest.mark.parametrize("model", OTHER)
def test_the_longest_is_that_of_the_positions_given(model: str, batch: str) -> None:
    compare_valid(Case(model=model, batch=batch, use_cache=batch != "packed"), *SIZES["ring 2"])


@pytest.mark.parametrize("checkpoint", ["reentrant", "plain"])
def test_also_when_blocks_are_run_again(checkpoint: str) -> None:
    compare(Case(model="llama_dynamic", checkpoint=checkpoint), *SIZES["ring 2"], calls=4)


def test_outside_of_a_step_it_is_the_plain_embedding() -> None:
    case, mesh = Case(model="llama_longrope"), cast(Any, None)
    model, plain, ids = make_model(case), make_model(case), make_batch(case)["input_ids"]
    handle = SwapHandle(mesh)
    swap_hf(model, handle)
    assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
    handle.undo()
    assert not model.model.rotary_emb._forward_hooks


class Config:
    def __init__(self) -> None:
        self.rope_parameters = {
            "full": {"rope_type": "dynamic"},
            "sliding": {"rope_type": "default"},
        }


class Elsewhere(nn.Module):
    """Looks at something else than positions."""

    rope_type = "longrope"

    def forward(self, x: torch.Tensor, seq_len: int) -> Any:
        return x


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (nn.Linear(1, 1), r"rope_type='dynamic', .*no module of it has such a rope_type"),
        (nn.Sequential(Elsewhere()), r"Elsewhere .*takes no position_ids, but \['x', 'seq_len'\]"),
    ],
    ids=["nobody does it", "in a way of its own"],
)
def test_what_cannot_be_told_is_refused(model: nn.Module, match: str) -> None:
    mesh: Any = None
    with pytest.raises(ConfigError, match=match):
        patch_length_dependent_rope(model, [Config()], SwapHandle(mesh))

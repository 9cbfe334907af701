"""Models whose attention is patched, BLOOM and Falcon: see also ``test_matrix``."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from lightning_cp.errors import ConfigError
from lightning_cp.models.handle import SwapHandle
from lightning_cp.models.hf import bloom_falcon
from lightning_cp.models.hf.swap import swap_hf
from tests.helpers.models.later import transformers_version
from tests.helpers.models.matrix import eager, ranks, whole_sequence, worst
from tests.helpers.models.steps import Case, make_batch, make_model
from tests.helpers.pool import expect_on_every_rank, run_ranks

MODELS = ["bloom", "falcon", "falcon_new", "falcon_alibi"]


@pytest.mark.nightly
@pytest.mark.parametrize("checkpoint", ["reentrant", "plain"])
@pytest.mark.parametrize("model", ["bloom", "falcon_alibi"])
def test_blocks_may_be_run_again(model: str, checkpoint: str) -> None:
    plain, again = Case(model=model), Case(model=model, checkpoint=checkpoint)
    for got in run_ranks(2, ranks, again, 1, 2):
        assert worst(got, whole_sequence(plain)) < 1e-6
        assert got.calls == 4


@pytest.mark.parametrize("model", MODELS)
def test_positions_that_restart_are_refused(model: str) -> None:
    """One process takes a row for one document, whatever its positions."""
    case = Case(model=model, batch="packed", use_cache=False)
    if model != "bloom" and transformers_version() >= (5, 24):  # Falcon reads them
        for got in run_ranks(2, ranks, case, 1, 2):
            assert worst(got, whole_sequence(case)) < 1e-6
        return
    match = "does not read them when it makes its mask"
    if model == "bloom" and transformers_version() < (5, 23):  # it makes an attention_mask of ones
        match = "restart .* but the model is given an attention_mask as well"
    expect_on_every_rank(2, ranks, case, 1, 2, error=ConfigError, match=match)


@pytest.mark.parametrize("model", MODELS)
def test_outside_of_a_step_it_is_the_plain_model(model: str) -> None:
    case, mesh = Case(model=model), cast(Any, None)
    swapped, plain, ids = make_model(case), make_model(case), make_batch(case)["input_ids"]
    handle = SwapHandle(mesh)
    how, before = swap_hf(swapped, handle)
    assert torch.equal(swapped(input_ids=ids).logits, plain(input_ids=ids).logits)
    assert how == "own attention, patched"
    assert before in ("eager", "sdpa")
    handle.activate(cast(Any, SimpleNamespace(layout=SimpleNamespace(seq_len=4))))
    patched = [type(part).__name__ for part in swapped.modules() if "forward" in vars(part)]
    assert sum(name.endswith("Attention") for name in patched) == 2
    assert sum(name.endswith(("Model", "ForCausalLM")) for name in patched) == len(patched) - 2
    handle.undo()
    assert not any("forward" in vars(part) for part in swapped.modules())


def test_rounding_of_falcons_bias_is_said_once() -> None:
    mesh = cast(Any, None)
    handle = SwapHandle(mesh)
    swap_hf(make_model(Case(model="falcon_alibi")), handle)
    for length, said in (
        (bloom_falcon.EXACT_UNTIL, 0),
        (bloom_falcon.EXACT_UNTIL + 1, 1),
        (4096, 0),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            handle.activate(cast(Any, SimpleNamespace(layout=SimpleNamespace(seq_len=length))))
        assert len([x for x in caught if "counts positions in bfloat16" in str(x.message)]) == said
    handle.undo()


def test_falcons_own_bias_is_exact_until_there() -> None:
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor

    length = bloom_falcon.EXACT_UNTIL + 2
    bias = build_alibi_tensor(torch.ones(1, length, dtype=torch.long), 8, torch.float32)[:, 0]
    exact = bias[:, 1:2] * torch.arange(length)
    assert torch.equal(bias[:, :-1], exact[:, :-1])
    assert not torch.equal(bias, exact)


def refused(model: Any) -> None:
    mesh: Any = None
    handle = SwapHandle(mesh)
    try:
        swap_hf(model, handle)
    finally:
        handle.undo()


class Changed(nn.Module):
    """BLOOM's attention as another version may have it."""

    def forward(self, hidden_states: torch.Tensor, alibi_slopes: torch.Tensor) -> torch.Tensor:
        return hidden_states


def test_other_arguments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.bloom.modeling_bloom import BloomAttention

    monkeypatch.setattr(BloomAttention, "forward", Changed.forward)
    with pytest.raises(ConfigError, match=r"BloomAttention of this version .*'alibi_slopes'"):
        refused(make_model(Case(model="bloom")))


def test_slow_but_exact_is_refused() -> None:
    model = make_model(Case(model="bloom"))
    attention = model.transformer.h[0].self_attention
    attention.slow_but_exact, attention.pretraining_tp = True, 2
    with pytest.raises(ConfigError, match="slow_but_exact=True"):
        refused(model)


def test_a_bias_that_is_added_twice_is_refused() -> None:
    """If transformers adds it once in a later version, this fails, and the refusal can go."""
    once, twice = (Case(model="falcon_alibi", attention=name) for name in ("sdpa", "eager"))
    model = make_model(twice)
    ids = make_batch(twice)["input_ids"]
    assert (model(input_ids=ids).logits - make_model(once)(input_ids=ids).logits).abs().max() > 1e-2
    with pytest.raises(ConfigError, match="has its ALiBi bias twice"):
        refused(model)


def test_the_bias_matters() -> None:
    """Or the comparisons would not see it."""
    bloom, case = make_model(Case(model="bloom")), Case(model="bloom")
    ids = make_batch(case)["input_ids"]
    before = bloom(input_ids=ids).logits
    bloom.transformer.build_alibi_tensor = lambda mask, heads, dtype: mask.new_zeros(
        mask.shape[0] * heads, 1, mask.shape[1], dtype=dtype
    )
    without = bloom(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    assert (before - without).abs().max() > 1e-2
    assert eager(case).logits.shape == before.shape

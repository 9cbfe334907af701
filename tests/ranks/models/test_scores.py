"""Models that change their scores: capped ones and sinks equal one process; ALiBi is refused by name.

One process runs transformers' eager attention, which has the order: scale, cap, mask, sinks. Its softmax in
float32 is taken in float64 here, so that the comparison sees everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_cp.errors import ConfigError
from lightning_cp.models import swap_attention
from tests.helpers.models import steps
from tests.helpers.models.steps import Case, Outcome, make_model, parallel, start
from tests.helpers.pool import run_ranks
from tests.ranks.models.test_windows import difference

SIZES = {
    "ring 2": (1, 2),
    "ulysses 2": (2, 1),
    "hybrid 2x2": (2, 2),
    "ring 3": (1, 3),
    "ulysses 4": (4, 1),
}
LIMIT = 1e-10
SINKS = [f"model.layers.{layer}.self_attn.sinks" for layer in range(2)]


@contextmanager
def softmax_in_float64() -> Iterator[None]:
    """Models ask for float32, whatever they were given."""
    plain = F.softmax

    def softmax(
        x: torch.Tensor, dim: int | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        return plain(x, dim=dim, dtype=None if x.dtype == torch.float64 else dtype)

    with mock.patch.object(F, "softmax", softmax):
        yield


def one_process(case: Case) -> Outcome:
    with softmax_in_float64():
        return steps.one_process(replace(case, checkpoint=""))


def without_sinks(case: Case) -> Outcome:
    """One process, whose sinks weigh nothing."""

    def made(case: Case) -> Any:
        model = make_model(case)
        for name, parameter in model.named_parameters():
            if name in SINKS:
                nn.init.constant_(parameter, -1e9)
        return model

    with mock.patch.object(steps, "make_model", made):
        return one_process(case)


VOID: dict[str, Callable[[Case], Outcome]] = {
    "gemma2_capped": lambda case: one_process(replace(case, model="gemma2_almost_uncapped")),
    "gpt_oss": without_sinks,
}
"""What one process computes without the feature."""


@pytest.mark.quick("gemma2_capped-both-ulysses 2")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("model", "batch"),
    # One process takes packed rows of gpt-oss for one document, which is refused.
    [
        ("gemma2_capped", "both"),
        ("gemma2_capped", "packed"),
        ("gpt_oss", "both"),
        ("gpt_oss", "plain"),
    ],
)
def test_caps_and_sinks_equal_one_process(model: str, batch: str, size: str) -> None:
    check(Case(model=model, window=5, batch=batch, use_cache=batch != "packed"), *SIZES[size])


@pytest.mark.quick("gpt_oss-keep", "gemma2_capped-reentrant")
@pytest.mark.parametrize("checkpoint", ["reentrant", "plain", "keep"])
@pytest.mark.parametrize("model", VOID)
def test_blocks_that_are_run_again_give_the_same(model: str, checkpoint: str) -> None:
    check(Case(model=model, checkpoint=checkpoint), 2, 2)


def check(case: Case, ulysses: int, ring: int) -> None:
    """Loss, the logits of tokens that are not padding, and every gradient, that of sinks too."""
    want, batch = one_process(case), steps.make_batch(case)
    seen = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    assert difference(only(VOID[case.model](case), seen), only(want, seen)) > 1e6 * LIMIT
    if case.model == "gpt_oss":
        assert all(float(want.gradients[name].abs().min()) > 1e6 * LIMIT for name in SINKS)
    for got in run_ranks(ulysses * ring, parallel, case, ulysses, ring, timeout=30):
        assert got.loss == pytest.approx(want.loss, rel=LIMIT)
        assert difference(only(got, seen), only(want, seen)) <= LIMIT
        assert got.calls == (4 if case.checkpoint else 2), (
            "one call a layer, twice if it is run again"
        )


def only(outcome: Outcome, seen: torch.Tensor) -> Outcome:
    """Without the logits of padding, which one process computes and nobody uses."""
    return replace(outcome, logits=outcome.logits[seen])


# -- which kernel they get ---------------------------------------------------------------------------


def explained(rank: int, world_size: int) -> tuple[str, str]:
    """What a runtime says before and after a step; its strategies hand it on."""
    case = Case(model="gemma2_capped", window=5)
    model = make_model(case)
    runtime = start(1, 2, model)
    before = runtime.binding.explain()
    steps.step_of(runtime, case, model, world_size)
    runtime.detach()
    return before, runtime.binding.explain()


def test_a_step_explains_its_kernels() -> None:
    for before, after in run_ranks(2, explained, timeout=30):
        assert before == "no attention call came through context parallelism yet"
        assert after.count("kernel='auto' for ") == 2, "sliding and full layers"
        assert after.count("softcap: reference\n") == 2
        assert "  aten_cpu_flash: has no softcap\n" in after


# -- ALiBi of models that are not patched (BLOOM and Falcon are: test_bloom_falcon.py) -------------------


def refused(name: str, kind: str = "ForCausalLM", **sizes: Any) -> str:
    import transformers

    mesh: Any = None
    config = getattr(transformers, f"{name}Config")(vocab_size=43, **sizes)
    with pytest.raises(ConfigError) as caught:
        swap_attention(getattr(transformers, f"{name}{kind}")(config), mesh)
    return str(caught.value)


def test_models_with_alibi_are_refused_by_name() -> None:
    said = refused("Mpt", d_model=16, n_layers=1, n_heads=2)
    assert said.startswith("MptForCausalLM does not use transformers' attention interface")
    assert "ALiBi bias" in said
    assert "alibi_slopes=" in said


def test_alibi_is_not_blamed_where_there_is_none() -> None:
    said = refused("XLNet", "LMHeadModel", d_model=16, n_layer=1, n_head=2, d_inner=16)
    assert said.startswith("XLNetLMHeadModel does not use transformers' attention interface")
    assert "ALiBi" not in said

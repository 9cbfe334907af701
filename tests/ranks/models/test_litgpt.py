"""LitGPT's models equal one process; what cannot be done is refused. In an environment of its own."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

from lightning_cp import SequenceLayout
from lightning_cp.models.handle import SwapHandle, SwapReportRow
from lightning_cp.models.litgpt import litgpt_models, swap_litgpt
from lightning_cp.models.structure import expected_heads, expected_mask
from lightning_cp.models.swap import swap_attention
from tests.helpers.models.litgpt_zoo import (
    LITGPT_FAMILIES,
    LITGPT_ZOO,
    LLAMA,
    litgpt_file,
    litgpt_model,
    needs_litgpt,
)
from tests.helpers.models.matrix import (
    LITGPT_BATCHES,
    MODES,
    case_of,
    cell,
    eager,
    ranks,
    whole_sequence,
    worst,
)
from tests.helpers.models.mesh import MESH
from tests.helpers.models.steps import (
    LENGTH,
    Case,
    Outcome,
    make_batch,
    make_model,
    one_process,
    start,
    step_of,
)
from tests.helpers.pool import run_ranks

pytestmark = needs_litgpt


# -- equal to one process -----------------------------------------------------------------------------


@pytest.mark.quick(
    "litgpt_pythia-ring 4",
    "litgpt_llama-hybrid 2x2",
    "litgpt_one_group-ulysses 4",
    "litgpt_yarn-ring 4",
    "litgpt_mistral-hybrid 2x2",
    "litgpt_gemma2-ring 4",
    "litgpt_gemma2_uncapped-ulysses 4",
    "litgpt_gemma3-hybrid 2x2",
    "litgpt_latent-ring 4",
    "litgpt_moe-ulysses 4",
    "litgpt_lora-hybrid 2x2",
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", LITGPT_FAMILIES)
def test_every_family(model: str, mode: str) -> None:
    found = cell(model, mode, LITGPT_BATCHES)
    assert found.reference <= 1e-9
    assert found.loss <= 1e-9
    assert found.eager <= 1e-5


def test_every_family_is_in_the_table() -> None:
    assert LITGPT_FAMILIES.keys() == LITGPT_ZOO.keys()


def test_own_attention_knows_nothing_of_ranks() -> None:
    """The oracle's: what is left out here would be left out there."""
    case = case_of("litgpt_gemma2", "plain")
    assert worst(one_process(case), eager(case)) < 1e-6


def test_padding_is_attended_to_as_in_one_process() -> None:
    """The models take no mask, so that one in the batch says nothing to them."""
    case = Case(model="litgpt_llama", batch="left")
    for got in run_ranks(2, ranks, case, 1, 2):
        assert worst(got, one_process(case)) < 1e-9


def test_caps_and_windows_matter() -> None:
    """Or the comparisons would not see them."""
    case = case_of("litgpt_gemma2", "plain")
    gpt, ids = make_model(case).gpt, make_batch(case)["input_ids"]
    both = gpt(ids)
    gpt.config.attention_logit_softcapping = None
    window = gpt(ids)
    gpt.transformer.h[0].attn.apply_sliding_window_attention = False
    assert (both - window).abs().max() > 1e-2
    assert (window - gpt(ids)).abs().max() > 1e-2


def recomputed(rank: int, world_size: int, case: Case, reentrant: bool) -> Outcome:
    """Blocks run again in backward; their names in the model change by that."""
    block = litgpt_file("model").Block
    model = make_model(case)
    kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    wrapper: Any = partial(checkpoint_wrapper, checkpoint_impl=kind)
    apply_activation_checkpointing(model, wrapper, lambda part: isinstance(part, block))
    runtime = start(1, world_size, model, labels="shift")
    try:
        got = step_of(runtime, case, model, world_size)
    finally:
        runtime.detach()
    got.gradients = {
        name.replace("_checkpoint_wrapped_module.", ""): x for name, x in got.gradients.items()
    }
    return got


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "plain"])
@pytest.mark.parametrize("model", ["litgpt_llama", "litgpt_gemma3"])
def test_blocks_may_be_run_again(model: str, reentrant: bool) -> None:
    case = case_of(model, "plain")
    for got in run_ranks(2, recomputed, case, reentrant):
        assert worst(got, whole_sequence(case)) < 1e-9
        assert got.calls == 4


def compiled(rank: int, world_size: int, case: Case) -> Outcome:
    """The model is compiled, and cut at attention."""
    model = make_model(case)
    runtime = start(1, world_size, model, labels="shift")
    model.gpt.compile(backend="aot_eager")
    try:
        return step_of(runtime, case, model, world_size)
    finally:
        runtime.detach()
        torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("model", ["litgpt_llama", "litgpt_gemma3"])
def test_compiled_models(model: str) -> None:
    case = case_of(model, "plain")
    for got in run_ranks(2, compiled, case, timeout=240.0):
        assert worst(got, whole_sequence(case)) < 1e-9


def rows_given(rank: int, world_size: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What the last attention module is given as cos, and what its tokens' global positions say."""
    case = case_of("litgpt_pythia", "plain")
    model = make_model(case)
    given: list[torch.Tensor] = []

    def note(part: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        given.append(kwargs["cos"])

    runtime = start(1, world_size, model, labels="shift", layout=kind)
    model.gpt.transformer.h[-1].attn.register_forward_pre_hook(note, with_kwargs=True)
    try:
        step_of(runtime, case, model, world_size)
    finally:
        runtime.detach()
    layout = SequenceLayout(LENGTH, ring_size=world_size, ulysses_size=1, kind=kind)  # type: ignore[arg-type]
    at = layout.positions(rank)
    return given[0][0, at < LENGTH], model.gpt.cos[at[at < LENGTH]]


def after_a_shorter_one(rank: int, world_size: int, case: Case) -> Outcome:
    """A step, after one of other positions."""
    model = make_model(case)
    runtime = start(1, world_size, model, labels="shift")
    short = {key: x[:, :21] for key, x in make_batch(case).items()}
    try:
        local = runtime.shard(short, needs_labels=True)
        runtime.begin_step()
        model.gpt(local["input_ids"])
        return step_of(runtime, case, model, world_size)
    finally:
        runtime.detach()


def test_every_step_looks_its_rows_up() -> None:
    case = case_of("litgpt_llama", "plain")
    for got in run_ranks(2, after_a_shorter_one, case):
        assert worst(got, whole_sequence(case)) < 1e-9


@pytest.mark.parametrize("kind", ["zigzag", "contiguous"])
def test_rotary_rows_are_those_of_global_positions(kind: str) -> None:
    every = run_ranks(4, rows_given, kind)
    for given, wanted in every:
        assert torch.equal(given, wanted)
    assert sum(len(given) for given, _ in every) == LENGTH
    assert not torch.equal(every[0][0], every[1][0])


# -- it is given back ---------------------------------------------------------------------------------


def hooks_of(model: nn.Module) -> int:
    return sum(len(part._forward_pre_hooks) for part in model.modules())


@pytest.mark.parametrize("model", ["litgpt_gemma2", "litgpt_gemma3", "litgpt_latent"])
def test_outside_of_a_step_it_is_the_plain_model(model: str) -> None:
    case, mesh = case_of(model, "plain"), None
    swapped, plain, ids = make_model(case), make_model(case), make_batch(case)["input_ids"]
    handle = SwapHandle(mesh)  # type: ignore[arg-type]
    swap_litgpt(swapped.gpt, handle)
    assert hooks_of(swapped) == 3
    assert torch.equal(swapped.gpt(ids), plain.gpt(ids))
    parts = [block.attn for block in swapped.gpt.transformer.h]
    windowed = [getattr(part, "apply_sliding_window_attention", None) for part in parts]
    handle.activate(None)  # type: ignore[arg-type]
    assert all("scaled_dot_product_attention" in vars(part) for part in parts)
    assert not any(getattr(part, "apply_sliding_window_attention", False) for part in parts)
    handle.undo()
    assert not any("scaled_dot_product_attention" in vars(part) for part in parts)
    assert [getattr(part, "apply_sliding_window_attention", None) for part in parts] == windowed
    assert hooks_of(swapped) == 0
    assert torch.equal(swapped.gpt(ids), plain.gpt(ids))


def test_what_was_swapped_is_reported() -> None:
    handle = swap_attention(litgpt_model(**LLAMA), MESH)
    assert handle.report[0] == SwapReportRow(
        modules="transformer.h.*.attn",
        count=2,
        kind="CausalSelfAttention",
        how="LitGPT's method, and RoPE",
        before="its own",
    )
    handle.undo()


def test_costs_are_estimated_for_its_heads_and_windows() -> None:
    gemma = make_model(case_of("litgpt_gemma2", "plain"))
    mistral = make_model(case_of("litgpt_mistral", "plain"))
    latent = make_model(case_of("litgpt_latent", "plain"))
    assert litgpt_models(gemma) == [gemma.gpt]
    assert expected_mask(gemma).window[0] == -1
    assert expected_mask(mistral).window[0] == 10
    heads = [expected_heads(model) for model in (gemma, latent)]
    assert [(one.query, one.kv, one.dim) for one in heads if one] == [(4, 2, 8), (4, 4, 9)]

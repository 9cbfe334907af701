"""torch.compile of a user's model: the numbers of one process without it, whatever is around attention.

The backend is AOTAutograd's without code generation (``aot_eager``), which cuts, differentiates and
recomputes graphs as all others do; a slow test generates code.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch._dynamo.callback import callback_handler
from torch._dynamo.exc import Unsupported

from lightning_cp.runtime.runtime import ContextParallelRuntime
from lightning_cp.utils.tracing import FirstCompile
from tests.helpers.models.steps import Case, Outcome, make_model, one_process, start, step_of
from tests.helpers.pool import run_ranks

pytestmark = pytest.mark.filterwarnings(
    # PyTorch's compiler asks every tensor for its gradient that one graph hands to the next.
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
    # And so it does with autograd functions of models (BLOOM's).
    "ignore:.*should not be instantiated:DeprecationWarning",
)

SLOW = pytest.mark.nightly
MODES = {"ring": (1, 2), "ulysses": (2, 1)}


def compiled(model: Any, how: str, backend: str) -> Any:
    """The model that is called; ``how`` says which parts of it are compiled."""
    if backend == "inductor":  # whose float32 cosines differ in their last bit, also in one process
        rotary = model.base_model.rotary_emb
        rotary.forward = torch.compiler.disable(rotary.forward)
    if how == "model":
        return torch.compile(model, backend=backend)
    if how == "method":
        model.compile(backend=backend)
    for block in model.base_model.layers if how == "blocks" else ():
        block.compile(backend=backend)
    return model


def parallel(
    rank: int, world_size: int, case: Case, how: str, mode: str, backend: str, settings: Any
) -> tuple[Outcome, int]:
    """Two steps of a compiled model, the second one compared; and the graphs that were compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = make_model(case)
    ulysses, ring = MODES[mode]
    runtime: ContextParallelRuntime = start(ulysses, ring, model, **settings)
    said: list[str] = []
    runtime._first_compile = FirstCompile(lambda: said.append("it takes minutes"))
    try:
        called = compiled(model, how, backend)
        step_of(runtime, case, called, world_size)
        assert len(said) == bool(torch._dynamo.utils.counters["frames"]["total"])
        said.append("again")
        model.zero_grad()
        outcome = step_of(runtime, case, called, world_size)
        assert said.pop() == "again"
        prefix = "_orig_mod."
        outcome.gradients = {k.removeprefix(prefix): v for k, v in outcome.gradients.items()}
        return outcome, torch._dynamo.utils.counters["stats"]["unique_graphs"]
    finally:
        runtime.detach()
        torch._dynamo.reset()
        assert not callback_handler.start_callbacks


def check(
    case: Case,
    how: str,
    mode: str,
    *,
    backend: str = "aot_eager",
    least: int = 3,
    want: Outcome | None = None,
    **settings: Any,
) -> None:
    """Loss and all gradients of two ranks, compiled to ``least`` graphs or more, against one process."""
    want = want or one_process(case)
    for got, graphs in run_ranks(2, parallel, case, how, mode, backend, settings, timeout=240.0):
        assert graphs >= least
        assert got.loss == pytest.approx(want.loss, rel=1e-12)
        assert got.gradients.keys() == want.gradients.keys()
        for name, gradient in want.gradients.items():
            torch.testing.assert_close(got.gradients[name], gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.quick("model-ring")
@pytest.mark.parametrize("mode", ["ring", pytest.param("ulysses", marks=SLOW)])
@pytest.mark.parametrize("how", ["model", pytest.param("method", marks=SLOW), "blocks"])
def test_numbers_are_those_of_one_process(how: str, mode: str) -> None:
    check(Case(), how, mode)


@pytest.mark.nightly
@pytest.mark.parametrize("batch", [pytest.param("right", marks=SLOW), "left", "packed"])
def test_padded_and_packed_rows(batch: str) -> None:
    check(Case(batch=batch, use_cache=False), "model", "ring")


@pytest.mark.nightly
@pytest.mark.parametrize("checkpoint", ["reentrant", "non-reentrant", "keep"])
@pytest.mark.parametrize("how", ["model", pytest.param("blocks", marks=SLOW)])
def test_with_activation_checkpointing(how: str, checkpoint: str) -> None:
    # What is within a checkpoint is one graph to the compiler or none: blocks run as they are.
    least = 0 if how == "blocks" else 3
    check(Case(checkpoint=checkpoint, use_cache=False), how, "ring", least=least)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "model",
    ["gemma2_capped", pytest.param("falcon", marks=SLOW), pytest.param("bloom", marks=SLOW)],
)
def test_other_families(model: str) -> None:
    """Windows and caps; attention that is patched. One process has softmax in float32: see the matrix."""
    case = Case(model=model, use_cache=False)
    want, _ = run_ranks(2, parallel, case, "", "ring", "", {})[0]
    check(case, "model", "ring", want=want)


@SLOW
@pytest.mark.parametrize("how", ["model", "blocks"])
def test_generated_code(how: str) -> None:
    check(Case(), how, "ring", backend="inductor")


def as_one_graph(rank: int, world_size: int) -> str:
    """What is asked for cannot be: attention leaves the graph. The error, which not every version pickles."""
    case = Case(use_cache=False)
    model = make_model(case)
    runtime = start(1, 2, model)
    try:
        called = torch.compile(model, backend="eager", fullgraph=True)
        with pytest.raises(Unsupported) as raised:
            step_of(runtime, case, called, world_size)
        return str(raised.value)
    finally:
        runtime.detach()
        torch._dynamo.reset()


def test_one_graph_is_refused_and_says_why() -> None:
    match = r"between ranks from Python.*call torch\.compile without fullgraph=True"
    for told in run_ranks(2, as_one_graph, timeout=60):
        assert re.search(match, told)


def test_a_compiler_that_was_reset_within_a_step_is_followed_again() -> None:
    """With Fabric a step lasts until the next batch is sharded, so that a reset in between is within it."""
    said: list[str] = []
    first = FirstCompile(lambda: said.append("it begins"))
    first.begin()
    torch.compiler.reset()
    first.end()
    first.begin()
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    first.end()
    assert said == ["it begins"]
    assert first._begins not in callback_handler.start_callbacks

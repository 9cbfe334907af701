"""Attention that is left alone: cross-attention to what every rank holds, and modules that are not listed."""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_cp.config import StrategyConfig
from lightning_cp.errors import ConfigError
from lightning_cp.layout import SequenceLayout
from lightning_cp.models import StepState, SwapHandle, swap_attention
from lightning_cp.runtime.runtime import ContextParallelRuntime
from tests.helpers.models.mesh import MESH
from tests.helpers.models.steps import Case, Outcome, make_model, run_step
from tests.helpers.pool import run_ranks
from tests.helpers.strategies.plain_llama import Block, RMSNorm

VOCAB, ROWS, LENGTH, MEMORY, WIDTH = 31, 2, 29, 7, 64


class Cross(nn.Module):
    """Attends from every token to the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm(WIDTH)
        self.attend = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return x + self.attend(self.norm(x), memory, memory, need_weights=False)[0]


class Captions(nn.Module):
    """A decoder that reads a memory, which an encoder makes of what is the same on every rank."""

    def __init__(self, recompute: str = "") -> None:
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 4, 48, dropout=0.0, batch_first=True)
        self.block, self.cross = Block(WIDTH, 8, 2, 8), Cross()
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Any, positions: Any, memory: Any) -> torch.Tensor:
        memory = self.encoder(memory)
        x = self.embed(tokens)
        for module, other in (
            (self.block, positions),
            (self.cross, memory),
            (self.block, positions),
        ):
            if self.recompute:
                reentrant = self.recompute == "reentrant"
                x = checkpoint(module, x, other, use_reentrant=reentrant)
            else:
                x = module(x, other)
        return self.head(x)


def captions(recompute: str = "") -> Any:
    torch.manual_seed(4)
    return Captions(recompute).double()


def captions_batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)
    memory = torch.randn(ROWS, MEMORY, WIDTH, generator=generator, dtype=torch.float64)
    return {"input_ids": ids, "labels": ids.roll(-1, 1), "memory": memory}


def captions_step(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    positions = batch.get("position_ids", torch.arange(LENGTH)[None])
    logits = model(batch["input_ids"], positions, batch["memory"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()), logits


def one_process() -> Outcome:
    model = captions()
    loss, logits = captions_step(model, captions_batch())
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Outcome(float(loss.detach()), gradients, logits.detach())


def declared(model: Any, how: str) -> dict[str, Any]:
    """What a user says: which modules are local, or which are the sequence's."""
    if how == "listed":
        return {"modules": [model.block]}
    if how == "local":
        model.cross.context_parallel_local = True
        model.encoder.context_parallel_local = True
    return {}


def parallel(rank: int, world_size: int, sizes: tuple[int, int], how: str, again: str) -> Outcome:
    model = captions(again)
    ulysses, ring = sizes
    runtime = ContextParallelRuntime(
        StrategyConfig(ulysses_size=ulysses, ring_size=ring, labels="aligned")
    )
    runtime.meshes.build(ulysses * ring, "cpu", None, model)
    try:
        runtime.attach(model, declared(model, how), needs_labels=True)
        return run_step(runtime, model, world_size, captions_batch(), captions_step)
    finally:
        runtime.detach()


@pytest.mark.quick(
    "sizes0-local-", "sizes0-local-reentrant", "sizes0-listed-reentrant", "sizes0-listed-checkpoint"
)
@pytest.mark.parametrize("again", ["", "reentrant", "checkpoint"])
@pytest.mark.parametrize("how", ["local", "listed"])
@pytest.mark.parametrize("sizes", [(1, 2), (2, 2)])
def test_cross_attention_is_exact(sizes: tuple[int, int], how: str, again: str) -> None:
    want = one_process()
    for got in run_ranks(sizes[0] * sizes[1], parallel, sizes, how, again, timeout=30):
        assert got.loss == pytest.approx(want.loss, rel=1e-13)
        torch.testing.assert_close(got.logits, want.logits, rtol=0, atol=1e-12)
        assert got.gradients.keys() == want.gradients.keys()
        for name, gradient in want.gradients.items():
            torch.testing.assert_close(got.gradients[name], gradient, rtol=0, atol=1e-12)
        assert got.calls == (4 if again else 2)  # two calls of the block; recomputed, twice that


def test_cross_attention_that_is_not_declared_is_refused_with_what_to_do() -> None:
    model = captions()
    handle = swap_attention(model, MESH)
    handle.activate(state())
    x = torch.randn(1, 8, WIDTH, dtype=torch.float64)
    with pytest.raises(
        ConfigError, match=r"8 queries and 7 keys.*context_parallel_local = True on"
    ):
        model.cross(x, x[:, :7])
    handle.undo()


# -- which calls are intercepted ---------------------------------------------------------------------


class SelfAttention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            return F.scaled_dot_product_attention(x, x, x)
        raise ValueError("an error")


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = SelfAttention(), SelfAttention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) + F.scaled_dot_product_attention(x, x, x)


X = torch.randn(1, 2, 8, 4)


def state() -> StepState:
    return StepState(SequenceLayout(8), torch.arange(8)[None])


def intercepted(model: Pair, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[int, Any]:
    """How many of the three calls of a step are intercepted, and the report."""
    count: list[int] = []

    def attention(self: Any, q: Any, k: Any, v: Any, spec: Any) -> torch.Tensor:
        count.append(1)
        self.state.calls += 1
        return q

    monkeypatch.setattr(SwapHandle, "attention", attention)
    handle = swap_attention(model, MESH, **options)
    try:
        handle.activate(state())
        model(X)
        assert not handle.scopes
    finally:
        handle.undo()
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    return len(count), handle.report


def test_without_a_word_all_calls_are_the_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, report = intercepted(Pair(), monkeypatch)
    assert calls == 3
    assert [(x.modules, x.how) for x in report] == [
        ("first", "calls of torch's"),
        ("second", "calls of torch's"),
        ("torch.nn.functional", "every call"),
    ]


def test_a_module_that_is_declared_local_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Pair()
    model.second.context_parallel_local = True  # type: ignore[assignment]
    calls, report = intercepted(model, monkeypatch)
    assert calls == 2
    assert [(x.modules, x.how) for x in report][1] == ("second", "left alone")


def test_what_is_not_listed_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Pair()
    calls, report = intercepted(model, monkeypatch, roots=[model.first])
    assert calls == 1
    assert [(x.modules, x.how) for x in report] == [
        ("first", "calls of torch's"),
        ("second", "left alone"),
        ("torch.nn.functional", "calls in listed modules"),
    ]


def test_what_is_declared_local_inside_of_a_listed_module(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Pair()
    model.first.context_parallel_local = True  # type: ignore[assignment]
    assert intercepted(model, monkeypatch, roots=[model])[0] == 2


def test_an_error_in_a_module_that_is_left_alone_does_not_confuse_what_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Pair()
    model.second.context_parallel_local = True  # type: ignore[assignment]
    handle = swap_attention(model, MESH)
    handle.activate(state())
    model.second.eval()
    with pytest.raises(ValueError, match="an error"):
        model.second(X)
    assert not handle.scopes
    assert handle.intercepts
    handle.undo()


def test_an_empty_list_is_refused() -> None:
    with pytest.raises(ConfigError, match="no module is listed"):
        swap_attention(Pair(), MESH, roots=[])


def test_a_part_of_a_hugging_face_model_is_not_swapped_alone() -> None:
    model = make_model(Case())
    match = "LlamaDecoderLayer is a part of LlamaForCausalLM.*swapped whole"
    with pytest.raises(ConfigError, match=match):
        swap_attention(model, MESH, roots=[model.model.layers[0]])
    swap_attention(model, MESH, roots=[model.model]).undo()


def test_a_part_of_a_hugging_face_model_is_not_left_alone() -> None:
    model = make_model(Case())
    model.model.layers[0].self_attn.context_parallel_local = True
    handle = swap_attention(model, MESH)
    try:
        handle.activate(state())
        ids, positions = torch.zeros(1, 8, dtype=torch.long), torch.arange(8)[None]
        with pytest.raises(ConfigError, match=r"LlamaAttention is a part .*no part of it can be"):
            model(input_ids=ids, position_ids=positions, use_cache=False)
    finally:
        handle.undo()


# -- where the function is kept ----------------------------------------------------------------------


def in_attribute() -> nn.Module:
    model = Pair()
    model.second.attend = F.scaled_dot_product_attention  # type: ignore[assignment]
    return model


def in_partial() -> nn.Module:
    model = Pair()
    model.second.attend = functools.partial(F.scaled_dot_product_attention, is_causal=True)  # type: ignore[assignment]
    return model


def in_dict() -> nn.Module:
    model = Pair()
    model.kinds = {"sdpa": F.scaled_dot_product_attention}  # type: ignore[assignment]
    return model


def in_class() -> nn.Module:
    class Kept(Pair):
        attend = staticmethod(F.scaled_dot_product_attention)

    return Kept()


def in_default() -> nn.Module:
    class Kept(Pair):
        def forward(self, x: Any, *, attend: Any = F.scaled_dot_product_attention) -> Any:
            return attend(x, x, x)

    return Kept()


def in_enclosed() -> nn.Module:
    attend = F.scaled_dot_product_attention

    class Kept(Pair):
        def forward(self, x: Any) -> Any:
            return attend(x, x, x)

    return Kept()


def in_file() -> nn.Module:
    file: Any = types.ModuleType("users_kinds")
    source = """
import torch.nn.functional as F
from torch import nn
KINDS = {"sdpa": F.scaled_dot_product_attention, "other": None}
class Kept(nn.Module):
    pass
"""
    sys.modules["users_kinds"] = file
    exec(source, file.__dict__)
    return file.Kept()


KEPT: dict[str, tuple[Any, str]] = {
    "attribute": (in_attribute, r"second \(SelfAttention\) keeps .* itself in attend, where"),
    "partial": (in_partial, r"second \(SelfAttention\) .* in attend's partial, where"),
    "dict": (in_dict, r"the model \(Pair\) .* in kinds, at key sdpa, where"),
    "class": (in_class, r"class Kept .* in attend, where"),
    "default": (in_default, r"class Kept .* in forward's default of attend, where"),
    "enclosed": (in_enclosed, r"class Kept .* in forward, which encloses attend, where"),
    "file": (in_file, r"file users_kinds .* in KINDS, at key sdpa, where"),
}


@pytest.mark.parametrize("while_swapped", [False, True])
@pytest.mark.parametrize("where", KEPT)
def test_a_function_that_is_kept_is_refused(where: str, while_swapped: bool) -> None:
    """Also where it was kept while another model is swapped: it is what has taken its place."""
    other = swap_attention(Pair(), MESH) if while_swapped else None
    make, match = KEPT[where]
    try:
        with pytest.raises(ConfigError, match=match + r" it cannot be replaced.*lambda"):
            swap_attention(make(), MESH)
    finally:
        sys.modules.pop("users_kinds", None)
        if other is not None:
            other.undo()


def test_a_function_that_is_kept_by_what_is_left_alone_is_accepted() -> None:
    model: Any = in_attribute()
    model.second.context_parallel_local = True
    swap_attention(model, MESH).undo()

"""Swapping and undoing: a swapped model outside of a step is the plain model, to the last bit."""

from __future__ import annotations

import gc
import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_cp.errors import ConfigError
from lightning_cp.layout import SequenceLayout
from lightning_cp.models import StepState, SwapHandle, num_heads_of, swap_attention
from lightning_cp.models.handle import install_replacements
from lightning_cp.models.sdpa import sdpa_replacements
from lightning_cp.utils.patching import ReplacedFunction
from tests.helpers.models.mesh import MESH
from tests.helpers.models.steps import Case, make_batch, make_model
from tests.helpers.pool import run_ranks
from tests.helpers.strategies.plain_llama import PlainLlama


class Kept:
    """PyTorch's own function, out of reach: a global of this module would be replaced as well."""

    sdpa = staticmethod(F.scaled_dot_product_attention)


def references() -> dict[tuple[str, str], Any]:
    """Every global of every loaded module that is PyTorch's attention function, or claims to be."""
    found: dict[tuple[str, str], Any] = {}
    for at, module in list(sys.modules.items()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            function = type(value) in (types.FunctionType, types.BuiltinFunctionType)
            if function and value.__name__ == Kept.sdpa.__name__:
                found[at, name] = value
    return found


def interfaces() -> tuple[list[str], list[str]]:
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    return list(AttentionInterface._global_mapping), list(AttentionMaskInterface._global_mapping)


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_pre_hooks) for module in model.modules())


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before, registered = references(), interfaces()
    yield
    after = references()
    assert before.items() <= after.items()
    assert ("torch.nn.functional", Kept.sdpa.__name__) in after
    assert all(value is Kept.sdpa for value in after.values())
    assert interfaces() == registered
    assert torch.backends.mha.get_fastpath_enabled()


def state(tokens: int = 8) -> StepState:
    return StepState(SequenceLayout(tokens), torch.arange(tokens)[None])


# -- what is replaced -------------------------------------------------------------------------------


def test_the_report_names_what_was_swapped() -> None:
    inner = nn.ModuleDict({"a": make_model(Case()), "b": make_model(Case(model="gpt2"))})
    handle = swap_attention(inner, MESH)
    *models, function = handle.report
    assert [str(line) for line in models] == [
        "2 x LlamaAttention (attention interface, was sdpa)",
        "2 x GPT2Attention (attention interface, was sdpa)",
    ]
    assert str(function) == "scaled_dot_product_attention (every call, was torch's)"
    shown = str(handle.report).splitlines()
    assert [line.split()[0] for line in shown] == [
        "modules",
        shown[1].split()[0],
        "a.model.layers.*.self_attn",
        "b.transformer.h.*.attn",
        "torch.nn.functional",
    ]
    assert [line.split()[1] for line in shown[2:]] == ["2", "2", "-"]
    handle.undo()


def test_only_the_chosen_models_are_swapped() -> None:
    chosen, other = make_model(Case()), make_model(Case(attention="eager"))
    handle = swap_attention(nn.ModuleList([chosen, other]), MESH, roots=[chosen])
    assert [(x.modules, x.how) for x in handle.report] == [
        ("0.model.layers.*.self_attn", "attention interface"),
        ("1.model.layers.*.self_attn", "left alone"),
        ("torch.nn.functional", "calls in listed modules"),
    ]
    handle.activate(state())
    assert chosen.config._attn_implementation.startswith("lightning_cp")
    assert other.config._attn_implementation == "eager"
    assert hooks(other) == 0
    handle.undo()


def test_a_step_changes_the_config_and_its_end_changes_it_back() -> None:
    model = make_model(Case(attention="eager"))
    handle = swap_attention(model, MESH)
    before = model.config.to_dict()
    assert model.config._attn_implementation == "eager"
    for _ in range(2):
        handle.activate(state())
        assert handle.active
        assert model.config._attn_implementation.startswith("lightning_cp")
        assert not torch.backends.mha.get_fastpath_enabled()
    handle.deactivate()
    assert not handle.active
    assert model.config._attn_implementation == "eager"
    assert torch.backends.mha.get_fastpath_enabled()
    assert model.config.to_dict() == before
    handle.undo()
    assert hooks(model) == 0


def test_undo_ends_a_step_that_is_under_way() -> None:
    model = make_model(Case())
    handle = swap_attention(model, MESH)
    handle.activate(state())
    handle.undo()
    assert not handle.active
    assert model.config._attn_implementation == "sdpa"
    assert hooks(model) == 0
    handle.undo()  # again: nothing to do


def test_parts_of_a_model_keep_their_own_implementations() -> None:
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    tiny: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2}
    config = LlavaConfig(
        text_config={"model_type": "llama", "vocab_size": 40, **tiny, **heads},
        vision_config={"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4, **tiny, **heads},
        image_token_index=39,
    )  # fmt: skip
    model: Any = LlavaForConditionalGeneration(config)
    model.set_attn_implementation({"text_config": "sdpa", "vision_config": "eager"})

    def names() -> list[str]:
        parts = (model.config, model.config.text_config, model.config.vision_config)
        return [part._attn_implementation for part in parts]

    before = names()
    assert before[1:] == ["sdpa", "eager"]
    handle = swap_attention(model, MESH)
    assert names() == before
    handle.activate(state())
    assert all(name.startswith("lightning_cp") for name in names())
    handle.undo()
    assert names() == before


def test_a_model_that_cannot_be_swapped_leaves_nothing_behind() -> None:
    from transformers import XLNetConfig, XLNetLMHeadModel

    config = XLNetConfig(vocab_size=48, d_model=32, n_layer=1, n_head=4, d_inner=32)
    good = make_model(Case())
    with pytest.raises(ConfigError, match="XLNetLMHeadModel does not use"):
        swap_attention(nn.ModuleList([good, XLNetLMHeadModel(config)]), MESH)
    assert hooks(good) == 0


# -- outside of a step ------------------------------------------------------------------------------


@pytest.mark.quick(
    "llama-right-eager",
    "bert-plain-sdpa",
    "gpt2-right-sdpa",
    "gpt2-plain-eager",
    "llama-plain-sdpa",
    "bert-right-eager",
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("batch", ["plain", "right"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_outside_of_a_step_it_is_the_plain_model(name: str, batch: str, attention: str) -> None:
    case = Case(model=name, batch=batch, attention=attention)
    plain, swapped = make_model(case), make_model(case)
    handle = swap_attention(swapped, MESH)
    given = make_batch(case)
    results: list[Any] = []
    for model in (plain, swapped):
        output = model(**given)
        output.loss.backward()
        results.append(output)
    want, got = results
    assert torch.equal(got.loss, want.loss)
    assert torch.equal(got.logits, want.logits)
    for p, q in zip(plain.parameters(), swapped.parameters(), strict=True):
        assert p.grad is None or torch.equal(p.grad, q.grad)  # type: ignore[arg-type]
    assert (got.get("past_key_values") is None) == (want.get("past_key_values") is None)
    handle.undo()


def test_generating_outside_of_a_step() -> None:
    plain, swapped = make_model(Case()), make_model(Case())
    prompt = make_batch(Case())["input_ids"][:1, :5]
    handle = swap_attention(swapped, MESH)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(prompt)
    want, got = (
        model.eval().generate(prompt, attention_mask=mask, **options) for model in (plain, swapped)
    )
    assert torch.equal(got, want)
    handle.undo()


def test_a_copy_of_a_swapped_model_works_alone() -> None:
    import copy

    model = make_model(Case())
    handle = swap_attention(model, MESH)
    twin = copy.deepcopy(model)
    handle.undo()
    given = make_batch(Case())
    assert twin.config._attn_implementation == "sdpa"
    assert torch.equal(twin(**given).loss, model(**given).loss)


def lonely_forward(rank: int, world_size: int) -> tuple[float, float]:
    """Rank 0 alone calls a swapped model, as a logger that draws the graph does."""
    from tests.helpers.models.steps import start

    case = Case()
    model = make_model(case)
    runtime = start(1, 2, model)
    runtime.shard(make_batch(case), needs_labels=True)
    runtime.begin_step()
    runtime.end_step()
    loss = float(model(**make_batch(case)).loss.detach()) if rank == 0 else 0.0
    runtime.detach()
    return loss, float(make_model(case)(**make_batch(case)).loss.detach())


def test_one_rank_alone_may_call_the_model_outside_of_a_step() -> None:
    (got, want), _ = run_ranks(2, lonely_forward, timeout=20)
    assert got == want


# -- every way to import the function ---------------------------------------------------------------

SOURCE = """
import torch
import torch.nn.functional
import torch.nn.functional as F
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.functional import scaled_dot_product_attention as renamed

STYLES = {
    "torch.nn.functional.f": lambda *x, **y: torch.nn.functional.scaled_dot_product_attention(*x, **y),
    "F.f": lambda *x, **y: F.scaled_dot_product_attention(*x, **y),
    "functional.f": lambda *x, **y: functional.scaled_dot_product_attention(*x, **y),
    "from import": lambda *x, **y: scaled_dot_product_attention(*x, **y),
    "import as": lambda *x, **y: renamed(*x, **y),
}
"""


class Calls(SwapHandle):
    """Counts intercepted calls, and computes them plainly."""

    def __init__(self) -> None:
        super().__init__(MESH)
        self.specs: list[Any] = []

    def attention(self, q_BLHD: Any, k_BLKD: Any, v_BLKD: Any, spec: Any) -> torch.Tensor:
        self.specs.append(spec)
        q, k, v = (x.transpose(1, 2) for x in (q_BLHD, k_BLKD, v_BLKD))
        scale = spec.softmax_scale
        out = Kept.sdpa(q, k, v, is_causal=spec.causal, scale=scale, enable_gqa=True)
        return out.transpose(1, 2)


def swapped(handle: SwapHandle) -> None:
    install_replacements(handle, sdpa_replacements)


@pytest.fixture
def styles(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """A user's module, imported before the swap."""
    (tmp_path / "users_model.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("users_model")
    yield module
    del sys.modules["users_model"]


def test_a_swap_that_is_collected_while_another_is_made(styles: types.ModuleType) -> None:
    held: list[Any] = [Calls()]
    held[0].itself = held[0]  # for the garbage collector
    swapped(held[0])

    def collects(handle: SwapHandle) -> list[ReplacedFunction]:
        held.clear()
        if gc.isenabled():  # as Python may at any moment
            gc.collect()
        return []

    q, second = torch.randn(2, 4, 8, 16), Calls()
    install_replacements(second, sdpa_replacements, collects)
    gc.collect()
    second.activate(state())
    F.scaled_dot_product_attention(q, q, q)
    assert len(second.specs) == 1
    assert gc.isenabled()
    second.undo()


def test_every_import_style_is_intercepted_and_restored(styles: types.ModuleType) -> None:
    q = torch.randn(2, 4, 8, 16)
    handle = Calls()
    want = Kept.sdpa(q, q, q, is_causal=True, scale=0.3)
    swapped(handle)
    for name, call in styles.STYLES.items():
        assert torch.equal(call(q, q, q, None, 0.0, True, scale=0.3), want), name
        assert not handle.specs, name
        handle.activate(state())
        assert torch.equal(call(query=q, key=q, value=q, is_causal=True, scale=0.3), want), name
        assert [(s.causal, s.softmax_scale) for s in handle.specs] == [(True, 0.3)], name
        handle.deactivate()
        handle.specs.clear()
    handle.undo()
    assert styles.renamed is Kept.sdpa
    assert styles.scaled_dot_product_attention is Kept.sdpa


def test_a_module_imported_while_swapped_is_restored_too() -> None:
    handle = Calls()
    swapped(handle)
    late: Any = types.ModuleType("imported_late")
    exec(SOURCE, late.__dict__)
    sys.modules["imported_late"] = late
    try:
        assert late.renamed is not Kept.sdpa
        handle.undo()
        assert late.renamed is Kept.sdpa
        assert late.scaled_dot_product_attention is Kept.sdpa
    finally:
        del sys.modules["imported_late"]


@pytest.mark.parametrize("order", ["inner first", "outer first"])
def test_nested_swaps_are_undone_in_any_order(order: str) -> None:
    models = [make_model(Case()), make_model(Case(model="gpt2"))]
    handles = [swap_attention(model, MESH) for model in models]
    model = models[0]
    handles += [swap_attention(model, MESH)]  # the same model twice
    undone = handles if order == "outer first" else handles[::-1]
    q = torch.randn(1, 2, 4, 8)
    want = Kept.sdpa(q, q, q)
    for handle in undone:
        handle.activate(state())
        handle.undo()
        assert torch.equal(F.scaled_dot_product_attention(q, q, q), want)
        assert [m.config._attn_implementation for m in models] == ["sdpa", "sdpa"]
    assert F.scaled_dot_product_attention is Kept.sdpa
    assert hooks(nn.ModuleList(models)) == 0


def test_the_middle_of_three_swaps_is_taken_out() -> None:
    handles = [Calls() for _ in range(3)]
    for handle in handles:
        swapped(handle)
    handles[1].undo()
    q = torch.randn(1, 2, 4, 8)
    for handle in (handles[2], handles[0]):
        handle.activate(state())
        F.scaled_dot_product_attention(q, q, q)
        handle.deactivate()
    assert [len(handle.specs) for handle in handles] == [1, 0, 1]
    handles[0].undo()
    F.scaled_dot_product_attention(q, q, q)
    handles[2].undo()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_torchs_own_attention_module_is_intercepted(training: bool, batch_first: bool) -> None:
    """Without gradients and in eval mode it has a fast path of its own, which must not be taken."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(16, 4, batch_first=batch_first).train(training)
    x = torch.randn(2, 8, 16) if batch_first else torch.randn(8, 2, 16)
    handle = Calls()
    swapped(handle)
    with torch.set_grad_enabled(training):
        want = module(x, x, x, need_weights=False)[0]
        handle.activate(state())
        got = module(x, x, x, need_weights=False)[0]
    assert len(handle.specs) == 1
    assert not handle.specs[0].causal
    torch.testing.assert_close(got, want)
    handle.undo()


def test_torchs_transformer_layer_is_intercepted() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.0).eval()
    handle = Calls()
    swapped(handle)
    x = torch.randn(2, 8, 16)
    with torch.no_grad():
        want = layer(x)
        handle.activate(state())
        torch.testing.assert_close(layer(x), want)
    assert len(handle.specs) == 1
    handle.undo()


# -- heads ------------------------------------------------------------------------------------------


def test_heads_come_from_configs() -> None:
    assert num_heads_of(make_model(Case())) == 4
    assert num_heads_of(make_model(Case(model="gpt2"))) == 4  # n_head, by its config's own alias


def test_heads_come_from_attributes() -> None:
    assert num_heads_of(PlainLlama(num_heads=6, num_kv_heads=3)) == 6
    assert num_heads_of(nn.TransformerEncoderLayer(24, 8, 8)) == 8
    model = nn.Linear(2, 2)
    model.config = types.SimpleNamespace(n_heads=12)  # type: ignore[assignment]
    assert num_heads_of(nn.Sequential(model)) == 12


def test_heads_of_several_kinds_are_shared_by_all() -> None:
    both = nn.ModuleList([nn.MultiheadAttention(24, 12), nn.MultiheadAttention(24, 8)])
    assert num_heads_of(both) == 4


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "8", None])
def test_what_is_no_count_is_not_taken(value: Any) -> None:
    model = nn.Linear(2, 2)
    model.num_heads = value
    with pytest.raises(
        ConfigError, match=r"mode='auto' needs the number of attention heads.*num_heads="
    ):
        num_heads_of(model)

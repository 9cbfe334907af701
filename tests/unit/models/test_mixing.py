"""Layers other than attention that mix tokens: a rank would mix its own tokens only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_cp.errors import ConfigError
from lightning_cp.layout import SequenceLayout
from lightning_cp.models import StepState, SwapHandle, swap_attention
from lightning_cp.models.guards.attention_calls import watch_attention, watch_calls
from lightning_cp.models.guards.token_mixing import check_no_mixing, watch_pooling
from lightning_cp.models.handle import install_replacements
from lightning_cp.models.hf.swap import swap_hf
from lightning_cp.models.sdpa import sdpa_replacements
from lightning_cp.models.swap import local_modules
from tests.helpers.models.later import all_families
from tests.helpers.models.mesh import MESH
from tests.helpers.models.steps import Case, make_model


def hf(name: str, **options: Any) -> Any:
    """A tiny model of the class ``name``."""
    import transformers

    kind: Any = getattr(transformers, name)
    sizes = {"vocab_size": 43, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
    return kind(kind.config_class(**{**sizes, **options}))


HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}


def qwen3_next() -> Any:
    linear = {f"linear_num_{kind}_heads": 2 for kind in ("key", "value")}
    dims = {f"linear_{kind}_head_dim": 8 for kind in ("key", "value")}
    kinds = {"layer_types": ["linear_attention", "full_attention"]}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "head_dim": 8}
    return hf("Qwen3NextForCausalLM", **HEADS, **linear, **dims, **kinds, **experts)


def lfm2() -> Any:
    return hf("Lfm2ForCausalLM", **HEADS, layer_types=["conv", "full_attention"])


class TinyMambaMixer(nn.Linear):
    """Known by its name."""


MIXERS = {
    "convolution": (lambda: nn.Conv1d(4, 4, 3), r"the model \(Conv1d, kernel 3\)"),
    "inside": (lambda: nn.Sequential(nn.ReLU(), nn.Conv1d(4, 4, 5, padding=2)), r"1 \(Conv1d, kernel 5\)"),
    "transposed": (lambda: nn.ConvTranspose1d(4, 4, 2), r"ConvTranspose1d, kernel 2"),
    "lstm": (lambda: nn.ModuleDict({"memory": nn.LSTM(4, 4)}), r"memory \(LSTM\)"),
    "gru": (lambda: nn.GRU(4, 4), r"\(GRU\)"),
    "rnn": (lambda: nn.RNN(4, 4), r"\(RNN\)"),
    "cell": (lambda: nn.GRUCell(4, 4), r"\(GRUCell\)"),
    "name": (lambda: nn.ModuleList([TinyMambaMixer(4, 4)]), r"0 \(TinyMambaMixer\)"),
    "many": (lambda: nn.ModuleList([nn.LSTM(4, 4) for _ in range(6)]), r"3 \(LSTM\) and 2 more"),
    "lfm2": (lfm2, r"Lfm2ForCausalLM, layers of type conv.*"),
    "qwen3 next": (qwen3_next, r"layers of type linear_attention"),
    "mamba": (lambda: hf("MambaForCausalLM", state_size=4, time_step_rank=2), "MambaForCausalLM"),
}  # fmt: skip


@pytest.mark.parametrize("which", MIXERS)
def test_mixers_are_refused_by_name(which: str) -> None:
    make, match = MIXERS[which]
    with pytest.raises(ConfigError, match=f"mix tokens along the sequence.*{match}") as refused:
        swap_attention(make(), MESH)
    assert "context_parallel_local = True" in str(refused.value)


def test_embeddings_of_neighbouring_tokens_are_refused() -> None:
    sizes = {"embedding_size": 16, "num_attention_heads": 4, "intra_bottleneck_size": 32}
    model = hf("MobileBertForMaskedLM", **sizes)
    with pytest.raises(ConfigError, match="MobileBertEmbeddings, which joins neighbouring tokens"):
        check_no_mixing(model)


def test_what_treats_every_token_alone_is_accepted() -> None:
    alone = [
        nn.Conv1d(4, 4, 1),
        nn.Conv2d(3, 4, 2),
        nn.Linear(4, 4),
        nn.LayerNorm(4),
        nn.Embedding(4, 4),
    ]
    check_no_mixing(nn.ModuleList(alone))


@pytest.mark.parametrize("name", all_families())
def test_ordinary_models_are_accepted(name: str) -> None:
    """GPT-2's Conv1D is a linear layer."""
    check_no_mixing(make_model(Case(model=name)))


def test_a_module_may_be_declared_local() -> None:
    model = nn.ModuleDict({"pixels": nn.Sequential(nn.Conv1d(4, 4, 3)), "memory": nn.LSTM(4, 4)})
    model["pixels"].context_parallel_local = True  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"attention: memory \(LSTM\)\. Under"):
        check_no_mixing(model)
    model["memory"].context_parallel_local = True  # type: ignore[assignment]
    check_no_mixing(model)


def test_models_that_are_not_swapped_are_not_looked_at() -> None:
    chosen, other = make_model(Case()), lfm2()
    both = nn.ModuleList([chosen, other])
    swap_attention(both, MESH, roots=[chosen]).undo()
    with pytest.raises(ConfigError, match="layers of type conv"):
        swap_attention(both, MESH)
    assert not any(module._forward_pre_hooks for module in both.modules())


# -- norms and pools --------------------------------------------------------------------------------


class Around(nn.Module):
    """Attention, and a layer over [batch, features, tokens] in front of it."""

    def __init__(self, layer: nn.Module, shape: tuple[int, ...] = (2, 16, 8)) -> None:
        super().__init__()
        self.layer, self.shape = layer, shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layer(torch.ones(self.shape))
        return nn.functional.scaled_dot_product_attention(x, x, x)


POOLS: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm1d": lambda: nn.BatchNorm1d(16),
    "InstanceNorm1d": lambda: nn.InstanceNorm1d(16),
    "GroupNorm": lambda: nn.GroupNorm(2, 16),
    "AvgPool1d": lambda: nn.AvgPool1d(3, 1, 1),
    "MaxPool1d": lambda: nn.MaxPool1d(2),
    "LPPool1d": lambda: nn.LPPool1d(2, 2),
    "AdaptiveAvgPool1d": lambda: nn.AdaptiveAvgPool1d(4),
    "AdaptiveMaxPool1d": lambda: nn.AdaptiveMaxPool1d(4),
}


def call_around(model: Around) -> None:
    model(X)  # outside of a step nothing is refused
    handle = Calls(MESH)
    try:
        install_replacements(handle, sdpa_replacements)
        watch_pooling(model, handle)
        handle.activate(state())
        model(X)
    finally:
        handle.undo()
    assert not model.layer._forward_pre_hooks


@pytest.mark.parametrize("name", POOLS)
def test_norms_and_pools_over_tokens_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"layer \({name}, called with \(2, 16, 8\)\) goes over"):
        call_around(Around(POOLS[name]()))


@pytest.mark.parametrize("name", POOLS)
def test_norms_and_pools_may_be_declared_local(name: str) -> None:
    layer = POOLS[name]()
    layer.context_parallel_local = True  # type: ignore[assignment]
    call_around(Around(layer))


def test_norms_and_pools_that_treat_tokens_alone_are_accepted() -> None:
    call_around(Around(nn.BatchNorm1d(16).eval()))
    call_around(Around(nn.GroupNorm(2, 16), (8, 16)))
    call_around(Around(nn.GroupNorm(2, 16), (2, 16, 3, 3)))  # an image
    call_around(Around(nn.AvgPool1d(1)))


def test_swapping_attention_watches_norms_and_pools() -> None:
    model = Around(nn.BatchNorm1d(16))
    handle = swap_attention(model, MESH)
    handle.activate(state())
    with pytest.raises(ConfigError, match="BatchNorm1d"):
        model(X)
    handle.undo()


# -- attention that computes by itself --------------------------------------------------------------


class HandmadeAttention(nn.Module):
    """Softmax by hand, which nothing intercepts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ x.transpose(-1, -2)).softmax(-1) @ x


class FusedAttention(nn.Module):
    """Calls PyTorch's function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x)


class Calls(SwapHandle):
    """Counts intercepted calls."""

    def attention(self, q_BLHD: Any, k_BLKD: Any, v_BLKD: Any, spec: Any) -> torch.Tensor:
        assert self.state is not None
        self.state.calls += 1
        return q_BLHD


def watched(model: nn.Module) -> SwapHandle:
    handle = Calls(MESH)
    install_replacements(handle, sdpa_replacements)
    watch_attention(model, handle, local_modules(model, None))
    watch_calls(model, handle, {model})
    return handle


X = torch.ones(2, 4, 8, 16)


def state() -> StepState:
    return StepState(SequenceLayout(8), torch.arange(8)[None])


def test_attention_that_is_not_intercepted_while_other_is() -> None:
    model = nn.Sequential(FusedAttention(), HandmadeAttention(), FusedAttention())
    handle = watched(model)
    model(X)
    handle.activate(state())
    try:
        with pytest.raises(
            ConfigError, match=r"1 \(HandmadeAttention\) computed attention by itself"
        ):
            model(X)
        model[1].context_parallel_local = True  # type: ignore[assignment]
    finally:
        handle.undo()
    model(X)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    handle = watched(model)
    handle.activate(state())
    model(X)
    assert handle.state is not None
    assert handle.state.calls == 2
    handle.undo()


class AttentionOfMine(HandmadeAttention):
    """Not named like a class that must call attention."""


def test_no_call_at_all_names_what_looks_like_attention() -> None:
    model = nn.Sequential(AttentionOfMine())
    handle = watched(model)
    handle.activate(state())
    try:
        model(X)
        with pytest.raises(
            ConfigError, match=r"\(0 calls\).*Attention classes seen: AttentionOfMine"
        ):
            handle.check_intercepted(model)
    finally:
        handle.undo()


def test_an_error_inside_attention_does_not_confuse_the_next_step() -> None:
    class Sometimes(FusedAttention):
        fails = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.fails:
                raise ValueError("an error")
            return super().forward(x)

    Sometimes.__name__ = "SometimesAttention"
    model = Sometimes()
    handle = watched(model)
    handle.activate(state())
    with pytest.raises(ValueError, match="an error"):
        model(X)
    model.fails = False
    handle.activate(state())
    model(X)
    handle.undo()


def test_one_layer_of_a_model_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(Case(model="gpt2"))
    by_hand: Any = lambda hidden, *_, **__: (hidden, None)  # noqa: E731
    monkeypatch.setattr(model.transformer.h[1].attn, "forward", by_hand)
    handle = Calls(MESH)
    swap_hf(model, handle)
    watch_attention(model, handle)
    handle.activate(state())
    try:
        with pytest.raises(
            ConfigError, match=r"transformer\.h\.1\.attn \(GPT2Attention\) computed"
        ):
            model.transformer(input_ids=torch.ones(1, 8, dtype=torch.long))
    finally:
        handle.undo()


@pytest.mark.parametrize("how", ["default", "by name", "by position"])
def test_weights_of_torchs_own_module_are_refused(how: str) -> None:
    module = nn.MultiheadAttention(16, 4, batch_first=True)
    handle = watched(nn.ModuleDict({"mix": module}))
    x = torch.ones(2, 8, 16)
    given: dict[str, Any] = {"by name": {"need_weights": True}}.get(how, {})
    more = (None, True) if how == "by position" else ()
    module(x, x, x)
    handle.activate(state())
    try:
        with pytest.raises(
            ConfigError, match=r"mix \(nn.MultiheadAttention\) is called with need_weights"
        ):
            module(x, x, x, *more, **given)
        module(x, x, x, None, False)
        module(x, x, x, need_weights=False)
    finally:
        handle.undo()

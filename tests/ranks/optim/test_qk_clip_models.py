"""Models of other libraries, and stages of a Trainer: whose attention is collected, and until when."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_cp.errors import ConfigError
from lightning_cp.optim.qk_clip import QKClip
from tests.helpers.models.litgpt_zoo import litgpt_model, needs_litgpt
from tests.helpers.optim.qk_models import Clipped, ClippedSGD, Watched, maxima_by_hand
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.helpers.strategies.small import HYBRID, RING, ULYSSES, VOCAB, Settings, trainer_of
from tests.ranks.optim.test_qk_clip_maxima import Loop, batch_of
from tests.ranks.optim.test_qk_clip_training import MESHES


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, attention_bias=True))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    none: Any = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(vocab_size=VOCAB, n_embd=32, n_head=4, n_layer=2, use_cache=False, **none)
    return GPT2LMHeadModel(config)


def qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8))


def litgpt() -> nn.Module:
    return litgpt_model(n_query_groups=2, padded_vocab_size=VOCAB, vocab_size=VOCAB)


SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "use_cache": False,
}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (llama, {}),
    "gpt2": (gpt2, {"fused": {"*.c_attn.weight": (32, 32, 32)}}),
    "litgpt": (litgpt, {"fused": {"*.qkv.weight": (32, 16, 16)}}),
}
NAMES = {"llama": "model.layers.{}.self_attn", "gpt2": "transformer.h.{}.attn"}
NAMES["litgpt"] = "transformer.h.{}.attn"


class Trained(pl.LightningModule):
    """Labels are aligned, also for models that would shift them."""

    def __init__(self, kind: str, clip: QKClip) -> None:
        super().__init__()
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(4)
        self.network = make(kind).double().train()
        self.clip = clip

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = self.network(ids)
        return getattr(found, "logits", found)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> Any:
        return ClippedSGD(self.network.named_parameters(), self.clip, 0.0)


def make(kind: str) -> Any:
    return MODELS[kind][0]() if kind in MODELS else {"qwen3": qwen3}[kind]()


class Seen(QKClip):
    """Keeps what each step found."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.steps: list[dict[str, list[float]]] = []

    def check_ready(self) -> None:
        super().check_ready()
        assert self._ready is not None
        self.steps.append(self._ready)


def largest_by_hand(module: Trained, ids: torch.Tensor) -> list[torch.Tensor]:
    """Of each layer, from what one process passes to PyTorch's function."""
    found: list[torch.Tensor] = []

    def attention(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = (q @ keys.transpose(2, 3)) * (scale or 1 / math.sqrt(q.shape[3]))
        seen = torch.ones_like(scores[0, 0], dtype=torch.bool).tril()
        assert is_causal or (attn_mask is not None and attn_mask.dtype == torch.bool)
        scores = scores.masked_fill(~(seen if attn_mask is None else attn_mask), -math.inf)
        found.append(scores.amax((0, 2, 3)))
        return scores.softmax(-1) @ values

    with torch.no_grad(), mock.patch.object(F, "scaled_dot_product_attention", attention):
        module(ids)
    return found


def fitted(rank: int, world_size: int, kind: str, settings: Settings) -> Any:
    """Two steps, without any change but the clip's: scores before and after."""
    clip = Seen(tau=1e9, **MODELS.get(kind, (None, {}))[1])
    module = Trained(kind, clip)
    ids = batch_of(0)["input_ids"]
    before = largest_by_hand(module, ids)
    clip.tau = 0.8 * float(before[0].max())
    data: Any = [{name: x[at] for name, x in batch_of(0).items()} for at in (0, 1)]
    trainer = trainer_of(world_size, {**settings, "labels": "aligned"}, max_epochs=2)
    trainer.fit(module, DataLoader(data, batch_size=2))
    return before, clip.steps, clip.tau


@pytest.fixture(autouse=True)
def _default_dtype() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


in_every_mode = pytest.mark.parametrize(
    ("ranks", "settings"),
    [(1, {}), pytest.param(2, RING, marks=pytest.mark.nightly), (2, ULYSSES), (4, HYBRID)],
    ids=str,
)


@pytest.mark.quick("1-{}-gpt2", "2-{'ring_size': 1, 'ulysses_size': 2}-gpt2")
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@in_every_mode
def test_hugging_face(kind: str, ranks: int, settings: Settings) -> None:
    check(kind, ranks, settings)


@needs_litgpt
@in_every_mode
def test_litgpt(ranks: int, settings: Settings) -> None:
    check("litgpt", ranks, settings)


def check(kind: str, ranks: int, settings: Settings) -> None:
    """Scores come down to tau, and in every layer."""
    for want, (before, after), tau in run_ranks(ranks, fitted, kind, settings):
        assert list(before) == [NAMES[kind].format(at) for at in (0, 1)]
        for at, largest in enumerate(want):
            got = torch.tensor(before[NAMES[kind].format(at)], dtype=torch.float64)
            torch.testing.assert_close(got, largest, rtol=1e-7, atol=1e-12)
        first = NAMES[kind].format(0)
        assert max(before[first]) > 1.2 * tau
        assert max(after[first]) == pytest.approx(tau, rel=1e-6)


def test_models_that_normalise_are_refused() -> None:
    expect_on_every_rank(
        *(2, fitted, "qwen3", RING),
        error=ConfigError,
        match=r"layers.0.self_attn normalises queries or keys .*\(k_norm, q_norm\)",
    )


class Validated(Clipped):
    """Validates."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)


def stages(rank: int, world_size: int, settings: Settings, same: bool) -> Any:
    """Validated, fitted, and both again, by one Trainer or two; afterwards nobody listens."""
    clip = Watched(tau=1e9)
    module = Validated(clip, 0.0)
    data: Any = [{name: x[at] for name, x in batch_of(0).items()} for at in (0, 1)]
    loader = DataLoader(data, batch_size=2)
    hooks: list[int] = []
    trainer = trainer_of(world_size, settings)
    for again in (False, True):
        if again:
            trainer = trainer if same else trainer_of(world_size, settings)
            trainer.fit_loop.max_epochs = 3 if same else 2  # two more
        trainer.validate(module, loader, verbose=False)
        trainer.fit(module, loader, loader)
        trainer.validate(module, loader, verbose=False)
        hooks.append(sum(len(x._forward_pre_hooks) for x in module.modules()))
    return clip.steps, hooks


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("mesh", "same"),
    [
        ("ring", False),
        ("fsdp", True),
        *(
            pytest.param(*x, marks=pytest.mark.nightly)
            for x in (("one rank", False), ("one rank", True), ("ring", True))
        ),
    ],
)
def test_stages(mesh: str, same: bool) -> None:
    ranks, settings = MESHES[mesh]
    want = maxima_by_hand(Clipped(Watched(), 0.0).model, batch_of(0))
    for steps, hooks in run_ranks(ranks, stages, settings, same):
        assert len(steps) == 3
        for step in steps:
            for layer, largest in want.items():
                got = torch.tensor(step[layer], dtype=torch.float64)
                torch.testing.assert_close(got, largest, rtol=1e-7, atol=0)
        if mesh != "fsdp":  # which keeps its own
            assert hooks == [0, 0]


def set_up_later(rank: int, world_size: int) -> list[dict[str, list[float]]]:
    """Another model is set up in between, which swaps all attention anew."""
    clip = Watched(tau=1e9)
    loop = Loop(world_size, RING, clip)
    loop.fabric.setup(nn.Linear(2, 2))
    loop.run(batch_of(0))
    loop.step()
    loop.strategy.runtime.detach()
    assert not any(x._forward_pre_hooks for x in loop.model.module.blocks)
    return clip.steps


def test_a_model_that_is_set_up_later() -> None:
    want = maxima_by_hand(Clipped(Watched(), 0.0).model, batch_of(0))
    for (step,) in run_ranks(2, set_up_later):
        for layer, largest in want.items():
            got = torch.tensor(step[layer], dtype=torch.float64)
            torch.testing.assert_close(got, largest, rtol=1e-7, atol=0)


def differing(rank: int, world_size: int) -> None:
    """Ranks that would clip at different scores."""
    module = Clipped(Watched(tau=10.0 + rank), 0.0)
    data: Any = [{name: x[at] for name, x in batch_of(0).items()} for at in (0, 1)]
    trainer_of(world_size, RING).fit(module, DataLoader(data, batch_size=2))


def test_settings_that_differ_between_ranks() -> None:
    expect_on_every_rank(2, differing, error=ConfigError, match=r"qk_clip.*tau=10.0.*tau=11.0")

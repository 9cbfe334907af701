"""QK-clip in one process: what scaling does to scores, where projections are found, and what is refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from lightning_cp.errors import ConfigError, NonFiniteError
from lightning_cp.optim.qk_clip import QKClip
from tests.helpers.strategies.plain_llama import rotate

HEADS, KV_HEADS, DIM, WIDTH = 4, 2, 6, 10
QUERIES, KEYS = HEADS * DIM, KV_HEADS * DIM


class Attention(nn.Module):
    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, QUERIES, bias=bias)
        self.k_proj = nn.Linear(WIDTH, KEYS, bias=bias)
        self.v_proj = nn.Linear(WIDTH, KEYS, bias=bias)


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(WIDTH, QUERIES + 2 * KEYS)


class Transposed(nn.Module):
    """As GPT-2's: columns are outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Module()
        self.c_attn.weight = nn.Parameter(torch.randn(WIDTH, QUERIES + 2 * KEYS))
        self.c_attn.bias = nn.Parameter(torch.randn(QUERIES + 2 * KEYS))


def model_of(*layers: nn.Module) -> Any:
    torch.manual_seed(2)
    model: Any = nn.Module()
    model.layers = nn.ModuleList(layers)
    return model.double()


@torch.no_grad()
def projected(layer: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [H, L, D], k and v."""
    if isinstance(layer, Attention):
        parts = [layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)]
    elif isinstance(layer, Fused):
        parts = list(layer.qkv_proj(x).split([QUERIES, KEYS, KEYS], -1))
    else:
        at: Any = layer.c_attn
        parts = list((x @ at.weight + at.bias).split([QUERIES, KEYS, KEYS], -1))
    q, k, v = (part.unflatten(-1, (-1, DIM)).transpose(0, 1) for part in parts)
    return q, k.repeat_interleave(HEADS // KV_HEADS, 0), v


@torch.no_grad()
def scores(layer: nn.Module, x: torch.Tensor, *, rotary: bool = False) -> torch.Tensor:
    """[H, L, L]."""
    q, k, _ = projected(layer, x)
    if rotary:
        q, k = (rotate(part[None], torch.arange(len(x))[None])[0] for part in (q, k))
    return q @ k.transpose(1, 2)


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "apart": (Attention, {}),
    "without biases": (lambda: Attention(bias=False), {}),
    "fused": (Fused, {"fused": {"*.qkv_proj.weight": (QUERIES, KEYS, KEYS)}}),
    "transposed": (Transposed, {"fused": {"*.c_attn.weight": (QUERIES, KEYS, KEYS)}}),
}


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keys", ["group", "query"])
def test_scores_are_scaled_by_gamma(keys: str, kind: str, alpha: float, rotary: bool) -> None:
    """Of each group alike, or of each head; values and the other layer stay as they were."""
    make, more = KINDS[kind]
    model = model_of(make(), make())
    layer, other = model.layers
    x = torch.randn(9, WIDTH, dtype=torch.float64)
    before, values = scores(layer, x, rotary=rotary), projected(layer, x)[2]
    untouched = [p.detach().clone() for p in other.parameters()]
    largest = before.amax((1, 2))
    tau = float(largest.sort().values[1:3].mean())
    clip = QKClip(tau=tau, alpha=alpha, keys=keys, **more)
    clip.bind(model.named_parameters())
    clip.note("layers.0", largest)
    clip.note("layers.1", torch.full((HEADS,), 0.99 * tau))
    clip.check_ready()
    clip.apply()
    deciding = (
        largest if keys == "query" else largest.view(KV_HEADS, -1).amax(1).repeat_interleave(2)
    )
    gamma = (tau / deciding.float().double()).clamp(max=1.0)
    assert 0 < int((gamma < 1).sum()) <= HEADS
    after = scores(layer, x, rotary=rotary)
    torch.testing.assert_close(after, before * gamma[:, None, None], rtol=1e-12, atol=1e-12)
    assert float(after.amax()) <= tau * (1 + 1e-6)
    assert torch.equal(projected(layer, x)[2], values)
    assert all(map(torch.equal, untouched, other.parameters()))
    assert clip.clipped == {"layers.0": (gamma < 1).nonzero()[:, 0].tolist()}


def test_rotary_keys_that_heads_share() -> None:
    """As of MLA: k's rotary rows are one for all heads, and stay; scores are gamma times what they were."""
    model = model_of(Attention())
    layer, x = model.layers[0], torch.randn(7, WIDTH, dtype=torch.float64)
    before, keys = scores(layer, x), projected(layer, x)[1]
    clip = QKClip(tau=1.0, alpha=0.4, rope="query", rope_rows=(4, 6))
    clip.bind(model.named_parameters())
    clip.note("layers.0", torch.full((HEADS,), 8.0))
    clip.apply()  # asks whether it is ready by itself
    torch.testing.assert_close(scores(layer, x), before / 8.0)
    after = projected(layer, x)[1]
    assert torch.equal(after[..., 4:], keys[..., 4:])
    torch.testing.assert_close(after[..., :4], keys[..., :4] * 8.0**-0.6)


def test_nothing_is_kept_between_steps() -> None:
    """A small score after a large one; a second call in one step counts too."""
    model = model_of(Attention())
    clip = QKClip(tau=10.0)
    clip.bind(model.named_parameters())
    clip.note("layers.0", torch.tensor([1.0, 20.0, 3.0, 4.0]))
    clip.note("layers.0", torch.tensor([5.0, 2.0, 3.0, 4.0]))
    clip.check_ready()
    assert clip.apply() == {"layers.0": [0, 1]}
    assert clip.largest == {"layers.0": 20.0}
    clip.note("layers.0", torch.ones(HEADS))
    clip.check_ready()
    assert clip.apply() == {}
    assert clip.largest == {"layers.0": 1.0}
    clip.note("layers.0", torch.full((HEADS,), 99.0))
    clip.forget()  # a step that was left out
    with pytest.raises(ConfigError, match=r"no largest scores of layers.0"):
        clip.check_ready()


def test_the_log(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of(Attention(), Attention())
    clip = QKClip(tau=10.0, keys="query")
    clip.bind(model.named_parameters())
    with caplog.at_level(logging.INFO, "lightning_cp"):
        for largest in (2.0, 30.0):
            for layer in ("layers.0", "layers.1"):
                clip.note(layer, torch.tensor([1.0, largest, 3.0, largest / 2]))
            clip.apply()
    (record,) = caplog.records
    told = "heads 1, 3, largest score 30"
    assert record.getMessage() == f"QK-clip at tau=10: layers.0: {told}; layers.1: {told}"


def test_halves_are_rounded_once() -> None:
    """In bfloat16 a factor would be off by 2**-9 before it is used."""
    model = model_of(Attention(bias=False)).bfloat16()
    layer: Any = model.layers[0]
    before = layer.q_proj.weight.detach().double()
    clip = QKClip(tau=1.0)
    clip.bind(model.named_parameters())
    clip.note("layers.0", torch.full((HEADS,), 3.0))
    clip.apply()
    assert torch.equal(layer.q_proj.weight, (before / 3**0.5).float().bfloat16())


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"tau": 0}, "tau is a number above 0, got 0"),
    ({"tau": -1.0}, "tau is a number above 0"),
    ({"tau": float("nan")}, "tau"),
    ({"tau": float("inf")}, "tau"),
    ({"tau": "100"}, "tau"),
    ({"alpha": -0.1}, "alpha is a number from 0 to 1"),
    ({"alpha": 1.5}, "alpha is a number from 0 to 1, got 1.5"),
    ({"alpha": True}, "alpha"),
    ({"keys": "all"}, "keys='all' is unknown. Known: group, query"),
    ({"rope": "none"}, "rope='none' is unknown. Known: uniform, query"),
    ({"rope": "query"}, r"rope='query' needs rope_rows=\(start, stop\)"),
    ({"rope": "query", "rope_rows": (4, 4)}, "needs rope_rows"),
    ({"rope": "query", "rope_rows": (-2, 4)}, "needs rope_rows"),
    ({"rope": "query", "rope_rows": (1, 2, 3)}, "needs rope_rows"),
    ({"rope_rows": (0, 2)}, "got rope='uniform'"),
    ({"query": ""}, "query is the name of a projection"),
    ({"key": None}, "key is the name of a projection"),
    ({"layers": "layers.*"}, "layers= is a list of patterns"),
    ({"extra_pass": "yes"}, "extra_pass is True or False"),
]


@pytest.mark.parametrize(("settings", "said"), SETTINGS, ids=[str(x) for x, _ in SETTINGS])
def test_settings(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        QKClip(**settings)


class Normed(Attention):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name, nn.LayerNorm(DIM))


PARAMETERS: list[tuple[dict[str, Any], Any, str]] = [
    (
        {"query": "query"},
        Attention,
        r"no layer with query.weight and k_proj.weight.*layers.0.q_proj",
    ),
    ({"key": "key"}, Attention, "q_proj.weight is there, and layers.0.key.weight is not"),
    ({"layers": ["towers.*"]}, Attention, r"no layer .* among layers \['towers.\*'\]"),
    ({}, Fused, "no layer with q_proj.weight"),
    ({"fused": {"*.qkv.weight": (1, 1, 1)}}, Fused, r"fused= has '\*.qkv.weight', which fits no"),
    ({"fused": {"*.qkv_proj.weight": (24, 12)}}, Fused, "does not fit layers.0.qkv_proj.weight"),
    ({"fused": {"*.qkv_proj.weight": (24, 12, 11)}}, Fused, r"\[48, 10\]: it has the rows of q"),
    ({"fused": {"*.qkv_proj.weight": (24, 24, 0)}}, Fused, "does not fit"),
    ({}, lambda: Normed("q_norm"), r"layers.0 normalises queries or keys .*\(q_norm\)"),
    ({}, lambda: Normed("k_norm"), r"\(k_norm\)"),
    ({}, lambda: Normed("q_layernorm"), r"\(q_layernorm\)"),
]


@pytest.mark.parametrize(("settings", "make", "said"), PARAMETERS)
def test_parameters(settings: dict[str, Any], make: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        QKClip(**settings).bind(model_of(make()).named_parameters())


def test_layers_that_are_left_out() -> None:
    """Also those that could not be clipped."""
    clip = QKClip(layers=["layers.0"])
    clip.bind(model_of(Attention(), Normed("q_norm")).named_parameters())
    assert list(clip.weights()) == ["layers.0"]


NOTES: list[tuple[dict[str, Any], str]] = [
    ({"layer": "layers.7"}, "knows no layer 'layers.7'. It has: layers.0"),
    ({"maxima": torch.ones(2, HEADS)}, r"are \[heads\], got a tensor of shape \[2, 4\]"),
    ({"maxima": torch.ones(5)}, "not those of 5 query heads"),
    ({"maxima": torch.ones(HEADS), "head_dim": 7}, "had 4 query heads of 7 rows.*24 rows"),
    ({"maxima": torch.ones(2), "head_dim": 6}, "had 2 query heads of 6 rows"),
    ({"maxima": torch.ones(3), "head_dim": 6, "tp_size": 2, "tp_rank": 1}, "rank 1 of 2 had 3"),
    ({"maxima": torch.ones(3)}, "24 rows of queries and 12 of keys are not those of 3 query heads"),
]


@pytest.mark.parametrize(("given", "said"), NOTES)
def test_notes(given: dict[str, Any], said: str) -> None:
    clip = QKClip()
    clip.bind(model_of(Attention()).named_parameters())
    with pytest.raises(ConfigError, match=said):
        clip.note(**{"layer": "layers.0", "maxima": torch.ones(HEADS), **given})


def test_before_a_step() -> None:
    with pytest.raises(ConfigError, match=r"knows no parameters. Call bind"):
        QKClip().check_ready()
    model = model_of(Attention(), Attention())
    before = [p.detach().clone() for p in model.parameters()]
    clip = QKClip(rope="query", rope_rows=(4, 8))
    clip.bind(model.named_parameters())
    with pytest.raises(ConfigError, match=r"no largest scores of layers.0, layers.1"):
        clip.check_ready()
    for layer in ("layers.0", "layers.1"):
        clip.note(layer, torch.full((HEADS,), 1e9))
    with pytest.raises(ConfigError, match=r"rope_rows=\(4, 8\) are not within a head of layers.0"):
        clip.check_ready()
    clip = QKClip()
    clip.bind(model.named_parameters())
    clip.note("layers.0", torch.full((HEADS,), 1e9))
    clip.note("layers.1", torch.tensor([1.0, torch.nan, 2.0, torch.inf]))
    with pytest.raises(NonFiniteError, match=r"layers.1: heads 1, 3"):
        clip.apply()
    assert all(map(torch.equal, before, model.parameters()))

"""Layers that ranks share: losses and gradients of one process, for plain and Hugging Face models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_cp.engines.tensor_parallel import FusedColwiseLinear, share_layers
from lightning_cp.engines.tensor_parallel.auto_plan import KNOWN_TYPES, automatic_plan
from lightning_cp.engines.tensor_parallel.user_plan import plan_from_patterns
from lightning_cp.errors import ConfigError
from lightning_cp.mesh import ContextParallelMesh
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.helpers.strategies.plain_llama import PlainLlama

PADDING = 30
"""In the second rank's part of the vocabulary."""


class TiedLlama(PlainLlama):
    """Its head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


def make(kind: str, **options: Any) -> Any:
    """A model whose weights are all different from what they begin with."""
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    plain = {"plain": PlainLlama, "tied": TiedLlama}
    if kind in plain:
        return plain[kind](**options)
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        kind,
        **{
            "vocab_size": 48,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "pad_token_id": PADDING,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "use_cache": False,
            "query_pre_attn_scalar": 8,
            "attention_dropout": 0.0,
            "residual_dropout": 0.0,
            **options,
        },
    )
    config._attn_implementation = "eager" if kind == "gemma2" else "sdpa"
    model = AutoModelForCausalLM.from_config(config).double()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def loss_of(model: Any) -> torch.Tensor:
    """Of one batch, with a token of padding."""
    ids = torch.randint(0, 48, (2, 13), generator=torch.Generator().manual_seed(5))
    ids[0, 3] = PADDING
    if isinstance(model, PlainLlama):
        return F.cross_entropy(model(ids, torch.arange(13)[None]).flatten(0, 1), ids.flatten())
    return model(input_ids=ids, labels=ids).loss


def compare(rank: int, world_size: int, kind: str, plan: Any, options: dict[str, Any]) -> Any:
    """Worst relative errors of the loss and of a gradient, and the names of what is sharded."""
    alone, shared = make(kind, **options), make(kind, **options)
    want = loss_of(alone)
    want.backward()
    if rank:  # what the group's first rank has counts
        for parameter in shared.parameters():
            parameter.data.zero_()
    mesh = ContextParallelMesh(tensor_parallel_size=world_size)
    given = PLANS.get(plan, plan) if isinstance(plan, str) else plan
    share_layers(shared, mesh, given)
    got = loss_of(shared)
    got.backward()
    gradients = {name: p.grad for name, p in alone.named_parameters()}
    assert gradients.keys() == dict(shared.named_parameters()).keys()
    worst, sharded = 0.0, []
    for name, parameter in shared.named_parameters():
        gradient: Any = parameter.grad
        if isinstance(gradient, DTensor):
            sharded.append(name)
            gradient = gradient.full_tensor()
        whole: Any = gradients[name]
        worst = max(worst, float((gradient - whole).abs().max() / whole.abs().max()))
    return abs(float(got.detach() - want.detach())), worst, sharded


def by_hand(model: nn.Module, mesh: Any) -> None:
    """A function of the user's, with PyTorch's own styles."""
    assert isinstance(model, PlainLlama)
    for block in model.blocks:
        styles = {"up": ColwiseParallel(), "gate": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh, styles)


PLANS: dict[str, Any] = {
    "by hand": by_hand,
    "automatic": None,
    "styles": {
        "blocks.*.q": ColwiseParallel(),
        "blocks.*.k": "colwise",
        "blocks.*.v": "colwise",
        "blocks.*.o": RowwiseParallel(),
        "embed": "vocabulary_embedding",
    },
    "fused": {
        "qkv_proj": "fused_colwise",
        "o_proj": "rowwise",
        "layers.0.mlp.gate_up_proj": "fused_colwise",
        "layers.1.mlp.gate_up_proj": FusedColwiseLinear((96, 96)),
        "down_proj": "rowwise",
    },
}


@pytest.mark.parametrize(("kind", "ranks"), [("plain", 2), ("tied", 2)])
def test_plain_models_equal_one_process(kind: str, ranks: int) -> None:
    for loss, gradient, sharded in run_ranks(ranks, compare, kind, None, {}):
        assert loss <= 1e-12
        assert gradient <= 1e-12
        assert {"embed.weight", "blocks.1.q.weight", "blocks.0.down.weight"} <= set(sharded)
        assert "head.weight" in sharded or kind == "tied"
        assert "norm.weight" not in sharded


@pytest.mark.nightly
def test_four_ranks_that_have_a_head_or_two() -> None:
    for loss, gradient, _ in run_ranks(4, compare, "plain", None, {"num_kv_heads": 4}):
        assert loss <= 1e-12
        assert gradient <= 1e-12


@pytest.mark.nightly
@pytest.mark.parametrize(("plan", "count"), [("by hand", 6), ("styles", 9)])
def test_a_plan_of_the_users_own(plan: str, count: int) -> None:
    for loss, gradient, sharded in run_ranks(2, compare, "plain", plan, {}):
        assert loss <= 1e-12
        assert gradient <= 1e-12
        assert len(sharded) == count


def test_a_plan_of_the_users_own_for_fused_layers() -> None:
    for loss, gradient, sharded in run_ranks(2, compare, "phi3", "fused", {}, timeout=120):
        assert loss <= 1e-6
        assert gradient <= 1e-6
        assert len(sharded) == 8


def test_a_vocabulary_that_does_not_divide_stays_whole() -> None:
    for loss, gradient, sharded in run_ranks(2, compare, "plain", None, {"vocab": 49}):
        assert loss <= 1e-12
        assert gradient <= 1e-12
        assert not {"embed.weight", "head.weight"} & set(sharded)


QUICK = ("llama", "phi3", "qwen3")
FAMILIES = [
    kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.nightly) for kind in KNOWN_TYPES
]


@pytest.mark.parametrize("kind", FAMILIES)
def test_families_of_hugging_face_equal_one_process(kind: str) -> None:
    """Their norms and losses are float32 inside."""
    for loss, gradient, sharded in run_ranks(2, compare, kind, None, {}, timeout=120):
        assert loss <= 1e-6
        assert gradient <= 1e-6
        assert any(name.endswith("o_proj.weight") for name in sharded)
        assert any("mlp" in name for name in sharded)


@pytest.mark.parametrize("kind", ["llama"])
def test_tied_embeddings_stay_tied(kind: str) -> None:
    options = {"tie_word_embeddings": True}
    for loss, gradient, sharded in run_ranks(2, compare, kind, None, options, timeout=120):
        assert loss <= 1e-6
        assert gradient <= 1e-6
        assert "model.embed_tokens.weight" in sharded


def refuse(rank: int, world_size: int, model: nn.Module, plan: Any, message: str) -> None:
    mesh = ContextParallelMesh(tensor_parallel_size=world_size)
    with pytest.raises(ConfigError, match=message):
        share_layers(model, mesh, plan)


def nothing_done(model: nn.Module, mesh: Any) -> None:
    pass


def another(model: nn.Module, mesh: Any) -> nn.Module:
    return nn.Linear(2, 2)


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "heads": (
        PlainLlama(num_heads=3, num_kv_heads=3),
        None,
        "does not divide the 3 attention heads and 3 key/value heads of blocks.0. With them, "
        "tensor_parallel_size can be 1 or 3",
    ),
    "kv heads": (
        PlainLlama(num_heads=6, num_kv_heads=3),
        None,
        "6 attention heads and 3 key/value heads.*can be 1 or 3",
    ),
    "nothing to share": (nn.Linear(4, 4), None, "finds nothing to share in Linear"),
    "a name that nothing has": (
        PlainLlama(),
        {"blocks.*.qq": "colwise"},
        r"no module is named 'blocks.\*.qq'. Did you mean",
    ),
    "no style": (
        PlainLlama(),
        {"blocks.*.q": "sideways"},
        "must be a .*ParallelStyle or one of colwise",
    ),
    "a plan that does nothing": (
        PlainLlama(),
        nothing_done,
        "shares nothing: no parameter is a DTensor",
    ),
    "a plan that returns another": (PlainLlama(), another, "returned another module"),
    "tied apart": (
        TiedLlama(),
        {"embed": "vocabulary_embedding"},
        "embed.weight and head.weight differently",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_shared_is_refused(name: str) -> None:
    run_ranks(2, refuse, *REFUSED[name])


def test_families_that_were_never_compared_are_refused() -> None:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=48,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
    with pytest.raises(
        ConfigError, match="Hugging Face's gpt_neox, and a wrong one could be silent"
    ):
        automatic_plan(GPTNeoXForCausalLM(config), 2)


class _Bare(nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        for name in ("q", "k", "v", "o"):
            setattr(self, name, nn.Linear(16, 16))
        for name, value in attributes.items():
            setattr(self, name, value)


def test_heads_that_nobody_tells_are_refused() -> None:
    with pytest.raises(ConfigError, match="_Bare does not tell its number of heads"):
        automatic_plan(_Bare(), 2)
    assert automatic_plan(_Bare(head_dim=4), 2).attention[0].query_heads == 4


def test_parameters_that_heads_may_share_keep_attention_whole() -> None:
    """Gradients would be those of one rank's heads only."""
    model = nn.Sequential(_Bare(head_dim=4, scale=nn.Parameter(torch.ones(4))), PlainLlama())
    plan = automatic_plan(model, 2)
    assert [whole.name for whole in plan.replicated] == ["0"]
    assert "scale" in plan.replicated[0].why
    assert not any(name.startswith("0.") for name in plan.styles)


REFUSED_HALVES: dict[str, tuple[str, dict[str, Any], str]] = {
    "queries alone": ("llama", {"q_proj": "colwise"}, "in part: k_proj, v_proj, o_proj would stay"),
    "keys alone": ("llama", {"layers.1.self_attn.k_proj": "colwise"}, "layers.1.self_attn in part"),
    "no way out": (
        "llama",
        {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise"},
        "in part: o_proj would stay whole.*or none",
    ),
    "no norms": (
        "qwen3",
        {"[qkv]_proj": "colwise", "o_proj": "rowwise"},
        "in part: q_norm, k_norm would stay whole",
    ),
    "fused heads": (
        "phi3",
        {"qkv_proj": "colwise", "o_proj": "rowwise"},
        "model.layers.0.self_attn.qkv_proj makes several things in one.*Use fused_colwise",
    ),
    "a fused MLP": (
        "phi3",
        {"gate_up_proj": ColwiseParallel(), "down_proj": "rowwise"},
        "mlp.gate_up_proj makes several things in one",
    ),
    "not fused": (
        "llama",
        {"up_proj": "fused_colwise"},
        "what model.layers.0.mlp.up_proj makes is not known by its name",
    ),
    "a norm": (
        "llama",
        {"model.norm": "colwise"},
        "model.norm is a LlamaRMSNorm, but colwise is for nn.Linear. .* head_norm; leave anything else",
    ),
    "a norm, by PyTorch's style": (
        "llama",
        {"model.norm": ColwiseParallel()},
        "model.norm is a LlamaRMSNorm, but ColwiseParallel is for nn.Linear and nn.Embedding",
    ),
    "an embedding by columns": (
        "llama",
        {"embed_tokens": "colwise"},
        "model.embed_tokens is a Embedding, but colwise is for nn.Linear",
    ),
    "ups alone": (
        "llama",
        {"up_proj": "colwise"},
        r"layers.0.mlp do not fit each other \(gate_proj: whole, up_proj: colwise, down_proj: whole\). "
        "gate_proj, up_proj take colwise .* down_proj takes rowwise",
    ),
    "an MLP's way out alone": (
        "llama",
        {"down_proj": RowwiseParallel()},
        "layers.0.mlp do not fit",
    ),
    "an MLP the other way round": (
        "llama",
        {"up_proj": "rowwise", "gate_proj": "rowwise", "down_proj": "colwise"},
        "up_proj: rowwise, down_proj: colwise",
    ),
    "attention the other way round": (
        "llama",
        {"[qkv]_proj": "rowwise", "o_proj": "colwise"},
        "layers.0.self_attn do not fit each other .q_proj: rowwise",
    ),
    "a head by columns": ("llama", {"lm_head": "colwise"}, "lm_head makes logits.*vocabulary_head"),
    "other parts": (
        "phi3",
        {"gate_up_proj": FusedColwiseLinear((48, 96)), "down_proj": "rowwise"},
        "parts of 48, 96 features do not fit .*gate_up_proj, which has 192 for 2 ranks",
    ),
}


@pytest.mark.parametrize("name", REFUSED_HALVES)
def test_plans_that_take_heads_apart_are_refused(name: str) -> None:
    kind, plan, message = REFUSED_HALVES[name]
    before = torch.get_default_dtype()
    try:
        model = make(kind)
    finally:
        torch.set_default_dtype(before)
    with pytest.raises(ConfigError, match=message):
        plan_from_patterns(model, plan, 2)


def test_layers_that_gather_or_split_may_stand_alone() -> None:
    """PyTorch's styles say what goes in and comes out."""
    plan = {
        "blocks.*.up": ColwiseParallel(output_layouts=Replicate()),
        "blocks.*.down": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    assert len(plan_from_patterns(PlainLlama(), plan, 2).styles) == 2 * len(PlainLlama().blocks) + 1


class _Strange(nn.Module):
    """Two layers whose names say nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x))


def misfit(rank: int, world_size: int, plan: dict[str, Any]) -> None:
    model = _Strange()
    share_layers(model, ContextParallelMesh(tensor_parallel_size=world_size), plan)
    model(torch.ones(3, 8))


@pytest.mark.parametrize(
    ("plan", "match"),
    [
        ({"two": "rowwise"}, "two is rowwise and takes 4 features, but was given 8"),
        (
            {"one": "colwise", "two": "colwise"},
            "two is colwise and takes 8 features, but was given 4",
        ),
        ({"one": "colwise", "two": "rowwise"}, None),
    ],
)
def test_layers_of_unknown_names_say_what_they_were_given(plan: Any, match: str | None) -> None:
    if match is None:
        run_ranks(2, misfit, plan)
    else:
        expect_on_every_rank(2, misfit, plan, error=ConfigError, match=match)


def test_a_plan_for_other_layers_asks_for_no_heads() -> None:
    model = nn.ModuleDict({"attention": _Bare(), "mlp": PlainLlama().blocks[0]})
    plan = {"mlp.up": "colwise", "mlp.gate": "colwise", "mlp.down": "rowwise"}
    assert list(plan_from_patterns(model, plan, 2).styles) == list(plan)


def test_a_gate_that_is_one_number_stays_whole() -> None:
    """What it makes is no part of what is behind: it scales all of it."""
    model = nn.ModuleDict(
        {"gate": nn.Linear(8, 1), "up": nn.Linear(8, 16), "down": nn.Linear(16, 8)}
    )
    assert len(plan_from_patterns(model, {"up": "colwise", "down": "rowwise"}, 2).styles) == 2


def shares(rank: int, world_size: int) -> None:
    torch.manual_seed(rank)
    model = PlainLlama()
    mesh = ContextParallelMesh(tensor_parallel_size=2)
    share_layers(model, mesh)
    again = dict(model.named_parameters())
    share_layers(model, mesh)  # at the next stage of a run
    assert all(p is again[name] for name, p in model.named_parameters())
    block: Any = model.blocks[0]
    assert (block.num_heads, block.num_kv_heads, block.head_dim) == (4, 1, 8)
    assert block.q.weight.placements == (Shard(0),)
    assert block.o.weight.placements == (Shard(1),)
    assert block.q.weight.to_local().shape == (32, 64)
    drawn = torch.rand(1)
    assert drawn == mesh_first(drawn)


def mesh_first(x: torch.Tensor) -> torch.Tensor:
    import torch.distributed as dist

    first = x.clone()
    dist.broadcast(first, 0)
    return first


def test_ranks_draw_the_same_numbers_and_share_once() -> None:
    run_ranks(2, shares)

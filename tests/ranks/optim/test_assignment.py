"""What steps which parameter, fused projections, and PyTorch's own implementation."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from lightning_cp.errors import ConfigError
from lightning_cp.optim import Muon
from tests.helpers.optim.by_hand import ByHand
from tests.helpers.optim.shardings import SHARDINGS, give, gradients, sharded, weights, whole
from tests.helpers.pool import run_ranks
from tests.ranks.optim.test_shardings import MATRICES, by_torch


def test_a_llama() -> None:
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    lines = Muon(LlamaForCausalLM(config).named_parameters()).table().splitlines()
    cells = [tuple(line.split(maxsplit=1)) for line in lines]
    assert lines[0].split() == ["parameters", "count", "shape", "by", "why"]
    by_name = {name: " ".join(rest.split()) for name, rest in cells[2:]}
    assert by_name["model.layers.*.self_attn.q_proj.weight"] == "2 [16, 16] Muon a matrix"
    assert by_name["model.layers.*.mlp.down_proj.weight"] == "2 [16, 24] Muon a matrix"
    assert by_name["model.layers.*.input_layernorm.weight"] == "2 [16] AdamW 1 dimension"
    assert by_name["model.norm.weight"] == "1 [16] AdamW 1 dimension"
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert by_name[name] == "1 [40, 16] AdamW an embedding or a head, by its name"
    assert len(by_name) == 12


class Unnamed(nn.Module):
    """A head whose name does not say so."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(30, 8)
        self.mix = nn.Linear(8, 8, bias=False)
        self.out = nn.Linear(8, 30, bias=False)


class Places(Unnamed):
    """An embedding whose name does not say so, in the way of README's model, and a tied matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(64, 8)
        self.again = nn.Linear(8, 8, bias=False)
        self.again.weight = self.mix.weight
        self.more = nn.Linear(8, 8, bias=False)


def test_a_model_tells_embeddings_and_ties() -> None:
    found = {one.name: one for one in Muon(Places()).assigned}
    assert found["places.weight"].why == "an embedding, by its module"
    assert found["mix.weight"].why == "tied: it is mix.weight and again.weight"
    assert [name for name, one in found.items() if one.is_matrix] == ["more.weight"]
    with pytest.raises(
        ConfigError, match=r"tied: it is mix\.weight and again\.weight\. Leave it to AdamW\.$"
    ):
        Muon(Places(), matrices=["mix.weight"])


def test_a_head_by_its_size() -> None:
    found = {one.name: one for one in Muon(Unnamed().named_parameters()).assigned}
    assert found["mix.weight"].is_matrix
    assert not found["out.weight"].is_matrix
    assert found["out.weight"].why == "as large as an embedding: a head"


@pytest.mark.parametrize("vocabulary", [16, 24])
def test_layers_as_large_as_the_embedding_are_no_heads(vocabulary: int) -> None:
    """Bytes, of which there are as many as features, or as the MLP has inner ones."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    found = Muon(LlamaForCausalLM(config).named_parameters()).assigned
    assert sum(one.is_matrix for one in found) == 7


def test_names_that_only_look_like_it() -> None:
    model = nn.ModuleDict({"embedding_mixer": nn.Linear(4, 6, bias=False)})
    assert Muon(model.named_parameters(), embeddings=()).assigned[0].is_matrix


CUTS = {"layers.0.up_proj.weight": (12, 16), "layers.1.up_proj.weight": (12, 16)}


def fused(rank: int, world_size: int, name: str) -> dict[str, torch.Tensor]:
    """Twenty rows are three projections."""
    model = sharded(name, torch.float64)
    sizes = {"*.up_proj.weight": (12, 4, 4)}
    how = {"adjust_lr_fn": "original", "ns_dtype": "float64", "chunk_mib": 1e-3}
    optimizer = Muon(model.named_parameters(), lr=0.02, fused=sizes, **how)  # type: ignore[arg-type]
    for step in range(4):
        give(model, gradients(whole(torch.float64), step))
        optimizer.step()
    return weights(model)


@pytest.mark.quick("fsdp 4", "ddp 2", "fsdp+tp 2x2", "plain")
@pytest.mark.parametrize("name", ["plain", "ddp 2", "fsdp 4", "fsdp+tp 2x2", "hsdp+tp 2x2x2"])
def test_fused_projections_are_matrices_by_themselves(name: str) -> None:
    model = whole(torch.float64)
    start = {n: x.numpy() for n, x in weights(model).items()}
    hand = ByHand(start, MATRICES, CUTS, adjust="original")
    for step in range(4):
        hand.step({n: x.numpy() for n, x in gradients(model, step).items()})
    for found in run_ranks(prod(SHARDINGS[name]), fused, name):
        for n, want in hand.now.items():
            assert np.abs(found[n].numpy() - want).max() <= 1e-12 * np.abs(want).max(), n


def test_columns_of_a_transposed_projection() -> None:
    """GPT-2's are [inputs, outputs]: q, k and v lie side by side."""
    config = GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    model = GPT2LMHeadModel(config)
    weight = model.get_parameter("transformer.h.0.attn.c_attn.weight")
    before = weight.detach().clone()
    how = {"ns_dtype": "float32", "weight_decay": 0.0}
    optimizer = Muon(model.named_parameters(), lr=0.1, fused={"*.c_attn.weight": (8, 8, 8)}, **how)  # type: ignore[arg-type]
    torch.manual_seed(0)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    moved = before - weight.detach()
    for at in range(3):
        values = torch.linalg.svdvals(moved[:, 8 * at : 8 * at + 8]) / (0.1 * 0.2 * 8**0.5)
        assert values.amin() > 0.5  # each is nearly orthogonal by itself
        assert values.amax() < 1.3


def test_the_reference_is_torchs() -> None:
    model = whole(torch.float32)
    optimizer = Muon(model.named_parameters(), lr=0.02, impl="reference")
    for step in range(20):
        give(model, gradients(model, step))
        optimizer.step()
    want = by_torch()
    assert all(torch.equal(x, want[n]) for n, x in weights(model).items())


@pytest.mark.parametrize("impl", ["owner", "reference"])
def test_a_bfloat16_momentum_without_nesterov_is_a_mean_of_gradients(impl: str) -> None:
    """PyTorch's own step overwrites it with a matrix of norm 1."""
    weight = torch.nn.Parameter(torch.ones(8, 12, dtype=torch.bfloat16))
    optimizer = Muon([("w", weight)], nesterov=False, momentum=0.5, matrices=["w"], impl=impl)
    generator = torch.Generator().manual_seed(3)
    want = torch.zeros(8, 12)
    for _ in range(3):
        weight.grad = (10 * torch.randn(8, 12, generator=generator)).bfloat16()
        optimizer.step()
        want = (want + weight.grad.float()) / 2
    torch.testing.assert_close(
        optimizer.state[weight]["momentum_buffer"].float(), want, rtol=2e-2, atol=0.1
    )


def reference(rank: int, world_size: int, name: str) -> dict[str, torch.Tensor]:
    model = sharded(name, torch.float32)
    optimizer = Muon(model.named_parameters(), lr=0.02, impl="reference")
    give(model, gradients(whole(torch.float32), 0))
    optimizer.step()
    return weights(model)


@pytest.mark.quick("fsdp 2")
@pytest.mark.parametrize("name", ["fsdp 2", "fsdp+tp 2x2"])
def test_the_reference_steps_what_is_sharded(name: str) -> None:
    """In bfloat16, whose sums come in another order: so about the same."""
    want = run_ranks(1, reference, "plain")[0]
    for found in run_ranks(prod(SHARDINGS[name]), reference, name):
        for n, x in want.items():
            torch.testing.assert_close(found[n], x, rtol=0.0, atol=0.02 * float(x.abs().max()))

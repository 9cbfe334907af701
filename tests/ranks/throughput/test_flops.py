"""Model FLOPs against PyTorch's own counter where both count the same, and what is known of many models."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lightning_cp.batch import BatchRules, CountedBatch, read_batch
from lightning_cp.layout import Documents
from lightning_cp.throughput.flops import CountedModel, count_active_parameters
from lightning_cp.throughput.step_flops import (
    AttentionCall,
    ThroughputOptions,
    observe_calls,
    shared_call,
)
from tests.helpers.models.later import all_families
from tests.helpers.models.steps import Case, make_batch, make_model, start, step
from tests.helpers.pool import run_ranks


class Dense(nn.Module):
    """Two layers of full attention over every token, a gated MLP, and a head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, 24)
        parts = [nn.ModuleList(nn.Linear(24, n) for n in (24, 12, 12, 24, 40)) for _ in range(2)]
        self.layers = nn.ModuleList(parts)
        self.down = nn.ModuleList(nn.Linear(40, 24) for _ in range(2))
        self.head = nn.Linear(24, 19, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer, down in zip(self.layers, self.down, strict=True):
            q, k, v = (part(x).unflatten(2, (-1, 6)).transpose(1, 2) for part in list(layer)[:3])  # type: ignore[arg-type]
            a = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            x = x + layer[3](a.transpose(1, 2).flatten(2))  # type: ignore[index]
            x = x + down(F.silu(layer[4](x)))  # type: ignore[index]
        return self.head(x)


def counted(model: nn.Module, batch: dict[str, torch.Tensor], loss: Any) -> int:
    """A step, as the callback counts it."""
    counting = CountedModel(model, None, ThroughputOptions())
    counting.begin(batch)
    loss().backward()
    counting.end_batch()
    counting.work.stepped()
    work = counting.work.take(wait=True)
    counting.end()
    assert not work.unknown, counting.reason
    return work.flops


@pytest.mark.nightly
def test_as_many_as_pytorch_counts_where_every_pair_is_visible() -> None:
    model, ids = Dense(), torch.randint(0, 19, (3, 21))
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as theirs:
            model(ids).sum().backward()
        ours = counted(model, {"input_ids": ids}, lambda: model(ids).sum())
    assert ours == theirs.get_total_flops()


@pytest.mark.parametrize("rows", [1, 3])
def test_as_many_as_pytorch_counts_for_bert(rows: int) -> None:
    """Without the padding mask BERT's attention is full."""
    model = make_model(Case("bert", attention="eager"))
    ids = torch.randint(0, 43, (rows, 37))
    with FlopCounterMode(display=False) as theirs:
        model(ids).logits.sum().backward()
    assert counted(model, {"input_ids": ids}, lambda: model(ids).logits.sum()) == (
        theirs.get_total_flops()
    )


def calls_of(rank: int, world: int, name: str) -> tuple[Counter[Any], Counter[Any]]:
    """What is seen of one step without context parallelism, and with it on one rank."""
    case = Case(name, window=7, use_cache=False)
    batch, model = make_batch(case), make_model(case)
    plain: Counter[Any] = Counter()
    end = observe_calls(model, lambda call, _: plain.update([facts_of(call)]))
    step(case, model, batch)
    end()
    step(case, model, batch)
    shared: Counter[Any] = Counter()
    runtime = start(1, 1, model, token_weighting="global")
    runtime.listen(lambda plan, q, out: shared.update([facts_of(shared_call(plan, q, out, 1))]))
    try:
        local = runtime.shard(batch, needs_labels=True)
        runtime.begin_step()
        step(case, model, local)
    finally:
        runtime.detach()
    return plain, shared


def facts_of(call: AttentionCall) -> tuple[object, ...]:
    """What the FLOPs depend on."""
    assert call.mask is not None
    return (*call[:2], call.mask.left, call.mask.right, *call[3:])


@pytest.mark.quick("falcon_alibi", "gemma2_capped", "youtu")
@pytest.mark.parametrize("name", all_families(but=("llama4", "esm", "roberta")))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_models_tell_what_they_ask_for(name: str) -> None:
    """Seen from outside, a model's attention is that of the calls that context parallelism executes."""
    ((plain, shared),) = run_ranks(1, calls_of, name)
    assert plain == shared
    assert sum(plain.values()) == 2


def test_chunks_are_no_mask_that_is_counted() -> None:
    case = Case("llama4", window=7, use_cache=False)
    model, seen = make_model(case), []
    end = observe_calls(model, lambda call, _: seen.append(call.mask))
    step(case, model, make_batch(case))
    end()
    assert seen == [None, None]


# -- parameters ---------------------------------------------------------------------------------------


def test_experts_count_as_often_as_a_token_goes_to_them() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes: dict[str, Any] = {"vocab_size": 43, "hidden_size": 32, "intermediate_size": 48}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_hidden_layers": 1}
    config = MixtralConfig(**sizes, **heads, num_key_value_heads=4, num_local_experts=8)
    assert config.num_experts_per_tok == 2
    found = count_active_parameters(MixtralForCausalLM(config))
    assert found.unknown == ()
    assert found.trained == 4 * 32 * 32 + 8 * 32 + 2 * 3 * 32 * 48 + 32 * 43


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.table = nn.Parameter(torch.zeros(3, 4))
        self.dense = nn.Linear(4, 5)


def test_what_nobody_knows_is_named() -> None:
    found = count_active_parameters(Experts())
    assert found.trained == 20
    assert found.unknown == ("table", *(f"experts.{index}.weight" for index in range(3)))


def test_layers_that_are_called_twice_are_named() -> None:
    model = Dense()
    model.layers[1] = model.layers[0]
    ids = torch.randint(0, 19, (3, 21))
    counting = CountedModel(model, None, ThroughputOptions())
    for _ in range(2):
        counting.begin({"input_ids": ids})
        model(ids).sum().backward()
        counting.end_batch()
        counting.work.stepped()
        work = counting.work.take(wait=True)
        assert (work.tokens, work.flops, work.unknown) == (63, 0, 1)
        assert "tokens go through layers.0.0 more than once in a step" in counting.reason
    counting.end()
    assert not any(part._forward_pre_hooks for part in model.modules())


def test_a_head_that_is_called_in_parts_is_called_once() -> None:
    model = Dense()
    ids = torch.randint(0, 19, (3, 20))
    whole = counted(model, {"input_ids": ids}, lambda: model(ids).sum())
    head, model.head = model.head, nn.Identity()  # type: ignore[assignment]

    def in_parts() -> torch.Tensor:
        return sum((head(part).sum() for part in model(ids).chunk(4, 1)), torch.zeros(()))

    model.last = head
    assert counted(model, {"input_ids": ids}, in_parts) == whole


def test_a_dense_mask_is_not_looked_into() -> None:
    model, seen = Dense(), []
    end = observe_calls(model, lambda call, _: seen.append(call.mask))
    q = torch.zeros(1, 2, 5, 4)
    F.scaled_dot_product_attention(q, q, q, torch.ones(5, 5, dtype=torch.bool))
    F.scaled_dot_product_attention(q, q, q)
    end()
    F.scaled_dot_product_attention(q, q, q)
    assert [mask is None for mask in seen] == [True, False]


# -- batches ------------------------------------------------------------------------------------------


def test_padding_that_only_the_batch_tells_of_is_no_token() -> None:
    """A plain model has one document; its mask says what is padding all the same."""
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 4:] = 0
    batch = {"input_ids": torch.zeros(2, 9, dtype=torch.long), "attention_mask": mask}
    whole = read_batch(batch, BatchRules(), needs_labels=False)
    found = CountedBatch.of_whole(whole, BatchRules())
    mask.zero_()  # the step may change its own
    assert found.tokens == 13
    assert found.documents == Documents.single(9)

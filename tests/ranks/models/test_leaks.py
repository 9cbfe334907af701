"""Whole models under context parallelism: a token changes nothing before it or outside of its document.

One token of a row becomes another one. Logits of all tokens that must not see it keep every bit, in
float64; those of the token itself and of all behind it in its document change.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from lightning_cp.config import StrategyConfig
from lightning_cp.runtime.runtime import ContextParallelRuntime
from tests.helpers.models.steps import LENGTH, ROWS, VOCAB, Case, make_batch, make_model, start
from tests.helpers.pool import run_ranks
from tests.helpers.strategies.plain_llama import PlainLlama

Sizes = dict[str, Any]
SIZES: dict[str, Sizes] = {
    "ring 2": {"ring_size": 2, "layout": "zigzag"},
    "ulysses 2": {"ulysses_size": 2},
    "zigzag_llama3 2": {"ring_size": 2, "mode": "zigzag_llama3"},
    "ring 4": {"ring_size": 4, "layout": "zigzag"},
    "ring 4 balanced": {"ring_size": 4, "layout": "balanced"},
    "ulysses 4": {"ulysses_size": 4},
    "hybrid 2x2": {"ring_size": 2, "ulysses_size": 2, "layout": "zigzag"},
    "zigzag_llama3 4": {
        "ring_size": 4,
        "mode": "zigzag_llama3",
        "layout": "zigzag",
        "forward_execution": "fused",
    },
    "zigzag_llama3 2x2": {"ring_size": 2, "ulysses_size": 2, "mode": "zigzag_llama3"},
}
CUTS = [[0, 5, 6, 30, LENGTH], [0, 18, LENGTH], [0, LENGTH]]
"""Of the packed rows in ``make_batch``."""
ALONE = [[*range(30, LENGTH)], [*range(11)], [*range(7, LENGTH)]]
"""Padding of its padded rows: each token sees itself at most."""
CHANGED = [(0, 0), (0, 5), (0, 14), (0, 29), (1, 10), (1, 17), (1, 18), (2, 6), (2, 20)]
"""(row, token): first, middle and last ones of documents, and padding."""


def started(name: str, model: Any, sizes: Sizes) -> ContextParallelRuntime:
    """A runtime that has swapped the model's attention."""
    ring, ulysses = sizes.get("ring_size", 1), sizes.get("ulysses_size", 1)
    more = {k: v for k, v in sizes.items() if k not in ("ring_size", "ulysses_size")}
    if name == "hf":
        return start(ulysses, ring, model, **more)
    how = StrategyConfig(ulysses_size=ulysses, ring_size=ring, labels="aligned", **more)
    runtime = ContextParallelRuntime(how)
    runtime.meshes.build(ulysses * ring, "cpu", None, model)
    runtime.attach(model, {}, needs_labels=True)
    return runtime


def case_of(rows: str) -> Case:
    return Case(batch=rows, use_cache=rows != "packed")


def make(name: str, rows: str) -> Any:
    """A Llama of Hugging Face, or one in plain PyTorch, in float64."""
    if name == "hf":
        return make_model(case_of(rows))
    torch.manual_seed(3)
    return PlainLlama(VOCAB, num_heads=4, num_kv_heads=2).double()


def logits_of(name: str, model: Any, runtime: ContextParallelRuntime, batch: Any) -> torch.Tensor:
    """The logits [ROWS, LENGTH, VOCAB] of all tokens."""
    local = runtime.shard(batch, needs_labels=True)
    runtime.begin_step()
    if name == "hf":
        given = {x: local[x] for x in ("position_ids", "attention_mask") if x in batch}
        logits = model(input_ids=local["input_ids"], **given).logits
    else:
        logits = model(local["input_ids"], local["position_ids"])
    runtime.check_step()
    runtime.step.scale_loss(logits.sum()).backward()
    runtime.step.after_backward(model.parameters())
    return runtime.step.unshard_output(logits.detach(), {})


def forward_all(
    rank: int, world_size: int, name: str, rows: str, sizes: Sizes
) -> list[torch.Tensor]:
    """Logits as they are, then with one token changed at a time."""
    model, batch = make(name, rows), make_batch(case_of(rows))
    if rows == "packed" and name == "plain":  # sees documents by these, not by what it is given
        batch["cu_seqlens"] = padded_cuts()
    runtime = started(name, model, sizes)
    try:
        found = [logits_of(name, model, runtime, dict(batch))]
        for row, token in CHANGED:
            ids = batch["input_ids"].clone()
            ids[row, token] = (ids[row, token] + 7) % VOCAB
            found.append(logits_of(name, model, runtime, {**batch, "input_ids": ids}))
        return found
    finally:
        runtime.detach()


def padded_cuts() -> torch.Tensor:
    """A line of boundaries for each row; the end repeats, for documents of nothing."""
    most = max(map(len, CUTS))
    return torch.tensor([[*cuts, *[LENGTH] * (most - len(cuts))] for cuts in CUTS])


def may_see(rows: str, row: int, token: int) -> torch.Tensor:
    """bool [ROWS, LENGTH]: tokens that may see the one that changed."""
    cuts = {"plain": [0, LENGTH], "packed": CUTS[row], "both": [0, LENGTH]}[rows]
    end = min(cut for cut in cuts if cut > token)
    seen = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
    seen[row, token:end] = True
    if rows == "both":
        alone = token in ALONE[row]
        seen[row, ALONE[row]] = False
        seen[row] &= not alone
        seen[row, token] = True
    return seen


KINDS = [*product(("hf", "plain"), ("plain", "packed")), ("hf", "both")]


def ranks(sizes: Sizes) -> int:
    return sizes.get("ring_size", 1) * sizes.get("ulysses_size", 1)


def is_slow(kind: tuple[str, str], size: str) -> bool:
    """Whether it is for the long suite: how attention finds its way into a model is seen on two ranks."""
    return ranks(SIZES[size]) > 2 and kind[0] == "plain"


@pytest.mark.quick("hf-both-ulysses 2")
@pytest.mark.parametrize(
    ("name", "rows", "size"),
    [
        pytest.param(*kind, size, marks=[pytest.mark.nightly] if is_slow(kind, size) else [])
        for kind, size in product(KINDS, SIZES)
    ],
)
def test_a_token_changes_nothing_that_may_not_see_it(name: str, rows: str, size: str) -> None:
    sizes = SIZES[size]
    for before, *rest in run_ranks(ranks(sizes), forward_all, name, rows, sizes):
        assert before.dtype == torch.float64
        for (row, token), after in zip(CHANGED, rest, strict=True):
            differ = (before != after).any(-1)
            seen = may_see(rows, row, token)
            assert torch.equal(differ, seen), (row, token, (differ & ~seen).nonzero())

"""Layouts change speed, never results: balanced and auto on packed rows against one process."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from lightning_cp import UlyssesRingStrategy
from lightning_cp.layout import CostModel, Mask
from lightning_cp.layout.cost import HeadCounts
from lightning_cp.models.structure import expected_heads, expected_mask
from lightning_cp.models.swap import num_heads_of
from tests.helpers.models.later import transformers_version
from tests.helpers.pool import run_ranks
from tests.helpers.strategies.runs import Result, Run, execute, make_data
from tests.helpers.strategies.runs import loader as row_loader
from tests.helpers.strategies.small import Batch, Small, close, samples, trainer_of, weights
from tests.ranks.strategies.test_exactness import MODELS, baseline, compare
from tests.ranks.strategies.test_fabric import Loop, fabric_of

# Two rows with other documents of up to 400 tokens each; a length that divides by nothing.
PACKED = Run(packed=True, seq_len=709, longest=400, steps=4, heads=(4, 2), predict=True)
Costs = tuple[int, int] | None
FREE: Costs = (0, 0)
"""Of a key and of a hop, in attended pairs."""


def executed(rank: int, world_size: int, run: Run, cost: Costs) -> Result:
    """``execute`` where communication costs something else than it is thought to."""
    before = CostModel.in_node
    if cost is not None:
        CostModel.in_node = classmethod(lambda cls: cls(*cost))  # type: ignore[assignment, method-assign]
    try:
        return execute(rank, world_size, run)
    finally:
        CostModel.in_node = before  # type: ignore[method-assign]


def run_with(layout: str, run: Run, ring: int, ulysses: int, cost: Costs = None) -> list[Result]:
    strategy = {"ring_size": ring, "ulysses_size": ulysses, "layout": layout}
    run = replace(run, strategy=tuple(strategy.items()))  # type: ignore[arg-type]
    return run_ranks(ring * ulysses, executed, run, cost, timeout=120)


@pytest.mark.nightly
@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("layout", ["balanced", "zigzag"])
def test_packed_rows_equal_one_process(layout: str, ring: int, ulysses: int) -> None:
    found = run_with(layout, PACKED, ring, ulysses)
    assert {name.split()[0] for name in found[0].layouts} == {layout}
    if layout == "balanced":
        assert set(found[0].layouts) != {"balanced with 1 chunks a rank"}, "no batch was dealt"
    compare(found, baseline(PACKED), MODELS["plain-float64"])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("exchange", "kinds"),
    [
        ({"mode": "zigzag_llama3"}, {"balanced"}),
        ({"mode": "ring", "exchange": "rotation"}, {"balanced", "zigzag"}),
    ],
    ids=["all-gather", "rotation"],
)
def test_keys_that_all_travel_take_even_layouts(exchange: dict[str, str], kinds: set[str]) -> None:
    """What is dear in a ring, which would take another one, costs nothing, or the same in every layout."""
    settings = {**exchange, "layout": "auto"}
    run = replace(PACKED, strategy=tuple(settings.items()))  # type: ignore[arg-type]
    found = run_ranks(4, executed, run, (10_000, 10**9), timeout=120)
    assert {name.split()[0] for name in found[0].layouts} == kinds
    compare(found, baseline(PACKED), MODELS["plain-float64"])


@pytest.mark.nightly
def test_balanced_equals_one_process_with_hugging_face() -> None:
    run = replace(PACKED, model="hf", rows=1, steps=3)
    found = run_with("balanced", run, 2, 1)
    assert any("with 1 " not in name for name in found[0].layouts)
    compare(found, baseline(run), MODELS["hf-float64"])


@pytest.mark.quick("None-contiguous")
@pytest.mark.parametrize(("cost", "kind"), [(None, "contiguous"), (FREE, "balanced")])
def test_auto_equals_one_process(cost: Costs, kind: str) -> None:
    """Tiny rows are not worth a message more; if messages were free, they would be dealt."""
    found = run_with("auto", PACKED, 2, 1, cost)
    assert any(kind in name for name in found[0].layouts), found[0].layouts
    assert all(result.layouts == found[0].layouts for result in found)
    compare(found, baseline(PACKED), MODELS["plain-float64"])


def fabric_loop(rank: int, world_size: int, layout: str) -> tuple[torch.Tensor, list[str]]:
    """Weights after a user's loop over packed rows; the kinds of layout they had."""
    settings: Any = {"ring_size": 2, "ulysses_size": 1, "layout": layout} if layout else None
    loop = Loop(world_size, settings)
    kinds: list[str] = []
    strategy: Any = loop.fabric.strategy
    rows = row_loader(make_data(PACKED), PACKED.rows)
    batches: Any = loop.fabric.setup_dataloaders(rows, use_distributed_sampler=False)
    for whole in batches:
        batch = loop.shard(whole)
        ids, segments, mask = batch["input_ids"], batch["segment_ids"], None
        if layout:
            kinds.append(strategy.runtime.part.layout.kind)
        else:
            mask = (segments[:, :, None] == segments[:, None, :]).tril()
        logits = loop.model(ids, batch["position_ids"], mask)
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        loop.fabric.backward(loss)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    loop.end()
    return loop.weights(), kinds


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["balanced", "auto"])
def test_a_fabric_loop_equals_one_process(layout: str) -> None:
    ((want, _),) = run_ranks(1, fabric_loop, "")
    for got, kinds in run_ranks(2, fabric_loop, layout):
        close(got, want)
        assert set(kinds) <= ({"balanced"} if layout == "balanced" else {"contiguous", "zigzag"})


class Packing(Small):
    """Notes which layout each batch got, and why."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        strategy: Any = self.trainer.strategy
        if isinstance(strategy, UlyssesRingStrategy):
            NOTED.append(str(strategy.layout_choice))
        return super().training_step(batch, batch_idx)


NOTED: list[str] = []


def mixed() -> DataLoader[Any]:
    """Plain and packed rows in turn, so that layouts change."""
    rows = samples(4, 300)
    for index, row in enumerate(rows):
        ends = torch.tensor([30, 40]) if index % 2 else torch.tensor([])
        row["segment_ids"] = torch.bucketize(torch.arange(300), ends, right=True)
    return DataLoader(rows, batch_size=1)  # type: ignore[arg-type]


def resumed(
    rank: int, world_size: int, folder: Path
) -> tuple[torch.Tensor, torch.Tensor, list[str], list[str]]:
    """Weights after two epochs at once, and after one and another that resumes; what was chosen."""
    settings = {"ring_size": 2, "ulysses_size": 1, "layout": "auto", "parity_check": "off"}
    module = Packing()
    found: list[torch.Tensor] = []
    chosen: list[list[str]] = []
    for stops in ((2,), (1, 2)):
        NOTED.clear()
        for epochs in stops:
            module = Packing()
            trainer = trainer_of(world_size, settings, max_epochs=epochs)
            trainer.fit(module, mixed(), ckpt_path=folder / "1" if epochs > stops[0] else None)
            if len(stops) > 1:
                trainer.save_checkpoint(folder / str(epochs))
        found.append(weights(module))
        chosen.append(list(NOTED))
    return *found, *chosen  # type: ignore[return-value]


@pytest.mark.nightly
def test_a_run_that_resumes_shards_as_before(tmp_path: Path) -> None:
    """Bit for bit: the choice does not depend on the steps that a process has seen."""
    for straight, again, chosen, repeated in run_ranks(2, resumed, tmp_path):
        assert torch.equal(straight, again)
        assert chosen == repeated
        assert chosen[0] == "layout zigzag: one causal document"
        assert "predicted time" in chosen[1]


def said(rank: int, world_size: int) -> list[str]:
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, handler = logging.getLogger("lightning.pytorch.utilities.rank_zero"), Keep()
    logger.addHandler(handler)
    try:
        trainer_of(world_size, {"ring_size": 2, "ulysses_size": 1}).fit(Small(), mixed())
    finally:
        logger.removeHandler(handler)
    return [message for message in messages if message.startswith("context parallel layout")]


@pytest.mark.nightly
def test_the_choice_is_said_once() -> None:
    first = "context parallel layout zigzag: one causal document (of the first batch; each gets its own)"
    assert run_ranks(2, said)[0] == [first]


SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "vocab_size": 32,
}
HF: dict[str, tuple[str, dict[str, Any], Mask]] = {
    "causal": ("Llama", {}, Mask()),
    "window of all layers": ("Mistral", {"sliding_window": 7}, Mask(window=(6, -1))),
    "window of some": ("Gemma2", {"sliding_window": 7, "head_dim": 8}, Mask()),
    "window switched off": ("Qwen2", {"sliding_window": 7}, Mask()),
    "window switched on": (
        "Qwen2",
        {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 0},
        Mask(window=(6, -1)),
    ),
    "encoder": ("Bert", {}, Mask(causal=False)),
}


@pytest.mark.parametrize(("name", "options", "mask"), HF.values(), ids=HF.keys())
def test_mask_and_heads_are_read_from_the_model(
    name: str, options: dict[str, Any], mask: Mask
) -> None:
    import transformers

    kv_heads = 4 if name == "Bert" else 2
    heads = {"num_attention_heads": 4} | (
        {} if name == "Bert" else {"num_key_value_heads": kv_heads}
    )
    kinds = {"Bert": ("BertConfig", "BertModel"), "Llama": ("LlamaConfig", "LlamaModel")}
    config, model = kinds.get(name, (f"{name}Config", f"{name}Model"))
    made = getattr(transformers, model)(getattr(transformers, config)(**SIZES, **heads, **options))
    assert expected_mask(torch.nn.Sequential(made)) == mask
    assert expected_heads(torch.nn.Sequential(made)) == HeadCounts(4, kv_heads, 8)


@pytest.mark.skipif(transformers_version() < (5, 6), reason="Gemma 4 comes with transformers 5.6")
def test_layers_that_differ_tell_nothing() -> None:
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    more: dict[str, Any] = {"global_head_dim": 16, "vocab_size_per_layer_input": 32}
    model = Gemma4ForCausalLM(Gemma4TextConfig(**SIZES, **heads, **more))
    with pytest.raises(RuntimeError, match="head_dim"):
        _ = model.config.head_dim
    found = expected_heads(model)
    assert found is None or (found.query, found.kv) == (4, 2)
    expected_mask(model)
    assert num_heads_of(model) == 4


def cost_of(rank: int, world_size: int) -> tuple[int, int]:
    """What ``layout="auto"`` goes by once the model is known."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2))
    fabric: Any = fabric_of(world_size, {"ring_size": 2, "ulysses_size": 2})
    fabric.launch()
    fabric.setup(model)
    cost = fabric.strategy.runtime.binding.layout_rule.cost
    return cost.key, cost.hop


def test_layouts_weigh_the_heads_of_a_ulysses_rank() -> None:
    """2 query heads and 1 K/V head of 8 entries, where the numbers for one node are of 32, 8 and 128."""
    key, hop = 333 * (1 / 8) * (32 / 2), 732_000 * (32 * 128) / (2 * 8)
    assert run_ranks(4, cost_of) == [(key, hop)] * 4


def test_plain_modules_do_not_tell() -> None:
    assert expected_mask(torch.nn.Linear(2, 2)) == Mask()
    assert expected_heads(torch.nn.Linear(2, 2)) is None

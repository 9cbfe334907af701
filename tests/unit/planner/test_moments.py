"""Peaks in closed form: what each setting, engine and axis takes away, and what it leaves alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_cp.errors import ConfigError
from lightning_cp.planner.activations import RankStep, saved_outside_layers, saved_per_layer
from lightning_cp.planner.memory import MemoryMoment, memory_moments, optimizer_moment, peak_moment
from lightning_cp.planner.model import model_from_config

LLAMA = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 131072,
    "tie_word_embeddings": True,
}
STEP = RankStep(model_from_config(LLAMA, "small"), tokens=1024, cp_size=2)


def named(step: RankStep, name: str) -> MemoryMoment:
    (found,) = [one for one in memory_moments(step) if one.name == name]
    return found


def test_what_is_kept_is_what_docs_measured() -> None:
    assert (saved_per_layer(STEP), saved_outside_layers(STEP)) == (6936, 525444)
    tiled = replace(STEP, tiled_mlp=128, chunked_loss=128)
    assert (saved_per_layer(tiled), saved_outside_layers(tiled)) == (2840, 1169)
    assert saved_per_layer(replace(STEP, recompute="blocks")) == 256
    keeping = replace(STEP, recompute="keep_attention")
    assert saved_per_layer(keeping) == 528
    assert saved_per_layer(replace(keeping, cp_size=1)) == 256


@pytest.mark.parametrize(
    ("settings", "slope"),
    [
        ({}, 1_601_764),
        ({"chunked_loss": 128}, 29_172),
        ({"tiled_mlp": 128}, 1_585_380),
        ({"chunked_loss": 128, "tiled_mlp": 128}, 12_788),
        ({"recompute": "blocks"}, 1_575_044),
        ({"recompute": "keep_attention"}, 1_576_132),
        ({"recompute": "blocks", "chunked_loss": 128, "tiled_mlp": 128}, 2_452),
        ({"recompute": "keep_attention", "chunked_loss": 128, "tiled_mlp": 128}, 3_540),
    ],
)
def test_growth_is_what_docs_measured(settings: dict[str, Any], slope: int) -> None:
    """The table of docs/benchmarks/results.md: the loss decides; the batch is not in it."""
    at = [
        max(
            (
                one
                for one in memory_moments(replace(STEP, tokens=n, **settings))
                if "loss" in one.name
            ),
            key=lambda one: one.total,
        )
        for n in (512, 1024)
    ]
    grown = (at[1].total - at[1].batch - at[0].total + at[0].batch) / 512
    assert grown == pytest.approx(slope, rel=2e-3)


def test_tensor_parallel_ranks_share_what_is_wide() -> None:
    """Half of q, k, v, out, lse, of the MLP and of the logits; the residual stream and norms are whole."""
    halved = replace(STEP, tp_size=2)
    shared = 2 * 2 * 128 + 2 * 2 * 64 + 4 * 4 + 4 * 2 * 512
    assert saved_per_layer(STEP) - saved_per_layer(halved) == shared // 2
    assert saved_outside_layers(STEP) - saved_outside_layers(halved) == 4 * 131072 // 2
    assert peak_moment(halved).loss == peak_moment(STEP).loss // 2


def test_of_what_is_offloaded_the_device_has_this_block_and_the_one_before() -> None:
    offloaded = replace(STEP, recompute="blocks", offload=True, chunked_loss=128)
    here = replace(offloaded, offload=False)
    for block, fewer in ((4, 2), (3, 1), (2, 0), (1, 0)):
        name = f"backward of block {block} of 4, at its MLP"
        less = named(here, name).total - named(offloaded, name).total
        assert less == fewer * 2 * 128 * 1024
    assert named(offloaded, "backward of block 2 of 4, at its MLP").layers == 2 * 128 * 1024
    assert named(offloaded, "backward of block 1 of 4, at its MLP").layers == 0
    assert named(offloaded, "forward, at the loss").layers == 0


def test_engines_hold_whole_parameters_or_parts() -> None:
    whole = 2 * STEP.model.num_parameters
    root = 2 * (131072 * 128 + 128)
    sharded = replace(STEP, engine="fsdp", shard_ranks=4)
    block = (whole - root) // 4
    assert named(STEP, "backward of block 4 of 4, at its MLP").buffers == whole
    in_block = named(sharded, "backward of block 4 of 4, at its MLP")
    assert (in_block.gathered, in_block.buffers) == (root + 2 * block, 0)
    assert named(sharded, "backward of block 2 of 4, at its MLP").buffers == block
    assert named(sharded, "backward of block 1 of 4, at its MLP").gathered == root + block
    kept = replace(sharded, engine="zero1")
    assert named(kept, "backward of block 2 of 4, at its MLP").gathered == whole
    assert optimizer_moment(sharded).gradients == whole // 4


def test_moments_add_up_and_the_largest_is_the_peak() -> None:
    found = memory_moments(STEP)
    assert all(one.total == sum(one.by_kind.values()) for one in found)
    assert peak_moment(STEP).total == max(one.total for one in found)
    assert peak_moment(STEP).name == "backward, at the loss"
    assert (
        "block"
        in peak_moment(replace(STEP, tokens=1 << 20, recompute="blocks", chunked_loss=16)).name
    )


def test_what_is_unknown_is_refused() -> None:
    with pytest.raises(ConfigError, match="recompute"):
        replace(STEP, recompute="all")
    with pytest.raises(ConfigError, match="engine"):
        memory_moments(replace(STEP, engine="zero3"))

"""The load-balancing loss of transformers' routers: that of all tokens of the batch, on every rank."""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import Any

import pytest
import transformers

from lightning_cp.errors import ConfigError
from tests.helpers.models.routers import DOORS, MODELS, train_alone
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.helpers.strategies.small import (
    HYBRID,
    LET_EMPTY,
    RING,
    RING3,
    ULYSSES,
    Settings,
    close,
)

pytestmark = LET_EMPTY

GRIDS: dict[str, tuple[int, Settings]] = {
    "ring2": (2, RING),
    "ring3": (3, RING3),
    "ulysses2": (2, ULYSSES),
    "hybrid": (4, HYBRID),
    "llama3": (2, {**RING, "mode": "zigzag_llama3"}),
    "fsdp": (2, {**RING, "data_parallel": "fsdp"}),
}


@lru_cache(maxsize=32)
def one(name: str, loss: str, kind: str) -> Any:
    return run_ranks(1, train_alone, name, loss, kind)[0]


def check(door: str, grid: str, name: str, loss: str, kind: str, **more: Any) -> None:
    """Losses and weights are those of one process."""
    ranks, settings = GRIDS[grid]
    want = one(name, loss, kind)
    for got in run_ranks(ranks, DOORS[door], {**settings, **more}, name, loss, kind):
        close(got, want)


@pytest.mark.quick(
    "fabric-ring3-right-Mixtral*", "trainer-hybrid-plain-Qwen3*", "*llama3-left-Gpt*"
)
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (kind, name)
        for kind, name in product(["plain", "left", "right", "packed"], MODELS)
        if (kind, name)
        != ("packed", "GptOssForCausalLM")  # it does not read where positions restart
    ],
)
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("door", DOORS)
def test_it_is_one_process_s(door: str, grid: str, kind: str, name: str) -> None:
    check(door, grid, name, "own", kind)


@pytest.mark.nightly
@pytest.mark.parametrize("recomputes", ["none", "blocks", "keep_attention"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "balanced"])
@pytest.mark.parametrize("kind", ["right", "packed"])
@pytest.mark.parametrize("door", DOORS)
def test_layouts_and_recomputation(door: str, kind: str, layout: str, recomputes: str) -> None:
    more = {"layout": layout, "activation_checkpointing": recomputes}
    check(door, "ring2", "MixtralForCausalLM", "own", kind, **more)


@pytest.mark.quick("trainer-ring2-packed", "fabric-hybrid-left")
@pytest.mark.parametrize("kind", ["plain", "left", "packed"])
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("door", DOORS)
def test_a_z_loss_of_the_step(door: str, grid: str, kind: str) -> None:
    check(door, grid, "MixtralForCausalLM", "z", kind)


@pytest.mark.quick("trainer-ring3-few", "fabric-fsdp-unlabelled", "trainer-llama3-unlabelled")
@pytest.mark.parametrize("kind", ["plain", "right", "packed", "few", "unlabelled"])
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("door", DOORS)
def test_beside_a_term_of_whole_rows(door: str, grid: str, kind: str) -> None:
    """Labels, routers and whole rows in one step."""
    check(door, grid, "MixtralForCausalLM", "mixed", kind)


@pytest.mark.quick("own-fabric", "mixed-trainer")
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("loss", ["own", "mixed"])
def test_tokens_of_equal_weight_are_refused(loss: str, door: str) -> None:
    """``token_weighting="global"`` would weigh a row's routers by its tokens."""
    settings = {**RING, "token_weighting": "global"}
    expect_on_every_rank(
        *(2, DOORS[door], settings, "MixtralForCausalLM", loss, "few"),
        error=ConfigError,
        match="model's routers.* would be weighted by the tokens.*for routers, output_router_logits=False",
    )


@pytest.mark.quick("fabric")
@pytest.mark.parametrize("door", DOORS)
def test_tokens_of_equal_weight_without_the_routers_loss(door: str) -> None:
    """What the refusal advises."""
    check(door, "ring2", "MixtralForCausalLM", "routers off", "few", token_weighting="global")


def test_transformers_adds_no_loss_of_routers_by_default() -> None:
    for name in MODELS:
        assert getattr(transformers, name).config_class().output_router_logits is False

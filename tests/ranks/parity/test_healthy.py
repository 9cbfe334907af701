"""Models that are well pass in every mode, engine and dtype, and the run that follows is the run without."""

from __future__ import annotations

import math
import re
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_cp.errors import ConfigError
from tests.helpers.models.later import BLOOMS_LOSS, transformers_version
from tests.helpers.models.steps import Case, make_batch, make_model
from tests.helpers.parity import modules
from tests.helpers.parity.heard import Heard
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.helpers.strategies.small import HYBRID, RING, ULYSSES, trainer_of, weights

CHECKED = {"parity_check": "first_batch"}


def fit(
    rank: int,
    world_size: int,
    settings: dict[str, Any],
    dtype: torch.dtype,
    options: dict[str, Any],
) -> tuple[torch.Tensor, list[float], int, list[str]]:
    """Weights, losses and counts of a run, and what was said of parity."""
    padded = options.pop("padded", False)
    module = modules.Healthy(dtype, options.pop("layers", 2))
    loader = DataLoader(modules.rows(8, padded=padded), batch_size=2)  # type: ignore[arg-type]
    with Heard() as heard:
        trainer_of(world_size, settings, **options).fit(module, loader)
    return weights(module), module.losses, module.counted, heard.parity


def worst(line: str) -> float:
    found = re.search(r"worst of \d+ gradients (\S+);", line)
    assert found
    return float(found[1])


MODES = {"ring": RING, "ulysses": ULYSSES, "hybrid": HYBRID}
ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"data_parallel": "fsdp"},
    "fsdp of blocks": {"data_parallel": "fsdp", "wrap_modules": "Block"},
    "zero1": {"data_parallel": "zero1"},
    "global": {"token_weighting": "global"},
    "recomputed": {"activation_checkpointing": "keep_attention", "tiled_mlp": 5},
}


@pytest.mark.quick("global-ring")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_run_is_the_one_without(mode: str, engine: str) -> None:
    """To the last bit: weights, losses, random numbers of dropout, and the module's own notes."""
    ranks = math.prod(MODES[mode].values())
    settings = {**MODES[mode], **ENGINES[engine]}
    run = (torch.float64, {})
    want = run_ranks(ranks, fit, {**settings, "parity_check": "off"}, *run, timeout=60)
    got = run_ranks(ranks, fit, {**settings, **CHECKED}, *run, timeout=60)
    for (a, losses, counted, heard), (b, losses_without, without, silence) in zip(
        got, want, strict=True
    ):
        assert torch.equal(a, b)
        assert losses == losses_without
        assert counted == without == 4
        assert silence == []
        assert len(heard) <= 1
    assert worst(got[0][3][0]) < 1e-12


def begun(rank: int, world_size: int, settings: dict[str, Any]) -> list[str]:
    with Heard() as heard:
        trainer_of(world_size, settings).fit(
            modules.Healthy(),
            DataLoader(modules.rows(8), batch_size=2),  # type: ignore[arg-type]
        )
    return [line.partition(" (")[0] for line in heard.lines if line.startswith("parity")]


def test_it_says_that_it_begins() -> None:
    """Once a check, on the first rank, before what it found."""
    first, other = run_ranks(2, begun, {**RING, "parity_check": "every_2"}, timeout=60)
    lines = [
        "parity: comparing one process and context parallel on 96 tokens",
        "parity: one process and context parallel agree on 96 tokens",
    ]
    assert first == lines * 2
    assert other == []


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["ddp", "fsdp", "global"])
def test_data_ranks_and_windows(engine: str) -> None:
    settings = {**RING, **ENGINES[engine], "data_parallel_size": 2}
    options = {"accumulate_grad_batches": 2, "padded": True}
    without = {**settings, "parity_check": "off"}
    want = run_ranks(4, fit, without, torch.float64, options, timeout=60)
    got = run_ranks(4, fit, {**settings, **CHECKED}, torch.float64, options, timeout=60)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(got, want, strict=True))
    assert worst(got[0][3][0]) < 1e-12


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("dtype", "options", "below"),
    [
        (torch.float32, {"layers": 12}, 1e-3),
        (torch.float32, {"precision": "bf16-mixed", "layers": 12}, 5e-2),
        (torch.float32, {"precision": "bf16-true", "layers": 12}, 7e-2),
    ],
    ids=["float32", "bf16-mixed", "bf16-true"],
)
@pytest.mark.parametrize("mode", MODES)
def test_rounding_is_no_fault(mode: str, dtype: Any, options: Any, below: float) -> None:
    ranks = math.prod(MODES[mode].values())
    got = run_ranks(ranks, fit, {**MODES[mode], **CHECKED}, dtype, options, timeout=60)
    assert 0 < worst(got[0][3][0]) < below


class HuggingFace(pl.LightningModule):
    """Computes its loss by itself."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.set_default_dtype(torch.float64)
        self.model = make_model(case)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def huggingface(
    rank: int, world_size: int, case: Case, settings: dict[str, Any], precision: str | None = None
) -> list[str]:
    module = HuggingFace(case)
    if precision is not None:
        module.float()
    with Heard() as heard:
        trainer_of(world_size, {**settings, "labels": "auto"}, precision=precision).fit(
            module,
            DataLoader([make_batch(case)], batch_size=None),  # type: ignore[arg-type]
        )
    return heard.parity


FAMILIES = ("llama", "gpt2", "bert", "gemma2_capped", "mixtral", "gpt_oss", "bloom", "falcon_alibi")


@pytest.mark.nightly
@pytest.mark.parametrize("model", FAMILIES)
def test_families(model: str) -> None:
    settings = {**HYBRID, **CHECKED}
    if model == "bloom" and transformers_version() < BLOOMS_LOSS.since:
        expect_on_every_rank(
            4, huggingface, Case(model=model), settings, error=ConfigError, match=BLOOMS_LOSS.match
        )
        return
    lines = run_ranks(4, huggingface, Case(model=model), settings, timeout=60)[0]
    assert len(lines) == 1
    assert worst(lines[0]) < 1e-5


@pytest.mark.nightly
@pytest.mark.parametrize("batch", ["right", "left", "packed"])
def test_padded_and_packed(batch: str) -> None:
    case = Case(batch=batch, use_cache=False)
    for more in ({}, {"chunked_loss": 5}, {"parity_tokens": 70}):
        lines = run_ranks(2, huggingface, case, {**RING, **CHECKED, **more}, timeout=60)[0]
        assert len(lines) == 1
        assert worst(lines[0]) < 1e-5
        assert ("logits never made (chunked_loss)" in lines[0]) == ("chunked_loss" in more)

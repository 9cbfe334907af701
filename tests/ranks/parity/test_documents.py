"""Documents that a batch declares are isolated on one process too, unless the model reads them by itself."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from lightning_cp.errors import ConfigError, ParityError
from tests.helpers.models.later import BLOOMS_LOSS, transformers_version
from tests.helpers.models.steps import Case, make_batch
from tests.helpers.parity import modules
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.helpers.strategies.small import HYBRID, RING, trainer_of, weights
from tests.helpers.suites import nightly_but
from tests.ranks.parity.test_healthy import CHECKED, MODES, Heard, HuggingFace, worst

CUTS = [[0, 19, 20, 48], [0, 7, 31, 48], [0, 48], [0, 30, 48]]
KINDS = ("segment_ids", "cu_seqlens", "restarting")


def packed(kind: str) -> list[Any]:
    """Batches of two rows; the last kind declares documents by both of the others' means, and positions."""
    batches: list[Any] = []
    rows = modules.rows(4)
    for at in (0, 2):
        batch: Any = {
            key: torch.stack([rows[at][key], rows[at + 1][key]]) for key in ("input_ids", "labels")
        }
        cuts = CUTS[at : at + 2]
        if kind == "cu_seqlens":
            length = max(map(len, cuts))
            lines = [line + [modules.LENGTH] * (length - len(line)) for line in cuts]
            batch["cu_seqlens"] = torch.tensor(lines, dtype=torch.int32)
        else:
            batch["segment_ids"] = torch.stack(
                [_of_documents(line, torch.full_like) for line in cuts]
            )
        if kind == "restarting":
            batch["position_ids"] = torch.stack([_of_documents(line, _counted) for line in cuts])
        batches.append(batch)
    return batches


def _of_documents(cuts: list[int], values: Any) -> torch.Tensor:
    parts = [torch.zeros(b - a, dtype=torch.long) for a, b in pairwise(cuts)]
    return torch.cat([values(part, at) for at, part in enumerate(parts)])


def _counted(part: torch.Tensor, _: int) -> torch.Tensor:
    return torch.arange(len(part))


def fit(
    rank: int, world_size: int, name: str, kind: str, settings: dict[str, Any]
) -> tuple[torch.Tensor, list[str]]:
    module = getattr(modules, name)()
    loader: Any = DataLoader(packed(kind), batch_size=None)  # type: ignore[arg-type]
    with Heard() as heard:
        trainer_of(world_size, settings).fit(module, loader)
    return weights(module), heard.parity


@pytest.mark.quick("cu_seqlens-hybrid")
@pytest.mark.parametrize("mode", nightly_but("hybrid", of={mode: mode for mode in MODES}))
@pytest.mark.parametrize("kind", KINDS)
def test_documents_of_a_plain_module(kind: str, mode: str) -> None:
    """It knows nothing of them; the run is the one without a check."""
    ranks, settings = math.prod(MODES[mode].values()), MODES[mode]
    off = {**settings, "parity_check": "off"}
    want = run_ranks(ranks, fit, "Healthy", kind, off, timeout=60)
    got = run_ranks(ranks, fit, "Healthy", kind, {**settings, **CHECKED}, timeout=60)
    (line,) = got[0][1]
    assert worst(line) < 1e-12
    assert "documents isolated as the batch declares them" in line
    for (a, _), (b, _) in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.quick("{'mode': 'zigzag_llama3'}")
@pytest.mark.parametrize(
    "more",
    [
        {"parity_tokens": 60},
        {"data_parallel": "fsdp", "wrap_modules": "Block"},
        {"activation_checkpointing": "keep_attention", "tiled_mlp": 5},
        {"data_parallel_size": 2},
        {"mode": "zigzag_llama3"},
    ],
    ids=str,
)
def test_declared_documents_elsewhere(more: dict[str, Any]) -> None:
    settings = {**RING, **CHECKED, **more}
    ranks = 2 * more.get("data_parallel_size", 1)
    lines = run_ranks(ranks, fit, "Healthy", "cu_seqlens", settings, timeout=60)[0][1]
    assert len(lines) == 1
    assert worst(lines[0]) < 1e-12


FAULTS = [
    ("Summed", "unscaled loss"),
    ("CountedHere", "local positions"),
    ("TurnedHere", "local positions"),
    ("ShiftedHere", "local labels"),
    ("Mixed", "a module that mixes the sequence"),
    ("DrawnPerRank", "different data inside the cp group"),
]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "cause"),
    nightly_but("CountedHere", "ShiftedHere", of={name: (name, cause) for name, cause in FAULTS}),
)
def test_other_faults_of_packed_batches(name: str, cause: str) -> None:
    settings = {**HYBRID, **CHECKED}
    match = f"Likely cause: {cause}"
    expect_on_every_rank(4, fit, name, "cu_seqlens", settings, error=ParityError, match=match)


def huggingface(rank: int, world_size: int, case: Case, settings: dict[str, Any]) -> list[str]:
    batch = make_batch(case)
    with Heard() as heard:
        trainer_of(world_size, {**settings, "labels": "auto"}).fit(
            HuggingFace(case),
            DataLoader([batch], batch_size=None),  # type: ignore[arg-type]
        )
    return heard.parity


FAMILIES = ("llama", "gpt2", "bert", "gemma2_capped", "gpt_oss", "bloom", "falcon_alibi")


@pytest.mark.nightly
@pytest.mark.parametrize("model", FAMILIES)
def test_documents_that_transformers_does_not_know(model: str) -> None:
    case, settings = Case(model=model, batch="segments", window=6), {**HYBRID, **CHECKED}
    if model == "bloom" and transformers_version() < BLOOMS_LOSS.since:
        match = BLOOMS_LOSS.match
        expect_on_every_rank(4, huggingface, case, settings, error=ConfigError, match=match)
        return
    (line,) = run_ranks(4, huggingface, case, settings, timeout=60)[0]
    assert worst(line) < 1e-5
    assert "documents isolated" in line


@pytest.mark.nightly
def test_documents_that_transformers_knows() -> None:
    """Restarting positions: one process isolates them by its own means, which is what is compared with."""
    for batch in ("packed", "declared"):
        case = Case(batch=batch, use_cache=False)
        (line,) = run_ranks(2, huggingface, case, {**RING, **CHECKED}, timeout=60)[0]
        assert worst(line) < 1e-5
        assert "documents isolated" not in line


def without_its_mask(
    module: Any,
    q_BHLD: torch.Tensor,
    k_BKLD: torch.Tensor,
    v_BKLD: torch.Tensor,
    mask: Any,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of the user's that looks at no document."""
    groups = q_BHLD.shape[1] // k_BKLD.shape[1]
    k_BHLD, v_BHLD = (x.repeat_interleave(groups, 1) for x in (k_BKLD, v_BKLD))
    out = F.scaled_dot_product_attention(q_BHLD, k_BHLD, v_BHLD, is_causal=True)
    return out.transpose(1, 2).contiguous(), None


def across_documents(rank: int, world_size: int, settings: dict[str, Any]) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register("without_its_mask", without_its_mask)
    AttentionMaskInterface.register("without_its_mask", sdpa_mask)
    case = Case(batch="packed", use_cache=False, attention="without_its_mask")
    huggingface(rank, world_size, case, settings)


@pytest.mark.nightly
@pytest.mark.parametrize("mode", [*MODES])
def test_attention_across_documents_is_named(mode: str) -> None:
    match = (
        r"(?s)Likely cause: cross-document attention\..*behind attention, and is gone without "
        r"documents.*apply the mask"
    )
    ranks, settings = math.prod(MODES[mode].values()), {**MODES[mode], **CHECKED}
    expect_on_every_rank(ranks, across_documents, settings, error=ParityError, match=match)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:position_ids restart, so the documents:UserWarning")
def test_a_bidirectional_model_that_restarts() -> None:
    """transformers reads no documents from its positions; here they are isolated, which is said."""
    case = Case(model="bert", batch="packed")
    (line,) = run_ranks(2, huggingface, case, {**RING, **CHECKED}, timeout=60)[0]
    assert worst(line) < 1e-5

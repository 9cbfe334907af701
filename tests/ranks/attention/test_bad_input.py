"""What context_parallel_attention refuses: at once, on every rank, saying what would work."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch

from lightning_cp.attention.api import context_parallel_attention, explain
from lightning_cp.attention.spec import AttentionSpec
from lightning_cp.errors import ConfigError, ShapeError
from lightning_cp.layout import Documents, SequenceLayout
from tests.helpers.attention.distributed import mesh_of
from tests.helpers.attention.problems import Grid
from tests.helpers.attention.wire import Wire
from tests.helpers.pool import expect_on_every_rank, run_ranks

GRID = Grid(2, 2)
LENGTH = 30  # padded to 32: 8 tokens a rank
OTHER_LAYOUT = SequenceLayout(LENGTH, 4, 1)

Change = dict[str, Any]


def tensor(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    """Zeros [batch, local tokens, heads, head dim]; trailing sizes as in a good call."""
    return torch.zeros(*shape, *(2, 8, 4, 8)[len(shape) :], dtype=dtype, device=device)


def attend(rank: int, world_size: int, changes: Change) -> set[str]:
    """A good call, but for the changes; what it communicated."""
    given: Change = {"layout": SequenceLayout(LENGTH, 2, 2), **changes}
    q, k, v = (given.pop(name, tensor()) for name in ("q", "k", "v"))
    with mesh_of(GRID) as mesh, Wire() as wire:
        try:
            context_parallel_attention(q, k, v, mesh=mesh, **given)
        except Exception:
            agreement = {"allreduce_", "allgather_"}  # a vote, and what there was to say
            assert set(wire.counts) == agreement, wire.counts  # and no data
            raise
    return set(wire.counts)


def test_the_unchanged_call_is_good() -> None:
    assert run_ranks(4, attend, {}) == [{"allreduce_", "alltoall_base_", "send", "recv_"}] * 4


def refuse(changes: Change, error: type[Exception], match: str) -> None:
    """Require the error on every rank."""
    expect_on_every_rank(4, attend, changes, error=error, match=match)


SHAPES: dict[str, tuple[Change, str]] = {
    "dtype of k": (
        {"k": tensor(dtype=torch.bfloat16)},
        r"one dtype and one device, got q \(2, 8, 4, 8\) torch.float32 on cpu, "
        r"k \(2, 8, 4, 8\) torch.bfloat16 on cpu",
    ),
    "dtype of v": ({"v": tensor(dtype=torch.float64)}, "one dtype .* v .* torch.float64"),
    "device": ({"v": tensor(device="meta")}, "one dtype and one device, got .* v .* on meta"),
    "batch of k and v": (
        dict.fromkeys(("k", "v"), tensor(3)),
        r"the batch size of q, got q \(2, .* k \(3, ",
    ),
    "batch of v": ({"v": tensor(3)}, r"k and v must have equal shapes"),
    "heads of v": ({"v": tensor(2, 8, 2)}, "k and v must have equal shapes"),
    "three dims": (
        {"q": torch.zeros(2, 8, 32)},
        r"must be \[batch, local tokens, heads, head dim\]",
    ),
    "five dims": (dict.fromkeys(("k", "v"), torch.zeros(1, 2, 8, 4, 8)), r"must be \[batch, "),
    "head dim": ({"q": tensor(2, 8, 4, 16)}, "q and k must have the same head dim"),
    "cross-attention": ({"q": tensor(2, 6)}, "the same local tokens .cross-attention"),
    "the whole sequence": (
        dict.fromkeys(("q", "k", "v"), tensor(2, LENGTH)),
        r"whole sequence: shard it first.*gives each rank 8 of 30 tokens \(padded to 32\), got q",
    ),
    "the whole padded sequence": (dict.fromkeys(("q", "k", "v"), tensor(2, 32)), "shard it first"),
    "too few tokens": (dict.fromkeys(("q", "k", "v"), tensor(2, 7)), r"each rank 8 of 30 tokens"),
    "query heads per K/V head": (
        dict.fromkeys(("k", "v"), tensor(2, 8, 3)),
        "multiple of the number of K/V heads, got 4 query heads and 3 K/V heads",
    ),
    "rows of documents": (
        {
            "layout": SequenceLayout(
                LENGTH, 2, 2, documents=Documents.from_padding_mask(torch.ones(3, LENGTH))
            )
        },
        r"documents describe 3 rows, but the batch has 2",
    ),
}


@pytest.mark.parametrize("case", SHAPES)
def test_tensors_that_do_not_fit(case: str) -> None:
    changes, match = SHAPES[case]
    refuse(changes, ShapeError, match)


SETTINGS: dict[str, tuple[Change, str]] = {
    "heads that do not split": (
        dict.fromkeys(("q", "k", "v"), tensor(2, 8, 3)),
        r"ulysses_size=2 does not divide the 3 attention heads. Sizes that work: 1, 3; .* ring",
    ),
    "a layout of another mesh": (
        {"layout": OTHER_LAYOUT},
        "layout is for ring_size=4, ulysses_size=1, but the mesh has ring_size=2, ulysses_size=2",
    ),
    "unknown exchange": (
        {"exchange": "smoke"},
        "exchange must be one of ring, rotation, all_gather.*, got 'smoke'",
    ),
    "unknown execution": (
        {"exchange": "all_gather", "backward_execution": "magic"},
        "backward_execution must be one of two_kernel, fused, got 'magic'",
    ),
    "no heads per gather": (
        {"exchange": "all_gather", "kv_heads_per_gather": 0},
        "kv_heads_per_gather must be an integer of at least 1, or None for all .*, got 0",
    ),
    "unknown kernel": (
        {"kernel": "magic"},
        "unknown kernel 'magic'. Known: auto, aten, .*aten_cpu_flash, reference",
    ),
    "a kernel of another device": (
        {"kernel": "aten_cuda_flash"},
        "aten_cuda_flash runs on cuda, not cpu",
    ),
    "a window that the kernel lacks": (
        {"kernel": "aten_cpu_flash", "spec": AttentionSpec(window=(3, 0))},
        "aten_cpu_flash has no window mask",
    ),
    "a dtype that no kernel takes": (
        dict.fromkeys(("q", "k", "v"), tensor(dtype=torch.int32)),
        "reference takes .*, not torch.int32",
    ),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_cannot_be_executed(case: str) -> None:
    changes, match = SETTINGS[case]
    refuse(changes, ConfigError, match)


FEATURES: dict[str, Change] = {
    "softcap": {"spec": AttentionSpec(softcap=30.0)},
    "alibi": {"spec": AttentionSpec(alibi_slopes=torch.ones(4))},
    "max_logits": {"return_max_logits": True},
}


@pytest.mark.parametrize("feature", FEATURES)
def test_features_that_a_kernel_lacks_name_it(feature: str) -> None:
    match = f".*, {feature}. Passed over: .*aten_cpu_flash has no {feature}"
    refuse({"kernel": "aten", **FEATURES[feature]}, ConfigError, match)


def slopes(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Change:
    return {"spec": AttentionSpec(alibi_slopes=torch.ones(shape, dtype=dtype, device=device))}


def sinks(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Change:
    return {"spec": AttentionSpec(sinks=torch.ones(shape, dtype=dtype, device=device))}


WANTED_SLOPES = (
    r"alibi_slopes must be float32, \[4\] or \[2, 4\], on cpu for q \(2, 8, 4, 8\), got "
)
WANTED_SINKS = r"sinks must be one floating-point logit per query head, \[4\] on cpu for q .*, got "
SCORES: dict[str, tuple[Change, str]] = {
    "slopes of this rank's heads only": (slopes(2), WANTED_SLOPES + r"\(2,\)"),
    "slopes of other rows": (slopes(3, 4), WANTED_SLOPES + r"\(3, 4\)"),
    "slopes of one row": (slopes(1, 4), WANTED_SLOPES + r"\(1, 4\)"),
    "one slope": (slopes(), WANTED_SLOPES + r"\(\)"),
    "dtype of slopes": (slopes(4, dtype=torch.bfloat16), WANTED_SLOPES + ".*torch.bfloat16"),
    "device of slopes": (slopes(4, device="meta"), WANTED_SLOPES + ".* on meta"),
    "infinite slopes": (
        {"spec": AttentionSpec(alibi_slopes=torch.tensor([1, 2, math.inf, 3]))},
        r"alibi_slopes must be finite, got \[1.0, 2.0, inf, 3.0\]",
    ),
    "sinks of this rank's heads only": (sinks(2), WANTED_SINKS + r"\(2,\)"),
    "sinks per row": (sinks(2, 4), WANTED_SINKS + r"\(2, 4\)"),
    "dtype of sinks": (sinks(4, dtype=torch.int64), WANTED_SINKS + ".*torch.int64"),
    "device of sinks": (sinks(4, device="meta"), WANTED_SINKS + ".* on meta"),
}


@pytest.mark.parametrize("case", SCORES)
def test_slopes_and_sinks_that_do_not_fit(case: str) -> None:
    changes, match = SCORES[case]
    refuse(changes, ShapeError, match)


@pytest.mark.parametrize(
    ("setting", "match"),
    [
        ({"dropout_p": 0.1}, "attention dropout must be 0.0 under context parallelism, got 0.1"),
        (
            {"softmax_scale": 0.0},
            "softmax_scale must be a finite number and not 0, or None, got 0.0",
        ),
        (
            {"softmax_scale": math.nan},
            "softmax_scale must be a finite number and not 0, or None, got nan",
        ),
        (
            {"softmax_scale": math.inf},
            "softmax_scale must be a finite number and not 0, or None, got inf",
        ),
        ({"window": (-2, 0)}, r"window must be .* at least 0, or -1 for unbounded, got \(-2, 0\)"),
        (
            {"softmax_scale": True},
            "softmax_scale must be a finite number and not 0, or None, got True",
        ),
        ({"window": (3.5, 0)}, r"window must be .* whole distances .*, got \(3.5, 0\)"),
        ({"window": (3,)}, r"window must be \(left, right\)"),
        ({"softcap": -1.0}, r"softcap must be 0.0 \(off\) or positive, got -1.0"),
        ({"softcap": math.nan}, "softcap must be"),
        ({"softcap": None}, "softcap must be .* got None"),
        ({"softcap": True}, "softcap must be .* got True"),
        (
            {"softcap": torch.tensor(30.0, requires_grad=True)},
            "to which no gradient would flow: pass float",
        ),
        ({"softmax_scale": 10**400}, "softmax_scale must be a finite number"),
        ({"window": (torch.tensor(3.5), 0)}, r"window must be \(left, right\)"),
        ({"softmax_scale": "0.1"}, "softmax_scale must be a finite number .* got '0.1'"),
        ({"softmax_scale": torch.nn.Parameter(torch.tensor(0.1))}, "multiply q by it"),
        ({"causal": "False"}, "causal must be True or False, got 'False'"),
        ({"causal": None}, "causal must be True or False, got None"),
        ({"window": 4}, r"window must be \(left, right\) .* got 4"),
        ({"window": None}, r"window must be \(left, right\) .* got None"),
        ({"window": (True, 0)}, r"window must be \(left, right\)"),
        ({"alibi_slopes": [0.5] * 4}, r"alibi_slopes must be a tensor or None, got list: torch"),
        ({"sinks": [0.5] * 4}, "sinks must be a tensor or None, got list"),
        (
            {"alibi_slopes": torch.ones(4, requires_grad=True)},
            "alibi_slopes with requires_grad=True cannot be used: no gradient flows to them.*detach",
        ),
    ],
    ids=str,
)
def test_a_spec_that_means_nothing(setting: Change, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        AttentionSpec(**setting)


def test_numbers_of_other_libraries() -> None:
    spec = AttentionSpec(window=(np.int64(3), 0), softmax_scale=np.float32(0.5))  # type: ignore[arg-type]
    assert spec.mask.window == (3, 0)
    assert AttentionSpec(softcap=torch.tensor(30.0)).softcap == 30.0  # type: ignore[arg-type]
    assert Documents.from_cu_seqlens([0, 8], np.int64(8)).seq_len == 8  # type: ignore[arg-type]
    assert spec.scale(64) == 0.5


@pytest.mark.parametrize(
    ("setting", "match"),
    [
        ({"layout": "zigzag"}, "layout must be a lightning_cp SequenceLayout, got str"),
        ({"spec": {"causal": True}}, "spec must be a lightning_cp AttentionSpec, got dict"),
        ({"spec": {}}, "spec must be a lightning_cp AttentionSpec, got dict"),
        ({"q": None}, "q_BLHD must be a torch Tensor, got NoneType"),
        ({"v": [[0.0]]}, "v_BLKD must be a torch Tensor, got list"),
    ],
    ids=str,
)
def test_arguments_of_another_type(setting: Change, match: str) -> None:
    refuse(setting, ConfigError, match)


def test_no_mesh() -> None:
    nothing: Any = None
    with pytest.raises(ConfigError, match=r"one of mesh= and layout=\. Pass both, or neither"):
        context_parallel_attention(*[tensor()] * 3, mesh=nothing, layout=SequenceLayout(8))
    match = "mesh must be a lightning_cp ContextParallelMesh, got NoneType"
    with pytest.raises(ConfigError, match=match):
        explain(*[tensor()] * 3, mesh=nothing, layout=SequenceLayout(8))


def explain_one(rank: int, world_size: int) -> list[str]:
    """What different calls are told, without communicating."""
    layout, spec = SequenceLayout(LENGTH, 2, 2), AttentionSpec(softcap=30.0, sinks=torch.ones(4))
    q = tensor()
    told: list[str] = []
    with mesh_of(GRID) as mesh, Wire() as wire:
        for kernel in ("auto", "aten") if not rank else ():
            told.append(explain(q, q, q, mesh=mesh, layout=layout, spec=spec, kernel=kernel))
        told.append(explain(q, q, q, mesh=mesh, layout=layout, return_max_logits=True))
        with pytest.raises(ShapeError, match="shard it first"):
            explain(*[tensor(2, 32)] * 3, mesh=mesh, layout=layout)
        with pytest.raises(ConfigError, match=r"ring_flash_attn' cannot do torch\.float32"):
            explain(q, q, q, mesh=mesh, layout=layout, exchange="ring_flash_attn")
    assert not wire.counts
    return told


def test_one_rank_may_ask_which_kernel_it_gets() -> None:
    (auto, aten, largest), *_ = run_ranks(4, explain_one)
    assert auto.startswith(
        "kernel='auto' for device cpu, torch.float32, head dim 8, masks causal, full, "
    )
    assert "softcap: reference\n" in auto
    assert "\n  aten_cpu_flash: has no softcap\n" in auto
    assert "sinks" not in auto, "no kernel needs to have them"
    assert "softcap: none can do it\n" in aten
    assert "\n  reference: not among kernel='aten'" in aten
    assert "\n  aten_cpu_flash: has no max_logits\n" in largest


def test_documents_of_another_length() -> None:
    documents = Documents.from_cu_seqlens([0, 10, 20])
    with pytest.raises(ShapeError, match="documents describe 20 tokens, but the layout has 30"):
        SequenceLayout(LENGTH, 2, 2, documents=documents)


def attend_one(rank: int, world_size: int) -> None:
    with mesh_of(Grid()) as mesh:
        q = tensor(2, 7)
        context_parallel_attention(q, q, q, mesh=mesh, layout=SequenceLayout(8))


def test_one_rank_refuses_too() -> None:
    match = re.escape("the layout gives each rank 8 of 8 tokens")
    expect_on_every_rank(1, attend_one, error=ShapeError, match=match)

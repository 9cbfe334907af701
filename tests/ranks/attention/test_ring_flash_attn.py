"""exchange="ring_flash_attn": that package's own communication code, on CPU, against the dense answer.

Its kernels are stand-ins (:mod:`tests.helpers.kernels.flash_attn_standin`); everything else is the package.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from lightning_cp.attention import ring_flash_attn_support as delegation
from lightning_cp.attention.api import context_parallel_attention, explain
from lightning_cp.attention.ring_flash_attn_support import delegate
from lightning_cp.attention.spec import AttentionSpec
from lightning_cp.errors import ConfigError
from lightning_cp.layout import Documents, SequenceLayout
from tests.helpers import oracle
from tests.helpers.attention.distributed import Shards, joined, mesh_of
from tests.helpers.attention.problems import HEADS, Grid, Problem, expected, voids
from tests.helpers.kernels.flash_attn_standin import installed
from tests.helpers.pool import expect_on_every_rank, run_ranks

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("ring_flash_attn") is None, reason="ring-flash-attn is not installed"
)
LIMIT = {torch.bfloat16: 2e-2, torch.float16: 4e-3}


@contextmanager
def on_cpu(version: str = "2.8.3") -> Iterator[None]:
    """Within it, calls are delegated on CPU, with a stand-in for flash-attn."""
    devices = delegation.DEVICE_TYPES
    with installed(version):
        _forget()
        delegation.DEVICE_TYPES = frozenset({"cpu"})
        try:
            yield
        finally:
            delegation.DEVICE_TYPES = devices
            _forget()


def _forget() -> None:
    delegation._modules.cache_clear()
    for name in [name for name in sys.modules if name.startswith(delegation._ALIAS)]:
        del sys.modules[name]


class Case(NamedTuple):
    """A grid of ranks, a version of flash-attn, and the problems."""

    grid: Grid
    version: str
    problems: Sequence[Problem]


def problems_of(grid: Grid) -> list[Problem]:
    pairs = HEADS[grid.ulysses].values()
    cells = [
        Problem(pair, "divides", causal, dtype=torch.bfloat16)
        for pair in pairs
        for causal in (True, False)
    ]
    if grid.kind == "zigzag":
        cells += [Problem(pair, "divides", dtype=torch.float16) for pair in pairs]
    return cells


GRIDS = [
    Grid(2),
    Grid(2, kind="contiguous"),
    Grid(4),
    Grid(4, kind="contiguous"),
    Grid(2, 2),
    Grid(2, 2, kind="contiguous"),
]
CASES = {str(grid): Case(grid, "2.8.3", problems_of(grid)) for grid in GRIDS}
CASES["old flash-attn"] = Case(Grid(2), "2.6.3", problems_of(Grid(2)))


def attend(rank: int, world_size: int, case: Case) -> list[Shards]:
    """This rank's part of every problem."""
    with on_cpu(case.version), mesh_of(case.grid) as mesh:
        return [_attend(problem, case.grid, mesh) for problem in case.problems]


def _attend(problem: Problem, grid: Grid, mesh: Any) -> Shards:
    layout = problem.layout(grid)
    q, k, v, dout = (mesh.shard(x, layout) for x in problem.tensors())
    for x in (q, k, v):
        x.requires_grad_()
    out, lse = context_parallel_attention(
        q,
        k,
        v,
        mesh=mesh,
        layout=layout,
        spec=problem.spec,
        exchange="ring_flash_attn",
        return_lse=True,
    )
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    return Shards(*(x.detach().contiguous() for x in (out, lse, *gradients)))


def errors(answer: oracle.Attention, problem: Problem) -> dict[str, float]:
    """Largest difference over the largest entry, of each result."""
    found: dict[str, float] = {}
    for (name, got), (_, want) in zip(answer.items(), expected(problem).items(), strict=True):
        found[name] = float((got.double() - want).abs().max() / want.abs().max())
    return found


@pytest.mark.quick("ring 2 zigzag", "hybrid 2x2 contiguous", "old flash-attn", "ring 4 contiguous")
@needs_package
@pytest.mark.parametrize("name", CASES)
def test_delegated_is_the_dense_answer(name: str) -> None:
    case = CASES[name]
    ranks = run_ranks(case.grid.world_size, attend, case)
    for problem, shards in zip(case.problems, zip(*ranks, strict=True), strict=True):
        answer = joined(problem, case.grid, shards)
        found = errors(answer, problem)
        limit = LIMIT[problem.dtype]
        assert all(error <= limit for error in found.values()), f"{problem}: {found}"
        for void in voids(problem, case.grid).values():
            assert max(errors(void, problem).values()) > 10 * limit


Q = torch.zeros(2, 8, 4, 8, dtype=torch.bfloat16)
ZIGZAG = SequenceLayout(32, ring_size=2, ulysses_size=2)
PLAIN = replace(ZIGZAG, kind="contiguous")
CAUSAL = AttentionSpec()
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "float32": ({"q": Q.float()}, "torch.float32: .*its float32 gradients are wrong"),
    "float16 in its plain ring": (
        {"q": Q.half(), "layout": PLAIN},
        "torch.float16 but for causal .* layout='zigzag': its plain ring rounds dq to bfloat16",
    ),
    "float16 without causality": (
        {"q": Q.half(), "spec": AttentionSpec(causal=False)},
        "torch.float16 .*rounds dq to bfloat16",
    ),
    "a device without its kernel": ({"q": Q.to("meta")}, "device meta: its kernel runs on cuda"),
    "head dim": ({"q": Q[..., :6]}, "head dim 6: it takes multiples of 8 up to 256"),
    "another width of v": (
        {"v": torch.zeros(2, 8, 4, 16, dtype=torch.bfloat16)},
        "head dim 16 of v with 8 of q and k: it takes equal ones",
    ),
    "window": (
        {"spec": AttentionSpec(window=(5, 0))},
        r"window=\(5, 0\): it applies the window to each hop by itself. Use exchange='ring'",
    ),
    "softcap": ({"spec": AttentionSpec(softcap=30.0)}, "softcap: it has no such scores"),
    "alibi": ({"spec": AttentionSpec(alibi_slopes=torch.ones(4))}, "alibi: it has no such"),
    "sinks": ({"spec": AttentionSpec(sinks=torch.ones(4))}, "sinks: it has no such scores"),
    "largest scores": ({"max_logits": True}, "return_max_logits=True: it does not return them"),
    "a kernel": ({"kernel": "reference"}, "kernel='reference': it has its own kernel"),
    "no ring": ({"layout": SequenceLayout(32, 1, 4)}, "ring_size=1: there is no ring to delegate"),
    "padding": (
        {"layout": SequenceLayout(30, 2, 2)},
        "a sequence of 30 tokens, padded to 32: it attends to padding; lengths that divide by 4 work",
    ),
    "packed documents": (
        {"layout": replace(ZIGZAG, documents=Documents.from_cu_seqlens([0, 16, 32]))},
        "packed documents or padded rows: .* rows of one document work",
    ),
    "padded rows": (
        {
            "layout": replace(
                ZIGZAG, documents=Documents.from_padding_mask(torch.ones(2, 32).tril(30))
            )
        },
        "packed documents or padded rows",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, match = REFUSED[case]
    monkeypatch.setattr(delegation, "DEVICE_TYPES", frozenset({"cpu"}))
    if case == "a device without its kernel":
        monkeypatch.undo()
    given: dict[str, Any] = {"q": Q, "layout": ZIGZAG, "spec": CAUSAL, "kernel": "auto"} | changes
    q, layout, spec, kernel = (given.pop(name) for name in ("q", "layout", "spec", "kernel"))
    v = given.pop("v", q)
    with pytest.raises(ConfigError, match="exchange='ring_flash_attn' cannot do " + match):
        delegate(q, v, layout, spec, kernel, **given)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    match = (
        "exchange='ring_flash_attn' needs the packages ring-flash-attn and flash-attn. Install both"
    )
    with on_cpu("none"), pytest.raises(ConfigError, match=match):
        delegate(Q, Q, ZIGZAG, CAUSAL, "auto")
    monkeypatch.setattr(delegation.importlib.util, "find_spec", lambda name: None)
    with on_cpu(), pytest.raises(ConfigError, match=match):
        delegate(Q, Q, ZIGZAG, CAUSAL, "auto")


def attend_float32(rank: int, world_size: int) -> None:
    with on_cpu(), mesh_of(Grid(2)) as mesh:
        _attend(Problem(sequences="divides", dtype=torch.float32), Grid(2), mesh)


def test_every_rank_refuses_before_data_moves() -> None:
    expect_on_every_rank(2, attend_float32, error=ConfigError, match="float32 gradients are wrong")


@needs_package
def test_single_documents_and_the_rings_it_chooses() -> None:
    single = replace(ZIGZAG, documents=Documents.single(32))
    with on_cpu():
        zigzag = delegate(Q, Q, single, CAUSAL, "flash_attn")
        plain = delegate(Q, Q, PLAIN, CAUSAL, "auto")
        full = delegate(Q, Q, ZIGZAG, AttentionSpec(causal=False), "auto")
    assert zigzag.forward.__name__ == "zigzag_ring_flash_attn_forward"
    assert plain.backward.__name__ == "ring_flash_attn_backward"
    assert full.forward.__name__ == "ring_flash_attn_forward"
    assert all(x.__module__.startswith("_lightning_cp") for x in (zigzag.forward, plain.forward))


def explain_delegated(rank: int, world_size: int) -> str:
    q = torch.zeros(1, 16, 4, 8, dtype=torch.bfloat16)
    with on_cpu(), mesh_of(Grid(2)) as mesh:
        layout = SequenceLayout(32, ring_size=2)
        return explain(q, q, q, mesh=mesh, layout=layout, exchange="ring_flash_attn")


@needs_package
def test_explain_names_whose_kernels_compute() -> None:
    for told in run_ranks(2, explain_delegated):
        assert "that package computes attention, with its own kernels" in told

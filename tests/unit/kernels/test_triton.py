"""Our Triton kernels: in Triton's interpreter on CPU, small, and on a CUDA device, at full size.

Limits go by what others get wrong of the same problem against the float64 oracle: in float32 twice
the reference kernel's own error and 1e-6, in half precision, where weights are rounded before they
meet the values, twice (gradients: three times) that of PyTorch's flash operator, in norm. The
interpreter's bfloat16 is wrong, so that dtype is for devices.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lightning_cp.kernels.aten import AtenCpuFlash
from lightning_cp.kernels.reference import ReferenceKernel
from lightning_cp.layout.mask import Mask
from lightning_cp.layout.sequence import SequenceLayout
from tests.helpers import oracle
from tests.helpers.kernels.cells import DOCUMENTS, intervals
from tests.helpers.kernels.dense import Answer, Problem, dense, errors, sharded
from tests.helpers.kernels.devices import DEVICES, OnDevice, triton_on, with_dtypes

MASKS = {
    "causal": Mask(),
    "full": Mask(causal=False),
    "window": Mask(causal=False, window=(5, 9)),
    "causal_window": Mask(window=(7, -1)),
    "lookahead": Mask(causal=False, window=(-1, 3)),
}
FULL_SIZE = {
    "dense": None,
    "packed": (intervals(1, 300, 16, 129, 577, 8),),
    "rows": (intervals(200, 801, -30), intervals(-7, 3, 1000, 21)),
}

HALF = (torch.float16, torch.bfloat16)
DTYPES = (torch.float32, *HALF)
INTERPRETED = (torch.float32, torch.float16)

# Slopes of both signs, all different, so that the bias of another head or row shows.
SLOPES = 0.1 * torch.cos(torch.arange(8, dtype=torch.float32) + 0.5)
CAP = oracle.Scores(softcap=1.5)


def slopes(device: str, rows: int = 1, softcap: float = 0.0) -> oracle.Scores:
    """Of the heads of a problem on a device; for more rows, of each row."""
    heads = 2 if device == "cpu" else 4
    shaped = SLOPES[: rows * heads].view(rows, heads).squeeze(0)
    return oracle.Scores(softcap, shaped)


def problem_on(device: str, mask: str, documents: str, **how: object) -> Problem:
    """Small for the interpreter, whole blocks and more for a device."""
    size = {"heads": (4, 2), "dtype": torch.float32, "head_dim": 64, "seq_len": 1031}
    if device == "cpu":
        rows = 2 if documents == "rows" else 1
        size |= {"heads": (2, 1), "head_dim": 32, "seq_len": 53, "batch": rows}
    of_rows = (DOCUMENTS if device == "cpu" else FULL_SIZE)[documents]
    return Problem(MASKS[mask], intervals=of_rows, **(size | how))  # type: ignore[arg-type]


def check(device: str, problem: Problem, ranks: int = 2, split_below: int = 512) -> None:
    """Compare the kernel's answer with the oracle's, through the schedule of some ranks."""
    layout = SequenceLayout(problem.seq_len, ranks)
    kernel = replace(triton_on(device), split_below=split_below)
    answer = sharded(problem, OnDevice(kernel, device), layout)
    if problem.dtype == torch.float32:
        other = errors(sharded(problem, ReferenceKernel(), layout), dense(problem))
        found = errors(answer, dense(problem))
        # As below, and as flash-attention's tests have it: gradients may err three times as much. How far
        # they do depends on the processor: the interpreter's products are numpy's.
        limits = {name: 2 * other[name] + 1e-6 for name in ("out", "lse")}
        limits |= {name: 3 * other[name] + 1e-6 for name in ("dq", "dk", "dv")}
        assert max(limits.values()) < 1e-5, limits
    else:
        # The operator has neither windows nor changed scores; it shows how far this dtype reaches.
        plain = replace(problem, mask=Mask(), how=oracle.PLAIN)
        other = norm_errors(sharded(plain, AtenCpuFlash(), layout), dense(plain))
        found = norm_errors(answer, dense(problem))
        limits = {name: 2 * other[name] + 1e-6 for name in ("out", "lse")}
        limits |= {name: 3 * other[name] for name in ("dq", "dk", "dv")}
        assert max(limits.values()) < 0.05, limits
    worse = {name: (found[name], limits[name]) for name in found if not found[name] <= limits[name]}
    assert not worse, worse


def norm_errors(answer: Answer, expected: Answer) -> dict[str, float]:
    """Norm of the difference over the norm, for each of out, lse, dq, dk and dv."""
    found: dict[str, float] = {}
    for name, got, want in zip(Answer._fields, answer, expected, strict=True):
        seen = want != -torch.inf
        assert torch.equal(got != -torch.inf, seen)
        difference = got.double()[seen] - want[seen]
        found[name] = float(difference.norm() / want[seen].norm())
    return found


CELLS = [
    ("causal", "dense", 2),
    ("causal", "packed", 2),
    ("causal", "rows", 2),
    ("full", "dense", 1),
    ("full", "rows", 1),
    ("window", "dense", 2),
    ("window", "rows", 4),
    ("causal_window", "packed", 2),
    ("lookahead", "dense", 2),
]


@pytest.mark.nightly
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("mask", "documents", "ranks"), CELLS)
def test_float32(mask: str, documents: str, ranks: int, device: str) -> None:
    check(device, problem_on(device, mask, documents), ranks)


@pytest.mark.quick("full-dense-1-cpu-float16", "*cuda*")
@pytest.mark.parametrize(("device", "dtype"), with_dtypes(INTERPRETED[1:], HALF))
@pytest.mark.parametrize(("mask", "documents", "ranks"), [CELLS[2], CELLS[3], CELLS[5]])
def test_half_precision(
    mask: str, documents: str, ranks: int, device: str, dtype: torch.dtype
) -> None:
    check(device, problem_on(device, mask, documents, dtype=dtype), ranks)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", [(3, 3), (6, 2), (5, 1)])
def test_head_groups(heads: tuple[int, int], device: str) -> None:
    """Each query head has its own programs of keys, since these are few."""
    seq_len = 19 if device == "cpu" else 300
    check(device, problem_on(device, "causal", "dense", heads=heads, seq_len=seq_len), ranks=1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("documents", ["dense", "rows"])
def test_head_groups_in_one_program(documents: str, device: str) -> None:
    """Where programs of keys are many, each has all query heads of its K/V head."""
    size = {"heads": (6, 2)} | ({"seq_len": 19} if documents == "dense" and device == "cpu" else {})
    check(device, problem_on(device, "causal", documents, **size), ranks=1, split_below=0)


@pytest.mark.nightly
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("documents", ["packed", "rows"])
def test_split_head_groups_of_documents(documents: str, device: str) -> None:
    """Keys beside the documents, of which no program computes gradients, have none."""
    check(device, problem_on(device, "causal", documents, heads=(6, 2)), ranks=2)


HEAD_DIMS = [(dim, dim) for dim in (20, 32, 64, 96, 128, 256)]
"""Of q and k, and of v."""
OTHER_WIDTHS = [(192, 128), (64, 96), (8, 40)]


@pytest.mark.quick("cpu-float32-32-32", "cpu-float32-256-256", "*cuda*")
@pytest.mark.parametrize(("head_dim", "value_dim"), [*HEAD_DIMS, *OTHER_WIDTHS])
@pytest.mark.parametrize(("device", "dtype"), with_dtypes(INTERPRETED[:1], DTYPES))
def test_head_dims(device: str, head_dim: int, value_dim: int, dtype: torch.dtype) -> None:
    """On a device with the blocks of each dtype; in the interpreter one dtype stands for all."""
    seq_len = 40 if device == "cpu" else 531
    how = {"head_dim": head_dim, "value_dim": value_dim, "dtype": dtype, "seq_len": seq_len}
    check(device, problem_on(device, "causal", "dense", batch=1, **how), ranks=1)


@pytest.mark.nightly
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value_dim", [16, 48])
def test_values_of_another_width(value_dim: int, device: str) -> None:
    """In a window of packed rows, capped and biased, of grouped heads."""
    how = slopes(device, 2, softcap=2.0)
    check(device, problem_on(device, "window", "rows", how=how, value_dim=value_dim))


@pytest.mark.quick("packed-*", "*cuda*")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("documents", ["rows", "packed"])
def test_cap(documents: str, device: str) -> None:
    check(device, problem_on(device, "causal", documents, how=CAP))


@pytest.mark.quick("causal-dense-1-*", "*cuda*")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("mask", "documents", "rows"), [("causal", "dense", 1), ("full", "rows", 2)]
)
def test_slopes(mask: str, documents: str, rows: int, device: str) -> None:
    check(device, problem_on(device, mask, documents, how=slopes(device, rows)))


@pytest.mark.nightly
@pytest.mark.parametrize(("device", "dtype"), with_dtypes(INTERPRETED, DTYPES))
def test_capped_slopes_in_a_window(device: str, dtype: torch.dtype) -> None:
    how = slopes(device, 2, softcap=2.0)
    check(device, problem_on(device, "window", "rows", how=how, dtype=dtype))

"""Launches of single functions of the device code; imported only where Triton is."""

# pyright: reportGeneralTypeIssues=false
import triton
import triton.language as tl

from lightning_cp.kernels.triton.device import seen_range, tanh


@triton.jit
def edges_of(cases, edges, BLOCK: tl.constexpr):
    """``seen_range`` of each row [begin, end, first, last, near, far] of ``cases``."""
    case = cases + tl.program_id(0) * 6
    at = edges + tl.program_id(0) * 4
    begin, end, first = tl.load(case), tl.load(case + 1), tl.load(case + 2)
    last, near, far = tl.load(case + 3), tl.load(case + 4), tl.load(case + 5)
    start, whole, cut, stop = seen_range(begin, end, first, last, near, far, BLOCK)
    tl.store(at, start)
    tl.store(at + 1, whole)
    tl.store(at + 2, cut)
    tl.store(at + 3, stop)


@triton.jit
def tanh_of(x, y, COUNT: tl.constexpr):
    """Of ``COUNT`` numbers."""
    index = tl.arange(0, COUNT)
    tl.store(y + index, tanh(tl.load(x + index)))

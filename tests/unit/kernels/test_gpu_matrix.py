"""Every kernel of CUDA devices in every cell of dtype, head dim, heads, mask, window and documents: 720.

A cell agrees with the float64 oracle as far as PyTorch's CPU operator does in the same dtype (out twice its
error in norm, gradients three times), or is refused by the kernel's own capabilities. A few more cells have
values of another head dim than keys. Without a device the cells are counted, and some of them run on the CPU
operator, so that what judges them is judged itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest
import torch

from lightning_cp.kernels.aten import AtenCpuFlash
from lightning_cp.kernels.protocol import Kernel, Request
from lightning_cp.kernels.select import kernels
from lightning_cp.layout.mask import Mask
from lightning_cp.layout.sequence import SequenceLayout
from tests.helpers.kernels.cells import HEADS
from tests.helpers.kernels.dense import Answer, Problem, dense, sharded
from tests.helpers.kernels.devices import OnDevice
from tests.unit.kernels.test_triton import FULL_SIZE, norm_errors

SEQ_LEN, WINDOW = 1031, 37
NAMES = ("aten_cuda_flash", "aten_cuda_cudnn", "flash_attn_2", "flash_attn_3", "triton")
DTYPES = (torch.bfloat16, torch.float16)
# Twice (gradients: three times) what PyTorch's CPU operator has in these cells, in norm.
LIMITS = {
    torch.bfloat16: {"out": 4.6e-3, "lse": 2e-5, "dq": 1.1e-2, "dk": 2e-2, "dv": 2e-2},
    torch.float16: {"out": 5.8e-4, "lse": 2e-5, "dq": 1.4e-3, "dk": 2.5e-3, "dv": 2.5e-3},
}


@dataclass(frozen=True)
class Cell:
    """One problem on one kernel."""

    kernel: str
    dtype: torch.dtype
    head_dim: int
    heads: str
    causal: bool
    window: bool
    documents: str
    value_dim: int | None = None
    """Head dim of v; that of q and k by default."""

    @property
    def mask(self) -> Mask:
        """A window reaches back, and forward too where the mask is not causal."""
        if not self.window:
            return Mask(self.causal)
        return Mask(self.causal, window=(WINDOW, -1 if self.causal else WINDOW))

    @property
    def problem(self) -> Problem:
        """Two rows."""
        return Problem(
            *(self.mask, HEADS[self.heads], FULL_SIZE[self.documents], self.dtype),
            seq_len=SEQ_LEN,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
        )

    @property
    def request(self) -> Request:
        """What is asked of the kernel."""
        kinds = {"full", "causal", "band"} if self.window else {"full"}
        kinds |= {"causal"} if self.causal else set()
        device = "cpu" if self.kernel == "aten_cpu_flash" else "cuda"
        masks = frozenset(kinds)
        return Request(device, self.dtype, self.head_dim, masks, value_dim=self.value_dim)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        mask = f"{'causal' if self.causal else 'full'}{' window' if self.window else ''}"
        dims = f"{self.head_dim}" + (f"/{self.value_dim}" if self.value_dim else "")
        return f"{self.kernel}-{dtype}-{dims}-{self.heads}-{mask}-{self.documents}"


CELLS = [
    Cell(*parts)
    for parts in product(NAMES, DTYPES, (64, 128), HEADS, (True, False), (False, True), FULL_SIZE)
]
OTHER_WIDTHS = [
    Cell(name, dtype, dim, heads, True, window, documents, of_values)
    for name in NAMES
    for dtype, dim, of_values, heads, window, documents in (
        (torch.bfloat16, 192, 128, "mha", False, "rows"),  # DeepSeek V2 and V3
        (torch.bfloat16, 192, 128, "gqa", True, "packed"),  # MiMo V2
        (torch.float16, 128, 64, "gqa", False, "packed"),
        (torch.bfloat16, 64, 128, "mqa", False, "dense"),
    )
]
ON_CPU = [
    Cell("aten_cpu_flash", torch.bfloat16, 64, "gqa", True, False, "rows", 32),
    Cell("aten_cpu_flash", torch.bfloat16, 64, "gqa", True, False, "rows"),
    Cell("aten_cpu_flash", torch.float16, 64, "mqa", False, False, "packed"),
]
HERE = [*CELLS, *OTHER_WIDTHS] if torch.cuda.is_available() else ON_CPU
"""What can run here."""


def judge(answer: Answer, cell: Cell) -> None:
    """Compare an answer with the oracle's."""
    found, limits = norm_errors(answer, dense(cell.problem)), LIMITS[cell.dtype]
    worse = {
        name: (error, limits[name]) for name, error in found.items() if not error <= limits[name]
    }
    assert not worse, (str(cell), worse)


def answered(kernel: Kernel, cell: Cell) -> Answer:
    return sharded(cell.problem, kernel, SequenceLayout(SEQ_LEN, ring_size=2))


@pytest.mark.nightly
@pytest.mark.parametrize("cell", HERE, ids=str)
def test_cell(cell: Cell) -> None:
    kernel = kernels()[cell.kernel]
    refusal = kernel.capabilities.refusal(cell.request)
    if refusal is not None and "has no window mask" in refusal:
        assert cell.window  # the documented error
        return
    if refusal is not None:
        pytest.skip(f"{cell.kernel} {refusal}")
    judge(answered(OnDevice(kernel, cell.request.device_type), cell), cell)


def test_there_are_720_cells() -> None:
    assert len(CELLS) == len({str(cell) for cell in CELLS}) == 720


@pytest.mark.quick("aten_cpu_flash-float16-64-mqa-full-packed")
@pytest.mark.parametrize("cell", ON_CPU, ids=str)
def test_what_judges_a_cell(cell: Cell) -> None:
    """It allows at least what the CPU operator has, and at most twice that; zeros fail in every part."""
    answer = answered(AtenCpuFlash(), cell)
    found = norm_errors(answer, dense(cell.problem))
    for name, error in found.items():
        assert error <= LIMITS[cell.dtype][name], (name, error)
        part = getattr(answer, name)
        nothing = torch.where(part == -torch.inf, part, 0.0)
        with pytest.raises(AssertionError, match=name):
            judge(answer._replace(**{name: nothing}), cell)
        assert name == "lse" or LIMITS[cell.dtype][name] <= 6 * error

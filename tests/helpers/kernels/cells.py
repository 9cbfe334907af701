"""The cells that kernels are compared with the dense answer on."""

from __future__ import annotations

from itertools import accumulate

from lightning_cp.kernels.aten import AtenCpuFlash
from lightning_cp.kernels.protocol import Kernel
from lightning_cp.kernels.reference import ReferenceKernel
from lightning_cp.layout.mask import Mask
from lightning_cp.layout.sequence import SequenceLayout
from tests.helpers.kernels.dense import Problem

SEQ_LEN = 53  # divides by no mesh, so that every layout pads


def intervals(*lengths: int) -> tuple[tuple[int, int], ...]:
    """The documents of a row from their lengths; a negative length is padding."""
    ends = list(accumulate(abs(length) for length in lengths))
    return tuple(
        (end - length, end) for length, end in zip(lengths, ends, strict=True) if length > 0
    )


DOCUMENTS: dict[str, tuple[tuple[tuple[int, int], ...], ...] | None] = {
    "dense": None,
    "packed": (intervals(1, 13, 16, 1, 22),),
    "rows": (intervals(20, 30, -3), intervals(-7, 3, 40, 3)),
}
HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1)}
MASKS = {"full": Mask(causal=False), "causal": Mask()}
WINDOWS = {
    "causal_window": Mask(window=(7, -1)),
    "window": Mask(causal=False, window=(5, 9)),
    "lookahead": Mask(causal=False, window=(-1, 3)),
    "diagonal": Mask(window=(0, 0)),
}
LAYOUTS = {
    "1": SequenceLayout(SEQ_LEN),
    "2_zigzag": SequenceLayout(SEQ_LEN, ring_size=2),
    "3_zigzag": SequenceLayout(SEQ_LEN, ring_size=3),
    "4_zigzag": SequenceLayout(SEQ_LEN, ring_size=4),
    "3_contiguous": SequenceLayout(SEQ_LEN, ring_size=3, kind="contiguous"),
}

# Blocks smaller than the shards and unequal, so that block edges fall everywhere.
REFERENCE = ReferenceKernel(block_q=5, block_k=7)
KERNELS: dict[str, tuple[Kernel, dict[str, Mask]]] = {
    "reference": (REFERENCE, MASKS | WINDOWS),
    "aten_cpu_flash": (AtenCpuFlash(), MASKS),
}
KERNEL_MASKS = [(kernel, mask) for kernel, (_, masks) in KERNELS.items() for mask in masks]


def cell(kernel: str, mask: str, heads: str, documents: str) -> tuple[Kernel, Problem]:
    """The kernel and the problem of a cell, by the names of its parts."""
    chosen, masks = KERNELS[kernel]
    return chosen, Problem(masks[mask], HEADS[heads], DOCUMENTS[documents], seq_len=SEQ_LEN)

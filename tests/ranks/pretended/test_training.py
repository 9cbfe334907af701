"""Training on pretended CUDA devices: the losses and weights of one CPU, and no operator of both devices.

``tests.helpers.pretended.device`` raises for an operator that gets tensors of the device and of the host.
"""

from __future__ import annotations

from itertools import product

import pytest

from tests.helpers.pretended.runs import MODES, Cell, compare

pytestmark = pytest.mark.filterwarnings("ignore:GPU available but not used")
ENGINES = ("ddp", "fsdp", "hsdp", "zero1")
MATRIX = {
    str(cell): cell
    for cell in (
        Cell(engine, mode, sequences, driver)
        for engine, mode, sequences, driver in product(
            ENGINES, MODES, ("dense", "packed"), ("trainer", "fabric")
        )
    )
}


@pytest.mark.quick(
    "ddp ring dense trainer",
    "fsdp ulysses packed trainer",
    "zero1 zigzag_llama3 packed fabric",
    "ddp hybrid dense fabric",
    "hsdp ring packed fabric",
)
@pytest.mark.parametrize("name", MATRIX)
def test_losses_and_weights_are_those_of_one_cpu(name: str) -> None:
    compare(MATRIX[name])


OFFLOAD = (("activation_checkpointing", "blocks"), ("activation_offload", True))
MORE = {
    "muon with QK-clip": Cell("fsdp", optimizer="muon"),
    "muon with QK-clip, zero1": Cell("zero1", "ulysses", optimizer="muon"),
    "tensor parallelism": Cell("fsdp", tp=2),
    "activation offload": Cell("ddp", more=OFFLOAD),
    "activation offload, fsdp": Cell("fsdp", "ulysses", more=OFFLOAD),
    "parameter offload": Cell("fsdp", more=(("cpu_offload", True),)),
    "resumed": Cell("ddp", "zigzag_llama3", resumes=True, optimizer="adamw"),
    "resumed, fsdp": Cell("fsdp", resumes=True, optimizer="adamw"),
    "validation and predict": Cell("ddp", "ulysses", stages=True),
    "validation and predict, packed": Cell("fsdp", "hybrid", "packed", stages=True),
    "validation and predict, zero1": Cell("zero1", "ulysses", stages=True),
    "validation and predict, hsdp": Cell("hsdp", stages=True),
    "parity check": Cell("ddp", more=(("parity_check", "first_batch"),)),
    "parity check, fsdp": Cell("fsdp", "hybrid", more=(("parity_check", "first_batch"),)),
    "accumulation": Cell("zero1", accumulate=2),
    "accumulation, tokens weighted globally": Cell("ddp", more=(("token_weighting", "global"),)),
    "whole rows": Cell("ddp", "ulysses", rows=True),
    "whole rows, fsdp": Cell("fsdp", "hybrid", rows=True),
    "operators of CUDA": Cell("ddp", flash=True),
    "operators of CUDA, packed": Cell("fsdp", "hybrid", "packed", flash=True),
}


@pytest.mark.quick(
    "whole rows", "muon with QK-clip", "activation offload", "validation and predict, zero1"
)
@pytest.mark.parametrize("name", MORE)
def test_features_are_those_of_one_cpu(name: str) -> None:
    compare(MORE[name])

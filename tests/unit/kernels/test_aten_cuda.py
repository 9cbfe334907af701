"""The CUDA kernels without a CUDA device: schemas, meta kernels, and emulated operators.

The emulation runs the wrappers' every line and shows that they ask for the right thing; that the
devices then compute it is for a run on one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import pytest
import torch

from lightning_cp.kernels import varlen as packs
from lightning_cp.kernels.aten import AtenCudaCudnn, AtenCudaFlash
from lightning_cp.kernels.merge import Accumulator
from lightning_cp.kernels.protocol import QKV, Kernel, Scores
from lightning_cp.layout.mask import Mask
from lightning_cp.layout.sequence import SequenceLayout
from lightning_cp.layout.tiles import ALL_ROWS, Tile
from tests.helpers.kernels.cells import (
    DOCUMENTS,
    HEADS,
    LAYOUTS,
    MASKS,
    SEQ_LEN,
    WINDOWS,
    intervals,
)
from tests.helpers.kernels.dense import Problem, check, in_dtype, is_wrong, run, sharded
from tests.helpers.kernels.emulated import cuda_operators_on_cpu

FLASH, CUDNN = AtenCudaFlash(), AtenCudaCudnn()
ALWAYS = AtenCudaFlash(packs.PackRule(fewest=1))


@pytest.fixture
def _emulated() -> Iterator[None]:
    with cuda_operators_on_cpu():
        yield


@pytest.mark.quick("causal-gqa-rows-2_zigzag", "causal_window-gqa-dense-3_contiguous")
@pytest.mark.pairwise
@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("heads", ["mha", "gqa"])
@pytest.mark.parametrize("mask", MASKS | WINDOWS)
def test_flash_asks_for_what_the_schedule_says(
    mask: str, heads: str, documents: str, layout: str
) -> None:
    problem = Problem((MASKS | WINDOWS)[mask], HEADS[heads], DOCUMENTS[documents], seq_len=SEQ_LEN)
    check(sharded(problem, FLASH, LAYOUTS[layout]), problem)


@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize("layout", ["1", "2_zigzag", "3_contiguous"])
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("mask", MASKS)
def test_cudnn_asks_for_what_the_schedule_says(mask: str, documents: str, layout: str) -> None:
    problem = Problem(MASKS[mask], HEADS["gqa"], DOCUMENTS[documents], seq_len=SEQ_LEN)
    check(sharded(problem, CUDNN, LAYOUTS[layout]), problem)


@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize("value_dim", [8, 24])
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("kernel", [FLASH, ALWAYS, CUDNN], ids=["flash", "packed", "cudnn"])
def test_values_of_another_width(kernel: Kernel, documents: str, value_dim: int) -> None:
    """FlashAttention's operators take one head dim, cuDNN's two."""
    parts = Mask(), HEADS["gqa"], DOCUMENTS[documents]
    problem = Problem(*parts, seq_len=SEQ_LEN, head_dim=16, value_dim=value_dim)
    check(sharded(problem, kernel, LAYOUTS["2_zigzag"]), problem)


@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", [FLASH, CUDNN], ids=lambda kernel: kernel.name)
def test_half_precision(kernel: Kernel, dtype: torch.dtype) -> None:
    problem = in_dtype(Problem(Mask()), dtype)
    answer = sharded(problem, kernel, LAYOUTS["2_zigzag"])
    assert {x.dtype for x in answer[1:]} == {torch.float32}
    check(answer, problem)


@pytest.mark.usefixtures("_emulated")
def test_red_when_tall_bands_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (intervals(14, 25, 14),)
    problem = Problem(Mask(causal=False, window=(9, 9)), intervals=rows, seq_len=SEQ_LEN)
    layout = SequenceLayout(SEQ_LEN, ring_size=4)
    check(sharded(problem, FLASH, layout), problem)
    monkeypatch.setattr(packs, "split_band", lambda tile, mask: [tile])
    packs._cached_packs.cache_clear()
    answer = sharded(problem, FLASH, layout)
    packs._cached_packs.cache_clear()
    assert is_wrong(answer, problem, "out")


@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize("mask", [Mask(window=(30, -1)), Mask(causal=False, window=(3, 3))])
def test_windows_are_not_ignored(mask: Mask) -> None:
    problem = Problem(mask)
    without = Problem(replace(mask, window=(-1, -1)))
    assert is_wrong(sharded(without, FLASH, LAYOUTS["2_zigzag"]), problem, "out")


@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize("kernel", [FLASH, CUDNN], ids=lambda kernel: kernel.name)
def test_queries_without_keys_are_minus_infinity(kernel: Kernel) -> None:
    q, k, v, dout = Problem(Mask()).tensors()
    k[0] = -torch.inf  # every score of row 0 is -inf, as if no key were visible
    q = q.abs()
    answer = run(kernel, (q, k, v, dout), [Tile(ALL_ROWS, 0, 53, 0, 53, 0, "causal")], Mask())
    assert bool((answer.lse[0] == -torch.inf).all())
    assert not bool(answer.out[0].any())
    assert not bool(answer.dv[0].any())
    assert bool(answer.dv[1].any())


@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize("layout", ["1", "2_zigzag", "3_contiguous"])
def test_cudnn_leaves_single_keys_to_another_kernel(layout: str) -> None:
    problem = Problem(Mask(), HEADS["gqa"], (intervals(1, 1, 25, 1, 25),), seq_len=SEQ_LEN)
    check(sharded(problem, CUDNN, LAYOUTS[layout]), problem)


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [(kernel, kind) for kernel in (FLASH, CUDNN) for kind in sorted(kernel.capabilities.masks)],
    ids=lambda part: part if isinstance(part, str) else part.name,
)
def test_meta_kernels_accept_the_calls(
    kernel: Kernel, kind: Literal["full", "causal", "band"]
) -> None:
    mask = Mask(window=(5, -1)) if kind == "band" else Mask()
    tensors = in_dtype(Problem(mask, seq_len=64), torch.bfloat16).tensors()
    q, k, v, dout = (x.to("meta") for x in tensors)
    tiles = [Tile(ALL_ROWS, 4, 32, 8, 32, 0, kind), Tile(1, 40, 8, 40, 24, 0, "full")]
    answer = run(kernel, (q, k, v, dout), tiles, mask)
    assert answer.out.shape == q.shape
    assert answer.lse.shape == (2, 4, 64)
    assert answer.dk.shape == k.shape
    assert {x.dtype for x in answer[1:]} == {torch.float32}


# Arguments as torch 2.10 has them, in order; `|` marks where keywords begin.
SCHEMAS = {
    "_flash_attention_forward": "query key value cum_seq_q cum_seq_k max_q max_k dropout_p"
    " is_causal return_debug_mask | scale window_size_left window_size_right",
    "_flash_attention_backward": "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q"
    " max_k dropout_p is_causal rng_state unused | scale window_size_left window_size_right",
    "_scaled_dot_product_cudnn_attention": "query key value attn_bias compute_log_sumexp dropout_p"
    " is_causal return_debug_mask | scale",
    "_scaled_dot_product_cudnn_attention_backward": "grad_out query key value out logsumexp"
    " philox_seed philox_offset attn_bias cum_seq_q cum_seq_k max_q max_k dropout_p is_causal"
    " | scale",
    "_scaled_dot_product_flash_attention_for_cpu": "query key value dropout_p is_causal"
    " | attn_mask scale",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "grad_out query key value out logsumexp"
    " dropout_p is_causal | attn_mask scale",
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_schema_is_the_one_called(name: str) -> None:
    positional, keywords = (part.split() for part in SCHEMAS[name].split("|"))
    arguments = getattr(torch.ops.aten, name).default._schema.arguments
    assert [x.name for x in arguments if not x.kwarg_only] == positional
    extra = [x for x in arguments if x.kwarg_only]
    assert [x.name for x in extra[: len(keywords)]] == keywords
    assert all(x.has_default_value() for x in extra)


@pytest.mark.parametrize("kernel", [FLASH, CUDNN], ids=lambda kernel: kernel.name)
def test_results_merge_into_an_accumulator_of_another_dtype(kernel: Kernel) -> None:
    q, k, v, _ = (x.to("meta", torch.float16) for x in Problem(Mask()).tensors())
    state = Accumulator(q, torch.float32)
    kernel.forward(QKV(q, k, v), [Tile(0, 0, 9, 0, 9, 0, "causal")], Scores(1.0, Mask()), state)
    assert state.result(torch.float16)[0].dtype == torch.float16

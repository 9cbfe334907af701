"""Mistakes in kernels and in merging."""

from __future__ import annotations

from tests.nightly.mutants.mutant import Mutant
from tests.nightly.mutants.selections import kernel, layout, modes, poisoned, scores

MERGE = "lightning_cp/kernels/merge.py"
REFERENCE = "lightning_cp/kernels/reference.py"
PER_TILE = "lightning_cp/kernels/per_tile.py"
PACKS = "lightning_cp/kernels/varlen.py"
AUTO = "lightning_cp/kernels/auto.py"

KERNEL_MUTANTS = (
    Mutant(
        "lse base 2 in the merge",
        MERGE,
        "torch.logaddexp(lse_BHL, new_lse_BHL, out=lse_BHL)",
        "torch.logaddexp2(lse_BHL, new_lse_BHL, out=lse_BHL)",
        (kernel("causal-mha-dense-3_zigzag"),),
        "FlashInfer and Triton kernels return base 2; weights of hops are then wrong by a power.",
    ),
    Mutant(
        "merge without max",
        MERGE,
        "torch.logaddexp(lse_BHL, new_lse_BHL, out=lse_BHL)",
        "lse_BHL.copy_((lse_BHL.exp() + new_lse_BHL.exp()).log())",
        ("tests/unit/kernels/test_tile_lists.py::test_scores_beyond_the_range_of_exp",),
        "Right for small scores, inf for large ones, late in training.",
    ),
    Mutant(
        "merge of two masked sides",
        MERGE,
        "merged = lse_BHL.clamp(min=torch.finfo(lse_BHL.dtype).min)",
        "merged = lse_BHL",
        ("tests/unit/kernels/test_merge.py::test_two_empty_sides_stay_empty",),
        "-inf - -inf: NaN in every row of padding, and from there in the loss.",
    ),
    Mutant(
        "padding kept, values cut",
        PER_TILE,
        "x[..., :width].contiguous()",
        "x[..., -width:].contiguous()",
        ("tests/unit/kernels/test_exactness.py::test_values_of_another_width",),
        "Where V has another head dim than K, results are shifted, and some are zeros.",
    ),
    Mutant(
        "first result kept in half precision",
        MERGE,
        "        self._out = self._out.to(self.dtype)\n",
        "",
        (
            "tests/unit/kernels/test_merge.py::test_accumulator_widens_a_first_result_of_lower_precision",
        ),
        "Every hop rounds the output again: the error grows with the ring.",
    ),
    Mutant(
        "gradients summed in half precision",
        "lightning_cp/kernels/merge.py",
        "self._sum = self._like = self.result.to(self.dtype)",
        "self._sum = self._like = self.result",
        ("tests/unit/kernels/test_sums.py::test_the_sum_is_that_of_the_parts",),
        "The first part is kept as it came, so that the others would be rounded to its dtype.",
    ),
    Mutant(
        "a gradient begins with what memory held",
        "lightning_cp/kernels/merge.py",
        "self._sum = self._like = self._memory().zero_()",
        "self._sum = self._like = self._memory()",
        ("tests/unit/kernels/test_sums.py::test_the_sum_is_that_of_the_parts",),
        "Fresh memory often holds zeros, so that it seldom shows.",
    ),
    Mutant(
        "tokens beside a first part keep what memory held",
        "lightning_cp/kernels/merge.py",
        "own[:, end:].fill_(value)",
        "own[:, end + 1 :].fill_(value)",
        (
            "tests/unit/kernels/test_sums.py::test_a_first_part_is_written_and_the_rest_is_zero",
            "tests/unit/kernels/test_merge.py::test_first_partial_result_is_written_not_merged[1-1]",
        ),
        "Fresh memory often holds zeros, so that it seldom shows.",
    ),
    Mutant(
        "sums in the dtype of the inputs",
        "lightning_cp/kernels/protocol.py",
        "return torch.float64 if dtype == torch.float64 else torch.float32",
        "return dtype",
        (
            "tests/unit/kernels/test_exactness.py::"
            "test_equals_dense_in_lower_precision[reference-causal-dense-dtype1]",
        ),
        "bfloat16 sums lose what a long sequence adds.",
    ),
    Mutant(
        "largest scores of the last tile only",
        MERGE,
        "torch.maximum(peak, max_BHL.to(peak.dtype), out=peak)",
        "peak.copy_(max_BHL)",
        (
            "tests/unit/kernels/test_scores.py::"
            "test_the_largest_scores[reference-softcap-causal-packed-3_zigzag]",
        ),
        "QK-clip would miss the logits of all hops but one.",
    ),
    Mutant(
        "cuDNN first for packed rows",
        AUTO,
        "if tiles is None or tiles.packed or tiles.tokens < LONG:",
        "if tiles is None or tiles.tokens < LONG:",
        ("tests/unit/kernels/test_auto.py::test_chosen_by_gpu_and_tiles",),
        "It makes a plan for each length of a document, for ever.",
    ),
    Mutant(
        "measurements of another GPU decide",
        AUTO,
        "if device != torch.cuda.get_device_name():",
        "if device == '':",
        ("tests/unit/kernels/test_auto.py::test_measurements_of_another_gpu_are_not_used",),
        "A file that was copied along chooses kernels that are slow here.",
    ),
    Mutant(
        "documents are not seen in tiles",
        AUTO,
        "packed = layout.documents is not None and not layout.documents.is_dense",
        "packed = False",
        ("tests/unit/kernels/test_auto.py::test_tiles_of_layouts",),
        "Packed rows get the kernel for long tiles.",
    ),
    Mutant(
        "rows of many lengths get cuDNN",
        AUTO,
        "    if tiles.varied:",
        "    if False:",
        ("tests/unit/kernels/test_auto.py::test_chosen_by_gpu_and_tiles",),
        "PyTorch keeps a plan for each length.",
    ),
    Mutant(
        "lengths of rows are not counted",
        "lightning_cp/models/handle.py",
        "return len(self.lengths) > MANY_LENGTHS",
        "return False",
        ("tests/unit/models/test_plans.py::test_a_run_with_rows_of_many_lengths_is_told_apart",),
        "PyTorch keeps a cuDNN plan for each length.",
    ),
    Mutant(
        "a window's argument has the name of another version",
        "lightning_cp/kernels/flash_attn.py",
        'self._pairs_window = "window_size" in parameters',
        "self._pairs_window = True",
        ("tests/unit/kernels/test_signatures.py::test_flash_attn_2",),
        "It fails at the first step, with a TypeError, for users of that version alone.",
    ),
    Mutant(
        "scale applied twice",
        REFERENCE,
        "softmax.add(_apply_bias_and_mask(_cap(q @ k.mT, scores.softcap), part, slopes), v)",
        "softmax.add(\n"
        "    _apply_bias_and_mask(_cap(q @ k.mT * scores.softmax_scale, scores.softcap), part, slopes), v)",
        (kernel("full-mha-dense-1"),),
        "A flatter softmax: the model trains, and is worse.",
    ),
    Mutant(
        "dk scaled twice",
        REFERENCE,
        "dk_BLKD[rows, part.keys] += (dscores.mT @ q).transpose(1, 2)",
        "dk_BLKD[rows, part.keys] += (dscores.mT @ q).transpose(1, 2) * scores.softmax_scale",
        (kernel("full-mha-dense-1"),),
        "The forward is right; only gradients of keys are too small.",
    ),
    Mutant(
        "online softmax of a masked block",
        REFERENCE,
        "finite = peak.masked_fill(peak == -torch.inf, 0.0)",
        "finite = peak",
        ("tests/unit/kernels/test_tile_lists.py::test_reference_runs_any_tile_list",),
        "NaN for a query that sees none of its first block of keys.",
    ),
    Mutant(
        "window one to the left",
        REFERENCE,
        'return (UNBOUNDED, 0) if tile.mask == "causal" else (mask.left, mask.right)',
        'return (UNBOUNDED, 0) if tile.mask == "causal" else (mask.left + 1, mask.right)',
        (kernel("causal_window-gqa-packed-3_zigzag"),),
        "flash-attn's windows count the query out, Hugging Face's count it in.",
    ),
    Mutant(
        "window one to the right",
        REFERENCE,
        'return (UNBOUNDED, 0) if tile.mask == "causal" else (mask.left, mask.right)',
        'return (UNBOUNDED, 0) if tile.mask == "causal" else (mask.left, mask.right + 1)',
        (kernel("window-gqa-packed-3_zigzag"),),
        "With a causal window every query sees the token that it shall predict.",
    ),
    Mutant(
        "K/V heads repeated instead of interleaved",
        REFERENCE,
        "return x_BLHD.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3).to(dtype)",
        "return x_BLHD.unflatten(2, (-1, kv_heads)).permute(0, 3, 2, 1, 4).flatten(2, 3).to(dtype)",
        (kernel("causal-gqa-dense-1"),),
        "Query heads attend to keys of another group; shapes are right.",
    ),
    Mutant(
        "derivative of the cap dropped",
        REFERENCE,
        "dscores *= _cap_derivative(capped, scores.softcap)",
        "dscores *= 1.0",
        (scores("softcap-causal-dense-1"),),
        "Gemma 2's loss is right and its gradients are not.",
    ),
    Mutant(
        "ALiBi's sign",
        REFERENCE,
        "grouped = grouped - slopes * part.ahead.abs()",
        "grouped = grouped + slopes * part.ahead.abs()",
        (scores("alibi-causal-dense-1"),),
        "Far keys weigh most.",
    ),
    Mutant(
        "no causal mask on the diagonal",
        PER_TILE,
        'return tile.mask == "causal"',
        "return False",
        (kernel("causal-mha-dense-1", "aten_cpu_flash"),),
        "Queries see the tokens that they shall predict: the loss looks wonderful.",
    ),
    Mutant(
        "top left instead of bottom right",
        PER_TILE,
        'ahead = tile.delta if tile.mask == "causal" else 0',
        'ahead = tile.delta if tile.mask == "causal" and tile.delta < 0 else 0',
        (modes("gather 2 zigzag two_kernel/two_kernel 1"),),
        "Operators align the diagonal differently; a tile with more keys than queries tells.",
    ),
    Mutant(
        "lse of a slice read as dense memory",
        "lightning_cp/kernels/varlen.py",
        "merged = merged._replace(lse=merged.lse.contiguous())",
        "merged = merged._replace()",
        (
            "tests/unit/kernels/test_aten_cuda.py::"
            "test_flash_asks_for_what_the_schedule_says[causal-gqa-rows-2_zigzag]",
        ),
        "FlashAttention ignores the strides of lse: gradients of another query's weights.",
    ),
    Mutant(
        "flash window off by one",
        "lightning_cp/kernels/varlen.py",
        "shift = tile.k_len - tile.q_len - tile.delta",
        "shift = tile.k_len - tile.q_len - tile.delta + 1",
        (
            "tests/unit/kernels/test_aten_cuda.py::"
            "test_flash_asks_for_what_the_schedule_says[causal_window-gqa-dense-3_contiguous]",
        ),
        "Only tiles on the edge of a window are wrong, by one key.",
    ),
    Mutant(
        "a query twice in one launch",
        PACKS,
        "for by_queries in _group_disjoint((_queries(tile), tile) for tile in tiles)",
        "for by_queries in [list(tiles)]",
        ("tests/unit/kernels/test_packs.py::test_every_tile_is_somewhere_and_no_token_twice",),
        "Merging reads and writes: of two results of a query one is lost.",
    ),
    Mutant(
        "a key twice in one launch",
        PACKS,
        "for group in _group_disjoint((_keys(tile), tile) for tile in by_queries)",
        "for group in [by_queries]",
        ("tests/unit/kernels/test_packs.py::test_queries_and_keys_in_several_tiles",),
        "Of two gradients of a key one is lost.",
    ),
    Mutant(
        "sinks seen by padding",
        "lightning_cp/attention/sinks.py",
        "torch.logaddexp(lse_BHL, sinks).masked_fill(lse_BHL == -torch.inf, -torch.inf)",
        "torch.logaddexp(lse_BHL, sinks)",
        (poisoned("ring 2 zigzag-rows-torch.float64-aten"),),
        "Padding gets an lse, and its gradient flows into the sinks.",
    ),
    Mutant(
        "padding in the sinks' gradient",
        "lightning_cp/attention/sinks.py",
        "share_BHT.masked_fill(blind, 0.0)",
        "share_BHT",
        (poisoned("ring 2 zigzag-rows-torch.float64-aten"),),
        "What a model leaves in padding (NaN included) reaches the sinks.",
    ),
    Mutant(
        "K/V head of a query head",
        "lightning_cp/layout/heads.py",
        "used = [head // split.group for head in range(first_q, last_q)]",
        "used = [head % split.num_kv_heads for head in range(first_q, last_q)]",
        (layout("heads.py::test_the_index_finds_the_head"),),
        "Query heads that straddle groups use the wrong keys.",
    ),
    Mutant(
        "windows with an implementation that has none",
        "lightning_cp/kernels/protocol.py",
        'if "band" in request.masks and self.no_bands is not None and (reason := self.no_bands()):',
        "if False and self.no_bands is not None and (reason := self.no_bands()):",
        (
            "tests/unit/kernels/test_auto.py::"
            "test_windows_are_left_to_others_where_the_activated_implementation_has_none",
        ),
        "The first backward of a model with windows raises with FA4 and torch before 2.12.",
    ),
    Mutant(
        "head dims that FlashAttention-4 refuses",
        "lightning_cp/kernels/devices.py",
        'if head_dim <= FA4_HEAD_DIM or flash_implementation() != "FA4":',
        'if head_dim <= 256 or flash_implementation() != "FA4":',
        (
            "tests/unit/kernels/test_auto.py::"
            "test_head_dims_that_flash_attention_4_refuses_are_left_to_others",
        ),
        "The first forward of DeepSeek's heads raises on Blackwell.",
    ),
)

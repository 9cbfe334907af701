"""Mistakes in our Triton kernels, seen in Triton's interpreter."""

from __future__ import annotations

from tests.nightly.mutants.mutant import Mutant
from tests.nightly.mutants.selections import triton, triton_modes

DEVICE = "lightning_cp/kernels/triton/device.py"
HOST = "lightning_cp/kernels/triton/launch.py"

TRITON_MUTANTS = (
    Mutant(
        "Triton: diagonal off by one",
        DEVICE,
        "\n                seen = (ahead >= low) & (ahead <= high) & (index",
        "\n                seen = (ahead >= low) & (ahead <= high + 1) & (index",
        (triton("head_dims[cpu-float32-32-32]"),),
        "Within a block of the diagonal a query sees the token that it shall predict.",
    ),
    Mutant(
        "Triton: keys beyond a tile",
        DEVICE,
        "\n                seen = (ahead >= low) & (ahead <= high) & (index < edges[part + 1])[None, :]",
        "\n                seen = (ahead >= low) & (ahead <= high)",
        (triton("lists[hidden-cpu]", "_tile_lists"),),
        "The last block of a tile is filled up with zeros, which take weight from the keys.",
    ),
    Mutant(
        "Triton: sum of weights not rescaled",
        DEVICE,
        "total = total * decay + tl.sum(weights, 1)",
        "total = total + tl.sum(weights, 1)",
        (triton("head_dims[cpu-float32-32-32]"),),
        "Right while the first block of keys has the largest score: the lse drifts, out shrinks.",
    ),
    Mutant(
        "Triton: lse in base 2",
        DEVICE,
        "(peak + tl.log2(divisor)) * 0.6931471805599453",
        "peak + tl.log2(divisor)",
        (triton("lists[bands-cpu]", "_tile_lists"),),
        "Device code counts in base 2, merging and backward in base e.",
    ),
    Mutant(
        "Triton: K/V heads repeated instead of interleaved",
        DEVICE,
        "weighted, total, peak, queries, k, v, row, head // GROUP",
        "weighted, total, peak, queries, k, v, row, head % (tl.num_programs(1) // GROUP)",
        (triton("head_groups[heads1-cpu]"),),
        "Query heads attend to keys of another group; shapes are right.",
    ),
    Mutant(
        "Triton: cap left out of forward",
        DEVICE,
        "scores = tanh(scores) * outer",
        "scores = scores * outer",
        (triton("cap[packed-cpu]"),),
        "Gemma 2 without its cap; nothing fails until scores grow.",
    ),
    Mutant(
        "Triton: largest scores in base 2",
        DEVICE,
        "largest = tl.where(total == total, peak, total) * 0.6931471805599453",
        "largest = tl.where(total == total, peak, total)",
        (triton("largest_scores[1-cpu]", "_tile_lists"),),
        "QK-clip would see scores 1.4 times as large as they are.",
    ),
    Mutant(
        "Triton: results put at the first query",
        HOST,
        "state.add(ALL_ROWS, start, out, lse, top)",
        "state.add(ALL_ROWS, 0, out, lse, top)",
        (triton_modes("ring 2 zigzag"),),
        "What late queries see of another rank's keys goes to early ones.",
    ),
    Mutant(
        "Triton: distances of local positions",
        HOST,
        "shift = delta + k_start - q_start",
        "shift = k_start - q_start",
        (triton("distances_are_global", "_tiles"),),
        "Masks and ALiBi are those of a rank's own numbering. One rank is right.",
    ),
    Mutant(
        "Triton: delta left out",
        DEVICE,
        "dscores = weights * (dweights - delta[:, None]) * bend",
        "dscores = weights * dweights * bend",
        (triton("lists[bands-cpu]", "_tile_lists"),),
        "The softmax is differentiated as if its sum were constant: only dq is wrong.",
    ),
    Mutant(
        "Triton: keys beyond a tile in backward",
        DEVICE,
        "\n            seen = (ahead >= low) & (ahead <= high) & (index < edges[part + 1])[None, :]",
        "\n            seen = (ahead >= low) & (ahead <= high)",
        (triton("all_scores_far_below_zero[cpu]", "_tile_lists"),),
        "They are zeros and add nothing, until a weight overflows: dq is NaN, late in training.",
    ),
    Mutant(
        "Triton: derivative of the cap dropped",
        DEVICE,
        "bend = 1.0 - capped * capped",
        "bend = 1.0",
        (triton("cap[packed-cpu]"),),
        "Gemma 2's loss is right and its gradients are not.",
    ),
    Mutant(
        "Triton: keys learn from one head of a group",
        DEVICE,
        "range(kv_head * GROUP, kv_head * GROUP + GROUP)",
        "range(kv_head * GROUP, kv_head * GROUP + 1)",
        (triton("head_groups[heads2-cpu]"),),
        "With grouped heads gradients of keys and values are too small.",
    ),
    Mutant(
        "Triton: one slope for a group",
        DEVICE,
        "head * slopes.head)\n                slope",
        "kv_head * slopes.head)\n                slope",
        (triton("slopes[causal-dense-1-cpu]"),),
        "With grouped heads dk and dv are those of other biases.",
    ),
)

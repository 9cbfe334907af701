"""Mistakes in what tensor-parallel ranks share, sum and count."""

from __future__ import annotations

from tests.nightly.mutants.mutant import Mutant

COMM = "lightning_cp/comm/tensor_parallel.py"
STYLES = "lightning_cp/engines/tensor_parallel/styles.py"
APPLY = "lightning_cp/engines/tensor_parallel/apply.py"
LOGITS = "tests/ranks/engines/test_sharded_logits.py::test_"
PLANS = "tests/ranks/engines/test_tensor_parallel_plans.py::test_"

TENSOR_PARALLEL_MUTANTS = (
    Mutant(
        "gradients of an activation are one rank's",
        COMM,
        "return _all_reduce(gradients[0], ctx.group), None",
        "return gradients[0], None",
        (PLANS + "plain_models_equal_one_process[plain-2]",),
        "What is before a shared layer learns from the heads of its own rank only.",
    ),
    Mutant(
        "every rank takes the first part of a gradient",
        COMM,
        "return _own_part(gradients[0], ctx.group), None",
        "return gradients[0].chunk(ctx.group.size(), -1)[0], None",
        (LOGITS + "anything_else_is_given_whole_rows[by hand]",),
        "The loss is right, and the last tokens of the vocabulary learn from the first ones.",
    ),
    Mutant(
        "what is changed in place is lost",
        "lightning_cp/comm/vocab_parallel.py",
        "            _write_back(whole, logits)\n",
        "",
        (LOGITS + "anything_else_is_given_whole_rows[divided]",),
        "The loss is that of logits as they were before.",
    ),
    Mutant(
        "exponentials of different scales are added",
        "lightning_cp/comm/vocab_parallel.py",
        "            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)",
        "            pass",
        (LOGITS + "cross_entropy_of_parts[flattened-2]",),
        "Each rank's part of the sum is relative to its own largest logit.",
    ),
    Mutant(
        "gradients of norms within heads are not summed",
        STYLES,
        "_local(module, name, [Partial()])",
        "_local(module, name)",
        (PLANS + "families_of_hugging_face_equal_one_process[qwen3]",),
        "A norm learns from one rank's heads, and ranks drift apart.",
    ),
    Mutant(
        "padding is learnt",
        STYLES,
        "local_padding = padding - first if here and padding is not None else None",
        "local_padding = None",
        (PLANS + "families_of_hugging_face_equal_one_process[llama]",),
        "The row of padding gets a gradient, which one process does not give it.",
    ),
    Mutant(
        "tied layers come apart",
        APPLY,
        "    _tie(module, tied)\n",
        "",
        (PLANS + "plain_models_equal_one_process[tied-2]",),
        "The embedding and the head learn apart from each other.",
    ),
    Mutant(
        "ranks drop different activations",
        APPLY,
        "    torch.set_rng_state(state.cpu())\n",
        "",
        (PLANS + "ranks_draw_the_same_numbers_and_share_once",),
        "Whole activations are no longer the same on all ranks of a group.",
    ),
    Mutant(
        "sums count every rank that shares a layer",
        "lightning_cp/strategies/base.py",
        'sums = isinstance(reduce_op, str) and reduce_op.lower() == "sum"',
        "sums = False",
        (
            "tests/ranks/engines/test_tensor_parallel.py::test_ranks_that_share_layers_count_once[2]",
        ),
        "Counts of tokens are tensor_parallel_size times too large.",
    ),
)

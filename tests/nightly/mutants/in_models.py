"""Mutants of what is asked of Hugging Face models."""

from __future__ import annotations

from tests.nightly.mutants.mutant import Mutant

REFUSALS = "tests/ranks/pretended/test_refusals.py"
DRAWS = "tests/unit/models/test_token_draws.py"
HF = "tests/ranks/models/test_hf.py"
BLOOM_FALCON = "lightning_cp/models/hf/bloom_falcon.py"
OWN_CALL = (
    "tests/ranks/models/test_own_attention.py::test_a_module_s_own_call_attends_over_the_whole_row"
)
CALLS = "tests/ranks/models/test_own_attention.py::test_calls_that_differ_between_ranks"
MATRIX = "tests/ranks/models/test_matrix.py::test_every_family"

MODEL_MUTANTS = (
    Mutant(
        "the compiler looks functions up after they were replaced",
        "lightning_cp/utils/patching.py",
        "    if rules is not None:\n",
        "    if rules is None:\n",
        (
            "tests/ranks/strategies/test_compile.py::"
            "test_blocks_that_call_scaled_dot_product_attention[ring-check]",
        ),
        "Compiled blocks have our exchange of attention traced into a graph.",
    ),
    Mutant(
        "each rank looks at its own longest position",
        "lightning_cp/models/hf/positions.py",
        "handle.state.positions.longest)",
        "int(positions.max()))",
        (
            "tests/ranks/models/test_rotary.py::test_ranks_use_the_frequencies_of_the_whole_sequence",
        ),
        "Ranks rotate by other frequencies.",
    ),
    Mutant(
        "BLOOM without its bias",
        BLOOM_FALCON,
        "        alibi_slopes=_slopes(module, q),\n",
        "",
        (f"{MATRIX}[bloom-ring 4]",),
        "Tokens far away count as much as near ones.",
    ),
    Mutant(
        "Falcon's bias is not scaled",
        BLOOM_FALCON,
        "_slopes(module, q) * module.inv_norm_factor",
        "_slopes(module, q)",
        (f"{MATRIX}[falcon_alibi-ring 4]",),
        "Scores are scaled together with the bias.",
    ),
    Mutant(
        "Falcon's groups are mixed up",
        BLOOM_FALCON,
        "parts[..., :-2, :].flatten(2, 3), parts[..., -2, :], parts[..., -1, :]",
        "parts[..., :-2, :].flatten(2, 3), parts[..., -1, :], parts[..., -2, :]",
        (f"{MATRIX}[falcon_new-ring 4]",),
        "Keys are taken for values.",
    ),
    Mutant(
        "a forward that is called past its hooks is not completed",
        "lightning_cp/models/hf/forward.py",
        "        if past_hooks:\n            args, kwargs = self._complete(model, args, kwargs)\n",
        "",
        (f"{HF}::test_a_forward_that_is_called_past_its_hooks[llama-forward]",),
        "Positions are counted on each rank, and labels shifted there.",
    ),
    Mutant(
        "a compiled model's attention is zeros",
        "lightning_cp/models/hf/swap.py",
        "return handle.attention(q, k, v, spec).contiguous(), None",
        "return handle.attention(q, k, v, spec).mul(0.0), None",
        ("tests/ranks/models/test_compile.py::test_numbers_are_those_of_one_process[model-ring]",),
        "Whatever is computed between attention calls would still be right.",
    ),
    Mutant(
        "of a compiled model the loss function is not looked at",
        "lightning_cp/models/hf/labels.py",
        "            note(loss, kwargs)\n",
        "            if not torch.compiler.is_compiling():\n                note(loss, kwargs)\n",
        (
            "tests/ranks/strategies/test_compile.py::test_numbers_are_those_of_one_process[trainer-all]",
        ),
        "A model whose loss is right would be refused.",
    ),
    Mutant(
        "one process does not isolate declared documents",
        "lightning_cp/runtime/probe.py",
        "    if reads_them or not positions.packed:\n",
        "    if reads_them or positions.packed or True:\n",
        ("tests/ranks/parity/test_documents.py::test_documents_of_a_plain_module",),
        "Runs that are well would be stopped before their first step.",
    ),
    Mutant(
        "what rounding moves is allowed a thousand times",
        "lightning_cp/parity/compare.py",
        "MARGIN = 2\n",
        "MARGIN = 2000\n",
        ("tests/unit/parity/test_rounding.py",),
        "In bfloat16 a fault would be taken for rounding.",
    ),
    Mutant(
        "workers' weights are not taken",
        "lightning_cp/launch/worker_results.py",
        "loaded = load(state, strict=False)",
        "loaded = load({}, strict=False)",
        ("tests/ranks/launch/test_weights_come_back.py::test_of_shards",),
        "After fit by fork the program has the weights that it began with.",
    ),
    Mutant(
        "targets on one rank are not shifted",
        "lightning_cp/batch/sharder.py",
        "        added[TARGETS] = shifted.aligned_labels\n",
        "        added[TARGETS] = shifted.aligned_labels.roll(1, -1)\n",
        ("tests/ranks/batch/test_positions.py::test_targets_are_there_on_one_rank",),
        "One device would train on other targets than two.",
    ),
    Mutant(
        "batches on a GPU are not compared",
        "lightning_cp/batch/read.py",
        "{name: int(copies.pop(name)) for name in sums}",
        "{name: 0 * int(copies.pop(name)) for name in sums}",
        (f"{REFUSALS}::test_ranks_compare_batches_that_are_on_the_device[input_ids]",),
        "Ranks would train on parts of different batches.",
    ),
    Mutant(
        "tokens draw by their place on the rank",
        "lightning_cp/randomness/token_draws.py",
        "return self._positions[device][self._tile]",
        "return torch.arange(len(self._positions[device]))[self._tile]",
        (f"{DRAWS}::test_ranks_draw_together_what_one_draws[dropout]",),
        "Ranks that share a sample drop the same features of different tokens.",
    ),
    Mutant(
        "a module's own call of attention loses its spec",
        "lightning_cp/attention/api.py",
        "return step.attention(q_BLHD, k_BLKD, v_BLKD, spec)",
        "return step.attention(q_BLHD, k_BLKD, v_BLKD, AttentionSpec(sinks=spec.sinks))",
        (f"{OWN_CALL}[ring 3]",),
        "Windows and caps are left out, silently.",
    ),
    Mutant(
        "a module's own call of attention stays on its rank",
        "lightning_cp/attention/api.py",
        "        if step is not None and step.intercepts:\n",
        "        if step is None:\n",
        (f"{OWN_CALL}[ulysses 2]",),
        "Each rank would attend to its own tokens.",
    ),
    Mutant(
        "a local module's own call of attention is over all tokens",
        "lightning_cp/attention/api.py",
        "        if step is not None and step.intercepts:\n",
        "        if step is not None:\n",
        ("tests/ranks/models/test_own_attention.py::test_a_local_module_attends_by_itself",),
        "Tokens of a memory that every rank has would be taken for parts of the row.",
    ),
    Mutant(
        "ranks do not compare the settings of a new attention call",
        "lightning_cp/models/handle.py",
        'facts=lambda _: {"attention": spec.kind},',
        "facts=lambda _: {},",
        (CALLS,),
        "Another cap on each rank trains another model, silently.",
    ),
    Mutant(
        "ranks do not compare the settings of later attention calls",
        "lightning_cp/models/handle.py",
        'spec.kind if out.requires_grad else ""',
        '"a call" if out.requires_grad else ""',
        (CALLS,),
        "The same, once both settings are known.",
    ),
)
"""All seeded mutants of them."""

"""Mistakes in the distributed optimizer, most of which leave all shapes as they are."""

from __future__ import annotations

from tests.nightly.mutants.mutant import Mutant

OPTIM = "lightning_cp/optim"
SHARDINGS = "tests/ranks/optim/test_shardings.py::test_numbers_are_those_of_one_process"
MAXIMA = "tests/ranks/optim/test_qk_clip_maxima.py::test_those_of_the_whole_sequence"

MUON_MUTANTS = (
    Mutant(
        "placements composed in reverse order",
        f"{OPTIM}/placement.py",
        "    held = distribute_tensor(indices,",
        "    placements = placements[::-1]\n    held = distribute_tensor(indices,",
        ("tests/ranks/optim/test_rows.py",),
        "The right number of rows, and the wrong ones.",
    ),
    Mutant(
        "columns are not asked where they are",
        f"{OPTIM}/placement.py",
        "                start = column.whole if whole else column.local",
        "                start = column.local",
        (f"{SHARDINGS}[tp 2]",),
        "Parts of all ranks lie on top of each other.",
    ),
    Mutant(
        "results of other copies are not taken",
        f"{OPTIM}/matrix_step.py",
        "            self._take_all(_split(posted.wait(), some, [grid.part] * len(some)))",
        "            message = posted.wait()\n"
        "            if copy == grid.copy:\n"
        "                self._take_all(_split(message, some, [grid.part] * len(some)))",
        (f"{SHARDINGS}[hsdp 2x2]",),
        "Copies drift apart.",
    ),
    Mutant(
        "results are not given back to other parts",
        f"{OPTIM}/matrix_step.py",
        "            self._held.update(_split(self._posted.wait(), some, [grid.part] * len(some)))",
        "            self._posted.wait()",
        (f"{SHARDINGS}[fsdp 2]",),
        "Only owners move their matrices.",
    ),
    Mutant(
        "momentum is not looked at again",
        f"{OPTIM}/matrix_step.py",
        'looks_on = group["nesterov"]',
        'looks_on = not group["nesterov"]',
        (f"{SHARDINGS}[plain]",),
        "Another optimizer.",
    ),
    Mutant(
        "a fused projection is one matrix",
        f"{OPTIM}/matrix_step.py",
        "    if not sizes:\n        yield Piece(one.name, one.parameter)",
        "    if sizes or not sizes:\n        yield Piece(one.name, one.parameter)",
        (
            "tests/ranks/optim/test_assignment.py::test_fused_projections_are_matrices_by_themselves[plain]",
        ),
        "Queries, keys and values are made orthogonal to each other.",
    ),
    Mutant(
        "owners in turn",
        f"{OPTIM}/work_list.py",
        "key=lambda place: (loads.get(ranks[place], 0), place)",
        "key=lambda place: ((place - at) % len(ranks), place)",
        ("tests/unit/optim/test_owners.py::test_llama_8b",),
        "Ranks wait for the one with the costly matrices.",
    ),
    Mutant(
        "a gradient that is not finite is found too late",
        f"{OPTIM}/muon.py",
        "    bad = _not_finite(gradients) if check_finite and not problems else []",
        "    bad: list[str] = []",
        ("tests/ranks/optim/test_refused.py::test_gradients_that_are_not_finite",),
        "One NaN makes all entries of its matrix NaN.",
    ),
    Mutant(
        "ranks do not compare whose gradients they have",
        f"{OPTIM}/muon.py",
        "    if all_equal(fact, world, dissents=bool(bad or problems), device_type=device_type):",
        "    if all_equal(None, world, dissents=bool(bad or problems), device_type=device_type):",
        ("tests/ranks/optim/test_refused.py::test_ranks_that_differ[others]",),
        "Ranks wait for each other for ever, or train several models.",
    ),
    Mutant(
        "results are sent to other copies after the next computation",
        f"{OPTIM}/matrix_step.py",
        "            for one in copied:\n                one.post()\n            results = {",
        "            results = {",
        (
            "tests/ranks/optim/test_pipeline.py::test_copies_are_sent_while_the_next_round_is_computed",
        ),
        "Nothing overlaps.",
    ),
    Mutant(
        "rows are scaled as if a rank held the first ones",
        f"{OPTIM}/qk_clip.py",
        "        own = whole[self._held[key]]",
        "        own = whole[: len(self._held[key])]",
        ("tests/ranks/optim/test_qk_clip_shardings.py::test_each_row_by_its_own_head",),
        "Heads are scaled by the scores of others.",
    ),
    Mutant(
        "largest scores are those of this rank alone",
        f"{OPTIM}/qk_layers.py",
        "            packed = all_max(packed, world)",
        "            all_max(packed, world)",
        (f"{MAXIMA}[hybrid-one document]",),
        "Ranks scale their rows differently, and a maximum that others have seen is missed.",
    ),
    Mutant(
        "heads of a tensor-parallel rank are taken for the first ones",
        f"{OPTIM}/qk_layers.py",
        "        return heads, tp_rank * count",
        "        return heads, 0",
        ("tests/ranks/optim/test_qk_clip_shardings.py::test_heads_of_tensor_parallel_ranks",),
        "Half of the heads are never scaled.",
    ),
    Mutant(
        "keys follow one head of their group",
        f"{OPTIM}/qk_layers.py",
        "    of_group = gammas.view(kv_heads, -1).amin(1)",
        "    of_group = gammas.view(kv_heads, -1)[:, 0]",
        ("tests/unit/optim/test_qk_clip.py::test_scores_are_scaled_by_gamma",),
        "Scores of the other heads stay too large.",
    ),
    Mutant(
        "largest scores are those of the last hop",
        "lightning_cp/kernels/merge.py",
        "            torch.maximum(peak, max_BHL.to(peak.dtype), out=peak)",
        "            peak.copy_(max_BHL)",
        (f"{MAXIMA}[ring-one document]",),
        "Other hops' scores are missed, and tau with them.",
    ),
    Mutant(
        "heads of an Ulysses rank are taken for the first ones",
        "lightning_cp/attention/function.py",
        "    largest[first:last] = peak_BHT.amax((0, 2))",
        "    largest[: last - first] = peak_BHT.amax((0, 2))",
        (f"{MAXIMA}[ulysses-one document]",),
        "Half of the heads have no largest score, and the other half that of two.",
    ),
)

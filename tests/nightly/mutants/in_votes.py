"""Mistakes in how ranks agree and in what they keep of it: differences that nobody looks for."""

from __future__ import annotations

from tests.nightly.mutants.mutant import Mutant

VOTE = "lightning_cp/comm/consensus.py"
HANDLE = "lightning_cp/models/handle.py"
PLANS = (
    "tests/unit/models/test_plans.py::test_calls_that_differ_in_anything_have_plans_of_their_own"
)

VOTE_MUTANTS = (
    Mutant(
        "votes that cancel in pairs",
        VOTE,
        "ballot = stable_hash(fact) * (1 if rank else 1 - size)",
        "ballot = stable_hash(fact) * (1 if rank % 2 else -1)",
        ("tests/ranks/comm/test_vote.py::test_whoever_is_odd_is_found",),
        "Two ranks that differ from two others pass, and train on batches of their own.",
    ),
    Mutant(
        "dissents ignored",
        VOTE,
        "    if dissents:\n",
        "    if dissents and rank >= size:\n",
        ("tests/ranks/comm/test_vote.py::test_ranks_vote_alike_or_not[2]",),
        "A rank with an error, or at the end of its loader, raises alone; the others wait for it.",
    ),
    Mutant(
        "parts at any call",
        VOTE,
        "ballot = stable_hash(fact)",
        "ballot = stable_hash(None)",
        ("tests/ranks/comm/test_vote.py::test_parts_at_different_calls_find_that_out",),
        "One data rank goes on where another one is told something else.",
    ),
    Mutant(
        "calls compared within lists only",
        "lightning_cp/comm/consensus.py",
        "    if len(set(calls)) > 1:\n",
        "    if calls[0] != calls[1]:\n",
        ("tests/ranks/comm/test_agreement.py::test_lists_at_different_calls_are_refused",),
        "Data ranks at different agreements take each other's answers for their own.",
    ),
    Mutant(
        "one plan for all masks",
        HANDLE,
        "*[id(value) if isinstance(value, torch.Tensor) else value for value in values],",
        "*[id(value) for value in values if isinstance(value, torch.Tensor)],",
        (PLANS,),
        "A layer with a window attends as the one before it, without.",
    ),
    Mutant(
        "one plan for all sinks",
        HANDLE,
        "*[id(value) if isinstance(value, torch.Tensor) else value for value in values],",
        "*[value for value in values if not isinstance(value, torch.Tensor)],",
        (PLANS,),
        "Every layer has the first one's sinks.",
    ),
    Mutant(
        "optimizers step by what they have",
        "lightning_cp/consistency/step_vote.py",
        "fact = (WHAT, numbers_of(step.optimizer))",
        "fact = WHAT",
        ("tests/ranks/consistency/test_rates.py",),
        "A scheduler that follows its own rank's value trains parts of what is no model.",
    ),
)
"""All seeded mutants of agreements.

Left out because ranks wait for each other forever, which shows at once: differences that a rank looks for
among its own names only.
"""

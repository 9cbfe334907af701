"""Mistakes in how ranks agree: votes that cancel, and differences that nobody looks for."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

VOTE = "lightning_cp/comm/vote.py"

VOTE_MUTANTS = (
    Mutant(
        "votes that cancel in pairs",
        VOTE,
        "return hashed(value) * (1 if rank else 1 - size)",
        "return hashed(value) * (1 if rank % 2 else -1)",
        ("tests/comm/test_vote.py::test_whoever_is_odd_is_found",),
        "Two ranks that differ from two others pass, and train on batches of their own.",
    ),
    Mutant(
        "dissents ignored",
        VOTE,
        "    if dissents:\n",
        "    if dissents and rank >= size:\n",
        ("tests/comm/test_vote.py::test_ranks_vote_alike_or_not[2]",),
        "A rank with an error, or at the end of its loader, raises alone; the others wait for it.",
    ),
    Mutant(
        "parts at any call",
        VOTE,
        "ballot = _ballot(fact, rank, size)",
        "ballot = _ballot(None, rank, size)",
        ("tests/comm/test_vote.py::test_parts_at_different_calls_find_that_out",),
        "One data rank goes on where another one is told something else.",
    ),
    Mutant(
        "calls compared within lists only",
        "lightning_cp/comm/agreement.py",
        "calls = [(1, everybody), *(",
        "calls = [*(",
        ("tests/comm/test_agreement.py::test_lists_at_different_calls_are_refused",),
        "Data ranks at different agreements take each other's answers for their own.",
    ),
)
"""All seeded mutants of agreements.

Left out because ranks wait for each other forever, which shows at once: differences that a rank looks for
among its own names only.
"""

"""Mistakes in how engines reduce gradients and take norms: runs that go on, and train another model."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ENGINES = "lightning_cp/strategies/engines/"
TESTS = "tests/strategies/test_engines.py::"
ODD = TESTS + "test_odd_parameters_are_trained_as_in_one_process[fsdp]"

ENGINE_MUTANTS = (
    Mutant(
        "scalars stay on their ranks",
        ENGINES + "root.py",
        "parameter.grad = all_sum(own, self._group) / self._group.size()",
        "parameter.grad = own",
        (ODD,),
        "What FSDP2 ignores is trained apart by every rank.",
    ),
    Mutant(
        "zeros in place of no gradient",
        ENGINES + "root.py",
        "if not count and id(parameter) in self._filled:",
        "if not count and not self._filled:",
        (ODD,),
        "AdamW decays parameters that one process leaves alone.",
    ),
    Mutant(
        "replicated gradients count once per rank",
        ENGINES + "norms.py",
        "if not isinstance(placed, Replicate)",
        "if placed is not None",
        (TESTS + "test_the_norm_of_any_mixture_is_that_of_one_process",),
        "The norm is too large, so gradients are clipped too much.",
    ),
    Mutant(
        "a bucket is added and not divided",
        ENGINES + "buckets.py",
        "done.value()[0].div_(size)",
        "done.value()[0]",
        (TESTS + "test_options_change_nothing[per_parameter]",),
        "Gradients are as many times too large as there are ranks.",
    ),
)
"""All seeded mutants of engines."""

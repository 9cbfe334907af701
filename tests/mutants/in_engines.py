"""Mistakes in how engines reduce gradients and take norms: runs that go on, and train another model."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ENGINES = "lightning_cp/strategies/engines/"
TESTS = "tests/strategies/test_engines.py::"
ODD = TESTS + "test_odd_parameters_are_trained_as_in_one_process[fsdp]"

ENGINE_MUTANTS = (
    Mutant(
        "scalars stay on their ranks",
        ENGINES + "averages.py",
        "parameter.grad = all_sum(own, group) / group.size()",
        "parameter.grad = own",
        (ODD,),
        "What FSDP2 ignores is trained apart by every rank.",
    ),
    Mutant(
        "steps along gradients that stayed on their ranks",
        "lightning_cp/strategies/fabric.py",
        "            self._refuse_kept_back(optimizer)\n",
        "",
        (
            "tests/strategies/test_fabric_kept_back.py"
            "::test_a_window_that_is_never_averaged_is_refused[steps-ddp]",
        ),
        "Copies of the model come apart.",
    ),
    Mutant(
        "what a program has averaged itself is not compared",
        ENGINES + "kept.py",
        "if not total or vote([_checksum(p.grad) for p in parameters], group):",
        "if not total:",
        (
            "tests/strategies/test_fabric_kept_back.py"
            "::test_what_was_averaged_by_hand_is_stepped_along[summed_in_place-{}]",
        ),
        "Gradients that are right are refused.",
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
    Mutant(
        "windows know of gradients in grad only",
        "lightning_cp/strategies/step/accumulation.py",
        "id(p) in kept or (p.grad is not None and _any(p.grad))",
        "(p.grad is not None and _any(p.grad))",
        (
            "tests/strategies/test_token_weighting.py::"
            "test_sharded_loops_of_ones_own_equal_a_loop_by_hand[fabric, fsdp]",
        ),
        "FSDP2 keeps those of a window elsewhere, so that each batch begins another window.",
    ),
    Mutant(
        "what a step unfreezes is frozen again",
        ENGINES + "torch_fsdp2.py",
        "if any(form.requires_grad != before for form in forms):",
        "if not forms:",
        (
            "tests/strategies/test_fabric_freezing.py::test_as_in_one_process[fsdp ThawingInTheStep]",
        ),
        "Layers that were unfrozen while they were gathered are never trained.",
    ),
    Mutant(
        "zero_grad leaves what ranks keep back",
        ENGINES + "successors.py",
        "        kind.zero_grad(self, set_to_none)\n        drop(",
        "        kind.zero_grad(self, set_to_none)\n        set(",
        ("tests/strategies/test_fabric_freezing.py::test_as_in_one_process[fsdp Discarding]",),
        "Gradients that were thrown away are stepped along.",
    ),
)
"""All seeded mutants of engines."""

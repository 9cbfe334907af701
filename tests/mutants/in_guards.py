"""Mistakes in what stops a run: values that are not finite, and signals."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

FINITE = "lightning_cp/strategies/watch/finite.py"
TRAINER = "tests/strategies/test_finite.py::test_a_trainer_stops"

GUARD_MUTANTS = (
    Mutant(
        "own losses unseen",
        "lightning_cp/strategies/step/weighting.py",
        "own = loss if self._own is None else self._own",
        "own = loss",
        (f"{TRAINER}[by norm-loss]",),
        "Every rank is blamed for one rank's loss.",
    ),
    Mutant(
        "finite after clipping only",
        "lightning_cp/strategies/trainer_setup.py",
        "before_clipping(self._replaced, self.precision_plugin, self._complete)",
        "pass",
        (f"{TRAINER}[manual-infinite gradient]",),
        "Clipping by value makes a number of an infinite gradient, and weights step along it.",
    ),
    Mutant(
        "a norm that overflows is an error",
        FINITE,
        "finite = not bad_loss and all(",
        "finite = False and all(",
        ("tests/strategies/test_finite.py::test_large_is_not_infinite",),
        "A run in which nothing is wrong ends.",
    ),
    Mutant(
        "scalers guarded",
        FINITE,
        "looks = self._looks and scaler is None",
        "looks = self._looks",
        ("tests/strategies/test_finite.py::test_left_alone[fp16 scaler]",),
        "Mixed precision in fp16 ends at the first gradient that its scaler would have skipped.",
    ),
    Mutant(
        "one look per optimizer",
        FINITE,
        "        self._voted.clear()\n",
        "",
        (f"{TRAINER}[by norm-gradient]",),
        "Only the first step of a run is looked at.",
    ),
    Mutant(
        "dead ranks are answered once for all",
        "lightning_cp/strategies/watch/restarts.py",
        '            if store.check([f"{_FOLDER}/{own}/knows/{other}"]):',
        '            if store.check([f"{_FOLDER}/asks/{other}"]):',
        ("tests/strategies/test_restarts.py::test_questions_of_the_dead_do_not_count",),
        "After a restart a rank waits for an answer that rank 0 has given to a dead one.",
    ),
)

"""Rounding raises the tolerances of the parity check: by what one process shows, and no more."""

from __future__ import annotations

import pytest

from lightning_cp.parity.compare import Comparison, Difference, Tolerance, allow_rounding

TIGHT = 1e-6
TOLERANCE = Tolerance("float64", TIGHT, TIGHT, TIGHT)
NAMES = ("loss", "logits", "gradient")


def of(errors: dict[str, float]) -> Comparison:
    """Errors of the loss, the logits and one gradient; 0 by default."""
    loss, logits, gradient = (Difference(name, errors.get(name, 0.0), TIGHT) for name in NAMES)
    return Comparison(loss, logits, (gradient,), 1.0, 0.0, 0.0, 0.0, TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_twice_the_effect_of_rounding_is_allowed_and_three_times_is_a_fault(name: str) -> None:
    rounded = of(dict.fromkeys(NAMES, 1e-3))
    assert of({name: 2e-3}).is_fault
    assert not allow_rounding(of({name: 1.9e-3}), rounded).is_fault
    assert allow_rounding(of({name: 3e-3}), rounded).is_fault


@pytest.mark.parametrize("name", NAMES)
def test_what_rounding_does_not_move_keeps_its_tolerance(name: str) -> None:
    others = {other: 1.0 for other in NAMES if other != name}
    for error, is_fault in ((0.9 * TIGHT, False), (2 * TIGHT, True)):
        assert allow_rounding(of({name: error}), of(others)).is_fault is is_fault
        endless = of({**others, name: float("inf")})
        assert allow_rounding(of({name: error}), endless).is_fault is is_fault

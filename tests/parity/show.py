"""What the doctor prints of each fault: ``python -m tests.parity.show``."""

from __future__ import annotations

from lightning_cp.errors import ParityError
from tests.parity.test_faults import FAULTS, fit
from tests.pool import expect_on_every_rank
from tests.strategies.small import HYBRID


def main() -> None:
    """Each fault on a hybrid of four ranks."""
    named = {"error": ParityError, "match": "Likely cause"}
    for name, *_ in FAULTS:
        print(_shown(name, expect_on_every_rank(4, fit, name, HYBRID, False, **named)[0]))


def _shown(name: str, error: ParityError) -> str:
    return f"### {name}\n\n```text\n{error}\n```\n"


if __name__ == "__main__":
    main()

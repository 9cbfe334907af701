"""What the doctor prints of each fault: ``python -m tests.helpers.parity.show``."""

from __future__ import annotations

from lightning_cp.errors import ParityError
from tests.helpers.pool import expect_on_every_rank
from tests.helpers.strategies.small import HYBRID
from tests.ranks.parity.test_faults import FAULTS, fit


def main() -> None:
    """Each fault on a hybrid of four ranks."""
    named = {"error": ParityError, "match": "Likely cause"}
    for name, *_ in FAULTS:
        print(_shown(name, expect_on_every_rank(4, fit, name, HYBRID, False, **named)[0]))


def _shown(name: str, error: ParityError) -> str:
    return f"### {name}\n\n```text\n{error}\n```\n"


if __name__ == "__main__":
    main()

"""What the doctor prints of each fault: ``python -m tests.parity.show``."""

from __future__ import annotations

from lightning_cp.errors import ParityError
from tests.parity.test_faults import FAULTS, fit
from tests.pool import expect_on_every_rank
from tests.strategies.small import HYBRID


def main() -> None:
    """Each fault on a hybrid of four ranks."""
    cases = [*((name, False) for name, *_ in FAULTS), ("Healthy", True)]
    for name, packed in cases:
        error = expect_on_every_rank(
            4, fit, name, HYBRID, packed, error=ParityError, match="Likely cause"
        )[0]
        print(f"### {name}{', of packed documents' * packed}\n\n```text\n{error}\n```\n")


if __name__ == "__main__":
    main()

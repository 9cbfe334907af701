"""One seeded mistake: a replacement in one file, and the tests that must notice it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


class StaleMutantError(Exception):
    """The text that a mutant replaces is not there exactly once, or what it makes is no Python."""


@dataclass(frozen=True)
class Mutant:
    """A mistake that somebody could make.

    Args:
        name: its name, unique.
        file: the file that it changes, from the root of the repository.
        old: the text that it replaces, which occurs there exactly once.
        new: what it puts there.
        tests: the smallest selection of tests that must kill it, as arguments of pytest.
        why: what it would do to a user.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    why: str

    def apply(self, root: Path) -> None:
        """Change the file in a copy of the repository.

        Raises:
            StaleMutantError: the mutant no longer fits the code.
        """
        path = root / self.file
        text = path.read_text()
        count = text.count(self.old)
        if count != 1:
            raise StaleMutantError(f"its text occurs {count} times in {self.file}:\n{self.old}")
        changed = text.replace(self.old, self.new)
        try:
            compile(changed, self.file, "exec")
        except SyntaxError as error:
            raise StaleMutantError(f"{self.file} is no Python any more: {error}") from error
        path.write_text(changed)

"""Blocks of code of the docs, and what ``docs/snippets.yaml`` says of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
FENCED = re.compile(r"^```(python|sh|bash)\n(.*?)^```", re.MULTILINE | re.DOTALL)
RUN = "run "
"""Begins the name of a scene, as other entries give a reason not to run."""
ENTRIES: dict[str, dict[str, str]] = yaml.safe_load((DOCS / "snippets.yaml").read_text())


@dataclass(frozen=True)
class Snippet:
    """A block of code of a page."""

    page: str
    language: str
    code: str
    before: str = ""
    """The block before it on its page."""

    @property
    def first_line(self) -> str:
        """The name of a snippet, without a comment."""
        return re.sub(r"\s+# .*", "", self.code.split("\n", 1)[0]).strip()

    @property
    def entry(self) -> str:
        """Its line in ``docs/snippets.yaml``; empty for one that runs as it stands."""
        return ENTRIES.get(self.page, {}).get(self.first_line, "")

    @property
    def runs(self) -> bool:
        """Whether it is executed."""
        return not self.entry or bool(self.scene)

    @property
    def scene(self) -> str:
        """What it is given to run in; empty for a block that needs nothing, or does not run."""
        return self.entry.removeprefix(RUN) if self.entry.startswith(RUN) else ""

    def __str__(self) -> str:
        return f"{self.page}: {self.first_line}"


def snippets() -> Iterator[Snippet]:
    """All of them, in the order of pages."""
    for path in (ROOT / "README.md", *sorted(DOCS.rglob("*.md"))):
        page = path.relative_to(DOCS if DOCS in path.parents else ROOT).as_posix()
        before = ""
        for language, code in FENCED.findall(path.read_text()):
            yield Snippet(page, language, code, before)
            before = code

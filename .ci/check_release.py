"""Check of what a release needs: run ``python .ci/check_release.py v0.2.0`` before that tag is pushed.

The tag, the version and the CHANGELOG must agree, and no placeholder may be left.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACEHOLDER = "<address-of-this-repository>"
"""Text to replace by the host and path of the repository, once it has a public one."""
SEARCHED = (
    *("*.md", "*.toml", "*.yml", ".github/**/*.yml", ".github/**/*.md"),
    *(
        "docs/**/*.md",
        "docs/*.yaml",
        "examples/**/*.py",
        "examples/**/*.ipynb",
        "configs/**/*.yaml",
    ),
    *("lightning_cp/**/*.py", "hydra_plugins/**/*.py", "benchmarks/**/*.py"),
)
"""Files of a checkout that a placeholder may stand in."""


def version(root: Path) -> str:
    """Return the version, which ``lightning_cp/__init__.py`` alone has."""
    source = (root / "lightning_cp/__init__.py").read_text()
    found = re.search(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    if found is None:
        raise ValueError("lightning_cp/__init__.py sets no __version__")
    return found[1]


def placeholders(root: Path) -> dict[str, list[int]]:
    """Return each file with a placeholder, and the lines that have one."""
    found: dict[str, list[int]] = {}
    for path in sorted(path for pattern in SEARCHED for path in root.glob(pattern)):
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if PLACEHOLDER in line:
                found.setdefault(path.relative_to(root).as_posix(), []).append(number)
    return found


def problems(root: Path, tag: str) -> list[str]:
    """Return a line for each reason not to publish a tag."""
    here = version(root)
    sections = re.findall(r"^## \[?([^\s\]]+)", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    found: list[str] = []
    if tag != f"v{here}":
        found.append(f"the tag is {tag}, the version {here}. Change one of them.")
    if here not in sections:
        found.append(f"CHANGELOG.md has no section '## {here}'. Write it.")
    if "Unreleased" in sections:
        found.append(f"CHANGELOG.md has a section 'Unreleased'. Move its lines to {here}.")
    for file, lines in placeholders(root).items():
        where = ", ".join(map(str, lines))
        found.append(f"{file} has {PLACEHOLDER} in line {where}. Put the address there.")
    return found


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: python .ci/check_release.py v{version(ROOT)}")
    if found := problems(ROOT, sys.argv[1]):
        sys.exit("\n".join(["not ready to release:", *(f"- {line}" for line in found)]))
    print(f"{sys.argv[1]} is ready to release")

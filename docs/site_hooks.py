"""Pages of the site from files outside ``docs/``: the texts at the root, and files that pages link to.

A link to such a file, as ``../../examples/dpo.py``, leads to its page.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TEXTS = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
LINK = re.compile(r"(?<=[^\\]\]\()(?![a-z]+:|#)([^)#\s]+)")
OUTSIDE = "The built site (`make docs`) shows the docstrings of these names.\n"
"""A line for readers of the sources alone."""
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "sh", ".ipynb": "json"}


def on_files(files: Any, config: Any) -> Any:
    """Add a page for each file that is shown."""
    from mkdocs.structure.files import File, InclusionLevel  # pyright: ignore[reportMissingImports]

    for path in shown_files():
        new = File.generated(config, page_of(path), content=page(path))
        if str(path) not in TEXTS:
            new.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(new)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Lead links to files outside ``docs/`` to their pages."""
    source = Path(page.file.src_uri)
    home = ROOT if source.parts[0] == "project" else (ROOT / "docs" / source).parent

    def moved(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(home / link[1]))
        if target.is_relative_to(ROOT / "docs"):
            there = target.relative_to(ROOT / "docs").as_posix()
        else:
            there = page_of(target.relative_to(ROOT))
        return os.path.relpath(there, source.parent)

    return LINK.sub(moved, markdown.replace(OUTSIDE, ""))


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Show reStructuredText of docstrings, ``::`` before code and ``:class:`` roles, as Markdown does."""
    return re.sub(r":(?:class|func|meth|mod):(?=<code>)", "", html.replace("::</p>", ":</p>"))


def shown_files() -> list[Path]:
    """Return the files that pages link to, and the texts, relative to the root."""
    pages = [*ROOT.glob("docs/**/*.md"), *(ROOT / name for name in TEXTS)]
    targets = {
        Path(os.path.normpath(page.parent / link))
        for page in pages
        for link in LINK.findall(page.read_text())
    }
    outside = {path for path in targets if path.is_file() and ROOT / "docs" not in path.parents}
    return sorted(path.relative_to(ROOT) for path in {*outside, *pages[-len(TEXTS) :]})


def page_of(path: Path) -> str:
    """Return the path of a file's page in the site's sources."""
    return f"project/{path}" if path.suffix == ".md" else f"project/{path}.md"


def page(path: Path) -> str:
    """Return a file's page."""
    text = (ROOT / path).read_text()
    if path.suffix == ".md":
        return text
    language = LANGUAGES.get(path.suffix, "text")
    return f"# {path}\n\n````{language}\n{text}````\n"

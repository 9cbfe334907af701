"""Docs: generated pages are current, links lead somewhere, and the site has every page."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GENERATOR: dict[str, Any] = runpy.run_path(str(DOCS / "generate_reference.py"))
REFERENCE = ("errors.md", "messages.md", "cli.md")
TEXTS = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
LINK = re.compile(r"(?<!\\)\]\((?![a-z]+:)([^)#\s]*)(?:#([^)\s]+))?\)")
FENCED = re.compile(r"^(`{3,}).*?^\1", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def generated() -> dict[str, tuple[Path, str]]:
    return {path.name: (path, text) for path, text in GENERATOR["files"]().items()}


@pytest.mark.parametrize("name", REFERENCE)
def test_no_page_of_the_reference_is_stale(
    name: str, generated: dict[str, tuple[Path, str]]
) -> None:
    path, text = generated[name]
    assert path.read_text() == text, "run python docs/generate_reference.py"


def test_messages_are_read_off_the_sources() -> None:
    source = """
_NO_MODEL = "{name} has no model. " "Pass one."

def check(x):
    if x < 0:
        raise ConfigError(f"x={x} is negative. " "Pass " + more)
    raise ShapeError(_NO_MODEL.format(name=x))
    raise ConfigError(unknown(x))
    raise ValueError("not ours at all")
"""
    assert list(GENERATOR["raised"](source)) == [
        ("ConfigError", "x=... is negative. Pass ..."),
        ("ShapeError", "... has no model. Pass one."),
    ]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(path: Path) -> None:
    for target, heading in LINK.findall(FENCED.sub("", path.read_text())):
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), target
        assert not heading or heading in anchors(file), f"{target}#{heading}"


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 900


def test_the_docs_are_short() -> None:
    """Without the pages that are generated."""
    generated = {"settings.md", "messages.md", "cli.md"}
    pages = [path for path in DOCS.rglob("*.md") if path.name not in generated]
    words = sum(len(path.read_text().replace("|", "").split()) for path in pages)
    assert words <= 40_000, f"{words:,} words: say a thing once, and link to it"


def test_the_site_has_every_page() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    listed = set(re.findall(r"[\w./-]+\.md", yaml.dump(yaml.safe_load(text)["nav"])))
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert pages == {page for page in listed if not page.startswith("project/")}


def test_the_site_loads_nothing_from_elsewhere() -> None:
    """Fonts and scripts of the theme; a reader may have no network."""
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert config["theme"]["font"] is False
    assert "extra_javascript" not in config
    for style in config["extra_css"]:
        text = (DOCS / style).read_text()
        assert "url(" not in text
        assert "@import" not in text
    assert config["strict"]


def test_tests_that_combinations_name_exist() -> None:
    page = (DOCS / "reference/combinations.md").read_text()
    file = Path()
    named = re.findall(r"`([\w/]*test_\w+\.py)?(?:::(test_\w+))?`", page)
    assert len(named) > 40
    for path, test in named:
        file = ROOT / "tests/ranks" / path if path else file
        assert file.exists(), path
        assert not test or f"def {test}(" in file.read_text(), f"{file.name}::{test}"

"""Release: what is still a placeholder, and what stops a tag from being published."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

import lightning_cp

ROOT = Path(__file__).parents[2]
CHECK: dict[str, Any] = runpy.run_path(str(ROOT / ".ci/check_release.py"))
PLACEHOLDERS = {"README.md", "docs/install.md", "docs/snippets.yaml", "pyproject.toml"}
"""Files with the address of the repository, which is not known before it is public."""


def test_placeholders_are_known() -> None:
    found = CHECK["placeholders"](ROOT)
    assert set(found) == PLACEHOLDERS, found


def test_the_changelog_has_the_version() -> None:
    found = CHECK["problems"](ROOT, f"v{lightning_cp.__version__}")
    assert not [line for line in found if "no section" in line or "the tag is" in line]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A small checkout of version 1.2.3 that is ready to release."""
    (tmp_path / "lightning_cp").mkdir()
    (tmp_path / "lightning_cp/__init__.py").write_text(
        '"""A package."""\n\n__version__ = "1.2.3"\n'
    )
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.3 - 2026-01-31\n\n## 1.2.2\n")
    (tmp_path / "README.md").write_text("# A package\n\nof https://example.com/package\n")
    return tmp_path


def test_a_release_that_is_ready(checkout: Path) -> None:
    assert CHECK["problems"](checkout, "v1.2.3") == []


def test_a_tag_of_another_version_is_refused(checkout: Path) -> None:
    (found,) = CHECK["problems"](checkout, "v1.2.2")
    assert found.startswith("the tag is v1.2.2, the version 1.2.3.")


@pytest.mark.parametrize(
    ("heading", "found"), [("1.2.30", "no section '## 1.2.3'"), ("Unreleased", "no section")]
)
def test_a_changelog_without_the_version_is_refused(
    heading: str, found: str, checkout: Path
) -> None:
    (checkout / "CHANGELOG.md").write_text(f"# Changelog\n\n## {heading}\n\n- 1.2.3 comes\n")
    assert found in CHECK["problems"](checkout, "v1.2.3")[0]


def test_lines_that_wait_for_a_version_are_refused(checkout: Path) -> None:
    (checkout / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n\n## 1.2.3\n")
    (found,) = CHECK["problems"](checkout, "v1.2.3")
    assert "has a section 'Unreleased'" in found


def test_a_placeholder_is_refused_with_its_place(checkout: Path) -> None:
    with (checkout / "README.md").open("a") as file:
        file.write(f"git clone https://{CHECK['PLACEHOLDER']}\n")
    (found,) = CHECK["problems"](checkout, "v1.2.3")
    assert found.startswith(f"README.md has {CHECK['PLACEHOLDER']} in line 4.")

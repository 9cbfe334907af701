"""Names: documented ones can be imported, old ones too; and the rules for new ones that a test can hold."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from importlib import import_module
from pathlib import Path

import pytest

import lightning_cp
from lightning_cp._moved import MOVED
from lightning_cp.errors import ConfigError

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lightning_cp"
SOURCES = sorted(PACKAGE.rglob("*.py"))
TEXTS = [
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "configs").rglob("*.yaml"),
    *(ROOT / "examples").rglob("*.py"),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile", ".ci/run")),
]
DOTTED = re.compile(r"(?<![\w./-])(?:lightning_cp|benchmarks)(?:\.[A-Za-z_]\w*)+")
IMPORTED = re.compile(r"from (lightning_cp[\w.]*) import (\w+(?:, \w+)*)")
TWINS = {"UlyssesRingStrategy"}
"""Classes of one name in two files: Lightning names its Trainer's and Fabric's strategies alike."""
PRIVATE_WORDS = {
    *("kept", "found", "apart", "together", "answers", "aside", "told", "given", "held", "others"),
    *(
        "alone",
        "agreed",
        "moved",
        "noted",
        "counted",
        "visible",
        "gathered",
        "near",
        "rest",
        "unasked",
    ),
}
"""What says nothing to those who have not written it."""
OPENINGS = ("What", "Who", "Whether", "Which", "How", "Where", "When")
"""First words of a docstring that should be a noun phrase or an imperative."""


def documented() -> list[str]:
    names: set[str] = set()
    for path in TEXTS:
        text = path.read_text()
        names.update(DOTTED.findall(text))
        for module, several in IMPORTED.findall(text):
            names.update(f"{module}.{name}" for name in several.split(", "))
    return sorted(name for name in names if not name.endswith(".md"))


def find(name: str) -> object:
    """The object of a dotted name: the longest part that is a module, and its attributes."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: object = import_module(".".join(parts[:count]))
        except ModuleNotFoundError as missing:
            if missing.name is None or not name.startswith(missing.name):
                raise
            continue
        for attribute in parts[count:]:
            found = getattr(found, attribute)
        return found
    raise ModuleNotFoundError(name)


@pytest.mark.parametrize("name", documented())
def test_documented_names_can_be_imported(name: str) -> None:
    find(name)


@pytest.mark.parametrize("name", lightning_cp.__all__)
def test_public_names_can_be_imported(name: str) -> None:
    assert getattr(lightning_cp, name).__module__.startswith("lightning_cp.")


@pytest.mark.parametrize(("old", "present"), MOVED.items(), ids=MOVED)
def test_old_names_are_the_same_modules(old: str, present: str) -> None:
    if ".triton." in present:
        pytest.importorskip("triton")
    assert import_module(old) is import_module(present)
    assert import_module(old).__spec__.name == present  # type: ignore[union-attr]


def test_files_of_a_moved_package_are_not_run_twice() -> None:
    old = import_module("lightning_cp.train.resume")
    assert old is import_module("lightning_cp.apps.train.resume")


def test_files_of_the_table_of_files_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text.partition("## Where is what?")[2].partition("\n## ")[0]
    files = re.findall(r"`([\w/]+\.py)`", table)
    assert len(files) > 20
    assert [name for name in files if not (PACKAGE / name).is_file()] == []


def test_an_old_name_of_an_attribute_warns() -> None:
    callback = lightning_cp.ContextParallelCallback()
    with (
        pytest.warns(DeprecationWarning, match=r"Use ContextParallelCallback\.runtime"),
        pytest.raises(ConfigError),
    ):
        _ = callback.core


def test_a_class_name_stands_for_one_class() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.name not in TWINS:
                homes[node.name].append(str(path.relative_to(ROOT)))
    assert {name for name in homes if re.search(r"[a-z]ed$", name)} == {"Pretrained"}, (
        "a participle"
    )
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


def test_names_of_modules_say_what_is_inside() -> None:
    parts = {part for path in SOURCES for part in path.relative_to(PACKAGE).with_suffix("").parts}
    assert parts & PRIVATE_WORDS == set()
    assert {x for x in parts if re.match(r"[a-z]\w*[a-z]ed$", x)} == {"pretrained"}, "a participle"


def test_a_file_is_one_concept() -> None:
    lines = {path: len(path.read_text().splitlines()) for path in SOURCES}
    assert {path: count for path, count in lines.items() if count > 600} == {}


RETURNS = {
    "check_": re.compile(r"None|NoReturn"),
    "(is|are|has)_": re.compile(r"(bool|TypeGuard\[.+\]|torch\.Tensor)( \| None)?"),
}
"""Types of results by the start of a name: a check raises, a question answers (a tensor: on its device)."""
REPORTS = {"check_parity"}
"""Public names of checks that return a line about what they found."""


def test_checks_raise_and_questions_answer() -> None:
    odd: list[str] = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name not in REPORTS:
                result = "" if node.returns is None else ast.unparse(node.returns)
                odd += [
                    f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name} -> {result}"
                    for start, types in RETURNS.items()
                    if re.match(f"_?{start}", node.name) and not types.fullmatch(result)
                ]
    assert odd == []


def openings_of(path: Path) -> list[str]:
    """The first lines of a file's docstrings, also of attributes, that open with a question word."""
    texts = (
        node.value.value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    )
    lines = (text.partition("\n")[0] for text in texts if isinstance(text, str))
    return [line for line in lines if re.split(r"\W", line, maxsplit=1)[0] in OPENINGS]


def test_docstrings_open_with_a_noun_or_a_verb() -> None:
    found = {str(path.relative_to(PACKAGE)): openings_of(path) for path in SOURCES}
    assert {name: x for name, x in found.items() if x} == {}


def test_messages_are_in_standard_words() -> None:
    """The page has every message of an error or a warning; it is generated."""
    odd = re.compile(
        r"\b([Mm]end|left as (it|they)|go(es|ing)? on|anew|nobody|is told|is no (sum|mean|number))\b"
    )
    lines = (ROOT / "docs/reference/messages.md").read_text().splitlines()
    assert len(lines) > 500
    assert [line for line in lines if odd.search(line)] == []

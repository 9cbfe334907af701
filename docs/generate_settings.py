"""Write what repeats the settings of ``lightning_cp.config``: run ``python docs/generate_settings.py``.

The strategies' signature and docstring, the Hydra config with every setting, and the tables of
``docs/reference/settings.md``.
"""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import yaml

from lightning_cp import UlyssesRingStrategy
from lightning_cp.config import GROUPS, StrategyConfig

ROOT = Path(__file__).parents[1]
WIDTH = 108
CODE = re.compile(r"`([^`]+)`")


def files() -> dict[Path, str]:
    """Return each file with generated parts, and its text."""
    source = Path(inspect.getfile(UlyssesRingStrategy.__init__))
    owner = f"class {UlyssesRingStrategy.__init__.__qualname__.partition('.')[0]}"
    config = ROOT / "configs/search_path/strategy/ulysses_ring.yaml"
    page = ROOT / "docs/reference/settings.md"
    code = source.read_text()
    code = replaced(code, owner, "    Args:\n", "        **kwargs: as for", new=docstring())
    code = replaced(code, owner, "        self,\n", "        **kwargs: Any", new=signature())
    return {
        source: code,
        config: replaced(config.read_text(), "UlyssesRingStrategy\n", new=hydra_config()),
        page: replaced(
            page.read_text(), "generate_settings.py -->\n", "<!-- end -->", new=tables()
        ),
    }


def replaced(text: str, *marks: str, new: str) -> str:
    """Return ``text`` with ``new`` between the last two marks, or after a single one."""
    *before, after = marks if len(marks) > 1 else (*marks, "")
    start = 0
    for mark in before:
        start = text.index(mark, start) + len(mark)
    return text[:start] + new + (text[text.index(after, start) :] if after else "")


def ordered() -> list[Field[Any]]:
    """Return settings in the signature's order, which positional arguments have; a new one comes last."""
    names = list(inspect.signature(UlyssesRingStrategy).parameters)
    known = {item.name: item for item in fields(StrategyConfig)}
    return sorted(
        known.values(),
        key=lambda item: names.index(item.name) if item.name in names else len(names),
    )


def default_of(item: Field[Any]) -> Any:
    """Return the default of an argument, which is ``None`` for a mapping."""
    return None if item.default is MISSING else item.default


def literal(value: object) -> str:
    """Return a value as formatted source has it."""
    return json.dumps(value) if isinstance(value, str) else repr(value)


def signature() -> str:
    """Return the parameters of the constructor."""
    lines = list[str]()
    for item in ordered():
        optional = " | None" if item.default is MISSING else ""
        lines.append(f"{item.name}: {item.type}{optional} = {literal(default_of(item))},\n")
    lines.append("*,\n")
    for name, kind in GROUPS.items():
        lines.append(f"{name}: {kind.__name__} | Mapping[str, Any] | None = None,\n")
    return textwrap.indent("".join(lines), " " * 8)


def docstring() -> str:
    """Return the entries of the docstring's arguments."""
    described = [(item.name, item.metadata["text"]) for item in ordered()]
    for name, kind in GROUPS.items():
        text = f"`{kind.__name__}`, or a mapping of its settings, in place of single arguments."
        described.append((name, text))
    return "".join(_entry(f"{name}: {text}") for name, text in described)


def _entry(text: str) -> str:
    in_one_line = CODE.sub(lambda code: f"``{code[1]}``".replace(" ", "\0"), text)
    wrapped = textwrap.fill(
        in_one_line,
        WIDTH,
        initial_indent=" " * 8,
        subsequent_indent=" " * 12,
        break_on_hyphens=False,
        break_long_words=False,
    )
    return wrapped.replace("\0", " ") + "\n"


def hydra_config() -> str:
    """Return every setting at its default, by group."""
    lines = list[str]()
    for kind in GROUPS.values():
        lines.append(f"# {kind.__doc__}\n")
        defaults = {item.name: default_of(item) for item in fields(kind)}
        lines.append(yaml.safe_dump(defaults, sort_keys=False))
    return "".join(lines)


def tables() -> str:
    """Return a table for each group."""
    return "\n".join(line for group in GROUPS for line in _table(group)) + "\n"


def _table(group: str) -> Iterator[str]:
    about, _, rest = str(GROUPS[group].__doc__).rstrip(".").partition(": ")
    yield from (f"## {about}", "", f"`{group}=`: {rest}." if rest else f"`{group}=`.", "")
    yield from ("| setting | default | meaning |", "|---|---|---|")
    for item in fields(GROUPS[group]):
        guide = item.metadata["guide"]
        name = Path(guide.partition("#")[0]).stem.replace("-", " ").replace("_", " ")
        more = f" ([{name}](../{guide}))" if guide else ""
        text = item.metadata["text"].replace("|", "\\|")
        yield f"| `{item.name}` | `{literal(default_of(item))}` | {text}{more} |"
    yield ""


if __name__ == "__main__":
    for path, text in files().items():
        if path.read_text() != text:
            path.write_text(text)
            print(f"wrote {path.relative_to(ROOT)}")

"""``--help`` of programs: every key with its value and an explanation.

For Hydra's keys the explanation is the comment after the key in a file of ``configs/``, else the entry in the
docstring of the key's ``_target_``, which is imported only for ``--help``. So no explanation is written
twice.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from typing_extensions import override

RESOLVER = "config_help"
"""The resolver's name in ``hydra.help.template``."""
_ENTRY = re.compile(r"^(?P<name>\w+)(?:\s*\(.*?\))?:\s*(?P<text>.*)$")
_SEE = re.compile(r"see (\w+)$")


def argument_parser(doc: str | None, **options: Any) -> argparse.ArgumentParser:
    """Return a parser whose ``--help`` shows defaults, and begins with a module docstring's first line.

    Its examples are the docstring's indented lines after that.
    """
    about, _, rest = (doc or "").partition("\n")
    examples = re.match(r"\n((?: {4}.*\n)+)", rest)
    running = getattr(sys.modules["__main__"], "__spec__", None)
    if running is not None:  # by python -m
        options = {"prog": f"python -m {running.name.removesuffix('.__main__')}", **options}
    parser = _Parser(description=about, formatter_class=_WithDefaults, **options)
    parser.examples = textwrap.indent(textwrap.dedent(examples[1]), "  ") if examples else ""
    return parser


class _Parser(argparse.ArgumentParser):
    """A parser that prints the program's purpose before its usage, and examples after it."""

    examples = ""

    @override
    def format_help(self) -> str:
        usage = self.format_usage()
        about, _, rest = super().format_help().removeprefix(usage).lstrip().partition("\n\n")
        return f"{about}\n\n{usage}{self.examples}\n{rest}"


class _WithDefaults(argparse.ArgumentDefaultsHelpFormatter):
    @override
    def _get_help_string(self, action: argparse.Action) -> str | None:
        absent = action.default is None or action.default is False
        return action.help if absent else super()._get_help_string(action)


def explain_keys(about: str = "", unread: Collection[str] = ()) -> None:
    """Make ``--help`` of a program explain the keys of its config: see ``help_text``."""

    def template(*, _root_: DictConfig) -> str:
        return _template(_root_, about, unread)

    OmegaConf.register_new_resolver(RESOLVER, template, replace=True)


def _template(_root_: DictConfig, about: str, unread: Collection[str]) -> str:
    hydra = _root_.hydra
    folder = next(Path(one.path) for one in hydra.runtime.config_sources if one.provider == "main")
    own = [str(name) for name in _root_ if name != "hydra"]
    config: Any = OmegaConf.to_container(OmegaConf.masked_copy(_root_, own))
    files = ConfigFiles(folder, str(hydra.job.config_name), dict(hydra.runtime.choices))
    return help_text(config, files, about, unread).replace("$", "$$")


class ConfigFiles:
    """The files of a program's config.

    Args:
        folder: the folder of all files.
        name: the name of the first file.
        choices: group -> the chosen file.
    """

    def __init__(self, folder: Path, name: str, choices: Mapping[str, str | None]) -> None:
        self.folder, self.first = folder, folder / f"{name}.yaml"
        found = sorted(folder.glob("*/*.yaml"))
        self.of_groups = [one for one in found if one.parent.name in choices]
        named = [folder / group / f"{choice}.yaml" for group, choice in choices.items()]
        self.chosen = [
            x for one in [self.first, *named] if one.exists() for x in _with_defaults(one)
        ]

    def group(self, path: Path) -> str:
        """Return the group of a file, such as ``strategy``; empty for the first file."""
        return "" if path.parent == self.folder else path.parent.name


def _with_defaults(path: Path) -> list[Path]:
    """Return a file after the files of its group that it includes: later comments take precedence."""
    listed = (yaml.safe_load(path.read_text()) or {}).get("defaults", [])
    beside = [path.parent / f"{one}.yaml" for one in listed if isinstance(one, str)]
    return [*(x for one in beside if one.exists() for x in _with_defaults(one)), path]


def help_text(
    config: Mapping[str, Any], files: ConfigFiles, about: str = "", unread: Collection[str] = ()
) -> str:
    """Return the whole help text.

    Args:
        config: the composed config, without Hydra's part.
        files: the files with the explanations of keys and choices.
        about: the program, its usage and its exit status; by default the first file's head.
        unread: keys and groups that the program ignores.
    """
    width = min(shutil.get_terminal_size().columns, 110)
    lines = [about or _head(files.first)]
    groups = [path for path in files.of_groups if files.group(path) not in unread]
    lines += ["", "Choices (group=choice):"] if groups else []
    for path in groups:
        about = _head(path).partition("\n")[0]
        lines += _entry(f"{files.group(path)}={path.stem}", about, width)
    lines += ["", "Keys and their default values (key=value):"]
    known = explanations(config, files)
    for key, value in leaves(config):
        if any(key == one or key.startswith(f"{one}.") for one in unread):
            continue
        lines += _entry(f"{key}={_shown(value)}", known.get(key, ""), width)
    return "\n".join([*lines, "", "--hydra-help: options of Hydra, such as -m for sweeps"])


def _entry(left: str, text: str, width: int) -> list[str]:
    return [
        f"  {left}",
        *textwrap.wrap(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6),
    ]


def _shown(value: object) -> str:
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


def leaves(config: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each key with its value, in the dotted form of a command line, except Hydra's own keys."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{before}{key}.")
        elif not str(key).startswith("_"):
            yield f"{before}{key}", value


def explanations(config: Mapping[str, Any], files: ConfigFiles) -> dict[str, str]:
    """Return an explanation for each key that has one: its own, else its parent's."""
    chosen = {key: said for path in files.chosen for key, said in _comments(path, files)}
    others = {key: said for path in files.of_groups for key, said in _comments(path, files)}
    found: dict[str, str] = {}
    for key, _ in leaves(config):
        parts = key.split(".")
        parents = [".".join(parts[:at]) for at in range(len(parts) - 1, 0, -1)]
        documented = _documented(config, parents, parts[-1])
        texts = [chosen.get(key), documented, others.get(key), *map(chosen.get, parents)]
        found[key] = next(filter(None, texts), "")
    return {key: text for key, text in found.items() if text}


def _documented(config: Mapping[str, Any], parents: list[str], name: str) -> str:
    """Return the docstring's entry for an argument of a config part's ``_target_``."""
    node: Any = config
    for part in parents[0].split(".") if parents else ():
        node = node.get(part, {})  # names of runs may have dots
    target = node.get("_target_") if parents else None
    return _entries(target).get(name, "") if isinstance(target, str) else ""


# -- comments of config files --------------------------------------------------------------------------


def _head(path: Path) -> str:
    """Return the comment at the beginning of a file."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("# @package")]
    own = [
        line[1:].removeprefix(" ").rstrip()
        for line in lines[: next((i for i, x in enumerate(lines) if x[:1] != "#"), 0)]
    ]
    return "\n".join(own)


def _comments(path: Path, files: ConfigFiles) -> Iterator[tuple[str, str]]:
    """Yield the keys of a file, as dotted names in the config, with the comments on their lines."""
    text = path.read_text()
    root, package = yaml.compose(text), re.search(r"^# @package (\S+)", text, re.MULTILINE)
    where = package[1] if package else files.group(path)
    if isinstance(root, yaml.MappingNode):
        yield from _comments_of(
            root, text.splitlines(), f"{where}." * (where not in ("_global_", ""))
        )


def _comments_of(
    node: yaml.MappingNode, lines: list[str], prefix: str
) -> Iterator[tuple[str, str]]:
    for key, value in node.value:
        mapping = isinstance(value, yaml.MappingNode)
        in_block = isinstance(value, yaml.CollectionNode) and not value.flow_style
        end = key.end_mark if in_block else value.end_mark
        comment = re.match(r".*?\s#\s*(.*)$", lines[end.line][end.column :])
        if comment:
            yield f"{prefix}{key.value}", comment[1]
        if mapping:
            yield from _comments_of(value, lines, f"{prefix}{key.value}.")


# -- docstrings ----------------------------------------------------------------------------------------


@cache
def _entries(target: str) -> Mapping[str, str]:
    """Return the first sentence of each argument's entry; nothing if the target cannot be imported."""
    module, _, name = target.rpartition(".")
    try:
        made = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return {}
    return _entries_of(made)


def _entries_of(made: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    for doc in (inspect.getdoc(made), inspect.getdoc(getattr(made, "__init__", None))):
        found = {**dict(_arguments(doc or "")), **found}
    for text in list(found.values()):  # settings: see `Another`
        if see := _SEE.search(text):
            other = getattr(sys.modules[made.__module__], see[1], None)
            found = {**_entries_of(other), **found} if other is not None else found
    return found


def _arguments(doc: str) -> Iterator[tuple[str, str]]:
    section = re.search(r"^Args:\n((?:[ \t]+.*\n?|\n)+)", inspect.cleandoc(doc), re.MULTILINE)
    name, said = "", []
    for line in [*textwrap.dedent(section[1]).splitlines(), "end:"] if section else []:
        entry = _ENTRY.match(line)
        if entry is None:
            said.append(line.strip())
            continue
        if name:
            yield name, _phrase(" ".join(said))
        name, said = entry["name"], [entry["text"]]


def _phrase(text: str) -> str:
    """Return the first sentence without markup."""
    plain = re.sub(r":\w+:`~?([^`]*)`", r"\1", text).replace("`", "").strip()
    return re.split(r"(?<=[a-z)\]])\.\s|\s{2,}", plain)[0].rstrip(".")

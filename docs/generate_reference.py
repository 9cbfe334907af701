"""Write the reference of commands and errors from the sources: run ``python docs/generate_reference.py``.

``docs/reference/cli.md`` is the commands' ``--help``; ``docs/reference/errors.md`` has the error classes, and
``docs/reference/messages.md`` has every message that is raised.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lightning_cp import errors
from lightning_cp.apps.doctor.__main__ import HELP
from lightning_cp.errors import LightningCPError
from lightning_cp.utils.command_help import ConfigFiles, help_text
from lightning_cp.utils.run_folder import config_dir

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_cp"
HEAD = "<!-- Written by docs/generate_reference.py. -->"
CLASSES: dict[str, type[LightningCPError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and issubclass(kind, LightningCPError)
}
COMMANDS: dict[str, Mapping[str, Any]] = {
    "train": {},
    "doctor": {"config": "train", **HELP},
    "compare": {"folder": "compare"},
    "plan": {},
    "bench": {"folder": "bench"},
}
"""Command -> its config, and arguments of ``help_text``."""
ELSEWHERE = ("strategy.", "trainer.", "model.optimizer.")
"""Keys of this package's settings, which have another page, and of other libraries' classes."""
AFTER = {
    "train": (
        "",
        "Further keys: `strategy.<setting>` ([settings](settings.md)), `trainer.<argument>` (of the Trainer)",
        "and `model.optimizer.<argument>`.",
    ),
    "doctor": ("", "Choices and keys are those of [train](#train)."),
}


def files() -> dict[Path, str]:
    """Return each file with generated parts, and its text."""
    folder = ROOT / "docs/reference"
    page = (folder / "errors.md").read_text()
    before, mark, rest = page.partition("generate_reference.py -->\n")
    _, _, after = rest.partition("<!-- end -->")
    return {
        folder / "errors.md": f"{before}{mark}{classes()}<!-- end -->{after}",
        folder / "messages.md": messages(),
        folder / "cli.md": commands(),
    }


# -- errors --------------------------------------------------------------------------------------------


def classes() -> str:
    """Return the table of error classes."""
    lines = ["| class | is also | raised for |", "|---|---|---|"]
    for name, kind in CLASSES.items():
        bases = [base.__name__ for base in kind.__bases__ if base is not Exception]
        about = inspect.getdoc(kind) or ""
        also = ", ".join(f"`{base}`" for base in bases) or "`Exception`"
        lines.append(f"| `{name}` | {also} | {_plain(about.partition(chr(10) * 2)[0])} |")
    return "\n".join(lines) + "\n"


def messages() -> str:
    """Return the page of messages."""
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).with_suffix("").parts[0]
        for kind, message in raised(path.read_text()):
            if message not in found[kind][room]:
                found[kind][room].append(message)
    lines = [HEAD, "# All messages", ""]
    lines += [
        "Messages of the package's own errors, by class and by the part of the package that raises them.",
        "`...` stands for a name or a value. [Errors](errors.md) explains the most frequent ones.",
    ]
    for kind in CLASSES:
        if kind in found:
            lines += ["", f"## {kind}"]
        for room in sorted(found.get(kind, ())):
            lines += ["", f"### {kind}: {room}", ""]
            lines += [f"- {_escaped(message)}" for message in found[kind][room]]
    return "\n".join(lines) + "\n"


def raised(source: str) -> Iterator[tuple[str, str]]:
    """Yield the class and the message of each error that a source makes, if it can be read off."""
    tree = ast.parse(source)
    constants: dict[str, ast.expr] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            constants[node.targets[0].id] = node.value
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    for node in sorted(calls, key=lambda call: (call.lineno, call.col_offset)):
        match node:
            case ast.Call(func=ast.Name(id=name), args=[text, *_]) if name in CLASSES:
                pass
            case ast.Call(func=ast.Attribute(attr="refuse_if"), args=[_, text]):
                name = "ConfigError"
            case _:
                continue
        message = " ".join(text_of(text, constants).split())
        if re.search(r"\w \w", message):
            yield name, re.sub(r"\.{5,}", "....", message)


def text_of(node: ast.expr, constants: Mapping[str, ast.expr]) -> str:
    """Return a message with ``...`` for what only a run knows."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(text_of(part, constants) for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return text_of(left, constants) + text_of(right, constants)
        case ast.Name(id=name) if name in constants:
            return text_of(constants[name], constants)
        case ast.Call(func=ast.Attribute(value=template, attr="format")):
            return re.sub(r"\{\w*[^{}]*\}", "...", text_of(template, constants))
        case ast.IfExp(body=body):
            return text_of(body, constants)
        case _:
            return "..."


def _escaped(text: str) -> str:
    """Return a text that Markdown shows as it is."""
    text = text.replace("\\", "\\\\").replace("<", "&lt;").replace("|", "&#124;")
    return re.sub(r"([*\[\]]|(?<!\w)_|_(?!\w))", r"\\\1", text)


def _plain(text: str) -> str:
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")


# -- commands ------------------------------------------------------------------------------------------


def commands() -> str:
    """Return the page of commands."""
    texts = {name: _help(name, **known) for name, known in COMMANDS.items()}
    texts["checkpoint"] = _arguments("lightning_cp.checkpoint")
    lines = [HEAD, "# Commands", "", "| command | purpose |", "|---|---|"]
    for name, text in texts.items():
        purpose = _plain(text.partition("\n")[0])
        lines.append(f"| [`python -m lightning_cp.{name}`](#{name}) | {purpose} |")
    lines += [
        "",
        "Copies of each command's `--help`. All commands but `checkpoint` are Hydra programs: with",
        "`-m` they make sweeps. `python -m lightning_cp` lists them. `lightning-cp train ...` is the same",
        "as `python -m lightning_cp.train ...`; a shell can complete its commands, choices and keys:",
        "",
        "```sh",
        'eval "$(lightning-cp completion bash)"   # or zsh; fish: lightning-cp completion fish | source',
        "```",
    ]
    texts["doctor"] = texts["doctor"].partition("Choices (")[0]
    for name, text in texts.items():
        lines += ["", f"## {name}", "", "```text", text.rstrip(), "```", *AFTER.get(name, ())]
    return "\n".join(lines) + "\n"


def _help(name: str, config: str = "", folder: str = "", **options: Any) -> str:
    """Return a command's help without the keys that stand elsewhere."""
    config, path = config or name, config_dir() / folder
    with initialize_config_dir(str(path), version_base="1.3"):
        whole = compose(config, return_hydra_config=True)
    own = OmegaConf.masked_copy(whole, [str(key) for key in whole if key != "hydra"])
    plain: Any = OmegaConf.to_container(own)
    files = ConfigFiles(path, config, dict(whole.hydra.runtime.choices))
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"
    try:
        text = help_text(plain, files, **options)
    finally:
        os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)
    entries = re.split(r"\n(?=  \S|\S|\n)", text)
    return "\n".join(entry for entry in entries if not entry.strip().startswith(ELSEWHERE))


def _arguments(module: str) -> str:
    """Return the help of a command whose arguments argparse reads."""
    return subprocess.run(  # noqa: S603 - our own command
        [sys.executable, "-m", module, "--help"],
        env={**os.environ, "COLUMNS": "100"},
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout


if __name__ == "__main__":
    for path, text in files().items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"wrote {path.relative_to(ROOT)}")

"""Where the text comes from: files, each one a document, split into training and validation.

A file's side is decided by a hash of its name alone, so adding or removing a file never moves
another one across the split.
"""

from __future__ import annotations

import hashlib
import itertools
import sysconfig
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lightning_cp.errors import ConfigError

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Document:
    """One file: its name, which decides its side of the split, and where it lies."""

    name: str
    path: Path


@dataclass(frozen=True)
class Text:
    """The bytes of every document, training and validation apart. Empty documents are left out."""

    training: tuple[Bytes, ...]
    validation: tuple[Bytes, ...]


def stdlib_files(exclude: Collection[str] = ()) -> list[Document]:
    """The sources of the running Python's standard library, sorted by name.

    Args:
        exclude: names of folders whose contents are left out, at any depth.

    Raises:
        ConfigError: this Python has no library sources on disk (it may be zipped).
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found = [
        Document(path.relative_to(root).as_posix(), path)
        for path in root.rglob("*.py")
        if not set(path.relative_to(root).parts[:-1]) & set(exclude)
    ]
    if not found:
        raise ConfigError(
            f"data=python_stdlib reads the standard library's *.py files, but found none under "
            f"{root}. Use data=text_files data.paths=[...] with files of your own."
        )
    return sorted(found, key=lambda document: document.name)


def text_files(paths: Sequence[str | Path]) -> list[Document]:
    """Files named directly, by a pattern, or by a folder (every file in it, hidden ones left out).

    A document's name is its path below the folder or the pattern's fixed part, so the split does
    not depend on where the files lie.

    Raises:
        ConfigError: no paths, or one of them matches no file.
    """
    if isinstance(paths, str | Path) or not paths:
        raise ConfigError(
            f"data.paths must be a list of files, folders or patterns, got {paths!r}. "
            "Example: data.paths=[book.txt,notes/,'logs/*.log']."
        )
    found: dict[Path, Document] = {}
    for given in paths:
        for document in _matches(str(given)):
            found.setdefault(document.path.resolve(), document)
    return sorted(found.values(), key=lambda document: (document.name, document.path))


def load_text(documents: Sequence[Document], validation_fraction: float) -> Text:
    """Read the documents and split them by the hash of their names.

    With so few documents that one side would be empty, the one whose hash lies nearest goes there.

    Args:
        documents: at least two.
        validation_fraction: the share of documents kept for validation, between 0 and 1.

    Raises:
        ConfigError: fewer than two documents with text, an unreadable one, a fraction out of range.
    """
    if not 0 < validation_fraction < 1:
        raise ConfigError(
            f"data.validation_fraction must lie between 0 and 1, got {validation_fraction}. "
            "Example: data.validation_fraction=0.05."
        )
    texts = [(_place(document.name), _read(document)) for document in documents]
    texts = [(place, text) for place, text in texts if text.size]
    if len(texts) < 2:
        raise ConfigError(
            f"the text is split into training and validation by file, so at least two files with "
            f"text are needed, got {len(texts)}. Name more files, or cut the one there is in two."
        )
    texts.sort(key=lambda entry: entry[0])
    below = sum(place < validation_fraction for place, _ in texts)
    held_out = min(max(below, 1), len(texts) - 1)
    return Text(
        training=tuple(text for _, text in texts[held_out:]),
        validation=tuple(text for _, text in texts[:held_out]),
    )


def unigram_entropy(text: Bytes) -> float:
    """Shannon entropy of the byte frequencies, in bits per byte.

    It is what the best model that ignores context reaches on this text.
    """
    counts = np.bincount(text.reshape(-1), minlength=256)
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log2(share)).sum())


def _matches(given: str) -> Iterable[Document]:
    path = Path(given).expanduser()
    if path.is_file():
        return [Document(path.name, path)]
    root, pattern = (path, "**/*") if path.is_dir() else _split_pattern(path)
    files = [(file.relative_to(root), file) for file in root.glob(pattern) if file.is_file()]
    found = [
        Document(name.as_posix(), file)
        for name, file in files
        if not any(part.startswith(".") for part in name.parts)
    ]
    if not found:
        raise ConfigError(
            f"data.paths names {given!r}, which matches no file (looked from {Path.cwd()}). "
            "Give an existing file, a folder with files, or a pattern such as 'texts/**/*.txt'."
        )
    return found


def _split_pattern(path: Path) -> tuple[Path, str]:
    """The leading folders without wildcards, and the pattern to look for below them."""
    fixed = list(itertools.takewhile(lambda part: not set(part) & set("*?["), path.parts[:-1]))
    return Path(*fixed), str(Path(*path.parts[len(fixed) :]))


def _read(document: Document) -> Bytes:
    try:
        return np.frombuffer(document.path.read_bytes(), dtype=np.uint8)
    except OSError as error:
        raise ConfigError(
            f"cannot read {document.path}: {error.strerror}. Make it readable, or leave it out."
        ) from error


def _place(name: str) -> float:
    """A number in [0, 1) that depends on the name only."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2**48

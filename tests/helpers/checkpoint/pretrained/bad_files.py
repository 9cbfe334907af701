"""Files and folders that must not be loaded: what is wrong with each, and what is said of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.helpers.checkpoint.pretrained.files import GOOD, entry, made_of, raw, write_index

DEEP = b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "truncated: 0 bytes"),
    "seven bytes": (bytes(7), "truncated: 7 bytes"),
    "ends in its header": (raw(b'{"a"', b"", length=400), "header claims 400 bytes, it has 4"),
    "ends in a tensor": (made_of(GOOD, 20), "truncated: its tensors end at byte"),
    "bytes after the end": (made_of(GOOD, 25), "1 bytes after its last tensor"),
    "header of a terabyte": (raw(b"{}", length=10**12), "100,000,000 is the limit"),
    "header length of all ones": (b"\xff" * 8 + bytes(32), "100,000,000 is the limit"),
    "header that is no JSON": (raw(b"nonsense"), "not valid JSON"),
    "header that is no UTF-8": (raw(b'{"\xff\xfe": 1}'), "not valid JSON"),
    "header that is a list": (raw(b"[]"), "not a JSON object"),
    "header that is empty": (raw(b""), "not valid JSON"),
    "header nested too deeply": (raw(DEEP), "nested too deeply"),
    "NaN in the header": (raw(b'{"a": NaN}'), "NaN is not a number"),
    "a name twice": (
        raw(b'{"a":%s,"a":%s}' % ((json.dumps(GOOD["a"]).encode(),) * 2)),
        "'a' comes twice",
    ),
    "a field twice": (
        raw(b'{"a":{"dtype":"F32","dtype":"F64","shape":[],"data_offsets":[0,4]}}'),
        "'dtype' comes twice",
    ),
    "metadata that is a number": (made_of({**GOOD, "__metadata__": 3}), "__metadata__"),
    "metadata of numbers": (made_of({**GOOD, "__metadata__": {"x": 3}}), "__metadata__"),
    "an entry that is a number": (made_of({"a": 3}), "of 'a' it does not say"),
    "an entry without a shape": (
        made_of({"a": {"dtype": "F32", "data_offsets": [0, 24]}}),
        "does not say exactly",
    ),
    "an entry with more": (
        made_of({"a": {**GOOD["a"], "__reduce__": "os.system"}}),
        "does not say exactly",
    ),
    "unknown dtype": (made_of({"a": entry("F7", [6], 0, 24)}), "dtype 'F7'; those known"),
    "dtype that is a list": (made_of({"a": entry(["F32"], [6], 0, 24)}), "has dtype"),  # type: ignore
    "negative size": (made_of({"a": entry("F32", [-2, -3], 0, 24)}), "shape .*integers from 0 on"),
    "size that is a fraction": (made_of({"a": entry("F32", [1.5, 4], 0, 24)}), "has shape"),  # type: ignore
    "size that is a boolean": (made_of({"a": entry("F32", [True, 6], 0, 24)}), "has shape"),
    "shape that is text": (made_of({"a": entry("F32", "6", 0, 24)}), "has shape"),  # type: ignore
    "shape of 65 dimensions": (made_of({"a": entry("F32", [1] * 65, 0, 4)}, 4), "65 dimensions"),
    "shape of more than there is": (
        made_of({"a": entry("F32", [2**40, 2**40], 0, 24)}),
        "data_offsets say 24",
    ),
    "shape of less than there is": (made_of({"a": entry("F32", [5], 0, 24)}), "takes 20 bytes"),
    "offsets the wrong way": (made_of({"a": entry("F32", [6], 24, 0)}), "not a start and an end"),
    "negative offset": (made_of({"a": entry("F32", [6], -24, 0)}), "data_offsets"),
    "three offsets": (
        made_of({"a": {**GOOD["a"], "data_offsets": [0, 8, 16]}}),
        "not a start and an end",
    ),
    "tensors that overlap": (
        made_of({"a": entry("F32", [4], 0, 16), "b": entry("F32", [4], 8, 24)}),
        "'b' overlaps 'a'",
    ),
    "a gap between tensors": (
        made_of({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 16, 24)}),
        "gap of 8 bytes before 'b'",
    ),
    "a gap at the beginning": (made_of({"a": entry("F32", [4], 8, 24)}), "gap of 8 bytes"),
    "offsets of an exabyte": (made_of({"a": entry("F32", [2**58], 0, 2**60)}), "truncated"),
    "numbers of a thousand digits": (
        made_of({"a": {**GOOD["a"], "shape": [10**4000, 10**4000]}}),
        "'a' has shape of numbers that take more than 63 bits",
    ),
    "a name without end": (
        made_of({"a" * 10_000: GOOD["a"]}),
        "a tensor's name has 10,000 characters",
    ),
    "a name that a terminal obeys": (made_of({"a\x1b[2J": GOOD["a"]}), "'a.x1b.2J' has characters"),
    "a dtype without end": (made_of({"a": {**GOOD["a"], "dtype": "F" * 10_000}}), "'F{80}'"),
    "a pickle by another name": (b"PK\x03\x04" + bytes(200), "truncated: its header claims"),
}


def good(folder: Path, **tensors: Any) -> None:
    """Two good files."""
    (folder / "one.safetensors").write_bytes(made_of({"a": entry("F32", [2, 2], 0, 16)}, 16))
    (folder / "two.safetensors").write_bytes(made_of({"b": entry("F32", [2], 0, 8)}, 8))


def outside(folder: Path) -> Path:
    """A good file that is not in the folder."""
    path = folder.parent / "outside.safetensors"
    path.write_bytes(made_of({"b": entry("F32", [2], 0, 8)}, 8))
    return path


def index_of(b: Any) -> Callable[[Path], None]:
    """Both files are there, and the index says this of the second tensor."""

    def make(folder: Path) -> None:
        good(folder)
        outside(folder)
        write_index(folder, {"a": "one.safetensors", "b": b})

    return make


def text_of(text: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        good(folder)
        (folder / "model.safetensors.index.json").write_text(text)

    return make


def huge_index(folder: Path) -> None:
    """A terabyte of holes."""
    index_of("two.safetensors")(folder)
    with (folder / "model.safetensors.index.json").open("r+b") as stream:
        stream.truncate(2**40)


def link_outside(folder: Path) -> None:
    index_of("link.safetensors")(folder)
    (folder / "link.safetensors").symlink_to("../outside.safetensors")


def link_by_folders(folder: Path) -> None:
    index_of("link.safetensors")(folder)
    (folder / "away").symlink_to("..")
    (folder / "link.safetensors").symlink_to("away/outside.safetensors")


def link_to_nothing(folder: Path) -> None:
    index_of("link.safetensors")(folder)
    (folder / "link.safetensors").symlink_to("nothing.safetensors")


def link_to_itself(folder: Path) -> None:
    index_of("link.safetensors")(folder)
    (folder / "link.safetensors").symlink_to("link.safetensors")


def pipe(folder: Path) -> None:
    index_of("pipe.safetensors")(folder)
    os.mkfifo(folder / "pipe.safetensors")


def device_file(folder: Path) -> None:
    index_of("zero.safetensors")(folder)
    (folder / "zero.safetensors").mkdir()


def same_key_in_both(folder: Path) -> None:
    good(folder)
    (folder / "two.safetensors").write_bytes(made_of(GOOD))
    write_index(folder, {"a": "one.safetensors", "b": "two.safetensors"})


def no_index(folder: Path) -> None:
    good(folder)


def both(folder: Path) -> None:
    index_of("two.safetensors")(folder)
    (folder / "model.safetensors").write_bytes(made_of(GOOD))


def pickle_only(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02cposix\nsystem\n(S'touch pwned'\ntR.")


FOLDERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "parent": (index_of("../outside.safetensors"), "only plain names are followed"),
    "parent in the middle": (index_of("x/../../outside.safetensors"), "only plain names"),
    "absolute": (index_of("/etc/passwd.safetensors"), "only plain names"),
    "backslashes": (index_of("..\\outside.safetensors"), "only plain names"),
    "drive": (index_of("C:two.safetensors"), "only plain names"),
    "a null byte": (index_of("two.safetensors\0.bin"), "only plain names"),
    "dot dot": (index_of(".."), "only plain names"),
    "no name": (index_of(""), "only plain names"),
    "a subfolder": (index_of("sub/two.safetensors"), "only plain names"),
    "not a safetensors file": (index_of("two.bin"), "not a safetensors file"),
    "a number": (index_of(3), "not a name"),
    "a list": (index_of(["two.safetensors"]), "not a name"),
    "missing shard": (index_of("three.safetensors"), "three.safetensors is named, but"),
    "a key that its file lacks": (index_of("one.safetensors"), "'b' is in one.safetensors"),
    "a link outside": (link_outside, "link that leads out"),
    "a link outside by folders": (link_by_folders, "link that leads out"),
    "a link to nothing": (link_to_nothing, "link to a file that is not there"),
    "a link to itself": (link_to_itself, "link"),
    "a pipe": (pipe, "not a regular file"),
    "a folder": (device_file, "not a regular file"),
    "a key in two files": (same_key_in_both, "'a' is in two files"),
    "an index that is no JSON": (text_of("{"), "not valid JSON"),
    "an index with a key twice": (
        text_of('{"weight_map": {"a": "one.safetensors", "a": "two.safetensors"}}'),
        "'a' comes twice",
    ),
    "an index without a map": (text_of("{}"), "no weight_map"),
    "an index with a list": (text_of('{"weight_map": ["a"]}'), "no weight_map"),
    "an index that is a list": (text_of("[]"), "not a JSON object"),
    "an index of a terabyte": (huge_index, "1,099,511,627,776 bytes, and 100,000,000 is the limit"),
    "files and no index": (no_index, "2 files such as one.safetensors"),
    "an index and a single file": (both, "give the path of the one"),
    "a pickle": (
        pickle_only,
        "pytorch_model.bin is refused: such files are pickles.*save_pretrained",
    ),
    "nothing": (lambda folder: None, "neither model.safetensors nor"),
}

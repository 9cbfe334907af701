"""What SECURITY.md says of weights from outside, each claim by trying it."""

from __future__ import annotations

import ast
import builtins
import os
import pickle
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import lightning_cp
from lightning_cp.checkpoint import CheckedStorageReader, load_pretrained
from lightning_cp.errors import CheckpointError
from tests.helpers.checkpoint.pretrained.files import GOOD, made_of
from tests.unit.checkpoint.pretrained.test_bad_files import Tiny


class Bomb:
    """Runs a command where it is unpickled."""

    def __init__(self, at: Path) -> None:
        self.at = at

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.at),)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.safetensors", "model.pt", ".metadata"]
)
def test_a_planted_pickle_is_never_run(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / name).write_bytes(pickle.dumps(Bomb(tmp_path / "pwned")))
    for given in (folder, folder / name):
        with pytest.raises(CheckpointError):
            load_pretrained(Tiny(), given, progress=False)
        with pytest.raises(CheckpointError):
            CheckedStorageReader(given)
    assert not (tmp_path / "pwned").exists()


def test_a_pickle_beside_good_files_is_not_even_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").write_bytes(made_of(GOOD))
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "pwned")))
    opened: list[str] = []

    def noting(path: Any, *args: Any, **kwargs: Any) -> Any:
        opened.append(str(path))
        return own(path, *args, **kwargs)

    own = builtins.open
    monkeypatch.setattr(builtins, "open", noting)
    monkeypatch.setattr("io.open", noting)
    load_pretrained(Tiny(), tmp_path, progress=False)
    assert not any("pytorch_model" in path for path in opened)
    assert not (tmp_path / "pwned").exists()


def test_nothing_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a connection was asked for")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    with pytest.raises(CheckpointError, match="are not fetched from here"):
        load_pretrained(Tiny(), "meta-llama/Llama-3.1-8B", progress=False)
    (tmp_path / "model.safetensors").write_bytes(made_of(GOOD))
    load_pretrained(Tiny(), tmp_path, progress=False)


def test_code_of_a_checkpoint_is_never_trusted() -> None:
    sources = sorted(Path(lightning_cp.__file__).parent.rglob("*.py"))
    assert not any(re.search(r"trust_remote_code\s*=\s*True", x.read_text()) for x in sources)
    pretrained = [path for path in sources if path.parent.name == "pretrained"]
    assert len(pretrained) > 10
    for path in pretrained:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        imported = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {alias.name for node in imported for alias in node.names}
        assert not names & {"pickle", "marshal", "shelve", "importlib", "subprocess"}, path
        called = {
            node.func.id
            for node in nodes
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        assert not called & {"eval", "exec", "compile", "__import__"}, path


def test_reports_name_no_home_and_no_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home" / "somebody"
    folder = home / "weights"
    folder.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    file = folder / "model.safetensors"
    said: list[str] = []
    for content in (b"", made_of(GOOD, 3), made_of({"a": GOOD["a"]}, 16), made_of(GOOD)):
        file.write_bytes(content)
        model: nn.Module = Tiny() if content != made_of(GOOD) else nn.Linear(3, 3)
        with pytest.raises(CheckpointError) as raised:
            load_pretrained(model, folder)
        said.append(str(raised.value))
    load_pretrained(Tiny(), folder)
    said.append(capsys.readouterr().err)
    assert "loading 100%" in said[-1]
    for text in said:
        assert str(home) not in text
        assert "somebody" not in text
        assert "hf_verysecret" not in text

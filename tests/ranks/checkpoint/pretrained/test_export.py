"""A model of any sharding as files that transformers loads, bitwise; nothing is left half-written."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from safetensors.torch import load_file
from torch import nn

from lightning_cp.checkpoint import atomic as durable
from lightning_cp.checkpoint import export_pretrained, load_pretrained
from lightning_cp.checkpoint.atomic import machine_id
from lightning_cp.checkpoint.pretrained import export as files_module
from lightning_cp.checkpoint.pretrained.files import TensorFile
from lightning_cp.errors import CheckpointError, ConfigError, RankFailure
from tests.helpers.checkpoint.cases import cases
from tests.helpers.checkpoint.pretrained.models import (
    MESHES,
    Wrapped,
    make,
    save,
    shard,
    world_of,
)
from tests.helpers.pool import run_ranks


def stored(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, as the library of the format reads them."""
    return {key: x for file in path.glob("*.safetensors") for key, x in load_file(file).items()}


def names_in(folder: Path) -> list[str]:
    """Of all that is there, hidden or not."""
    return sorted(path.name for path in folder.iterdir())


def there_and_back(rank: int, world: int, source: Path, target: Path, kind: str) -> None:
    model = make(torch.bfloat16, device="meta")
    mesh = shard(model, kind)
    load_pretrained(model, source, mesh, progress=False)
    export_pretrained(model, target, file_bytes=9000)


@pytest.mark.parametrize("kind", cases(zip(MESHES), [("fsdp_tp",)]))
def test_what_was_loaded_is_exported_bitwise(kind: str, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    wanted = save(tmp_path / "source", torch.bfloat16, seed=6)
    target = tmp_path / "target"
    run_ranks(world_of(kind), there_and_back, tmp_path / "source", target, kind)
    assert names_in(tmp_path) == ["source", "target"]
    assert len(list(target.glob("*.safetensors"))) > 2
    found = stored(target)
    assert found.keys() == stored(tmp_path / "source").keys()
    model: Any = LlamaForCausalLM.from_pretrained(target)
    assert model.dtype == torch.bfloat16
    for name, x in model.state_dict().items():
        assert torch.equal(x, wanted[name]), name
    assert json.loads((target / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_one_process_exports_too(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    model = make(tie_word_embeddings=True)
    made = export_pretrained(Wrapped(model), tmp_path / "made")
    assert [file.name for file in made.glob("*.safetensors")] == ["model.safetensors"]
    assert "lm_head.weight" not in stored(made)  # tied: once
    again: Any = LlamaForCausalLM.from_pretrained(made)
    assert all(torch.equal(x, model.state_dict()[name]) for name, x in again.state_dict().items())


@pytest.mark.nightly
def test_a_model_as_fabric_and_compile_return_it(tmp_path: Path) -> None:
    model = make(seed=6)
    wrapped = Fabric(accelerator="cpu", devices=1).setup(model)
    compiled: Any = torch.compile(model, backend="eager")
    for name, given in {"fabric": wrapped, "compiled": compiled}.items():
        export_pretrained(given, tmp_path / name)
        assert stored(tmp_path / name).keys() == model.state_dict().keys()
        said = json.loads((tmp_path / name / "config.json").read_text())
        assert said["architectures"] == [type(model).__name__]


def test_another_place_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"local or mounted folders, got s3://\.\.\."):
        export_pretrained(nn.Linear(2, 2), "s3://bucket/model")
    with pytest.raises(ConfigError, match="a checkpoint is given by its path, got None"):
        export_pretrained(nn.Linear(2, 2), None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="/ is there, and cannot be replaced"):
        export_pretrained(nn.Linear(2, 2), "/", overwrite=True)


def test_another_dtype(tmp_path: Path) -> None:
    model = make()
    export_pretrained(model, tmp_path / "made", dtype="bfloat16")
    for name, x in stored(tmp_path / "made").items():
        assert torch.equal(x, model.state_dict()[name].bfloat16())
    assert json.loads((tmp_path / "made" / "config.json").read_text())["dtype"] == "bfloat16"


def test_tensors_of_all_kinds_begin_where_their_dtype_may(tmp_path: Path) -> None:
    model = nn.Module()
    for name, dtype, size in (
        ("a", torch.uint8, 3),
        ("b", torch.float64, 2),
        ("c", torch.int16, 1),
    ):
        model.register_buffer(name, torch.arange(size).to(dtype))
    model.register_buffer("d", torch.tensor(2.5))
    model.register_buffer("e", torch.empty(0, 3))
    export_pretrained(model, tmp_path / "made")
    found = stored(tmp_path / "made")
    for name, x in model.state_dict().items():
        assert found[name].dtype == x.dtype
        assert torch.equal(found[name], x)
    again = nn.Module()
    for name, x in model.state_dict().items():
        again.register_buffer(name, torch.full_like(x, 9))
    load_pretrained(again, tmp_path / "made", progress=False)
    assert all(torch.equal(x, found[name]) for name, x in again.state_dict().items())


def interrupted(rank: int, world: int, target: Path, how: str) -> str:
    """The third tensor cannot be written, on rank 0; the other one is told."""
    model = make(device="cpu")
    shard(model, "fsdp") if how == "OSError" else None
    count = []

    class Fails(TensorFile):
        def write(self, x: torch.Tensor) -> None:
            count.append(x)
            if len(count) == 3:
                raise (
                    OSError(28, "No space left on device")
                    if how == "OSError"
                    else KeyboardInterrupt
                )
            super().write(x)

    files_module.TensorFile = Fails  # type: ignore[misc]
    try:
        export_pretrained(model, target, overwrite=True)
    except (CheckpointError, RankFailure, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        files_module.TensorFile = TensorFile  # type: ignore[misc]
    return "nothing was raised"


def test_a_full_disk_leaves_what_was_there_before(tmp_path: Path) -> None:
    target = tmp_path / "made"
    export_pretrained(make(seed=6), target)
    before = stored(target)
    said = run_ranks(4, interrupted, target, "OSError")
    assert said[0].startswith("CheckpointError: the export could not be written to ")
    assert "made (No space left on device), and nothing" in said[0]
    assert all("RankFailure" in x and "rank 0 raised CheckpointError" in x for x in said[1:])
    assert names_in(tmp_path) == ["made"]
    assert all(torch.equal(x, before[name]) for name, x in stored(target).items())


def pid_of_the_dead() -> int:
    """Of a process that is gone."""
    gone = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True
    )
    return int(gone.stdout)


def test_what_a_killed_export_left_is_put_back_or_goes(tmp_path: Path) -> None:
    model, target = nn.Linear(2, 2), tmp_path / "made"
    export_pretrained(model, target)
    owner = f"{machine_id()}-{pid_of_the_dead()}-0"
    target.rename(tmp_path / f".made.before-{owner}")  # killed between the two renames
    (tmp_path / f".made.saving-{owner}").mkdir()
    load_pretrained(nn.Linear(2, 2), target, progress=False)
    export_pretrained(nn.Linear(3, 3), tmp_path / "other")
    assert names_in(tmp_path) == ["made", "other"]


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    assert interrupted(0, 1, tmp_path / "made", "Ctrl-C") == "KeyboardInterrupt: "
    assert names_in(tmp_path) == []


def test_folders_that_are_there(tmp_path: Path) -> None:
    model, target = nn.Linear(2, 2), tmp_path / "made"
    export_pretrained(model, target)
    with pytest.raises(ConfigError, match="the folder made is not empty"):
        export_pretrained(model, target)
    export_pretrained(model, target, overwrite=True)
    for name in ("thesis.tex", "tokens.json", "model.safetensors.bak"):
        (target / name).write_text("years of work")
        with pytest.raises(
            ConfigError, match=f"made holds {name}, which this export does not write"
        ):
            export_pretrained(model, target, overwrite=True)
        assert (target / name).read_text() == "years of work"
        with pytest.raises(ConfigError, match="is there, and no folder"):
            export_pretrained(model, target / name)
        (target / name).unlink()
    (tmp_path / "empty").mkdir()
    export_pretrained(model, tmp_path / "empty")


def test_a_tokenizer_in_the_folder_stays(tmp_path: Path) -> None:
    """A script that saves one beside its model runs twice."""
    target = tmp_path / "made"
    for width in (2, 3):
        model = nn.Linear(width, width)
        export_pretrained(model, target, overwrite=True)
        tokenizer = [
            target / name for name in ("tokenizer.json", "merges.txt", "chat_template.jinja")
        ]
        assert [x.exists() for x in tokenizer] == [width == 3] * 3
        for x in tokenizer:
            x.write_text(f"{x.name}: {width}")
    export_pretrained(nn.Linear(4, 4), target, overwrite=True)
    assert [x.read_text() for x in tokenizer] == [f"{x.name}: 3" for x in tokenizer]
    load_pretrained(nn.Linear(4, 4), target, progress=False)
    (target / "spiece.model").symlink_to(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"made holds spiece\.model, which this export does not"):
        export_pretrained(nn.Linear(4, 4), target, overwrite=True)
    (target / "spiece.model").unlink()
    with pytest.raises(ConfigError, match=r"made holds \S+, which this export does not write"):
        export_pretrained(nn.Linear(4, 4), target, config=Tokenizer(), overwrite=True)
    (target / "audio").mkdir()
    (target / "audio" / "tokenizer.json").write_text("of another model")
    with pytest.raises(ConfigError, match=r"made holds audio, which this export does not write"):
        export_pretrained(nn.Linear(4, 4), target, overwrite=True)


class Tokenizer:
    """A configuration that writes a tokenizer, beside which files of another one would be wrong."""

    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


class Processor:
    """A configuration with a processor beside it, which has a folder of its own, too."""

    def __init__(self, wrong: str = "") -> None:
        self.wrong = wrong

    def save_pretrained(self, folder: Path) -> None:
        if self.wrong:
            raise ValueError(self.wrong)
        (folder / "audio").mkdir()
        for name in ("config.json", "processor_config.json", "chat.jinja", "audio/config.json"):
            (folder / name).write_text("{}")


def test_what_an_export_wrote_is_replaced_by_the_next(tmp_path: Path) -> None:
    """Whatever a configuration writes; what it does not write stays, and is named."""
    target = tmp_path / "made"
    export_pretrained(nn.Linear(2, 2), target, config=Processor())
    (target / "chat.jinja").write_text("older")
    export_pretrained(nn.Linear(2, 2), target, config=Processor(), overwrite=True)
    assert (target / "chat.jinja").read_text() == "{}"
    with pytest.raises(ConfigError, match=r"made holds \S+, which this export does not write"):
        export_pretrained(nn.Linear(2, 2), target, overwrite=True)
    (target / "audio" / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match=r"made holds audio.thesis\.tex, which this export"):
        export_pretrained(nn.Linear(2, 2), target, config=Processor(), overwrite=True)
    assert (target / "audio" / "thesis.tex").read_text() == "years of work"
    assert names_in(tmp_path) == ["made"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_came_to_the_folder_meanwhile_is_not_lost(
    overwrite: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "made"

    class Slow(TensorFile):
        def sync(self) -> None:
            target.mkdir(exist_ok=True)
            (target / "thesis.tex").write_text("years of work")

    monkeypatch.setattr(files_module, "TensorFile", Slow)
    with pytest.raises(ConfigError, match=r"made holds thesis\.tex"):
        export_pretrained(nn.Linear(2, 2), target, overwrite=overwrite)
    assert names_in(tmp_path) == ["made"]
    assert names_in(target) == ["thesis.tex"]


def test_a_configuration_that_cannot_be_written_is_told_before_the_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "TensorFile", None)
    with pytest.raises(CheckpointError, match="nothing of it is left: ValueError: not today"):
        export_pretrained(nn.Linear(2, 2), tmp_path / "made", config=Processor("not today"))
    assert names_in(tmp_path) == []


def test_what_fails_once_it_is_in_its_place_is_told_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = durable.sync

    def sync(folder: Path) -> None:
        if folder == tmp_path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        own(folder)

    monkeypatch.setattr(durable, "sync", sync)
    model = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match="made is complete and in its place, but ") as raised:
        export_pretrained(model, tmp_path / "made")
    assert "Input/output error" in str(raised.value)
    assert "nothing of it is left" not in str(raised.value)
    assert torch.equal(stored(tmp_path / "made")["weight"], model.weight)


def test_an_older_export_that_is_put_back_is_not_replaced_unasked(tmp_path: Path) -> None:
    """It was set aside by one that was killed then."""
    target = tmp_path / "made"
    export_pretrained(nn.Linear(2, 2), target)
    before = stored(target)
    target.rename(tmp_path / f".made.before-{machine_id()}-{pid_of_the_dead()}-0")
    with pytest.raises(ConfigError, match="the folder made is not empty"):
        export_pretrained(nn.Linear(2, 2), target)
    assert all(torch.equal(x, before[name]) for name, x in stored(target).items())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"file_bytes": 0}, "file_bytes must be an integer of at least 1"),
        ({"dtype": "int8"}, "floating-point dtype"),
        ({"prefix": 3}, "prefix must be text"),
        ({"overwrite": "x"}, "overwrite must be True or False"),
        ({"config": 3}, "config must have save_pretrained"),
        ({"keys": {"nothing": "w"}}, "keys has a line for nothing, and no parameter"),
        ({"prefix": "x."}, "no parameter of the model begins with"),
        ({"keys": {"weight + nothing": "w"}}, "nothing, and no parameter of the model"),
        ({"keys": {"weight + bias": "w"}}, "side by side along one dimension"),
        (
            {"keys": {"weight": "w", "bias": "w"}},
            "bias cannot be written as w, which is the name of",
        ),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        export_pretrained(nn.Linear(2, 2), tmp_path / "made", **options)
    assert not (tmp_path / "made").exists()

"""While a checkpoint is loaded: Ctrl-C, memory that runs out, and the line that shows how far it is."""

from __future__ import annotations

import io
import re
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from lightning_cp.checkpoint import load_pretrained
from lightning_cp.checkpoint.pretrained import load as load_module
from lightning_cp.checkpoint.pretrained import load as progress_module
from lightning_cp.checkpoint.pretrained.files import open_weight_files
from lightning_cp.checkpoint.pretrained.load import LoadProgress
from lightning_cp.checkpoint.pretrained.options import check_complete
from lightning_cp.checkpoint.pretrained.plan import plan_load
from lightning_cp.errors import CheckpointError
from tests.helpers.checkpoint.pretrained.models import Wrapped, make, save
from tests.helpers.pool import run_ranks


def load(model: nn.Module, path: Path, **options: Any) -> Any:
    return load_pretrained(model, path, progress=False, **options)


def test_ctrl_c_leaves_a_model_that_refuses_to_be_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path)
    model, read = make(device="meta"), []

    class Interrupted(load_module.SliceReader):
        def read(self, entry: Any, offsets: Any, into: torch.Tensor) -> None:
            read.append(entry)
            if len(read) == 5:
                raise KeyboardInterrupt
            super().read(entry, offsets, into)

    monkeypatch.setattr(load_module, "SliceReader", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        load(model, tmp_path)
    monkeypatch.undo()
    ids = torch.arange(4)[None]
    with pytest.raises(CheckpointError, match="this model is incomplete"):
        model(ids)
    with pytest.raises(CheckpointError, match="this model is incomplete"):
        model.model.layers[0].mlp(torch.zeros(1, 24))
    with pytest.raises(CheckpointError, match="this model is incomplete"):
        check_complete(Wrapped(model))
    load(model, tmp_path)
    check_complete(model)
    assert torch.equal(model(ids).logits, make()(ids).logits)


def test_no_memory_is_an_error_that_names_the_parameter_and_what_would_help(tmp_path: Path) -> None:
    big = nn.Linear(2**14, 2**13, bias=False, device="meta")  # 512 MiB
    save_file(
        {"weight": torch.zeros(2**13, 2**14, dtype=torch.float8_e4m3fn)},
        tmp_path / "model.safetensors",
    )
    status = Path("/proc/self/status").read_text()
    used = int(re.search(r"VmSize:\s+(\d+)", status)[1]) * 1024  # type: ignore[index]
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, before[1]))
    try:
        with pytest.raises(CheckpointError) as raised:
            load(big, tmp_path)
        monkey = pytest.MonkeyPatch()
        monkey.setattr(load_module, "_bytes_needed", lambda *_: None)
        with pytest.raises(CheckpointError) as later:
            load(big, tmp_path)
        with pytest.raises(CheckpointError, match="1,073,741,824 bytes wanted"):
            load(big, tmp_path, dtype="float64")
        monkey.undo()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    for error in (raised, later):
        said = str(error.value)
        assert "weight of shape [8192, 16384]" in said
        assert "536,870,912 bytes" in said
        assert re.search(r"\d[\d,]+ (are )?free", said)
        assert "data_parallel='fsdp'" in said
        assert "dtype='bfloat16'" in said


def test_the_line_is_about_the_whole_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path)
    plan = plan_load(make(device="meta"), open_weight_files(tmp_path))
    monkeypatch.setattr(progress_module, "INTERVAL", 3600.0)  # its own thread does not write
    out = io.StringIO()
    with LoadProgress(plan, plan.nbytes, stream=out) as progress:
        for one in plan.slices:
            progress.now(one.parameter)
            progress.add(one.nbytes)
            progress.flush()
            progress.show()
        progress.finish()
    lines = out.getvalue().strip().splitlines()
    assert shares_of(lines) == sorted(shares_of(lines))
    assert shares_of(lines).count(100) == 2  # of the last bytes, and at the end; not for each file
    assert len(lines) == len(plan.slices) + 1
    size = f"{plan.model_bytes / 1e3:.1f} kB"
    assert all(f" of {size}, " in line for line in lines)
    some = next(line for line in lines if "layers.1.mlp.up_proj.weight" in line)
    assert "layer 2 of 2" in some
    assert re.search(r"\d [kMG]?B/s, \d+:\d\d left, .*peak \d+\.\d+ [MG]B \(rank 0\)", some)


def test_the_line_says_what_else_takes_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = {name: x.clone() for name, x in make().state_dict().items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors")
    monkeypatch.setattr(progress_module, "INTERVAL", 3600.0)  # its own thread does not write

    class Showing(LoadProgress):
        def __enter__(self) -> LoadProgress:
            self.show()
            return super().__enter__()

        def now(self, name: str) -> None:
            super().now(name)
            self.show()

        def finish(self) -> None:
            self.show()
            super().finish()

    monkeypatch.setattr(load_module, "LoadProgress", Showing)
    model = make(device="meta", tie_word_embeddings=True)
    loaded = load_pretrained(model, tmp_path)
    lines = capsys.readouterr().err.strip().splitlines()
    assert "taking memory" in lines[0]
    assert "setting model.rotary_emb" in lines[1]
    at = next(number for number, line in enumerate(lines) if "comparing lm_head.weight" in line)
    nbytes = sum(x.nbytes for x in weights.values())
    assert loaded.nbytes == nbytes
    read = nbytes - weights["lm_head.weight"].nbytes
    assert f" {read / 1e3:.1f} kB of {nbytes / 1e3:.1f} kB" in lines[at]  # all slices are told
    assert not any("rank 0 is done" in line for line in lines[: at + 1])
    assert shares_of(lines) == sorted(shares_of(lines))
    assert shares_of(lines[at + 1 :])[-1] == 100


def shares_of(lines: list[str]) -> list[int]:
    return [int(re.match(r"loading +(\d+)%", line)[1]) for line in lines]  # type: ignore[index]


def slow_second(rank: int, world: int, path: Path) -> str:
    """Rank 1 begins to read once rank 0's line has been written with nothing left for rank 0 to do."""
    model, out = make(device="meta"), io.StringIO()
    plan = plan_load(model, open_weight_files(path))
    progress_module.INTERVAL, before = 0.02, progress_module.INTERVAL
    try:
        with LoadProgress(plan, world * plan.nbytes, stream=out) as progress:
            if rank == 0:
                progress.add(plan.nbytes)
                progress.finish()
                while "rank 0 is done" not in out.getvalue():
                    time.sleep(0.01)
            dist.barrier()
            if rank == 1:
                progress.add(plan.nbytes)
                progress.finish()
            dist.barrier()
    finally:
        progress_module.INTERVAL = before
    return out.getvalue()


def test_all_is_loaded_once_all_ranks_have_their_part(tmp_path: Path) -> None:
    save(tmp_path)
    said, other = run_ranks(2, slow_second, tmp_path)
    assert other == ""
    lines = said.strip().splitlines()
    first = next(line for line in lines if "rank 0 is done" in line)
    assert shares_of([first]) == [50]
    assert shares_of(lines)[-1] == 100
    assert "done" in lines[-1]

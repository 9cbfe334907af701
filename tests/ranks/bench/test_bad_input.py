"""What cannot be measured is refused before any process is started."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from omegaconf import OmegaConf

from lightning_cp.bench import suites
from lightning_cp.bench.__main__ import bench
from lightning_cp.bench.methods import AttentionCase, ContextParallelMethod, Step
from lightning_cp.bench.modes import ModeRow, chosen_methods, measure_modes, row_of
from lightning_cp.bench.processes import TorchrunRank, torchrun_rank
from lightning_cp.bench.settings import SUITES, BenchSettings
from lightning_cp.errors import ConfigError
from tests.helpers.bench.configured import TINY, plain, settings_of
from tests.helpers.launch.programs import run
from tests.helpers.pool import run_ranks

REFUSED = [
    (
        ("suites=[kernels,speed]",),
        r"suites=\[kernels,speed\] names speed. Known: kernels, links, m",
    ),
    (("suites=[]",), r"suites=\[\] names nothing. Known"),
    (("masks=diagonal",), "masks=.* names diagonal. Known: full, causal, window, packed"),
    (("device=tpu",), "device must be auto, cpu or cuda, got 'tpu'"),
    (("devices=0",), "devices must be an integer of at least 1, or auto; got 0"),
    (("devices=many",), "devices must be an integer .* got 'many'"),
    (
        ("devices=1", "suites=links"),
        "there is one. Take suites=.kernels,compute,overheads., or more devices",
    ),
    (("devices=1", "suites=[modes]"), "links and modes are about devices that work together"),
    (
        ("tokens=1001", "devices=2"),
        "tokens=1001 does not divide .* each of 2 ranks.* 1000 or 1004 w",
    ),
    (("tokens=3", "devices=2"), "tokens=3 does not divide .* measured along. 4 works"),
    (("tokens=[]",), "tokens is an empty list"),
    (("tokens=[1024,0.5]",), "tokens must be an integer of at least 1, or auto; got 0.5"),
    (
        ("heads=8", "kv_heads=3"),
        "heads=8 is not a multiple of kv_heads=3.* kv_heads may be 1, 2, 4, 8",
    ),
    (
        ("heads=3", "kv_heads=3", "devices=2", "modes=ulysses"),
        "ulysses: 3 heads do not divide by u",
    ),
    (
        ("dtype=float8",),
        r"dtype=\[float8\] names float8. Known: float32, bfloat16, float16, float64",
    ),
    (("kernel=flash_attn",), "(?s)nothing to measure.*flash_attn_2: runs on cuda, not cpu"),
    (
        ("kernel=triton",),
        r"measure on cpu with float32, head dim 64, full.\n  triton: is for tests on cpu\n"
        "kernel=auto takes every kernel that can run here.$",
    ),
    (
        ("kernel=aten", "masks=[window]"),
        "(?s)nothing to measure.*aten_cpu_flash: has no window mask",
    ),
    (("documents=0", "masks=[packed]"), "masks=.packed. needs documents, and documents=0"),
    (("kernel=flash",), "unknown kernel flash. Known: auto, aten, flash_attn, flash_attn_3"),
    (
        ("devices=2", "modes=[ring,double]"),
        "modes names double, but on 2 ranks there are ours, ring, .*ulysses, .*zigzag_llama3, or by their "
        "whole names ulysses; zigzag ring; zigzag_llama3 two_kernel/two_kernel; ",
    ),
    (("devices=2", "modes=hybrid"), "modes names hybrid.* hybrid needs 4 devices"),
    (("documents=-1",), "documents must be an integer of at least 0; got -1"),
    (("repeats=0",), "repeats must be an integer of at least 1"),
    (("seconds_per_run=0",), "seconds_per_run must be a number above 0, got 0"),
    (("message_bytes=[1.5]",), "message_bytes must be an integer"),
]


@pytest.mark.parametrize(("overrides", "match"), REFUSED, ids=[" ".join(x) for x, _ in REFUSED])
def test_refused(overrides: tuple[str, ...], match: str) -> None:
    on_cpu = () if any("device=" in x for x in overrides) else ("device=cpu",)
    with pytest.raises(ConfigError, match=match):
        suites.check(settings_of(*on_cpu, *overrides))


def test_before_any_process_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr("lightning_cp.bench.processes.on_ranks", started)
    config = OmegaConf.create(plain("device=cpu", "tokens=1001", "devices=2"))
    with pytest.raises(ConfigError, match="1000 or 1004 works"):
        bench(config, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu() -> None:
    with pytest.raises(ConfigError, match="device=cuda, but PyTorch finds no CUDA device here"):
        settings_of("device=cuda")


def test_more_devices_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    with pytest.raises(ConfigError, match=r"devices=8, but this machine has 4 GPUs. At most devi"):
        settings_of("devices=8")
    with pytest.raises(ConfigError, match=r"process 4 on a node with 4 GPUs: .*--nproc-per-node=4"):
        settings_of(own=TorchrunRank(4, 4, 8))
    found = settings_of()
    assert (found.device_type, found.devices, found.dtypes) == ("cuda", 4, ("bfloat16",))
    assert settings_of(own=TorchrunRank(8, 0, 16)).devices == 16


def test_torchrun_says_how_many() -> None:
    with pytest.raises(ConfigError, match="devices=4, but torchrun has started 2 processes"):
        settings_of("device=cpu", "devices=4", own=TorchrunRank(0, 0, 2))
    assert settings_of("device=cpu", "devices=2", own=TorchrunRank(0, 0, 2)).devices == 2


def test_who_was_started_by_torchrun() -> None:
    told = {"RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "16", "MASTER_ADDR": "a"}
    assert torchrun_rank({}) is None
    assert torchrun_rank({**told, "MASTER_PORT": "1"}) == TorchrunRank(9, 1, 16)
    with pytest.raises(ConfigError, match=r"this one has RANK=9, .*MASTER_ADDR=a. Unset them"):
        torchrun_rank(told)
    with pytest.raises(ConfigError, match="RANK=nine"):
        torchrun_rank({**told, "MASTER_PORT": "1", "RANK": "nine"})
    with pytest.raises(ConfigError, match="srun has started several processes"):
        torchrun_rank({"SLURM_PROCID": "1"})
    assert torchrun_rank({"SLURM_PROCID": "0"}) is None


def test_one_device_measures_kernels_alone() -> None:
    assert settings_of("device=cpu", "devices=1").suites == (*("kernels", "compute", "overheads"),)
    assert settings_of("device=cpu", "devices=2").suites == SUITES


def test_no_documents_no_packed_mask() -> None:
    assert settings_of("device=cpu", "documents=0").masks == ("full", "causal", "window")


@pytest.mark.nightly
def test_the_program_says_it_and_fails(tmp_path: Path) -> None:
    done = run(tmp_path, "-m", "lightning_cp.bench", "hydra.run.dir=out", "device=tpu")
    assert done.returncode == 1
    assert "ConfigError: device must be auto, cpu or cuda, got 'tpu'" in done.stderr
    assert "Traceback" not in done.stderr


class Foreign:
    """A way of another library, which fails on this case."""

    name = "other ring"

    def obstacle(self, case: AttentionCase) -> str | None:
        return None

    def step(self, case: AttentionCase, *, backward: bool = True) -> Step:
        def step() -> object:
            raise RuntimeError("no CUDA here\nand more")

        return step


def with_foreign(rank: int, world_size: int, settings: BenchSettings) -> list[ModeRow]:
    with mock.patch("benchmarks.peers.registry.peer_ways", return_value=[Foreign()]):
        return measure_modes(settings, lambda text: None)


@pytest.mark.nightly
def test_another_library_s_failure_is_told_and_the_rest_measured() -> None:
    settings = settings_of(*TINY, "modes=[ulysses,other]", "documents=0")
    ours, other, *_ = run_ranks(2, with_foreign, settings)[0]
    assert (ours.way, ours.obstacle) == ("ulysses", None)
    assert (other.way, other.obstacle) == ("other ring", "fails: RuntimeError: no CUDA here")
    assert other.both is None


@pytest.mark.nightly
def test_ways_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.peers.registry.peer_ways", lambda case: [Foreign()])

    def names(modes: str) -> list[str]:
        settings = settings_of("device=cpu", "devices=4", f"modes={modes}")
        return [way.name for way in chosen_methods(settings, settings.cases(4)[0])]

    assert names("ring") == ["zigzag ring"]
    assert names("hybrid") == names("[hybrid 2x2]") == ["hybrid 2x2"]
    assert names("other") == ["other ring"]
    assert len(names("zigzag_llama3")) == 4
    assert names("[ours,other]") == names("auto")


def test_documents_that_are_there_are_counted() -> None:
    """Of 5,000 documents in 1,024 tokens many are empty, and are none."""
    settings = settings_of("device=cpu", "devices=2", "documents=5000", "tokens=1024")
    case = settings.masked(settings.cases(2)[0], "packed")
    assert row_of(Foreign(), case, backward=False).documents == len(case.lengths) < 1024
    assert row_of(Foreign(), settings.cases(2)[0], backward=False).documents == 0


def test_ways_of_packed_documents_have_the_name_of_their_layout() -> None:
    """As in the side-by-side tables, where ``zigzag ring`` is zigzag for packed documents too."""
    settings = settings_of("device=cpu", "devices=4", "modes=[hybrid,zigzag ring,zigzag_llama3]")
    case = settings.masked(settings.cases(4)[0], "packed")
    ways = [way for way in chosen_methods(settings, case) if isinstance(way, ContextParallelMethod)]
    assert [way.name for way in ways[:3]] == [
        "hybrid 2x2, balanced",
        "balanced ring",
        "zigzag_llama3 two_kernel/two_kernel, balanced",
    ]
    assert {way.sequence_layout(case).kind for way in ways} == {"balanced"}
    again = settings_of("device=cpu", "devices=4", "modes=balanced ring")
    assert [way.name for way in chosen_methods(again, case)] == ["balanced ring"]
    assert [way.name for way in chosen_methods(again, again.cases(4)[0])] == ["zigzag ring"]

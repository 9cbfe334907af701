"""The order of kernels for ``kernel="auto"``: by GPU, by tiles, by measurements; with stubbed GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_cp.errors import ConfigError
from lightning_cp.kernels import auto, devices
from lightning_cp.kernels.auto import Platform, Tiles, load_crossovers, tiles_of
from lightning_cp.kernels.protocol import Request
from lightning_cp.kernels.select import explain_kernels, select_kernel
from lightning_cp.kernels.triton import launch
from lightning_cp.layout import Documents, SequenceLayout
from lightning_cp.planner.hardware import Hardware, KernelCrossover
from tests.helpers.kernels.flash_attn_standin import installed

CAUSAL = Request("cuda", torch.bfloat16, 128, frozenset({"full", "causal"}))
WINDOW = replace(CAUSAL, masks=frozenset({"full", "causal", "band"}))
WIDE = replace(CAUSAL, head_dim=256)
LONG, SHORT, PACKED = Tiles(False, 8192), Tiles(False, 512), Tiles(True, 8192)
VARIED = Tiles(False, 8192, varied=True)
GPU = "Stub GPU"


@pytest.fixture(autouse=True)
def _triton_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "is_installed", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: GPU)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Pretends a GPU of a compute capability."""

    def pretend(major: int, minor: int) -> None:
        monkeypatch.setattr(devices, "has_nvidia_gpu", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, minor))

    return pretend


@pytest.mark.parametrize(
    ("capability", "package", "request_", "tiles", "chosen"),
    [
        ((8, 0), "none", CAUSAL, LONG, "aten_cuda_flash"),
        ((8, 9), "2.8.3", CAUSAL, LONG, "aten_cuda_flash"),
        ((8, 0), "none", CAUSAL, PACKED, "aten_cuda_flash"),
        ((9, 0), "none", CAUSAL, LONG, "aten_cuda_cudnn"),
        ((9, 0), "none", replace(CAUSAL, masks=frozenset({"full"})), LONG, "aten_cuda_cudnn"),
        ((9, 0), "3", CAUSAL, LONG, "flash_attn_3"),
        ((9, 0), "3", CAUSAL, PACKED, "flash_attn_3"),
        ((9, 0), "none", CAUSAL, SHORT, "aten_cuda_flash"),
        ((9, 0), "none", CAUSAL, PACKED, "aten_cuda_flash"),
        ((9, 0), "none", CAUSAL, None, "aten_cuda_flash"),
        ((9, 0), "none", WINDOW, LONG, "aten_cuda_flash"),
        ((9, 0), "none", WIDE, LONG, "aten_cuda_flash"),
        ((9, 0), "none", replace(CAUSAL, dtype=torch.float32), LONG, "triton"),
        ((10, 0), "none", CAUSAL, LONG, "aten_cuda_cudnn"),
        ((10, 3), "3", CAUSAL, LONG, "aten_cuda_cudnn"),
        ((9, 0), "none", CAUSAL, VARIED, "aten_cuda_flash"),
        ((10, 0), "none", CAUSAL, VARIED, "aten_cuda_flash"),
        ((10, 0), "none", CAUSAL, PACKED, "aten_cuda_flash"),
        ((12, 0), "none", CAUSAL, LONG, "aten_cuda_flash"),
    ],
)
def test_chosen_by_gpu_and_tiles(
    capability: tuple[int, int],
    package: str,
    request_: Request,
    tiles: Tiles | None,
    chosen: str,
    gpu: Callable[[int, int], None],
) -> None:
    gpu(*capability)
    with installed(package):
        assert select_kernel("auto", request_, tiles).name == chosen
        assert f"  {chosen}: chosen" in explain_kernels("auto", request_, tiles)


def test_cudnn_is_not_preferred_where_results_must_repeat(gpu: Callable[[int, int], None]) -> None:
    """Its backward adds up in any order."""
    gpu(9, 0)
    platform = Platform.of_calls_on("cuda")
    assert select_kernel("auto", CAUSAL, LONG, platform).name == "aten_cuda_cudnn"
    strict = platform._replace(deterministic=True)
    assert select_kernel("auto", CAUSAL, LONG, strict).name == "aten_cuda_flash"
    text = explain_kernels("auto", CAUSAL, LONG, strict)
    assert "aten_cuda_flash: chosen: the order for compute capability 9.0, deterministic " in text


def test_deterministic_algorithms_are_noticed() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert Platform.of_calls_on("cuda").deterministic
    finally:
        torch.use_deterministic_algorithms(False)
    assert not Platform.of_calls_on("cuda").deterministic


def test_calls_on_cpu_leave_the_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its context would take memory, and fail in a process that was forked."""
    monkeypatch.setattr(devices, "has_nvidia_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", pytest.fail)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert select_kernel("auto", replace(CAUSAL, device_type="cpu"), LONG).name == "aten_cpu_flash"


def test_an_activated_implementation_comes_first(
    gpu: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(10, 0)
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA4")
    assert select_kernel("auto", CAUSAL, LONG).name == "aten_cuda_flash"
    text = explain_kernels("auto", CAUSAL, LONG)
    said = "chosen: PyTorch's FlashAttention is FA4, which was activated"
    assert f"  aten_cuda_flash: {said}\n" in text
    assert "  aten_cuda_cudnn: could do it, but aten_cuda_flash comes first" in text


def test_windows_are_left_to_others_where_the_activated_implementation_has_none(
    gpu: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its backward raises, in the first step, before torch 2.12."""
    gpu(10, 0)
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA4")
    monkeypatch.setattr(devices, "FA4_HAS_WINDOWS", False)
    band = replace(CAUSAL, masks=frozenset({"causal", "band"}))
    assert select_kernel("auto", CAUSAL, LONG).name == "aten_cuda_flash"
    assert select_kernel("auto", band, LONG).name != "aten_cuda_flash"
    with pytest.raises(ConfigError, match=r"has no window mask: FA4, which.*before torch 2\.12"):
        select_kernel("aten_cuda_flash", band, LONG)
    monkeypatch.setattr(devices, "FA4_HAS_WINDOWS", True)
    assert select_kernel("auto", band, LONG).name == "aten_cuda_flash"


@pytest.mark.parametrize(
    ("head_dim", "value_dim"), [(136, None), (192, 128), (256, None), (128, 192)]
)
def test_head_dims_that_flash_attention_4_refuses_are_left_to_others(
    head_dim: int,
    value_dim: int | None,
    gpu: Callable[[int, int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its forward asserts 8 to 128 on Blackwell, or 192 with values of 128, which are padded here."""
    gpu(10, 0)
    wide = replace(CAUSAL, head_dim=head_dim, value_dim=value_dim)
    assert select_kernel("aten_cuda_flash", wide, LONG).name == "aten_cuda_flash"
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA4")
    assert select_kernel("auto", wide, LONG).name == "triton"
    with pytest.raises(ConfigError, match=rf"takes no head dim {max(wide.dims)}: FA4, which"):
        select_kernel("aten_cuda_flash", wide, LONG)


def test_flash_attention_4_is_named_where_it_is_installed(
    gpu: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpu(10, 0)
    assert "FA4" not in explain_kernels("auto", CAUSAL, LONG)
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    text = explain_kernels("auto", CAUSAL, LONG)
    assert (
        "aten_cuda_cudnn: chosen: the order for compute capability 10.0, few long tiles; " in text
    )
    assert "activate_flash_attention_impl('FA4')" in text


def test_without_a_gpu_the_order_is_the_default() -> None:
    assert select_kernel("auto", CAUSAL, LONG).name == "aten_cuda_flash"
    assert "  aten_cuda_flash: chosen\n" in explain_kernels("auto", CAUSAL, LONG)


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Names a ``hardware.json`` with crossovers."""

    def write(*crossovers: KernelCrossover, name: str = GPU) -> Path:
        file = tmp_path / "hardware.json"
        one = Hardware("cuda", name, 8, 8, 1 << 30, "2.13.0", "nccl", crossovers=crossovers)
        one.save(file)
        load_crossovers.cache_clear()
        monkeypatch.setenv(auto.HARDWARE, str(file))
        return file

    return write


CROSSOVERS = (
    KernelCrossover("bfloat16", 128, "causal", 1024, "triton"),
    KernelCrossover("bfloat16", 128, "causal", 4096, "aten_cuda_cudnn"),
    KernelCrossover("bfloat16", 128, "full", 1024, "aten_cuda_flash"),
    KernelCrossover("bfloat16", 128, "packed", 1024, "triton"),
)


@pytest.mark.parametrize(
    ("request_", "tiles", "chosen"),
    [
        (CAUSAL, Tiles(False, 2048), "triton"),
        (CAUSAL, Tiles(False, 128), "triton"),
        (CAUSAL, Tiles(False, 4096), "aten_cuda_cudnn"),
        (CAUSAL, LONG, "aten_cuda_cudnn"),
        (CAUSAL, PACKED, "triton"),
        (CAUSAL, VARIED, "triton"),
        (replace(CAUSAL, masks=frozenset({"full"})), LONG, "aten_cuda_flash"),
        (WINDOW, LONG, "aten_cuda_flash"),
        (replace(CAUSAL, head_dim=64), LONG, "aten_cuda_cudnn"),
    ],
)
def test_measurements_overwrite_the_table(
    request_: Request,
    tiles: Tiles,
    chosen: str,
    gpu: Callable[[int, int], None],
    measured: Callable[..., Path],
) -> None:
    gpu(9, 0)
    measured(*CROSSOVERS)
    assert select_kernel("auto", request_, tiles).name == chosen


def test_measurements_are_named(
    gpu: Callable[[int, int], None], measured: Callable[..., Path]
) -> None:
    gpu(9, 0)
    file = measured(*CROSSOVERS)
    text = explain_kernels("auto", CAUSAL, Tiles(False, 2048))
    what = "bfloat16, head dim 128, causal, 1,024 tokens"
    assert f"  triton: chosen: the fastest in {file} for {what}\n" in text


def test_measurements_of_another_gpu_are_not_used(
    gpu: Callable[[int, int], None], measured: Callable[..., Path]
) -> None:
    gpu(8, 0)
    measured(*CROSSOVERS, name="Another GPU")
    assert select_kernel("auto", CAUSAL, LONG).name == "aten_cuda_flash"


def test_measurements_that_cannot_be_read(
    gpu: Callable[[int, int], None], measured: Callable[..., Path]
) -> None:
    gpu(9, 0)
    file = measured()
    file.unlink()
    with pytest.raises(
        ConfigError, match=r"LIGHTNING_CP_HARDWARE=.* cannot be read \(No such file"
    ):
        select_kernel("auto", CAUSAL, LONG)
    file.write_text("{}")
    with pytest.raises(
        ConfigError, match=r"has no crossovers of kernels\. Give the path of one that"
    ):
        select_kernel("auto", CAUSAL, LONG)
    measured(KernelCrossover("bfloat16", 128, "causal", 1024, "flashy"))
    with pytest.raises(ConfigError, match="names the unknown kernel flashy"):
        select_kernel("auto", CAUSAL, LONG)


def test_tiles_of_layouts() -> None:
    assert tiles_of(SequenceLayout(4096, ring_size=2, ulysses_size=2)) == Tiles(False, 2048)
    assert tiles_of(SequenceLayout(4100, ring_size=2)) == Tiles(False, 2048)
    whole = Documents.from_cu_seqlens([0, 4096])
    assert tiles_of(SequenceLayout(4096, documents=whole)) == Tiles(False, 4096)
    packed = Documents.from_cu_seqlens([0, 96, 4096])
    assert tiles_of(SequenceLayout(4096, documents=packed)) == Tiles(True, 4096)
    padded = Documents.from_padding_mask(torch.arange(64)[None] < torch.tensor([[64], [9]]))
    assert tiles_of(SequenceLayout(64, documents=padded)) == Tiles(True, 64)


def test_many_lengths_are_the_reason(gpu: Callable[[int, int], None]) -> None:
    gpu(9, 0)
    assert "rows of more than 8 lengths" in explain_kernels("auto", CAUSAL, VARIED)


def test_every_order_has_all_kernels() -> None:
    from lightning_cp.kernels.select import kernels

    assert tuple(kernels()) == auto.DEFAULT
    assert all(sorted(order) == sorted(auto.DEFAULT) for order in auto.LONG_TILES.values())

"""Which kernel a request gets, and what a refusal says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lightning_cp.errors import ConfigError
from lightning_cp.kernels import devices
from lightning_cp.kernels.protocol import Request
from lightning_cp.kernels.select import explain_kernels, kernels, select_kernel
from lightning_cp.kernels.triton import launch as triton_fa2

CPU = Request("cpu", torch.float32, 64, frozenset({"full", "causal"}))
CUDA = replace(CPU, device_type="cuda", dtype=torch.bfloat16)
WINDOW = frozenset({"full", "causal", "band"})


@pytest.fixture
def _triton_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_fa2, "is_installed", lambda: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.parametrize(
    ("name", "request_", "chosen"),
    [
        ("auto", CPU, "aten_cpu_flash"),
        ("aten", CPU, "aten_cpu_flash"),
        ("reference", CPU, "reference"),
        ("auto", replace(CPU, masks=WINDOW), "reference"),
        ("auto", replace(CPU, device_type="xpu"), "reference"),
        ("auto", replace(CPU, needs=frozenset({"softcap", "alibi", "max_logits"})), "reference"),
        ("auto", CUDA, "aten_cuda_flash"),
        ("auto", replace(CUDA, masks=WINDOW), "aten_cuda_flash"),
        ("aten_cuda_cudnn", CUDA, "aten_cuda_cudnn"),
        ("aten", replace(CUDA, packed=True), "aten_cuda_flash"),
        ("auto", replace(CUDA, dtype=torch.float32), "triton"),
        ("auto", replace(CUDA, needs=frozenset({"softcap", "alibi", "max_logits"})), "triton"),
        ("auto", replace(CUDA, head_dim=48, dtype=torch.float32), "triton"),
        ("auto", replace(CUDA, head_dim=192, value_dim=128), "aten_cuda_flash"),
        ("aten_cuda_cudnn", replace(CUDA, value_dim=128), "aten_cuda_cudnn"),
        ("auto", replace(CUDA, head_dim=64, value_dim=264), "reference"),
        ("auto", replace(CPU, head_dim=20, value_dim=7), "aten_cpu_flash"),
        ("triton", CUDA, "triton"),
        ("auto", replace(CUDA, head_dim=20), "triton"),
        ("auto", replace(CUDA, value_dim=20), "triton"),
    ],
)
@pytest.mark.usefixtures("_triton_installed")
def test_chosen(name: str, request_: Request, chosen: str) -> None:
    assert select_kernel(name, request_).name == chosen


@pytest.mark.parametrize(
    ("name", "request_", "match"),
    [
        ("flashy", CPU, r"unknown kernel 'flashy'\. Known: auto, aten, flash_attn, flash_attn_3, "),
        ("aten_cuda_flash", CPU, "aten_cuda_flash runs on cuda, not cpu"),
        ("aten_cpu_flash", CUDA, "aten_cpu_flash runs on cpu, not cuda"),
        (
            "aten_cuda_flash",
            replace(CUDA, dtype=torch.float32),
            "takes torch.bfloat16, torch.float16, not torch.float32",
        ),
        ("aten_cuda_cudnn", replace(CUDA, head_dim=136), "takes head dims up to 128, not 136"),
        ("triton", CPU, r"triton runs on cuda \(for tests on cpu, .*TRITON_INTERPRET=1\), not cpu"),
        ("triton", replace(CUDA, head_dim=264), "takes head dims up to 256, not 264"),
        ("aten_cuda_cudnn", replace(CUDA, value_dim=192), "takes head dims up to 128, not 192"),
        ("aten_cuda_flash", replace(CUDA, value_dim=20), "head dim 64 of q and k, 20 of v, .*by 8"),
        ("triton", replace(CUDA, dtype=torch.float64), "triton takes .*, not torch.float64"),
        ("aten_cuda_flash", replace(CUDA, head_dim=264), "takes head dims up to 256, not 264"),
        ("aten_cuda_flash", replace(CUDA, head_dim=20), "takes head dims divisible by 8, not 20"),
        ("aten_cpu_flash", replace(CPU, masks=WINDOW), "aten_cpu_flash has no window mask"),
        ("aten_cuda_cudnn", replace(CUDA, masks=WINDOW), "aten_cuda_cudnn has no window mask"),
        (
            "aten_cuda_cudnn",
            replace(CUDA, packed=True),
            "full, packed.*aten_cuda_cudnn is not for packed documents and padded rows: PyTorch makes a "
            "cuDNN plan for each length.*Others can: kernel='auto', or aten_cuda_flash",
        ),
        ("aten", replace(CPU, needs=frozenset({"softcap"})), "aten_cpu_flash has no softcap"),
        ("reference", replace(CPU, dtype=torch.int64), "not torch.int64"),
    ],
)
@pytest.mark.usefixtures("_triton_installed")
def test_refused(name: str, request_: Request, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        select_kernel(name, request_)


def test_a_refusal_says_what_would_work() -> None:
    with pytest.raises(
        ConfigError, match=r"Others can: kernel='auto', or aten_cpu_flash or reference\.$"
    ):
        select_kernel("aten_cuda_flash", CPU)
    with pytest.raises(ConfigError, match=r"No other can either\.$"):
        select_kernel("aten", replace(CPU, dtype=torch.complex64))


def test_refusal_names_the_request_and_every_kernel_that_was_passed_over() -> None:
    request_ = replace(CPU, dtype=torch.complex64, needs=frozenset({"alibi", "softcap"}))
    with pytest.raises(ConfigError) as caught:
        select_kernel("auto", request_)
    text = str(caught.value)
    assert "device cpu, torch.complex64, head dim 64, masks causal, full, alibi, softcap" in text
    assert all(f"{name} " in text for name in kernels())


def test_an_explanation_has_a_line_for_every_kernel() -> None:
    text = explain_kernels("auto", replace(CPU, needs=frozenset({"alibi"})))
    head, *lines = text.splitlines()
    assert head.endswith("masks causal, full, alibi: reference")
    assert [line.split(":")[0].strip() for line in lines] == list(kernels())
    assert "  aten_cpu_flash: has no alibi" in lines
    assert "  reference: chosen" in lines
    others = explain_kernels("auto", CPU).splitlines()
    assert "  reference: could do it, but aten_cpu_flash comes first" in others
    asked = explain_kernels("reference", CPU).splitlines()
    assert "  aten_cpu_flash: not among kernel='reference'" in asked
    assert "none can do it" in explain_kernels("aten_cuda_flash", CPU)
    with pytest.raises(ConfigError, match="unknown kernel 'flashy'"):
        explain_kernels("flashy", CPU)


@pytest.mark.usefixtures("_triton_installed")
def test_triton_on_cpu_is_chosen_by_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert select_kernel("triton", CPU).name == "triton"
    assert select_kernel("auto", CPU).name == "aten_cpu_flash"
    assert "triton: is for tests on cpu, and only chosen by kernel='triton'" in explain_kernels(
        "auto", CPU
    )


@pytest.mark.usefixtures("_triton_installed")
def test_old_gpus_get_the_kernel_that_runs_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "has_nvidia_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert select_kernel("auto", CUDA).name == "reference"
    text = explain_kernels("auto", CUDA)
    for name, called in {
        "aten_cuda_flash": "PyTorch's FlashAttention",
        "aten_cuda_cudnn": "cuDNN's attention",
        "triton": "triton",
    }.items():
        needs = f"{called} needs a GPU of compute capability 8.0 or later, not 7.5"
        assert f"  {name}: cannot run: {needs}" in text
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert select_kernel("auto", CUDA).name == "aten_cuda_flash"


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_fa2, "is_installed", lambda: False)
    request_ = replace(CUDA, dtype=torch.float32)
    assert select_kernel("auto", request_).name == "reference"
    assert "triton: needs triton, which is not installed" in explain_kernels("auto", request_)
    with pytest.raises(ConfigError, match="is not installed: pip install triton"):
        select_kernel("triton", request_)


def test_names_are_their_own() -> None:
    assert all(kernel.name == name for name, kernel in kernels().items())

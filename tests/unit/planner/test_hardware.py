"""``hardware.json``: written, read, refused, and used to choose a layout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_cp.bench.hardware_json import (
    kernel_crossovers,
    kernel_rates,
    link_rates,
    network_cards,
)
from lightning_cp.bench.kernels import KernelRow
from lightning_cp.bench.links import LinkRow
from lightning_cp.errors import ConfigError
from lightning_cp.layout import CostModel, Documents, choose_layout
from lightning_cp.planner.hardware import Hardware, KernelCrossover, KernelRate, LinkRate

HARDWARE = Hardware(
    device_type="cuda",
    device_name="a GPU",
    devices=8,
    devices_per_node=8,
    memory_bytes=80 << 30,
    torch_version="2.13.0",
    backend="nccl",
    kernels=(
        KernelRate("aten_cuda_flash", "bfloat16", 128, "causal", 65536, 600.0, 450.0),
        KernelRate("aten_cuda_flash", "bfloat16", 128, "full", 65536, 640.0, 500.0),
    ),
    links=(
        LinkRate("ring", "p2p", 4, 2, 25.0, 30e-6),
        LinkRate("ring", "p2p", 1, 8, 50.0, 20e-6),
        LinkRate("loss", "all-reduce", 1, 8, 45.0, 40e-6),
    ),
)


def test_round_trip(tmp_path: Path) -> None:
    HARDWARE.save(tmp_path / "hardware.json")
    assert Hardware.load(tmp_path / "hardware.json") == HARDWARE


def test_fields_of_later_versions_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "hardware.json"
    HARDWARE.save(file)
    given = json.loads(file.read_text())
    given["links"][0]["jitter"] = given["color"] = 1
    file.write_text(json.dumps(given))
    assert Hardware.load(file) == HARDWARE


def test_network_cards_are_of_later_versions(tmp_path: Path) -> None:
    file = tmp_path / "hardware.json"
    replace(HARDWARE, network_cards=2).save(file)
    assert Hardware.load(file).network_cards == 2
    given = json.loads(file.read_text())
    del given["network_cards"]
    file.write_text(json.dumps(given))
    assert Hardware.load(file) == HARDWARE
    for wrong in (0, 1.5, "one"):
        file.write_text(json.dumps(given | {"network_cards": wrong}))
        with pytest.raises(ConfigError, match=r"network_cards .*must be"):
            Hardware.load(file)


def test_cards_are_counted_where_linux_lists_them(tmp_path: Path) -> None:
    assert network_cards(tmp_path / "none") is None
    assert network_cards(tmp_path) is None
    for name in ("mlx5_0", "mlx5_1"):
        (tmp_path / name).mkdir()
    assert network_cards(tmp_path) == 2


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"schema": 2}, r"has schema 2, and this version reads 1\. .*bench writes a new one"),
        ({"schema": None}, "has schema None"),
        ({"devices": "eight"}, "devices must be int, got 'eight'"),
        ({"devices": True}, "devices must be int, got True"),
        ({"memory_bytes": 0}, "memory_bytes of Hardware must be a positive number, got 0"),
        ({"kernels": None}, "kernels must be a list of objects"),
        ({"links": [3]}, "links must be a list of objects"),
        ({"links": [{"axis": "ring"}]}, r"links\[0\]: collective must be str, got nothing"),
    ],
)
def test_files_that_are_none(tmp_path: Path, change: dict[str, object], match: str) -> None:
    file = tmp_path / "hardware.json"
    HARDWARE.save(file)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ConfigError, match=match):
        Hardware.load(file)


@pytest.mark.parametrize(
    ("text", "match"), [("{", "is not valid JSON"), ("[]", "is a JSON list, not an object")]
)
def test_texts_that_are_no_objects(tmp_path: Path, text: str, match: str) -> None:
    (tmp_path / "hardware.json").write_text(text)
    with pytest.raises(ConfigError, match=match):
        Hardware.load(tmp_path / "hardware.json")


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read \(No such file or directory\)"):
        Hardware.load(str(tmp_path / "hardware.json"))


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_rates_are_positive(rate: float) -> None:
    with pytest.raises(ConfigError, match=f"gigabytes_per_second of LinkRate .* got {rate}"):
        replace(HARDWARE, links=(LinkRate("ring", "p2p", 1, 8, rate, 1e-6),))


def test_what_was_not_measured() -> None:
    match = r"no kernel was measured with float32, head dim 128, causal. There is: bfloat16, head dim 128, c"
    with pytest.raises(ConfigError, match=match):
        HARDWARE.kernel("float32", 128)
    match = r"p2p along ring of 4 ranks was not measured. There is: p2p along ring of 2, p2p along ring of 8"
    with pytest.raises(ConfigError, match=match):
        HARDWARE.link("ring", "p2p", 4)
    with pytest.raises(ConfigError, match="There is: none, which needs two devices"):
        replace(HARDWARE, links=()).link("ring", "p2p")


def test_the_cost_model_of_the_machine() -> None:
    """600 TFLOP/s and 50 GB/s with 32 and 8 heads of 128 in two bytes are the defaults of CostModel."""
    model = {"heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
    cost = HARDWARE.cost_model(**model)
    assert cost == CostModel(3000, 732_422)
    assert cost.key == CostModel().key
    slower = HARDWARE.cost_model(**model, ring_size=2)
    assert slower == CostModel(6000, 1_098_633)
    packed = Documents.from_cu_seqlens([0, 700, 2048])
    layout = choose_layout(2048, 2, documents=packed, cost=cost)
    assert layout.seq_len == 2048


def kernel_row(kernel: str, tokens: int, both: float | None, mask: str = "causal") -> KernelRow:
    row = KernelRow(kernel, "float32", 64, 8, 8, mask, tokens)
    if both is None:
        return replace(row, obstacle="is not here")
    return replace(row, forward_tflops=both, backward_tflops=both, both_tflops=both)


def test_the_best_of_the_kernels() -> None:
    rows = [
        kernel_row("slow", 1024, 2.0),
        kernel_row("fast", 1024, 3.0),
        kernel_row("fast", 2048, 5.0),
        kernel_row("fast", 4096, 4.0),
        kernel_row("absent", 2048, None),
        kernel_row("slow", 1024, 1.0, "window"),
    ]
    assert kernel_rates(rows) == (
        KernelRate("fast", "float32", 64, "causal", 2048, 5.0, 5.0),
        KernelRate("slow", "float32", 64, "window", 1024, 1.0, 1.0),
    )


def test_lengths_at_which_another_kernel_becomes_the_fastest() -> None:
    rows = [
        *(kernel_row("first", tokens, 2.0) for tokens in (4096, 1024, 2048)),
        *(kernel_row("later", tokens, both) for tokens, both in ((1024, 1.0), (2048, 2.5))),
        kernel_row("later", 4096, 3.0),
        kernel_row("absent", 1024, None),
        kernel_row("first", 1024, 1.0, "packed"),
        kernel_row("absent", 1024, None, "full"),
    ]
    crossovers = kernel_crossovers(rows)
    assert crossovers == (
        KernelCrossover("float32", 64, "causal", 1024, "first"),
        KernelCrossover("float32", 64, "causal", 2048, "later"),
        KernelCrossover("float32", 64, "packed", 1024, "first"),
    )


def test_crossovers_are_written_and_read(tmp_path: Path) -> None:
    there = replace(
        HARDWARE, crossovers=(KernelCrossover("bfloat16", 128, "causal", 4096, "aten_cuda_cudnn"),)
    )
    there.save(tmp_path / "hardware.json")
    assert Hardware.load(tmp_path / "hardware.json") == there


def test_the_rate_and_the_latency_of_a_link() -> None:
    rows = [
        LinkRow("ring", "p2p", 1, 2, 0, 256, 2e-5, 0.01, 0.0),
        LinkRow("ring", "p2p", 1, 2, 1 << 20, 1 << 20, 1e-3, 1.05, 0.0),
        LinkRow("ring", "p2p", 1, 2, 1 << 24, 1 << 24, 2e-2, 0.84, 0.0),
        LinkRow("ring", "all-gather", 1, 2, 0, 256, 3e-5, 0.01, 0.0),
    ]
    assert link_rates(rows) == (
        LinkRate("ring", "p2p", 1, 2, 1.05, 2e-5),
        LinkRate("ring", "all-gather", 1, 2, 0.01, 3e-5),
    )

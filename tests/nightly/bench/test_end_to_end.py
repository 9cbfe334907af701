"""One tiny run of everything, on two processes as torchrun would start them; timings decide nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lightning_cp.bench.methods import AttentionCase, context_parallel_methods, log_normal
from lightning_cp.bench.settings import SUITES
from lightning_cp.planner.hardware import Hardware
from lightning_cp.planner.machines import machine_of_hardware
from tests.helpers.bench.configured import TINY
from tests.helpers.launch.start import all_succeeded, finish, program, ranks, torchrun_variables

COMMAND = ("-m", "lightning_cp.bench", *TINY, "modes=[ours]")
MASKS = ("full", "causal", "window", "packed")
LINKS = {
    ("ulysses", "all-to-all", 2, 1),
    ("ring", "p2p", 1, 2),
    ("ring", "all-gather", 1, 2),
    ("ring", "reduce-scatter", 1, 2),
    ("loss", "all-reduce", 1, 2),
}
PNG = b"\x89PNG\r\n"


class Run(NamedTuple):
    """What the first rank printed and wrote."""

    output: str
    folder: Path
    found: dict[str, Any]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("bench")
    ran = ranks(folder, torchrun_variables(2), *COMMAND, "hydra.run.dir=run${oc.env:RANK}")
    first, second = all_succeeded(ran)
    assert "|" not in second.output  # the first reports
    assert {path.name for path in folder.iterdir()} == {"run0", "output0.txt", "output1.txt"}
    found = json.loads((folder / "run0" / "bench.json").read_text())
    return Run(first.output, folder / "run0", found)


def test_what_is_left(done: Run) -> None:
    names = {path.name for path in done.folder.iterdir()}
    pictures = {f"{suite}.png" for suite in SUITES}
    assert names == {".hydra", "bench.json", "hardware.json", *pictures}
    assert all((done.folder / name).read_bytes().startswith(PNG) for name in pictures)
    assert done.found["settings"]["tokens"] == [64]
    assert done.found["machine"]["devices"] == 2


def test_tables(done: Run) -> None:
    lines = done.output.splitlines()
    tables = [line for line in lines if line.startswith("|")]
    assert sum(set(line) <= set("|-: ") for line in tables) == 4 + 1 + 2 * 4 + 1 + 1
    assert max(map(len, tables)) <= 110
    assert done.output.count("FLOP convention: 4 x head dim x heads") == 1
    assert "- triton: is for tests on cpu" in lines
    assert "- aten_cpu_flash, window: has no window mask" in lines
    for suite in ("bench.json", "hardware.json", *(f"{suite}.png" for suite in SUITES)):
        assert any(line.endswith(f"run0/{suite}") for line in lines)


def visible(mask: str) -> int:
    """Pairs of 64 tokens that a mask leaves."""
    pairs = ((q, k) for q in range(64) for k in range(64))
    bounds = log_normal(64, 3, 0, 1.5).rows[0].tolist()
    sees = {
        "full": lambda q, k: True,
        "causal": lambda q, k: k <= q,
        "window": lambda q, k: k <= q <= k + 8,
        "packed": lambda q, k: k <= q and any(a <= k and q < b for a, b in bounds),
    }
    return sum(sees[mask](q, k) for q, k in pairs)


def test_kernels(done: Run) -> None:
    rows = done.found["kernels"]
    measured = [row for row in rows if row["obstacle"] is None]
    names = {(row["mask"], row["kernel"]) for row in measured}
    assert names == {
        *((mask, "reference") for mask in MASKS),
        *((mask, "aten_cpu_flash") for mask in MASKS if mask != "window"),
    }
    for row in measured:
        operations = 4 * 8 * 4 * visible(row["mask"]) / 1e12
        forward, backward = row["forward_seconds"], row["backward_seconds"]
        assert row["forward_tflops"] == pytest.approx(operations / forward)
        assert row["backward_tflops"] == pytest.approx(2.5 * operations / backward)
        assert row["both_tflops"] == pytest.approx(3.5 * operations / (forward + backward))


def test_links(done: Run) -> None:
    rows = done.found["links"]
    names = [(r["axis"], r["collective"], r["ulysses_size"], r["ring_size"]) for r in rows]
    assert set(names) == LINKS
    assert len(names) == 2 * len(LINKS)  # the latency, and one size
    for row in rows:
        assert row["cpu_seconds"] > 0
        least = 512 if row["axis"] == "loss" else 256
        assert (row["asked"], row["bytes"]) in ((0, least), (4096, 4096))
        assert row["gigabytes_per_second"] == pytest.approx(row["bytes"] / row["seconds"] / 1e9)


def test_modes(done: Run) -> None:
    rows = done.found["modes"]
    dense = [way.name for way in context_parallel_methods(2)] * 2
    packed = [
        way.with_layout_of(AttentionCase(64, 2, packed=3)).name
        for way in context_parallel_methods(2)
    ] * 2
    assert [row["way"] for row in rows] == dense + packed
    sequences = [
        (row["documents"], row["backward"]) for row in rows[:: len(context_parallel_methods(2))]
    ]
    assert sequences == [(0, False), (0, True), (3, False), (3, True)]
    for row in rows:
        compute, comm, both = row["compute"], row["comm"], row["both"]
        assert min(compute, both, row["one"], row["cpu"]) > 0
        if row["exposed"] is not None:
            assert row["exposed"] == pytest.approx(both - compute)
        if row["overlap"] is not None:
            hidden = (compute + comm - both) / min(compute, comm)
            assert row["overlap"] == pytest.approx(hidden)
        assert row["efficiency"] == pytest.approx(row["one"] / (2 * both))
        pairs = visible("packed" if row["documents"] else "causal")
        operations = 4 * 8 * 4 * pairs * (3.5 if row["backward"] else 1) / 1e12
        assert row["tflops"] == pytest.approx(operations / 2 / both)
        assert row["cpu_ratio"] == pytest.approx(row["cpu"] / row["cpu_one"])
        assert row["cpu_compute"] > 0


def test_compute(done: Run) -> None:
    """Operations and bytes by hand: 4 heads of 8 entries, 2 K/V heads, float32."""
    rows = {row["what"]: row for row in done.found["compute"]}
    assert list(rows) == ["products", "layer", "loss", "optimizer"]
    assert rows["products"]["operations"] == 6 * 64 * 32 * 128
    assert rows["loss"]["bytes"] == 5 * 2 * 4 * 64 * 256
    # Queries, out; keys, values; gate, up, down; norms: each is read or written 7 times, and once more.
    parameters = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 128 * 32 + 2 * 32
    assert rows["optimizer"]["bytes"] == 7 * 4 * parameters
    for row in rows.values():
        assert (row["dtype"], row["features"], row["tokens"]) == ("float32", 32, 64)
        assert row["seconds"] > 0
        assert (row["operations"] > 0) != (row["bytes"] > 0)


def test_overheads(done: Run) -> None:
    """A ring of two sends keys, and in backward keys and gradients; a gather is of one of two heads."""
    rows = done.found["overheads"]
    calls = {(row["mode"], row["ranks"]): row["calls"] for row in rows}
    assert calls == {
        ("alone", 1): 0,
        ("ulysses", 2): 4,
        ("ring", 2): 3,
        ("zigzag_llama3", 2): 2 * 3,
    }
    assert all(row["layer_seconds"] + row["step_seconds"] > 0 for row in rows)


def test_a_planner_s_machine(done: Run) -> None:
    """What was measured is all that a planner needs of this machine."""
    machine = machine_of_hardware(Hardware.load(done.folder / "hardware.json"))
    assert {tile.mask for tile in machine.tiles} == {"full", "causal"}
    (products,) = [row for row in done.found["compute"] if row["what"] == "products"]
    assert machine.matmul_flops == pytest.approx(products["operations"] / products["seconds"])
    (layer,) = [row for row in done.found["compute"] if row["what"] == "layer"]
    assert machine.memory_bandwidth == pytest.approx(layer["bytes"] / layer["seconds"])


def test_hardware(done: Run) -> None:
    hardware = Hardware.load(done.folder / "hardware.json")
    assert (hardware.device_type, hardware.devices, hardware.backend) == ("cpu", 2, "gloo")
    assert {(r.axis, r.collective, r.ulysses_size, r.ring_size) for r in hardware.links} == LINKS
    best = hardware.kernel("float32", 8)
    rates = [row["both_tflops"] or 0 for row in done.found["kernels"] if row["mask"] == "causal"]
    (fastest,) = [row for row in done.found["kernels"] if row["both_tflops"] == max(rates)]
    assert (best.kernel, best.forward_tflops) == (fastest["kernel"], fastest["forward_tflops"])
    cost = hardware.cost_model(heads=4, kv_heads=2, head_dim=8, dtype="float32")
    assert cost.key >= 0


def test_on_processes_of_its_own(tmp_path: Path) -> None:
    with program(tmp_path, *COMMAND, "hydra.run.dir=run", "suites=[kernels,links]") as started:
        output = finish(started)
    assert "## kernels" in output
    assert "## modes" not in output
    assert Hardware.load(tmp_path / "run" / "hardware.json").devices == 2

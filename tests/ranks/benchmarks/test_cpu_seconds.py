"""The measurement of CPU seconds runs and prints a row for each split; how fast it is decides nothing."""

from __future__ import annotations

import math

import pytest

from benchmarks import balance, cpu_ratio, rank_flops
from lightning_cp.bench.methods import AttentionCase, AttentionMethod, context_parallel_methods
from lightning_cp.bench.timers import Figure
from tests.helpers.pool import call_on_ranks


@pytest.mark.nightly
def test_a_row_for_each_split(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--tokens", "64", "--ranks", "2", "--repeats", "1", "--kv-heads", "2"]
    monkeypatch.setattr(cpu_ratio, "on_ranks", call_on_ranks)
    monkeypatch.setattr("sys.argv", ["cpu_ratio", *arguments])
    cpu_ratio.main()
    head, line, *rows = capsys.readouterr().out.splitlines()
    assert head.count("|") == line.count("|") == len(cpu_ratio.HEAD) + 1
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[:2] for row in cells] == [["64", "2"]] * 6
    assert [row[2] for row in cells] == [way.name for way in context_parallel_methods(2)]
    for row in cells:
        assert all(math.isfinite(float(x)) and float(x) > 0 for x in row[3::2]), row


def test_the_spread_of_both_sides_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def seconds(case: AttentionCase, ways: list[AttentionMethod], repeats: int) -> list[Figure]:
        return [Figure(2.0, 0.25)] if case.ranks == 1 else [Figure(3.0, 0.1)] * len(ways)

    monkeypatch.setattr(cpu_ratio, "cpu_seconds", seconds)
    monkeypatch.setattr("sys.argv", ["cpu_ratio", "--tokens", "64", "--ranks", "2"])
    cpu_ratio.main()
    head, _, first, *_ = capsys.readouterr().out.splitlines()
    cells = dict(zip(*([x.strip() for x in row.split("|")] for row in (head, first)), strict=True))
    assert (cells["one process, s"], cells["its spread"]) == ("2.000", "25%")
    assert (cells["ranks together, s"], cells["spread"]) == ("3.000", "10%")
    assert (cells["mode"], cells["ratio"]) == ("ulysses", "1.500")


def test_modes_are_named_as_the_field_does() -> None:
    assert [way.name for way in context_parallel_methods(4)] == [
        "ulysses",
        "hybrid 2x2",
        "zigzag ring",
        "zigzag_llama3 two_kernel/two_kernel",
        "zigzag_llama3 two_kernel/fused",
        "zigzag_llama3 fused/two_kernel",
        "zigzag_llama3 fused/fused",
    ]


def test_a_row_for_each_deal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["balance", "--repeats", "1"])
    monkeypatch.setattr(balance, "SIZES", ((1 << 14, 4, 40),))
    balance.main()
    head, line, *rows = capsys.readouterr().out.splitlines()
    assert head.count("|") == line.count("|") == len(balance.HEAD) + 1
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[3] for row in cells][:1] == ["zigzag"]
    assert any(row[3] == "balanced (default)" and float(row[5]) <= 1.02 for row in cells)
    assert all(len(row) == len(balance.HEAD) for row in cells)
    assert float(cells[0][7]) == 1.0


def test_flops_of_every_rank_in_both_conventions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """GFLOP of 65,536 tokens on 8 ranks, as the field's tables have them."""
    monkeypatch.setattr("sys.argv", ["rank_flops"])
    rank_flops.main()
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert rows[2][1:] == ["824.6", "549.8", "4,672.9", "4,398.1"]
    assert rows[9][1:] == ["8,521.2", "8,246.4", "4,672.9", "4,398.1"]
    assert rows[10][1:] == ["10.33x", "15.00x", "1.00x", "1.00x"]

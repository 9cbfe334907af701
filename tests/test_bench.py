"""The measurement of CPU seconds runs and prints a row for each split; how fast it is decides nothing."""

from __future__ import annotations

import math

import pytest

from lightning_cp.bench import balance, cpu_ratio


def test_a_row_for_each_split(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--tokens", "64", "--ranks", "2", "--repeats", "1", "--kv-heads", "2"]
    monkeypatch.setattr("sys.argv", ["cpu_ratio", *arguments])
    cpu_ratio.main()
    head, line, *rows = capsys.readouterr().out.splitlines()
    assert head.count("|") == line.count("|") == 8
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[:3] for row in cells] == [["64", "2", "ulysses"], ["64", "2", "zigzag ring"]]
    for row in cells:
        assert all(math.isfinite(float(x)) and float(x) > 0 for x in row[3:6]), row


def test_modes_are_named_as_the_field_does() -> None:
    names = [cpu_ratio.Shape(64, *sizes).mode for sizes in ((4, 1), (1, 4), (2, 2))]
    assert names == ["ulysses", "zigzag ring", "hybrid 2x2"]


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

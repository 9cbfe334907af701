"""A line of the table says how sure both of its figures are."""

from __future__ import annotations

import pytest

from lightning_cp.bench import cpu_ratio
from lightning_cp.bench.case import Case
from lightning_cp.bench.clock import Figure
from lightning_cp.bench.ways import Way


def test_the_spread_of_both_sides_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def seconds(case: Case, ways: list[Way], repeats: int) -> list[Figure]:
        return [Figure(2.0, 0.25)] if case.ranks == 1 else [Figure(3.0, 0.1)] * len(ways)

    monkeypatch.setattr(cpu_ratio, "cpu_seconds", seconds)
    monkeypatch.setattr("sys.argv", ["cpu_ratio", "--tokens", "64", "--ranks", "2"])
    cpu_ratio.main()
    head, _, first, *_ = capsys.readouterr().out.splitlines()
    cells = dict(zip(*([x.strip() for x in row.split("|")] for row in (head, first)), strict=True))
    assert (cells["one process, s"], cells["its spread"]) == ("2.000", "25%")
    assert (cells["ranks together, s"], cells["spread"]) == ("3.000", "10%")
    assert (cells["mode"], cells["ratio"]) == ("ulysses", "1.500")

"""What the programs beside the bench refuse before they start a process, and what they leave out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import ModuleType

import pytest

from benchmarks import cpu_ratio, side_by_side
from lightning_cp.bench.methods import AttentionCase, AttentionMethod
from lightning_cp.bench.timers import Figure

REFUSED = [
    (["--tokens", "1001", "--ranks", "2"], "tokens=1001 does not divide .* 1000 or 1004 works"),
    (["--tokens", "66", "512", "--ranks", "3"], "tokens=512 does not divide .* each of 3 ranks"),
    (["--kv-heads", "3"], "heads=8 is not a multiple of kv_heads=3"),
]


def started(*_: object, **__: object) -> None:
    raise AssertionError


@pytest.mark.parametrize("program", [side_by_side, cpu_ratio])
@pytest.mark.parametrize(("arguments", "match"), REFUSED)
def test_refused(
    program: ModuleType,
    arguments: list[str],
    match: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(program, "on_ranks", started)
    monkeypatch.setattr("sys.argv", ["program", *arguments])
    with pytest.raises(SystemExit, match="2"):
        program.main()
    assert re.search(match, capsys.readouterr().err)


def test_ways_that_nobody_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(side_by_side, "on_ranks", started)
    monkeypatch.setattr("sys.argv", ["side_by_side", "--only", "ulysses", "nosuch"])
    with pytest.raises(SystemExit, match="2"):
        side_by_side.main()
    told = capsys.readouterr().err
    assert "--only nosuch is part of no way's name. There are: ulysses; zigzag ring; " in told
    assert "hybrid 2x2" in told  # of 4 ranks


def test_a_mode_that_cannot_share_the_heads_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def seconds(case: AttentionCase, ways: Sequence[AttentionMethod], repeats: int) -> list[Figure]:
        assert not any(way.obstacle(case) for way in ways)
        return [Figure(1.0, 0.1)] * len(ways)

    monkeypatch.setattr(cpu_ratio, "cpu_seconds", seconds)
    monkeypatch.setattr("sys.argv", ["cpu_ratio", "--tokens", "516", "--ranks", "3"])
    cpu_ratio.main()
    _, _, first, second, *_ = capsys.readouterr().out.splitlines()
    assert "| ulysses | 8 heads do not divide by ulysses_size=3 |" in first
    assert "| zigzag ring | 1.000 |" in second
    assert first.count("|") == second.count("|")

"""Ranks that are killed, whichever it is, wherever it is, and however the processes were started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_cp.watchdog.attribution import NO_MESSAGE
from tests.nightly.faults.run import LAUNCHED, Outcome, run_fault, run_torchrun
from tests.nightly.faults.table import Row

BOUND = 10.0
PLACES = ("forward", "backward", "optimizer")
FSDP = "data_parallel=fsdp"


def who(rank: int, ranks: int) -> str:
    """How it is named, where all ranks share a sample."""
    return f"rank {rank} (cp_rank {rank} of {ranks}, data_rank 0)"


def alone(way: str, rank: int, where: str, *settings: str, ranks: int = 3) -> Row:
    """Each process was started by somebody else, and has an output of its own."""

    def check(done: Outcome) -> None:
        assert done.last == f"{who(rank, ranks)} lost at step 3, in {where}: {NO_MESSAGE}", (
            done.output
        )
        assert done.statuses == tuple(-9 if at == rank else 1 for at in range(ranks))
        assert "Traceback" not in done.output

    def run(folder: Path) -> Outcome:
        return run_fault(folder, way, ranks, "kill", rank, where, *settings, ranks=ranks)

    name = f"SIGKILL of rank {rank} of {ranks} in {where} ({', '.join((way, *settings))})"
    return Row(name, BOUND, run, check)


def launched(way: str, rank: int, *, late: bool = False) -> Row:
    """Lightning starts the processes; ``late``: the others hear of it once they were sent SIGTERM."""

    def check(done: Outcome) -> None:
        line = f"{who(rank, 2)} lost at step 3, in backward: {NO_MESSAGE}"
        killed_itself = way in ("trainer", "fabric") and rank == 0
        assert done.statuses == (-9 if killed_itself else 1,), done.output
        assert done.last.endswith(line), done.output
        assert "Connection closed by peer" not in done.output

    def run(folder: Path) -> Outcome:
        return run_fault(folder, way, 2, "kill", rank, "backward", ranks=LAUNCHED, **_late(late))

    started = f"started by Lightning{', heard late' * late}"
    return Row(f"SIGKILL of rank {rank} of 2 ({way}, {started})", BOUND, run, check)


def by_torchrun(way: str, *, late: bool = False) -> Row:
    """Its agent ends the others with SIGTERM as soon as one is gone, and has the last word."""
    line = f"{who(1, 2)} lost at step 3, in backward: {NO_MESSAGE}"

    def check(done: Outcome) -> None:
        assert line in done.output.splitlines(), done.output
        assert done.statuses == (1,)

    def run(folder: Path) -> Outcome:
        return run_torchrun(folder, 2, way, 2, "kill", 1, "backward", **_late(late))

    return Row(
        f"SIGKILL of rank 1 of 2 ({way}, torchrun{', heard late' * late})", BOUND, run, check
    )


def _late(late: bool) -> dict[str, Any]:
    return {"HEARD_LATE": "1"} if late else {}


def group_of(rank: int) -> str:
    """How it is named where two data ranks are two ranks each."""
    return f"rank {rank} (cp_rank {rank % 2} of 2, data_rank {rank // 2})"


def in_groups(way: str, rank: int, where: str) -> Row:
    """Several samples at once."""

    def check(done: Outcome) -> None:
        assert done.last == f"{group_of(rank)} lost at step 3, in {where}: {NO_MESSAGE}", (
            done.output
        )
        assert done.statuses == tuple(-9 if at == rank else 1 for at in range(4))

    def run(folder: Path) -> Outcome:
        return run_fault(folder, way, 4, "kill", rank, where, "data_parallel_size=2", ranks=4)

    return Row(f"SIGKILL of rank {rank} of 2 x 2 in {where} ({way})", BOUND, run, check)


def exits() -> Row:
    """A process that ends by itself, without a word: ``os._exit``, a crash in native code."""

    def check(done: Outcome) -> None:
        assert done.last == f"{who(1, 3)} lost at step 3, in forward: {NO_MESSAGE}", done.output
        assert done.statuses == (1, 3, 1)

    def run(folder: Path) -> Outcome:
        return run_fault(folder, "trainer", 3, "exit", 1, "forward", ranks=3)

    return Row("rank 1 of 3 ends by os._exit in forward (trainer)", BOUND, run, check)


KILLS = (
    *(alone(way, rank, at) for way in ("trainer", "fabric") for rank in range(3) for at in PLACES),
    in_groups("trainer", 2, "forward"),
    in_groups("fabric", 3, "backward"),
    in_groups("manual", 1, "optimizer"),
    alone("manual", 2, "backward"),
    *(alone("trainer", rank, at, FSDP) for rank, at in enumerate(PLACES)),
    alone("fabric", 0, "backward", FSDP),
    alone("fabric", 2, "forward", "data_parallel=zero1"),
    exits(),
    *(launched(way, rank) for way in ("trainer", "fabric", "trainer_spawn") for rank in (0, 1)),
    *(launched("trainer_fork", rank) for rank in (0, 1)),
    launched("fabric_fork", 0),
    launched("fabric_spawn", 1),
    *(launched(way, 1, late=True) for way in ("fabric_spawn", "fabric_fork", "trainer_spawn")),
    *(by_torchrun(way, late=late) for way in ("trainer", "fabric") for late in (False, True)),
)

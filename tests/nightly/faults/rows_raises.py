"""Ranks that raise: their own traceback is what the job shows, and nobody waits for them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tests.nightly.faults.rows_kills import FSDP, group_of, who
from tests.nightly.faults.run import LAUNCHED, Outcome, run_fault, run_torchrun
from tests.nightly.faults.table import Row

BOUND = 10.0
ERROR = "ValueError: the user's own mistake"
TIMED_OUT = "RuntimeError: DataLoader timed out after 5 seconds"


def alone(way: str, rank: int, where: str, *settings: str) -> Row:
    """Each process has an output of its own: the traceback in one, one line in the others."""

    def check(done: Outcome) -> None:
        line = f"{who(rank, 3)} raised at step 3, in {where}: {ERROR}"
        assert done.last == line, done.output
        shown = ["Traceback" in text for text in done.outputs]
        assert shown == [at == rank for at in range(3)]
        assert done.outputs[rank].rstrip().endswith(ERROR)
        assert done.statuses == (1, 1, 1)

    def run(folder: Path) -> Outcome:
        return run_fault(folder, way, 3, "raise", rank, where, *settings, ranks=3)

    name = f"rank {rank} of 3 raises in {where} ({', '.join((way, *settings))})"
    return Row(name, BOUND, run, check)


def like_a_connections(way: str, rank: int) -> Row:
    """Its error reads like one that another rank's end has caused; it is the only one all the same."""

    def check(done: Outcome) -> None:
        line = f"{who(rank, 2)} raised at step 3, in forward: {TIMED_OUT}"
        assert done.last == line, done.output
        assert "Traceback" in done.outputs[rank], done.output
        assert done.outputs[rank].rstrip().endswith(TIMED_OUT), done.output
        assert done.statuses == (1, 1)

    def run(folder: Path) -> Outcome:
        return run_fault(folder, way, 2, "timeout", rank, "forward", ranks=2)

    name = f"rank {rank} of 2 raises what reads like a broken connection ({way})"
    return Row(name, BOUND, run, check)


def in_groups(way: str, rank: int, where: str) -> Row:
    """Several samples at once."""

    def check(done: Outcome) -> None:
        assert done.last == f"{group_of(rank)} raised at step 3, in {where}: {ERROR}", done.output
        shown = ["Traceback" in text for text in done.outputs]
        assert shown == [at == rank for at in range(4)]
        assert done.statuses == (1, 1, 1, 1)

    def run(folder: Path) -> Outcome:
        return run_fault(folder, way, 4, "raise", rank, where, "data_parallel_size=2", ranks=4)

    return Row(f"rank {rank} of 2 x 2 raises in {where} ({way})", BOUND, run, check)


def with_savers(way: str, rank: int, ranks: int) -> Row:
    """With callbacks that save on exceptions: nobody does, as the others would have to take part."""

    def check(done: Outcome) -> None:
        assert ERROR in done.last, done.output
        assert "A SAVE BEGINS" not in done.output, done.output
        assert not done.saved, done.saved

    def run(folder: Path) -> Outcome:
        return run_fault(folder, way, 2, "raise", rank, "backward", "saves=1", ranks=ranks)

    started = "" if ranks else ", started by Lightning"
    name = f"rank {rank} of 2 raises, callbacks save on exceptions ({way}{started})"
    return Row(name, BOUND, run, check)


def launched(way: str, rank: int) -> Row:
    """Lightning starts the processes: one output, with one traceback of the program's own error."""

    def check(done: Outcome) -> None:
        assert ERROR in done.output, done.output
        assert done.output.count("raise ValueError(") == 1, done.output
        assert "Connection closed by peer" not in done.output
        assert ERROR in done.last
        assert done.statuses == (1,)

    run = partial(_run, way, 2, rank, "forward", LAUNCHED)
    name = f"rank {rank} of 2 raises ({way}, started by Lightning)"
    return Row(name, BOUND, run, check)


def by_torchrun() -> Row:
    """With an agent in between."""

    def check(done: Outcome) -> None:
        assert done.output.count("raise ValueError(") == 1, done.output

    def run(folder: Path) -> Outcome:
        return run_torchrun(folder, 2, "trainer", 2, "raise", 1, "backward")

    return Row("rank 1 of 2 raises (trainer, torchrun)", BOUND, run, check)


def _run(way: str, devices: int, rank: int, where: str, ranks: int, folder: Path) -> Outcome:
    return run_fault(folder, way, devices, "raise", rank, where, ranks=ranks)


RAISES = (
    alone("trainer", 0, "backward"),
    alone("trainer", 1, "forward"),
    alone("fabric", 2, "optimizer"),
    alone("fabric", 0, "forward"),
    alone("manual", 1, "backward"),
    alone("trainer", 2, "backward", FSDP),
    alone("trainer", 1, "optimizer", FSDP),
    alone("fabric", 0, "forward", FSDP),
    like_a_connections("trainer", 0),
    like_a_connections("fabric", 1),
    in_groups("trainer", 1, "backward"),
    in_groups("fabric", 2, "forward"),
    in_groups("manual", 3, "backward"),
    with_savers("trainer", 1, 2),
    with_savers("manual", 0, 2),
    with_savers("trainer", 0, LAUNCHED),
    with_savers("trainer_spawn", 1, LAUNCHED),
    *(
        launched(way, rank)
        for way in ("trainer", "fabric_spawn", "trainer_spawn")
        for rank in (0, 1)
    ),
    *(launched("trainer_fork", rank) for rank in (0, 1)),
    by_torchrun(),
)

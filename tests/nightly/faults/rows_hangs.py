"""Ranks that are there and do not go on."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tests.nightly.faults.fault import SUSPENDED
from tests.nightly.faults.rows_kills import FSDP, who
from tests.nightly.faults.run import LAUNCHED, LIMIT, Outcome, run_fault
from tests.nightly.faults.table import Row

TIMEOUT = 10.0
BOUND = TIMEOUT + 5
CRAWL = 4.0
"""Seconds; forward and backward of a rank that crawls take longer, each by itself."""


def stopped(way: str, rank: int, where: str) -> Row:
    """SIGSTOP: no thread of it runs any more; the others end it."""

    def check(done: Outcome) -> None:
        start, end = f"{who(rank, 3)} gave no sign of life for ", f" s, at step 3, in {where}"
        assert done.last.startswith(start), done.output
        assert done.last.endswith(end), done.output
        assert done.seconds > TIMEOUT - 1
        assert done.statuses == tuple(-9 if at == rank else 1 for at in range(3))

    run = partial(_run, way, "stop", rank, where)
    name = f"SIGSTOP of rank {rank} of 3 in {where} ({way}, step_timeout={TIMEOUT:g})"
    return Row(name, BOUND, run, check)


def asleep(way: str, rank: int, where: str, *settings: str) -> Row:
    """It waits for something that never comes, while its other threads run."""

    def check(done: Outcome) -> None:
        line = f"first to stop: {who(rank, 3)} at step 3, in {where}"
        assert "no rank made progress for " in done.last
        assert line in done.last, done.output
        assert "time.sleep(600)" in done.output  # where it is
        assert done.statuses == (1, 1, 1)

    def run(folder: Path) -> Outcome:
        return run_fault(folder, way, 3, "sleep", rank, where, *settings, ranks=3)

    told = ", ".join((way, f"step_timeout={TIMEOUT:g}", *settings))
    name = f"rank {rank} of 3 hangs in {where} ({told})"
    return Row(name, BOUND, run, check)


def alone(rank: int, where: str, place: str, call: str) -> Row:
    """It alone calls a part of a sharded model, as ``if is_global_zero: model.generate(...)`` does."""
    settings = (FSDP, f"first_step_timeout={TIMEOUT:g}")

    def check(done: Outcome) -> None:
        other = 1 - rank
        of_ranks = {rank: f"in call {call}", other: "in none of them"}
        calls = "; ".join(f"{who(at, 2)} {place}, {of_ranks[at]}" for at in (0, 1))
        line = f"first to stop: {who(other, 2)} {place}. Ranks have to call these modules together: {calls}"
        assert done.last.endswith(line), done.output
        assert done.statuses == (1, 1)

    def run(folder: Path) -> Outcome:
        return run_fault(folder, "trainer", 2, "alone", rank, where, *settings, ranks=2)

    name = f"rank {rank} of 2 alone calls a part of the model {where} (trainer, {FSDP})"
    return Row(name, BOUND, run, check)


def asleep_on_one_terminal() -> Row:
    """All ranks write to one place: where they stand is said once, and the verdict last."""

    def check(done: Outcome) -> None:
        assert f"first to stop: {who(1, 2)} at step 3, in forward" in done.last, done.output
        for text in ("no rank made progress for ", "time.sleep(600)"):
            assert done.output.count(text) == 1, done.output
        assert done.statuses == (1,)

    def run(folder: Path) -> Outcome:
        return run_fault(folder, "trainer", 2, "sleep", 1, "forward", ranks=LAUNCHED)

    name = f"rank 1 of 2 hangs in forward, on one terminal (trainer, step_timeout={TIMEOUT:g})"
    return Row(name, BOUND, run, check)


def _run(way: str, fault: str, rank: int, where: str, folder: Path) -> Outcome:
    return run_fault(folder, way, 3, fault, rank, where, ranks=3)


def crawling(way: str, ranks: int, *settings: str) -> Row:
    """A rank takes long for everything, in all twice the timeout for a step, and nobody is ended."""

    def check(done: Outcome) -> None:
        assert all(text.rstrip().endswith("ENDED WELL") for text in done.outputs), done.output
        assert done.statuses == (0,) * ranks
        assert done.seconds > 2 * CRAWL, done

    def run(folder: Path) -> Outcome:
        pairs = (f"step_timeout={CRAWL}", *settings)
        return run_fault(folder, way, ranks, "crawl", 1, "everywhere", *pairs, ranks=ranks)

    told = "".join(f", {pair}" for pair in settings)
    name = f"rank 1 of {ranks} crawls, and none is ended ({way}, step_timeout={CRAWL:g}{told})"
    return Row(name, LIMIT, run, check)


def saving_slowly(ranks: int) -> Row:
    """A save takes several times as long as nothing may; the others wait for it."""
    limit = 2.0

    def check(done: Outcome) -> None:
        assert all(text.rstrip().endswith("ENDED WELL") for text in done.outputs), done.output
        assert any(place.endswith(".ckpt") for place in done.saved), done.saved
        assert done.seconds > 3 * limit, done

    def run(folder: Path) -> Outcome:
        pairs = (f"step_timeout={limit}", f"first_step_timeout={limit}", "saves=1")
        return run_fault(folder, "trainer", ranks, "slow", 0, "save", *pairs, ranks=ranks)

    name = f"a save of {ranks} ranks takes long, and none is ended (first_step_timeout={limit:g})"
    return Row(name, LIMIT, run, check)


def suspended(way: str) -> Row:
    """Ctrl-Z, and ``fg`` after several times as long as a rank may be silent: nothing has happened."""
    limit = SUSPENDED / 4

    def check(done: Outcome) -> None:
        assert done.output.count("ENDED WELL") == 2, done.output
        assert done.statuses == (0,)
        assert done.seconds > SUSPENDED

    def run(folder: Path) -> Outcome:
        pair = f"step_timeout={limit}"
        return run_fault(folder, way, 2, "suspend", 1, "forward", pair, ranks=LAUNCHED)

    name = f"all of 2 ranks are suspended for {SUSPENDED:g} s, and go on ({way}, step_timeout={limit:g})"
    return Row(name, LIMIT, run, check)


HANGS = (
    stopped("trainer", 0, "backward"),
    stopped("trainer", 2, "forward"),
    stopped("fabric", 1, "optimizer"),
    asleep("trainer", 1, "forward"),
    asleep("fabric", 0, "backward"),
    asleep("trainer", 2, "backward", FSDP),
    alone(0, "again", "at step 3, in forward", "2 of network.layers.0"),
    alone(1, "between", "after step 3, between steps", "1 of network"),
    asleep_on_one_terminal(),
    crawling("trainer", 3),
    crawling("fabric", 2, "data_parallel_size=2"),
    crawling("manual", 2, "data_parallel_size=2"),
    crawling("trainer", 2, "data_parallel_size=2", "data_parallel=fsdp", "accumulate=2"),
    saving_slowly(2),
    suspended("trainer"),
    suspended("fabric"),
)

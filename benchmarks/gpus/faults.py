"""A rank that is killed, stopped or hangs, or whose device hangs: the others end in time, and name it."""

from __future__ import annotations

from functools import partial

from benchmarks.gpus.line import Line, Place, WrongResultError
from tests.nightly.faults.run import Outcome, run_fault

TIMEOUT = 10.0
"""Seconds of ``step_timeout``."""
KINDS = {
    "kill": 10.0,
    "stop": TIMEOUT + 10.0,
    "sleep": TIMEOUT + 10.0,
    "device": TIMEOUT + 10.0,
}
"""Seconds within which the others end, by fault."""
NAMES = {
    "kill": "a rank is killed",
    "stop": "a rank is stopped",
    "sleep": "a rank hangs",
    "device": "a rank's device hangs",
}
RANK, STEP = 1, 3


def fault_line(kind: str, place: Place) -> str:
    """Let one rank or its device fail in the forward of the third step, and see how the others end.

    On CPU a stand-in has no more complete events, and its host waits for it at the step's end.
    """
    folder = place.folder / kind
    folder.mkdir(exist_ok=True)
    settings = (f"accelerator={place.accelerator}", f"step_timeout={TIMEOUT}")
    done = run_fault(
        *(folder, "trainer", place.count, kind, RANK, "forward", *settings),
        ranks=place.count,
    )
    check_end(kind, place.count, done)
    return f"after {done.seconds:.1f} s: {done.last.partition(chr(10))[0][:200]}"


def check_end(kind: str, count: int, done: Outcome) -> None:
    """Check that the other ranks ended in time, with an error that names the rank and the step.

    Raises:
        WrongResultError: they did not.
    """
    wrong = ""
    named = f"rank {RANK} (cp_rank {RANK} of {count}, data_rank 0)"
    stands = f"cuda:{RANK} stands still at step {STEP}, in forward"
    own = (-9,) if kind in ("kill", "stop") else (1,)
    if done.seconds > KINDS[kind]:
        wrong = f"took {done.seconds:.0f} s, and {KINDS[kind]:.0f} s are allowed"
    elif any(
        status not in ((1,) if at != RANK else own) for at, status in enumerate(done.statuses)
    ):
        wrong = f"ended with {done.statuses}"
    elif kind == "device" and f"{named}, whose device {stands}" not in done.output:
        wrong = f"did not say: {named}, whose device {stands}"
    elif named not in done.output or f"at step {STEP}, in forward" not in done.output:
        wrong = f"did not say that {named} was at step {STEP}, in forward"
    if wrong:
        raise WrongResultError(f"the ranks {wrong}: {done.last}")


def lines() -> list[Line]:
    """Each fault."""
    return [
        Line(NAMES[kind], partial(fault_line, kind), False, is_short=kind == "kill")
        for kind in KINDS
    ]

"""A long run that is killed again and again, and loses nothing.

    python -m tests.nightly.faults.soak                     # 2,000 steps, a kill about every 300

torchrun keeps four processes (two data ranks of two that share a sample) going; from outside, one of them is
killed with SIGKILL now and then, rank 0 first, and nobody does anything about it. At the end, weights, the
optimizer's state and the loss of every step are compared with those of a run that was left alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.launch.start import environment, free_port

JOB = Path(__file__).parent / "soak_job.py"
RANKS = 4


@dataclass(frozen=True)
class Plan:
    """How long a run is, and how often it is killed."""

    steps: int = 2000
    every: int = 300
    """Steps between kills, give or take a tenth."""
    save_every: int = 50
    limit: float = 3000.0
    """Seconds for a run."""
    seed: int = 0


@dataclass(frozen=True)
class Ran:
    """What a run has left."""

    kills: tuple[tuple[int, int], ...]
    """(step, rank) of each."""
    ends: tuple[str, ...]
    """The digest of weights and optimizer state, on each rank."""
    losses: dict[int, float]
    """Of every step."""
    repeated: int
    """Steps that were done again after a kill."""
    seconds: float


def run(folder: Path, plan: Plan, *, kill: bool) -> Ran:
    """Run the job to its end.

    Raises:
        RuntimeError: it did not come there.
    """
    folder.mkdir(parents=True)
    began = time.monotonic()
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}"]
    command += ["--max-restarts=100", "--monitor-interval=0.2", f"--master-port={free_port()}"]
    command += [str(JOB), str(folder), str(plan.steps), str(plan.save_every)]
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(
            command, env=environment(), stdout=output, stderr=output, start_new_session=True
        )
        try:
            kills = _watch(process, folder, plan, kill=kill)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode:
        raise RuntimeError((folder / "output.txt").read_text()[-4000:])
    lines = losses_of(folder)
    ends = tuple((folder / f"end{rank}").read_text() for rank in range(RANKS))
    return Ran(tuple(kills), ends, dict(lines), len(lines) - plan.steps, time.monotonic() - began)


def _watch(
    process: subprocess.Popen[bytes], folder: Path, plan: Plan, *, kill: bool
) -> list[tuple[int, int]]:
    """Kill a rank whenever the run has come so much further; until it ends."""
    drawn = random.Random(plan.seed)
    ranks = [0, RANKS - 1]
    kills: list[tuple[int, int]] = []
    aim, end = _next(0, plan, drawn), time.monotonic() + plan.limit
    while process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
        step = max(dict(losses_of(folder)), default=0)
        if kill and aim <= step < plan.steps - 1:
            rank = ranks[len(kills)] if len(kills) < len(ranks) else drawn.randrange(RANKS)
            os.kill(int((folder / f"pid{rank}").read_text()), signal.SIGKILL)
            kills.append((step, rank))
            aim = _next(step, plan, drawn)
    if process.poll() is None:
        raise RuntimeError(f"not done after {plan.limit} s:\n{_tail(folder)}")
    return kills


def _next(step: int, plan: Plan, drawn: random.Random) -> int:
    return step + round(plan.every * drawn.uniform(0.9, 1.1))


def losses_of(folder: Path) -> list[tuple[int, float]]:
    """(step, loss) as they were written, steps that were done again included."""
    with suppress(FileNotFoundError):
        lines = (folder / "losses.jsonl").read_text().splitlines()
        return [tuple(json.loads(line)) for line in lines if line.endswith("]")]
    return []


def _tail(folder: Path) -> str:
    return (folder / "output.txt").read_text()[-4000:]


def soak(folder: Path, plan: Plan) -> tuple[Ran, Ran]:
    """The run that was killed, and the one that was left alone."""
    return run(folder / "killed", plan, kill=True), run(folder / "alone", plan, kill=False)


def differences(killed: Ran, alone: Ran) -> list[str]:
    """What is not the same bit for bit; nothing, if nothing was lost."""
    found: list[str] = []
    if len({*killed.ends, *alone.ends}) != 1:
        found.append(f"weights or optimizer state: {killed.ends} and {alone.ends}")
    steps = sorted(set(killed.losses) | set(alone.losses))
    other = [x for x in steps if killed.losses.get(x) != alone.losses.get(x)]
    if other:
        found.append(f"losses of {len(other)} of {len(steps)} steps, first step {other[0]}")
    return found


def main() -> None:
    """Do it, and say what came of it; status 1 if anything was lost."""
    parser = argparse.ArgumentParser(description="A long run that is killed again and again.")
    parser.add_argument("--steps", type=int, default=Plan.steps)
    parser.add_argument("--every", type=int, default=Plan.every)
    parser.add_argument("--save-every", type=int, default=Plan.save_every)
    parser.add_argument("--seed", type=int, default=Plan.seed)
    options = parser.parse_args()
    plan = Plan(options.steps, options.every, options.save_every, seed=options.seed)
    with tempfile.TemporaryDirectory() as folder:
        killed, alone = soak(Path(folder), plan)
    lost = differences(killed, alone)
    shown = ", ".join(f"rank {rank} at step {step}" for step, rank in killed.kills)
    print(f"{plan.steps} steps on {RANKS} processes, {len(killed.kills)} kills: {shown}")
    print(
        f"{killed.repeated} steps were done again; {killed.seconds:.0f} s, alone {alone.seconds:.0f} s"
    )
    print(f"sha256 of weights and optimizer state, alone:  {alone.ends[0]}")
    print(f"                                      killed: {killed.ends[0]}")
    if not killed.kills or not killed.repeated:  # then it shows nothing
        lost.append("nobody was killed, or no step was done again")
    print("nothing was lost" if not lost else "LOST: " + "; ".join(lost))
    sys.exit(bool(lost))


if __name__ == "__main__":
    main()

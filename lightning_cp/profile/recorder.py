"""StepRecorder: records the training steps that were asked for, on every rank at once.

A step begins where the first batch of an accumulation window is about to be sharded and ends after the
optimizer's step. All ranks are at these two places together, so only there they talk to each other: at the
beginning they agree that all of them record, at the end they exchange what they found. A rank that cannot
record is an error on every rank; one that cannot write its trace says so, and training goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.autograd.profiler as profiler
import torch.distributed as dist
from torch.profiler import ProfilerActivity

from lightning_cp.attention.plan import AttentionPlan
from lightning_cp.comm.agreement import agree, lists_of_ranks
from lightning_cp.errors import ConfigError
from lightning_cp.mesh import ContextParallelMesh, Flat
from lightning_cp.named_ranges import named
from lightning_cp.profile.summary import Report
from lightning_cp.profile.timeline import timeline_of
from lightning_cp.profile.trace import BEGIN, END, read_trace
from lightning_cp.profile.work import ScheduledWork
from lightning_cp.profile.write import trace_name, write_summary

_log = logging.getLogger("lightning_cp")


class StepRecorder:
    """Counts training steps and records some of them.

    Args:
        steps: which ones; the first one is 1.
        folder: where each gets a folder of its own.
    """

    def __init__(self, steps: Sequence[int], folder: Path) -> None:
        self.folder = folder
        self._steps = frozenset(steps)
        self._step = 0
        self._open = False
        self._running: _Recording | None = None

    def begin(self, mesh: ContextParallelMesh) -> None:
        """A training batch is about to be sharded; the first one of a window begins a step.

        Raises:
            ConfigError: a profiler is on already.
            RankFailure: that, or something else, is so on another rank.
        """
        if self._open or not self._steps:
            return
        self._open = True
        self._step += 1
        if self._step in self._steps:
            self._running = _Recording(self._step, self.folder / f"step-{self._step}", mesh)

    def note(self, plan: AttentionPlan, q_BLHD: torch.Tensor, out_BLHD: torch.Tensor) -> None:
        """An attention call was made."""
        if self._running is not None:
            self._running.work.note(plan, q_BLHD, out_BLHD)

    def end(self) -> None:
        """An optimizer has stepped: the step is over."""
        running, self._running, self._open = self._running, None, False
        if running is not None:
            running.end()

    def abandon(self) -> None:
        """Something ended before its time; nothing is written, and no rank waits for another."""
        running, self._running, self._open = self._running, None, False
        if running is not None:
            running.stop()

    def say_what_is_missing(self) -> None:
        """Training is over: steps that it did not come to are told once, by the first rank."""
        missed = sorted(step for step in self._steps if step > self._step)
        if not self._step or not missed:
            return
        self._steps -= frozenset(missed)
        if not dist.get_rank():
            _log.warning(
                "profile=%s was not recorded: training ended after %d steps.", missed, self._step
            )


class _Recording:
    """One step, under way."""

    def __init__(self, step: int, folder: Path, mesh: ContextParallelMesh) -> None:
        self.work = ScheduledWork()
        self._step, self._folder = step, folder
        self._group = mesh.control_group(Flat.LOSS)
        self._on_gpu = mesh.device_type == "cuda"
        self._profiler = torch.profiler.profile(activities=self._activities())
        error: Exception | None = None
        try:
            self._start()
        except Exception as refused:  # any: a rank that raised alone would leave the others waiting
            error = refused
        try:
            with named(BEGIN):
                agree({"step": step}, self._group, what="profile", error=error, remedy=_SAME_STEPS)
        except BaseException:
            if error is None:
                self.stop()
            raise

    def _activities(self) -> list[ProfilerActivity]:
        return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]

    def _start(self) -> None:
        if profiler._is_profiler_enabled:
            raise ConfigError(
                f"profile={self._step} records this step with torch.profiler, but another profiler is on "
                "already, and there can be one at a time. Leave out profile=, or the other one (the "
                "Trainer's profiler='pytorch', or a torch.profiler of your own), or let it record other "
                "steps. It shows the same named ranges."
            )
        self._profiler.start()

    def stop(self) -> None:
        """Let others profile again."""
        self._profiler.stop()

    def end(self) -> None:
        """Write this rank's trace; the first rank writes what all of them found."""
        report = self._report()
        reports = [found for (found,) in lists_of_ranks([report], self._group, what="profile")]
        if report.rank == reports[0].rank:
            write_summary(reports, self._step, self._folder)

    def _report(self) -> Report:
        rank = dist.get_rank()
        try:
            if self._on_gpu:
                torch.cuda.synchronize()
            with named(END):
                pass
            self.stop()
            with _place_of(self._folder / trace_name(rank)) as (path, lost):
                self._profiler.export_chrome_trace(str(path))
                return Report(rank, timeline_of(read_trace(path)), self.work.shown(), lost=lost)
        except Exception as error:  # a profile is not worth a training run
            return Report(rank, error=f"{type(error).__name__}: {error}")


@contextmanager
def _place_of(path: Path) -> Iterator[tuple[Path, str | None]]:
    """Where a trace can be written: there, or aside for a while; and why it is lost then."""
    lost = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.touch()  # the profiler does not say when it cannot write
    except OSError as error:
        lost = f"{type(error).__name__}: {error}"
    if lost is None:
        yield path, None
        return
    with TemporaryDirectory() as aside:
        yield Path(aside, path.name), lost


_SAME_STEPS = "Every rank records the same steps: give all of them the same profile=."


def steps_of(profile: Any) -> tuple[int, ...]:
    """The steps that a setting names, in order.

    Raises:
        ConfigError: it does not name steps.
    """
    if profile is None:
        return ()
    steps = [profile] if isinstance(profile, (int, str)) else profile
    if (
        not isinstance(steps, Sequence)
        or isinstance(steps, str)
        or not steps
        or any(type(step) is not int or step < 1 for step in steps)
        or len(set(steps)) < len(steps)
    ):
        raise ConfigError(
            f"profile must be a training step, counted from 1, or a list of different ones, got {profile!r}. "
            "profile=3 records the third, when caches are warm; profile=[3, 100] two of them; None records "
            "nothing."
        )
    return tuple(sorted(steps))

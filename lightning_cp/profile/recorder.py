"""StepRecorder: records selected training steps on all ranks at once, with the schedule's work in them.

A step begins before the first batch of an accumulation window is sharded and ends after the optimizer's step.
All ranks reach these two points together, so they communicate only there: at the beginning they agree that
all of them record, at the end they exchange their results. A rank that cannot record is an error on every
rank; one that cannot write its trace logs that, and training continues.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch
import torch.autograd.profiler as profiler
import torch.distributed as dist
from torch.profiler import ProfilerActivity

from lightning_cp.attention.checkpointing import current_stash
from lightning_cp.attention.plan import AttentionPlan
from lightning_cp.comm.consensus import check_equal, gather_by_vote
from lightning_cp.errors import ConfigError
from lightning_cp.kernels.protocol import accumulate_dtype
from lightning_cp.layout.axes import Flat
from lightning_cp.layout.cost import Traffic, attention_traffic
from lightning_cp.mesh import ContextParallelMesh
from lightning_cp.profile.timeline import BEGIN, END, read_trace
from lightning_cp.utils.tracing import profile_range

if TYPE_CHECKING:
    from lightning_cp.profile.report import RankSummary


class ScheduledWork:
    """Tiles, visible pairs and sent bytes of a step's attention calls, by the schedule.

    Recomputations are included; a call's backward counts when a gradient reaches it.
    """

    def __init__(self) -> None:
        self.calls = self.backward_calls = self.tiles = self.pairs = 0
        self.sent = Traffic()

    def note(self, plan: AttentionPlan, q_BLHD: torch.Tensor, out_BLHD: torch.Tensor) -> None:
        """Count a call with these queries, and its backward when it comes."""
        forward, backward = _traffic(plan, q_BLHD, out_BLHD)
        stash, pairs = current_stash(), _pairs(plan, q_BLHD)
        self.calls += 1
        if stash is not None:  # exchanged again in backward, and not at all in a replay
            backward += _over_ulysses(forward)
        if stash is None or not stash.replaying:
            self.sent += forward
            self.pairs += pairs
            self.tiles += _tiles(plan, plan.exchange.forward)

        def passed(_: torch.Tensor) -> None:
            self.backward_calls += 1
            self.sent += backward
            self.pairs += pairs
            self.tiles += _tiles(plan, plan.exchange.backward)

        if out_BLHD.requires_grad:
            out_BLHD.register_hook(passed)

    def shown(self) -> dict[str, object]:
        """Return the counts as they are written."""
        return {
            "attention_calls": self.calls,
            "attention_calls_backward": self.backward_calls,
            "tiles": self.tiles,
            "visible_pairs": self.pairs,
            "sent": {**asdict(self.sent), "total_bytes": self.sent.total_bytes},
        }


def _traffic(
    plan: AttentionPlan, q_BLHD: torch.Tensor, out_BLHD: torch.Tensor
) -> tuple[Traffic, Traffic]:
    batch, _, _, dim = q_BLHD.shape
    return attention_traffic(
        plan.schedule,
        plan.heads,
        plan.mesh.cp_rank,
        batch=batch,
        head_dim=dim,
        value_dim=out_BLHD.shape[3],
        itemsize=q_BLHD.dtype.itemsize,
        accumulate_itemsize=accumulate_dtype(q_BLHD.dtype).itemsize,
        exchange=plan.exchange.name,
        kv_heads_per_gather=plan.exchange.kv_heads_per_gather,
        key_gradients=plan.exchange.key_gradients,
    )


def _over_ulysses(forward: Traffic) -> Traffic:
    """Return the part of a forward's traffic that backward repeats if inputs were saved before Ulysses."""
    return replace(forward, p2p_messages=0, p2p_bytes=0, all_gather_calls=0, all_gather_bytes=0)


def _pairs(plan: AttentionPlan, q_BLHD: torch.Tensor) -> int:
    """Return this rank's visible (query, key) pairs; the schedule has one row where all are equal."""
    rows = q_BLHD.shape[0] if plan.schedule.documents.num_rows == 1 else 1
    return rows * plan.schedule.work[plan.mesh.ring_rank]


def _tiles(plan: AttentionPlan, execution: str) -> int:
    """Return this rank's tiles in one pass of one call."""
    if plan.exchange.name != "all_gather":
        return sum(len(hop.tiles) for hop in plan.hops)
    calls = sum(len(call.tiles) for call in plan.gathered.calls(execution))
    return calls * len(plan.blocks(plan.exchange.kv_heads_per_gather))


_log = logging.getLogger("lightning_cp")


class StepRecorder:
    """Counts training steps and records some of them.

    Args:
        steps: the numbers of recorded steps, counted from 1.
        folder: receives one folder for each step.
    """

    def __init__(self, steps: Sequence[int], folder: Path) -> None:
        self.folder = folder
        self._steps = frozenset(steps)
        self._step = 0
        self._open = False
        self._running: _Recording | None = None

    def begin(self, mesh: ContextParallelMesh) -> None:
        """Begin a step if this training batch, about to be sharded, is the first of a window.

        Raises:
            ConfigError: a profiler is already running.
            RankFailure: another rank failed, for this or another reason.
        """
        if self._open or not self._steps:
            return
        self._open = True
        self._step += 1
        if self._step in self._steps:
            self._running = _Recording(self._step, self.folder / f"step-{self._step}", mesh)

    def note(self, plan: AttentionPlan, q_BLHD: torch.Tensor, out_BLHD: torch.Tensor) -> None:
        """Count an attention call."""
        if self._running is not None:
            self._running.work.note(plan, q_BLHD, out_BLHD)

    def end(self) -> None:
        """End the step after an optimizer stepped."""
        running, self._running, self._open = self._running, None, False
        if running is not None:
            running.end()

    def abandon(self) -> None:
        """Stop recording early; write nothing, and wait for no other rank."""
        running, self._running, self._open = self._running, None, False
        if running is not None:
            running.stop()

    def say_what_is_missing(self) -> None:
        """Warn once on the first rank about steps that training did not reach."""
        missed = sorted(step for step in self._steps if step > self._step)
        if not self._step or not missed:
            return
        self._steps -= frozenset(missed)
        if not dist.get_rank():
            _log.warning(
                "profile=%s was not recorded: training ended after %d steps.", missed, self._step
            )


class _Recording:
    """The recording of one step."""

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
            with profile_range(BEGIN):
                check_equal(
                    {"step": step}, self._group, what="profile", error=error, remedy=_SAME_STEPS
                )
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
        """Stop the profiler, so that others can run."""
        self._profiler.stop()

    def end(self) -> None:
        """Write this rank's trace; the first rank writes the summary of all."""
        from lightning_cp.profile.report import write_summary

        report = self._report()
        reports = gather_by_vote(report, self._group, what="end of the profile")
        if report.rank == reports[0].rank:
            write_summary(reports, self._step, self._folder)

    def _report(self) -> RankSummary:
        from lightning_cp.profile.report import RankSummary, trace_name
        from lightning_cp.profile.timeline import timeline_of

        rank = dist.get_rank()
        try:
            if self._on_gpu:
                torch.cuda.synchronize()
            with profile_range(END):
                pass
            self.stop()
            with _writable_path(self._folder / trace_name(rank)) as (path, lost):
                self._profiler.export_chrome_trace(str(path))
                return RankSummary(
                    rank, timeline_of(read_trace(path)), self.work.shown(), lost=lost
                )
        except Exception as error:  # a profile is not worth a training run
            return RankSummary(rank, error=f"{type(error).__name__}: {error}")


@contextmanager
def _writable_path(path: Path) -> Iterator[tuple[Path, str | None]]:
    """Yield a writable path of a trace, and the error if it is only temporary, so that the trace is lost."""
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

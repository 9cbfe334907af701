"""The parent's side of the pool: processes that outlive cases, and limits that outlive patience.

Workers are forked from a fork server that has imported torch and lightning once, so a new rank
costs milliseconds. They are started when a case first needs them and kept. A case that hangs or
kills a rank costs the whole pool, which the next case starts again; any other failure costs only
the group.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.helpers.pool.handle import Worker, gather, report_of, succeeded
from tests.helpers.pool.isolation import current_filters
from tests.helpers.pool.report import RankReport
from tests.helpers.pool.worker import Regroup, Reply, Run, Settle, serve

MAX_RANKS = 8
GRACE = 5.0
"""Seconds that the other ranks get once one has failed: most of them can only wait for it."""
REGROUP_LIMIT = 15.0
SETTLE_LIMIT = 10.0
START_LIMIT = 180.0
"""Seconds for the fork server's imports and the first workers, on a busy machine."""

PRELOAD = (
    "pytest",
    "torch.distributed.tensor",
    "torch._dynamo",  # which any optimizer imports
    "lightning.pytorch",
    "transformers.models.llama.modeling_llama",
    "lightning_cp.strategies.trainer",
    "lightning_cp.strategies.trainer_checkpoints",
    "lightning_cp.strategies.fabric",
    "lightning_cp.runtime.model_binding",
    "lightning_cp.engines.fsdp",
    "lightning_cp.engines.tensor_parallel",
    "lightning_cp.checkpoint.pretrained.load",
    "lightning_cp.parity.check",
    "lightning_cp.parity.runner",
    "tests.helpers.pool.shared",
)
"""Imported once, in the fork server; what is not installed is passed over."""

CASES = 150
"""Cases until new ranks take over: after a thousand, collecting garbage takes half of a case's time."""

OUT_OF_STEP = "in the barrier after the case: the ranks did not call the same collectives"


class Pool:
    """Up to ``MAX_RANKS`` standing ranks that run one case at a time."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []
        self._world_size = 0  # of the default group that stands; 0 if none can be trusted
        self._served = 0  # cases, by these ranks
        self._groups = itertools.count()
        self._directory = Path(tempfile.mkdtemp(prefix="ranks-"))
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(PRELOAD))
        self._alive_here, self._alive_there = self._context.Pipe()

    def run(
        self,
        world_size: int,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        timeout: float,
    ) -> list[RankReport]:
        """Run ``fn(rank, world_size, *args, **kwargs)`` on ranks 0 .. world_size-1."""
        if not 1 <= world_size <= MAX_RANKS:
            raise ValueError(f"the pool has 1 to {MAX_RANKS} ranks, got world_size={world_size}.")
        call = pickle.dumps((fn, tuple(args), dict(kwargs)))
        try:
            self._prepare(world_size)
            return self._run_case(self._workers[:world_size], call, timeout)
        except BaseException:  # Ctrl-C, a test's own time limit: the ranks are in an unknown state
            self.kill_ranks()
            raise

    def pids(self) -> list[int]:
        """Process ids of the ranks that stand."""
        return [worker.pid for worker in self._workers]

    def close(self) -> None:
        """Kill every rank and remove the pool's files."""
        self.kill_ranks()
        self._alive_here.close()
        self._alive_there.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def kill_ranks(self) -> None:
        """Kill every rank; the next case starts new ones."""
        for worker in self._workers:
            worker.kill()
        self._workers.clear()
        self._world_size = self._served = 0

    def _prepare(self, world_size: int) -> None:
        """Have the processes and a default group of the right size."""
        self._served += 1
        if self._served > CASES:
            self.kill_ranks()
        self._start(world_size)
        if self._world_size == world_size:
            return
        if not self._regroup(world_size):
            self.kill_ranks()  # something that an earlier case left cannot be destroyed
            self._start(world_size)
            if not self._regroup(world_size):
                raise RuntimeError(f"could not make a group of {world_size} ranks.")
        self._world_size = world_size

    def _start(self, world_size: int) -> None:
        new = range(len(self._workers), world_size)
        self._workers += [self._start_worker(rank) for rank in new]
        replies = gather(self._workers[new.start :], START_LIMIT, START_LIMIT)
        for worker in self._workers[new.start :]:
            if replies.get(worker.rank) is None:
                raise RuntimeError(f"rank {worker.rank} did not start:\n{worker.output()}")

    def _start_worker(self, rank: int) -> Worker:
        here, there = self._context.Pipe()
        log, stacks = self._directory / f"rank{rank}.log", self._directory / f"rank{rank}.stacks"
        log.touch()
        process = self._context.Process(
            target=serve,
            name=f"rank{rank}",
            args=(rank, there, self._alive_there, str(log), str(stacks)),
        )
        process.start()
        there.close()
        return Worker(rank, process, here, log, stacks)

    def _regroup(self, world_size: int) -> bool:
        self._world_size = 0
        store = str(self._directory / f"store{next(self._groups)}")
        for worker in self._workers:
            worker.send(Regroup(world_size if worker.rank < world_size else 0, store))
        replies = gather(self._workers, REGROUP_LIMIT, GRACE)
        return all(succeeded(replies.get(worker.rank)) for worker in self._workers)

    def _run_case(self, ranks: Sequence[Worker], call: bytes, timeout: float) -> list[RankReport]:
        directory = tempfile.mkdtemp(prefix="case-", dir=self._directory)
        request = Run(call, current_filters(), directory)
        start = time.monotonic()
        for worker in ranks:
            os.truncate(worker.log, 0)
            worker.send(request)
        replies = gather(ranks, timeout, GRACE)
        elapsed = time.monotonic() - start
        running = f"after {elapsed:.1f} s (limit {timeout:g} s)"
        reports = [report_of(worker, replies, running) for worker in ranks]
        if all(report.status == "returned" for report in reports):
            reports = self._settle(ranks, replies, reports)
        else:
            self._world_size = 0
        if any(report.status in ("running", "died") for report in reports):
            self.kill_ranks()
        shutil.rmtree(directory, ignore_errors=True)
        return reports

    def _settle(
        self,
        ranks: Sequence[Worker],
        replies: Mapping[int, Reply | None],
        reports: list[RankReport],
    ) -> list[RankReport]:
        """Check that the group can serve the next case; one that broke it unnoticed fails here."""
        if not all(reply is not None and reply.group_intact for reply in replies.values()):
            self._world_size = 0
            return reports
        for worker in ranks:
            worker.send(Settle())
        settled = gather(ranks, SETTLE_LIMIT, GRACE)
        after = [report_of(worker, settled, OUT_OF_STEP) for worker in ranks]
        if any(report.status != "returned" for report in after):
            self._world_size = 0
            return after
        if len({reply.groups_made for reply in settled.values() if reply is not None}) > 1:
            self._world_size = 0
        return reports

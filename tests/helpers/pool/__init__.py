"""Standing ranks: run a function on N gloo processes without starting them.

    def sums(rank: int, world_size: int, scale: float) -> float:
        total = torch.tensor(float(rank))
        dist.all_reduce(total)
        return scale * total.item()

    def test_sums() -> None:
        assert run_ranks(4, sums, 2.0) == [12.0] * 4

The function must be at module level, and its arguments and result picklable. On every rank
torch.distributed is initialised (gloo, FileStore, loopback), torch uses one thread, seeds and modes
are fresh, the warning filters are the calling test's, and the working directory is a temporary one
that the ranks share.

What a case leaves behind: groups and meshes that it made are destroyed; environment variables,
signal handlers, warning filters and the working directory are put back. It must join its threads,
wait for its own asynchronous work and undo its own patches of modules. Errors in ``__del__`` and in
threads fail the case, and so do ranks that called different numbers of collectives. The default
group is kept for the next case of the same size unless a rank failed, replaced or destroyed it.
"""

from __future__ import annotations

import atexit
import re
from collections.abc import Callable
from typing import Any, TypeVar

from tests.helpers.pool.master import MAX_RANKS, Pool
from tests.helpers.pool.report import RankError, RankReport

__all__ = [
    "MAX_RANKS",
    "RankError",
    "RankReport",
    "call_on_ranks",
    "expect_on_every_rank",
    "rank_pids",
    "run_ranks",
    "shut_down",
]

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

_pools: list[Pool] = []
"""The pool of this process, once there is one."""


def run_ranks(
    world_size: int, fn: Callable[..., T], *args: Any, timeout: float = 60.0, **kwargs: Any
) -> list[T]:
    """Run ``fn(rank, world_size, *args, **kwargs)`` on every rank; the results in rank order.

    Args:
        world_size: 1 to 8 ranks.
        fn: a module-level function.
        timeout: seconds until ranks that are still running are killed; 5 once another one failed.

    Raises:
        RankError: a rank raised, died or hung; says for each rank what and where.
    """
    __tracebackhide__ = True
    reports = _pool().run(world_size, fn, args, kwargs, timeout)
    if any(report.status != "returned" for report in reports):
        raise RankError(_call(fn, world_size), reports)
    return [report.value for report in reports]


def call_on_ranks(count: int, function: Callable[..., T], *arguments: Any) -> list[T]:
    """In place of ``lightning_cp.bench.processes.on_ranks``: these ranks need not import all again."""
    return run_ranks(count, _called, function, arguments)


def _called(rank: int, world_size: int, function: Callable[..., T], arguments: Any) -> T:
    return function(*arguments)


def expect_on_every_rank(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    error: type[E],
    match: str,
    timeout: float = 60.0,
    **kwargs: Any,
) -> list[E]:
    """Require that every rank raises ``error`` with a message that the regex ``match`` finds.

    Returns:
        The exceptions in rank order.

    Raises:
        RankError: a rank returned, hung, died, raised something else or said something else.
    """
    __tracebackhide__ = True
    reports = _pool().run(world_size, fn, args, kwargs, timeout)
    found = [report.error for report in reports if isinstance(report.error, error)]
    if len(found) == world_size and all(re.search(match, str(raised)) for raised in found):
        return found
    wanted = f"{error.__name__} matching {match!r} on every rank"
    raise RankError(f"{_call(fn, world_size)}, where {wanted} was expected", reports)


def rank_pids() -> list[int]:
    """Process ids of the ranks that stand."""
    return [pid for pool in _pools for pid in pool.pids()]


def shut_down() -> None:
    """End every rank; a later case would start new ones."""
    while _pools:
        _pools.pop().close()


def _pool() -> Pool:
    if not _pools:
        _pools.append(Pool())
        atexit.register(shut_down)  # a plain script would wait for its ranks forever
    return _pools[0]


def _call(fn: Callable[..., Any], world_size: int) -> str:
    name = getattr(fn, "__qualname__", repr(fn))
    return f"{getattr(fn, '__module__', '?')}.{name} (world size {world_size})"

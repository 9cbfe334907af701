"""What plays a rank does so in a process of its own: fake groups never meet those of tests and of the pool.

    answers = apart([["groups", {"sizes": {"ring": 4}, "rank": 3}]])

Each answer is what the function returned, or ``{"error": message}`` of a ``ConfigError``.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_cp.errors import ConfigError

Call = tuple[str, Mapping[str, Any]]


def apart(calls: Sequence[Call], timeout: float = 240.0) -> list[Any]:
    """Answers in order, all of one process."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.planner.apart"],
        input=json.dumps(calls),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def groups(sizes: Mapping[Any, int], rank: int, expected: Mapping[Any, int] | None = None) -> Any:
    """The groups of a rank, compared with those of other sizes if ``expected`` are given."""
    from lightning_cp.apps.plan.verify import fake_world, group_ranks

    with fake_world(sizes, rank) as mesh:
        found = group_ranks(mesh, expected or sizes, rank)
        places = (mesh.data_rank, mesh.ring_rank, mesh.ulysses_rank, mesh.tp_rank)
    return {"groups": [{**_plain(each), "agrees": each.agrees} for each in found], "places": places}


def state(**arguments: Any) -> Any:
    """What a rank holds."""
    from lightning_cp.apps.plan.verify import measured_state

    return _plain(measured_state(**arguments))


def spent() -> dict[str, float]:
    """Of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"cpu_seconds": time.process_time(), "peak_bytes": peak}


FUNCTIONS: dict[str, Callable[..., Any]] = {"groups": groups, "state": state, "spent": spent}


def _plain(answer: Any) -> Any:
    return dataclasses.asdict(answer)


def _answer(name: str, arguments: Mapping[str, Any]) -> Any:
    try:
        return FUNCTIONS[name](**arguments)
    except ConfigError as error:
        return {"error": str(error)}


if __name__ == "__main__":
    print(json.dumps([_answer(*call) for call in json.load(sys.stdin)]))

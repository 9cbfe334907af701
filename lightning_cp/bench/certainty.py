"""What the runs of a call that is taken apart say of it, and whether they are sure enough to say it."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_cp.bench.clock import Figure, Samples, wall_of_slowest, widest


@dataclass(frozen=True)
class Runs:
    """Samples of every rank; of other libraries' ways those of the whole call alone."""

    both: list[Samples]
    compute: list[Samples] | None = None
    comm: list[Samples] | None = None
    neither: list[Samples] | None = None


def apart_figures(both: Figure, runs: Runs) -> dict[str, float | None]:
    """Of the four runs; without what differs less than the repeats of any of them do."""
    if runs.compute is None or runs.comm is None or runs.neither is None:
        return {}
    compute = wall_of_slowest(runs.compute)
    comm = beyond(wall_of_slowest(runs.comm), wall_of_slowest(runs.neither))
    figures: dict[str, float | None] = {"compute": compute.best, "comm": comm}
    every = (both, compute, *map(wall_of_slowest, (runs.comm, runs.neither)))
    margin = widest(figure.margin for figure in every)
    exposed = both.best - compute.best
    if margin is None or exposed < -margin:  # then they contradict each other
        return figures
    less = min(compute.best, comm)
    if comm > margin:
        figures["exposed"] = exposed
    if less > margin:
        figures["overlap"] = (comm - exposed) / less
    return figures


def beyond(figure: Figure, without: Figure) -> float:
    """What it takes more, if it does."""
    return max(figure.best - without.best, 0.0)

"""The summary as Markdown: a table with a line per rank, and what is worst in words."""

from __future__ import annotations

from lightning_cp.profile.summary import RankFigures, Summary
from lightning_cp.profile.timeline import WORK

_OTHERS = {"agreement": "agreement", "shard batch": "sharding"}


def markdown(summary: Summary, step: int) -> str:
    """The table, in milliseconds, and lines below it."""
    kinds = [kind for kind in _kinds(summary) if kind != "other"]
    columns = [
        *("rank", "step", *WORK),
        *(f"{kind}: exposed / in flight" for kind in kinds),
        *("overlap", *_OTHERS.values(), "rest", "kernel calls", "tiles", "sent, MB"),
    ]
    lines = [_row(columns), "|" + "---:|" * len(columns)]
    lines += [_row(_cells(rank, kinds)) for rank in summary.ranks]
    head = f"Training step {step}, milliseconds of the {_CLOCK[summary.device]}:"
    return "\n".join([head, "", *lines, "", *(f"- {line}" for line in in_words(summary))])


_CLOCK = {"cpu": "wall clock", "cuda": "GPU"}


def in_words(summary: Summary) -> list[str]:
    """What to look at first."""
    lines: list[str] = []
    compute = [rank.work["compute"] for rank in summary.ranks]
    if summary.imbalance is not None:
        due = summary.scheduled_imbalance
        by_schedule = "" if due is None else f" By the schedule it would be {due:.2f}."
        busiest = summary.ranks[compute.index(max(compute))].rank
        lines.append(
            f"imbalance {summary.imbalance:.2f}: rank {busiest} computes for {_ms(max(compute))} ms, the "
            f"mean is {_ms(sum(compute) / len(compute))} ms.{by_schedule}"
        )
    spread = summary.most_uneven
    if spread is not None:
        most, mean, rank, (way, index) = spread
        lines.append(
            f"most uneven: {summary.unit} {index}, {way}: {_ms(most)} ms on rank {rank}, the mean is "
            f"{_ms(mean)} ms."
        )
    exposed = summary.most_exposed
    if exposed is not None:
        seconds, rank, way, kind, index = exposed
        of = f" of {summary.unit} {index}" if index is not None else ""
        lines.append(f"most waited for: {kind}{of}, {way}: {_ms(seconds)} ms on rank {rank}.")
    return lines


def _kinds(summary: Summary) -> list[str]:
    """Of communication, in the order in which they are shown."""
    return list(dict.fromkeys(kind for rank in summary.ranks for kind in rank.flows))


def _cells(rank: RankFigures, kinds: list[str]) -> list[str]:
    moved = [rank.flows.get(kind) for kind in kinds]
    overlap = rank.total.overlap
    return [
        str(rank.rank),
        _ms(rank.step),
        *(_ms(rank.work[kind]) for kind in WORK),
        *("" if flow is None else f"{_ms(flow.exposed)} / {_ms(flow.in_flight)}" for flow in moved),
        "" if overlap is None else f"{overlap:.0%}",
        *(_ms(rank.work[kind]) for kind in _OTHERS),
        _ms(rank.rest),
        str(rank.kernel_calls or ""),
        str(rank.scheduled.get("tiles", "")),
        f"{rank.scheduled.get('sent', {}).get('total_bytes', 0) / 1e6:.2f}",
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"

"""Figures follow from a trace: traces made by hand, whose figures are counted by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_cp.errors import ConfigError
from lightning_cp.profile.report import (
    RankFigures,
    RankSummary,
    as_json,
    draw,
    figures,
    markdown,
    summarise,
)
from lightning_cp.profile.timeline import Nesting, exposed_parts, timeline_of, trace_of, union
from tests.helpers.profile.events import BACKWARD_THREAD, event, kernel, ours, step


def report(events: list[dict[str, Any]], rank: int = 0, pairs: int = 10) -> RankSummary:
    return RankSummary(rank, timeline_of(trace_of(events)), {"visible_pairs": pairs})


def found(events: list[dict[str, Any]]) -> RankFigures:
    return figures(report(events))


def ms(seconds: float) -> float:
    return round(seconds * 1e3, 6)


FORWARD = [
    event("ContextParallelAttention", 10, 48),
    ours("hop 1 keys post", 10, 11),
    ours("hop 0 compute", 11, 20),
    event("aten::_scaled_dot_product_flash_attention_for_cpu", 12, 14),
    ours("hop 1 keys wait", 20, 24),
    ours("hop 2 keys post", 24, 25),
    ours("hop 1 compute", 25, 32),
    event("aten::_flash_attention_forward", 26, 27),
    ours("merge", 28, 31),
    ours("hop 2 keys wait", 32, 33),
    ours("hop 2 compute", 33, 37),
    ours("copies", 44, 46),
]
BACKWARD = [
    event("ContextParallelAttentionBackward", 50, 90, tid=BACKWARD_THREAD),
    ours("hop 1 keys post", 50, 51, tid=BACKWARD_THREAD),
    ours("hop 0 compute", 51, 60, tid=BACKWARD_THREAD),
    ours("hop 1 keys wait", 60, 62, tid=BACKWARD_THREAD),
    ours("hop 1 compute", 62, 70, tid=BACKWARD_THREAD),
    event("aten::_flash_attention_backward", 63, 64, tid=BACKWARD_THREAD),
    ours("hop 1 gradients post", 70, 71, tid=BACKWARD_THREAD),
    ours("hop 1 gradients wait", 71, 80, tid=BACKWARD_THREAD),
]
SHARDING = [ours("shard batch", 1, 6), ours("agreement", 2, 5)]


def test_seconds_of_the_host() -> None:
    """Ranges without what is named within; from post to the end of the wait; waits are exposed."""
    rank = found([*step(100), *SHARDING, *FORWARD, *BACKWARD])
    assert ms(rank.step) == 100
    work = {kind: ms(seconds) for kind, seconds in rank.work.items()}
    assert work == {"compute": 34, "merge": 3, "copies": 2, "agreement": 3, "shard batch": 2}
    hops = {place: ms(seconds) for place, seconds in rank.hops.items()}
    forward = {("forward", 0): 9, ("forward", 1): 4, ("forward", 2): 4}
    assert hops == {**forward, ("backward", 0): 9, ("backward", 1): 8}
    keys, gradients = rank.flows["keys"], rank.flows["gradients"]
    assert (keys.count, ms(keys.in_flight), ms(keys.exposed)) == (3, 14 + 9 + 12, 4 + 1 + 2)
    assert (gradients.count, ms(gradients.in_flight), ms(gradients.exposed)) == (1, 10, 9)
    assert rank.total.overlap == pytest.approx(1 - 16 / 45)
    assert ms(rank.rest) == 100 - 34 - 3 - 2 - 3 - 2 - 16
    assert rank.kernel_calls == 3


def test_transfers_in_flight_together_count_once() -> None:
    """Waited for in the order in which they were posted: 0 to 6 and 1 to 9, of which 3 and 2 exposed."""
    names = [("post", 0, 1), ("post", 1, 2), ("wait", 3, 6), ("wait", 7, 9)]
    events = [ours(f"all-to-all {phase}", start, end) for phase, start, end in names]
    flights = report([*step(10), *events]).timeline.flights
    assert [(ms(span.start), ms(span.end)) for span in flights] == [(0, 6), (1, 9)]
    flow = found([*step(10), *events]).flows["all-to-all"]
    assert (flow.count, ms(flow.in_flight), ms(flow.exposed)) == (2, 9, 5)


def test_a_recomputation_is_a_forward() -> None:
    """It runs within the backward of a checkpoint, and not within the one of attention."""
    recomputed = [{**e, "ts": e["ts"] + 100e3} for e in FORWARD]
    around = event("CheckpointFunctionBackward", 105, 150)
    spans = report([*step(200), *FORWARD, around, *recomputed]).timeline.work
    assert {span.backward for span in spans} == {False}
    assert {span.call for span in spans} == {0, 1}


def test_a_backward_has_the_number_of_its_forward() -> None:
    """A forward without gradients, of a validation say, has autograd's number of the next operation."""
    numbers = [(False, 5), (False, 5), (False, 6), (True, 6), (True, 5)]
    events = []
    for at, (backward, sequence) in enumerate(numbers):
        name = f"ContextParallelAttention{'Backward' if backward else ''}"
        span = (10.0 * at + 1, 10.0 * at + 9)
        events.append(event(name, *span, args={"Sequence number": sequence}))
        events.append(ours("hop 0 compute", span[0] + 1, span[1] - 1))
    spans = report([*step(60), *events]).timeline.work
    calls = [(span.call, span.backward) for span in sorted(spans, key=lambda span: span.start)]
    assert calls == [(0, False), (1, False), (2, False), (2, True), (1, True)]


def test_chunks_of_gathered_keys() -> None:
    events = [ours("chunk 0 compute", 1, 2), ours("chunk 1 compute", 2, 5)]
    summary = summarise([report([*step(10), *events])])
    assert summary.unit == "chunk"
    assert "most uneven: chunk 0" in markdown(summary, 1)


def test_seconds_of_a_gpu() -> None:
    """The host is done at once; kernels run later, on streams side by side."""
    host = [
        event("ContextParallelAttention", 0, 1),
        ours("hop 1 keys post", 0.0, 0.1),
        ours("hop 0 compute", 0.2, 0.3),
        ours("hop 1 keys wait", 0.4, 0.5),
        ours("hop 1 compute", 0.6, 0.9),
        ours("merge", 0.7, 0.8),
        ours("copies", 0.9, 0.94),
    ]
    device = [
        *kernel("ncclDevKernel_SendRecv(x)", 2, 12, 0.05),
        *kernel("flash_fwd_kernel", 3, 7, 0.25),
        *kernel("flash_fwd_kernel", 12, 15, 0.65),
        *kernel("elementwise", 15, 17, 0.75),
        *kernel("Memcpy DtoD (Device -> Device)", 17, 18, 0.91, cat="gpu_memcpy"),
        *kernel("gemm", 18, 20, 0.95),
        *kernel("ncclDevKernel_AllReduce", 19, 24, 0.96),
    ]
    rank = found([*step(30), *host, *device])
    work = {kind: ms(seconds) for kind, seconds in rank.work.items()}
    assert work == {"compute": 7, "merge": 2, "copies": 1, "agreement": 0, "shard batch": 0}
    assert {place: ms(s) for place, s in rank.hops.items()} == {
        ("forward", 0): 4,
        ("forward", 1): 3,
    }
    keys = rank.flows["keys"]
    assert (ms(keys.in_flight), ms(keys.exposed)) == (
        10,
        6,
    )  # but for 3 to 7, when hop 0 is computed
    assert ms(rank.flows["other"].in_flight) == 5  # DDP's
    assert rank.total.overlap == pytest.approx(0.4)
    assert "milliseconds of the GPU" in markdown(
        summarise([report([*step(30), *host, *device])]), 1
    )


def test_our_own_kernels_on_a_gpu_are_counted() -> None:
    host = [ours("hop 0 compute", 0, 1)]
    launches = [*kernel("forward", 1, 2, 0.5), *kernel("forward", 3, 4, 1.5)]
    assert found([*step(9), *host, *launches]).kernel_calls == 1


def of_ranks() -> list[RankSummary]:
    """Two ranks, the second of which computes its hop 1 for longer, and waits less."""
    late = [{**e, "dur": e["dur"] + 6e3} if "hop 2 compute" in e["name"] else e for e in FORWARD]
    return [
        report([*step(100), *FORWARD, *BACKWARD]),
        report([*step(100), *late], rank=3, pairs=30),
    ]


def test_what_is_worst_over_the_ranks() -> None:
    """Rank 0 computes for 17 + 17 ms, rank 3 for 17 + 6: the mean is 28.5 ms."""
    summary = summarise(of_ranks())
    assert summary.imbalance == pytest.approx(34 / 28.5)
    assert summary.scheduled_imbalance == 1.5
    seconds, rank, *place = summary.most_exposed or (0.0, -1)
    assert (ms(seconds), rank, place) == (9, 0, ["backward", "gradients", 1])
    largest, mean, rank, hop = summary.most_uneven or (0.0, 0.0, -1, ("", -1))
    assert (ms(largest), ms(mean), rank, hop) == (9, 4.5, 0, ("backward", 0))
    written = as_json(summary, 4)
    assert written["imbalance"] == summary.imbalance
    assert [each["rank"] for each in written["ranks"]] == [0, 3]
    lines = markdown(summary, 4).splitlines()
    assert lines[4].startswith("| 0 | 100.0 | 34.0 | 3.0 | 2.0 | 7.0 / 35.0 | 9.0 / 10.0 | 64% |")
    assert (
        "imbalance 1.19: rank 0 computes for 34.0 ms, the mean is 28.5 ms. By the schedule it would be 1.50."
        in lines[-3]
    )
    assert lines[-1] == "- most waited for: gradients of hop 1, backward: 9.0 ms on rank 0."


def test_a_step_without_attention_says_nothing_of_it() -> None:
    summary = summarise([report(step(10))])
    assert (summary.imbalance, summary.most_exposed, summary.most_uneven) == (None, None, None)
    assert markdown(summary, 1).splitlines()[4].startswith("| 0 | 10.0 | 0.0 | 0.0 | 0.0 |  |")


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2, 20])
def test_the_picture_is_drawn(ranks: int, tmp_path: Path) -> None:
    reports = (of_ranks() * 10)[:ranks]
    draw(reports, summarise(reports), 3, tmp_path / "profile.png")
    assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG")


def test_a_foreign_trace_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"the trace holds no step that the profile view recorded"
    ):
        trace_of(FORWARD)


def test_ranges_lie_within_each_other() -> None:
    trace = trace_of([*step(100), *SHARDING, *FORWARD])
    nesting = Nesting(trace.ranges)
    thread = trace.ranges[0].thread
    inner = [getattr(nesting.at(thread, at * 1e-3), "kind", None) for at in (0.5, 1.5, 3, 5.5, 7)]
    assert inner == [None, "shard batch", "agreement", "shard batch", None]
    assert nesting.at(99, 0.003) is None


def test_intervals() -> None:
    assert union([(5, 6), (0, 2), (1, 3)]) == [(0, 3), (5, 6)]
    assert exposed_parts((0, 10), [(-1, 1), (3, 4), (9, 12)]) == ((1, 3), (4, 9))
    assert exposed_parts((0, 10), []) == ((0, 10),)
    assert exposed_parts((2, 3), [(0, 10)]) == ()

"""Pictures of layouts and of streams: all that they show is the schedule's."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from lightning_cp.layout import CostModel, Documents, Mask, SequenceLayout, schedule
from lightning_cp.layout.drawing import (
    BACKWARD_WORK,
    COMPUTE,
    LOADS,
    PAIR_SECONDS,
    draw_timeline,
)
from lightning_cp.utils.colors import color_of

DOCUMENTS = Documents.from_cu_seqlens([0, 70, 240, 290, 350, 410])
LAYOUTS = {
    "contiguous": SequenceLayout(408, 4, kind="contiguous"),
    "zigzag": SequenceLayout(408, 4),
    "window": SequenceLayout(408, 3, kind="zigzag", mask=Mask(window=(60, 0))),
    "full": SequenceLayout(408, 2, kind="contiguous", mask=Mask(causal=False)),
    "packed, padded, Ulysses": SequenceLayout(410, 4, 2, documents=DOCUMENTS),
    "balanced": SequenceLayout(410, 3, kind="balanced", documents=DOCUMENTS, chunks=4),
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def spans(collection: Any) -> list[tuple[float, float]]:
    """The (begin, end) of the bars that one call has drawn."""
    corners = [path.vertices[:, 0] for path in collection.get_paths()]
    return [(x.min(), x.max()) for x in corners]


def panels(layout: SequenceLayout) -> list[Any]:
    """The picture's panels: tokens, pairs, totals."""
    return layout.draw().axes


def area(corners: np.ndarray) -> float:
    x, y = corners[:, 0], corners[:, 1]
    return abs(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1))) / 2


@every_layout
def test_each_rank_is_drawn_with_its_tokens(layout: SequenceLayout) -> None:
    lines = panels(layout)[0].collections
    for rank in range(layout.cp_size):
        runs = [np.arange(begin, end) for begin, end in spans(lines[rank])]
        assert np.concatenate(runs).tolist() == layout.positions(rank).tolist()


@every_layout
def test_pairs_have_the_colour_of_the_rank_that_computes_them(layout: SequenceLayout) -> None:
    """Areas are pairs, within an eighth for each end of a diagonal; light ones have received keys."""
    plan, tiles = schedule(layout, None, layout.mask), panels(layout)[1].collections[0]
    drawn: defaultdict[tuple[float, ...], float] = defaultdict(float)
    for path, color in zip(tiles.get_paths(), tiles.get_facecolor(), strict=True):
        drawn[tuple(color[:3].round(4))] += area(path.vertices[:-1])
    for rank in range(layout.ring_size):
        color = np.array(to_rgb(color_of(rank)))
        own = int(plan.pairs[rank, rank])
        received = int(plan.pairs[rank].sum()) - own
        error = 0.25 * len(tiles.get_paths())
        assert drawn[tuple(color.round(4))] == pytest.approx(own, abs=error)
        assert drawn[tuple(((1 + color) / 2).round(4))] == pytest.approx(received, abs=error)


@every_layout
def test_totals_are_those_of_the_schedule(layout: SequenceLayout) -> None:
    plan, axes = schedule(layout, None, layout.mask), panels(layout)[2]
    assert [bar.get_width() for bar in axes.patches] == list(plan.work)
    received = [text.get_text().split()[-2].replace(",", "") for text in axes.texts]
    ranks = [plan.rank(rank) for rank in range(layout.ring_size)]
    hops = [sum(hop.num_received for hop in rank.hops[1:]) for rank in ranks]
    assert received == [str(keys) for keys in hops]


def test_a_picture_is_written(tmp_path: Path) -> None:
    LAYOUTS["zigzag"].draw(tmp_path / "layout.svg")
    assert "ring 4" in (tmp_path / "layout.svg").read_text()


def test_the_timeline_has_the_predicted_times() -> None:
    """Computes, transfers and the end of both passes, in milliseconds, of ranks that wait for each other."""
    layout = LAYOUTS["balanced"]
    plan, cost = schedule(layout, None, layout.mask), CostModel(key=50, hop=40, latency=10)
    later = CostModel(key=20, hop=16, latency=4, gradient=40)
    axes: list[Any] = draw_timeline(layout, cost, pair_seconds=1e-3).axes
    for panel, model, unit in ((axes[0], cost, 1.0), (axes[1], later, BACKWARD_WORK)):
        backward = panel is axes[1]
        _, computes, messages = model.streams(plan, backward=backward)
        drawn: defaultdict[tuple[float, ...], list[tuple[float, float]]] = defaultdict(list)
        for bars in panel.collections:
            drawn[tuple(bars.get_facecolor()[0])[:3]] += spans(bars)
        lengths = {color: sum(end - begin for begin, end in of) for color, of in drawn.items()}
        assert lengths[to_rgb(COMPUTE)] == pytest.approx(computes.sum() * unit)
        for load, message in messages.items():
            assert lengths[to_rgb(LOADS[load])] == pytest.approx(message.times.sum() * unit)
        took = model.cost(plan, backward=backward) * unit
        assert max(end for of in drawn.values() for _, end in of) == pytest.approx(took)
        assert panel.get_title().endswith(f"{took:.2f} ms")


def test_a_hop_takes_20_microseconds_by_default() -> None:
    assert CostModel().hop * PAIR_SECONDS == pytest.approx(20e-6, rel=1e-3)

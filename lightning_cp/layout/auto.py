"""``layout="auto"``: the choice of a batch's layout, with its reason.

Two cases need no arithmetic: one causal document (zigzag is exactly even), and one document that every query
sees (contiguous is, with one message per hop). Windows, packed and padded rows get the layout with the least
predicted cost: even compute is worth nothing if the keys that it needs take longer to travel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from lightning_cp.layout.balance import useful_chunk_counts
from lightning_cp.layout.cost import CostModel
from lightning_cp.layout.documents import Documents
from lightning_cp.layout.mask import Mask
from lightning_cp.layout.sequence import CAUSAL, SequenceLayout
from lightning_cp.layout.tiles import Schedule

DEFAULT_COST = CostModel()


@dataclass(frozen=True)
class Prediction:
    """Predicted cost of one layout."""

    layout: SequenceLayout
    ideal: int
    """Pairs of each rank if all had equally many."""
    compute: int
    """Pairs of the busiest rank."""
    cost: int | None
    """Cost of the slowest rank, with waiting; ``None``: compute alone exceeds the chosen layout's cost."""

    @property
    def busiest(self) -> str:
        """Pairs of the busiest rank over the ideal, as text; 1 is even."""
        return f"{self.compute / max(self.ideal, 1):.2f}"

    def versus(self, least: int) -> str:
        """Describe the cost relative to ``least``, the cost of the chosen layout."""
        cost, bound = (self.compute, "at least ") if self.cost is None else (self.cost, "")
        return f"{layout_name(self.layout)} {bound}{_duration_text(cost, least)} ({self.busiest})"


@dataclass(frozen=True)
class LayoutChoice:
    """A layout, and the reason for it."""

    layout: SequenceLayout
    reason: str
    predictions: tuple[Prediction, ...] = ()

    def __str__(self) -> str:
        text = f"layout {layout_name(self.layout)}: {self.reason}"
        chosen = [found for found in self.predictions if found.layout == self.layout]
        if not chosen or chosen[0].cost is None:
            return text
        others = [x.versus(chosen[0].cost) for x in self.predictions if x is not chosen[0]]
        busiest = f"compute of the busiest rank {chosen[0].busiest}, 1 being even"
        return f"{text} ({busiest}){'; others: ' * bool(others)}{', '.join(others)}"


def _duration_text(cost: int, least: int) -> str:
    """Describe ``cost`` relative to ``least``, which may be far apart: a short sequence mostly waits."""
    if cost == least:
        return "as long"
    percent = 100 * (cost - least) / max(least, 1)
    if percent < 0.1:
        return "under 0.1% longer"
    if percent >= 1000:
        return f"{cost / max(least, 1):,.0f} times as long"
    return f"{percent:.{0 if percent >= 10 else 1}f}% longer"


def layout_name(layout: SequenceLayout) -> str:
    """Return the kind of a layout; for ``balanced`` also its chunks per rank."""
    if layout.kind != "balanced":
        return layout.kind
    return f"balanced with {layout.chunks_per_rank} chunks a rank"


def choose_layout(
    seq_len: int,
    ring_size: int = 1,
    ulysses_size: int = 1,
    documents: Documents | None = None,
    mask: Mask = CAUSAL,
    *,
    cost: CostModel = DEFAULT_COST,
    padding: bool = True,
) -> SequenceLayout:
    """Choose the layout of a batch for ``layout="auto"``; the arguments are those of ``explain_layout``."""
    return explain_layout(
        seq_len, ring_size, ulysses_size, documents, mask, cost=cost, padding=padding
    ).layout


@lru_cache(maxsize=128)
def explain_layout(
    seq_len: int,
    ring_size: int = 1,
    ulysses_size: int = 1,
    documents: Documents | None = None,
    mask: Mask = CAUSAL,
    *,
    cost: CostModel = DEFAULT_COST,
    padding: bool = True,
) -> LayoutChoice:
    """Choose a layout, and give the reason. The same on every rank, without communication.

    Args:
        seq_len: tokens of the sequence.
        ring_size: ranks that K/V travel around.
        ulysses_size: ranks that trade sequence for heads.
        documents: of the batch; ``None`` is one document.
        mask: the expected mask of the model's attention calls. Another one is as exact, and slower.
        cost: the price of communication.
        padding: allow layouts that pad.

    Raises:
        ConfigError: sizes below 1.
        ShapeError: too short a sequence, or documents of another length.
    """
    sizes = (seq_len, ring_size, ulysses_size)
    contiguous = SequenceLayout(*sizes, "contiguous", documents, mask)
    zigzag = SequenceLayout(*sizes, "zigzag", documents, mask)
    if ring_size == 1:
        return LayoutChoice(contiguous, "one ring rank")
    documents = documents or Documents.single(seq_len)
    if documents.is_dense and mask.left >= seq_len - 1:
        if mask.right == 0 and (padding or zigzag.padded_len == seq_len):
            return LayoutChoice(zigzag, "one causal document")
        if mask.right >= seq_len - 1:
            return LayoutChoice(contiguous, "one document that every query sees")
    dealt = [
        SequenceLayout(*sizes, "balanced", contiguous.documents, mask, count)
        for count in _chunk_counts(SequenceLayout(*sizes, "balanced", documents, mask))
    ]
    found = [x for x in (contiguous, zigzag, *dealt) if padding or x.padded_len == seq_len]
    if not found:
        return LayoutChoice(contiguous, "least to pad")
    return _cheapest(found, documents, mask, cost)


def _chunk_counts(balanced: SequenceLayout) -> tuple[int, ...]:
    """Chunks per rank worth a prediction: one is contiguous, more than reach the bound gain nothing."""
    counts = useful_chunk_counts(balanced.seq_len, balanced.ring_size)
    return tuple(count for count in counts if 1 < count <= balanced.chunks_per_rank)


def _cheapest(
    found: list[SequenceLayout], documents: Documents, mask: Mask, cost: CostModel
) -> LayoutChoice:
    """Take the least predicted cost, of equals the first; skip predictions that compute rules out."""
    plans = [Schedule(layout, documents, mask) for layout in found]
    compute = [max(plan.work) for plan in plans]
    costs: dict[int, int] = {}
    for index in sorted(range(len(found)), key=lambda at: compute[at]):
        if not costs or compute[index] <= min(costs.values()):
            costs[index] = cost.cost(plans[index])
    best = min(sorted(costs), key=lambda at: costs[at])
    ideal = sum(plans[0].work) // len(plans[0].work)
    predictions = tuple(
        Prediction(layout, ideal, compute[at], costs.get(at)) for at, layout in enumerate(found)
    )
    return LayoutChoice(found[best], "the least predicted time", predictions)
